# SPDX-License-Identifier: Apache-2.0
"""One process of a tensor-parallel group; started by test_vocab_parallel.py."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_infcl.distributed.vocab_parallel import vocab_parallel_logprobs_of_labels
from paddle_infcl.distributed.watch import end_process
from tests.functional.oracle_logprobs import linear_label_logprobs

CUTS = [0, 13, 40]


def main() -> None:
    dist.init_parallel_env()
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    rng = np.random.default_rng(0)
    hidden, weight, bias = (rng.standard_normal(shape).astype("float32") for shape in ([2, 5, 6], [40, 6], [40]))
    labels, g = rng.integers(0, 40, [2, 4]), rng.standard_normal([2, 4]).astype("float32")
    want = linear_label_logprobs(hidden, weight, labels, bias=bias, temperature=0.5, g=g)
    part = slice(*CUTS[group.rank : group.rank + 2])
    for transposed in (False, True):
        shard = weight[part].T.copy() if transposed else weight[part]
        h, w, b = leaves = [paddle.to_tensor(x, stop_gradient=False) for x in (hidden, shard, bias[part])]
        logprobs = vocab_parallel_logprobs_of_labels(
            h, w, paddle.to_tensor(labels), group=group, bias=b, temperature=0.5, transposed_weight=transposed,
            backend="paddle",
        )  # fmt: skip
        logprobs.backward(paddle.to_tensor(g))
        dh, dw, db = (leaf.grad.numpy() for leaf in leaves)
        np.testing.assert_allclose(logprobs.numpy(), want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(dh, want[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(dw.T if transposed else dw, want[2][part], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(db, want[3][part], rtol=1e-5, atol=1e-5)
    print("equal to one process")


if __name__ == "__main__":
    main()
    end_process(0)
