# SPDX-License-Identifier: Apache-2.0
"""One process of a tensor-parallel group; started by test_vocab_parallel.py."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_infcl.distributed.vocab_parallel import vocab_parallel_logprobs_of_labels
from paddle_infcl.distributed.watch import end_process
from tests.functional.oracle_logprobs import linear_label_logprobs


class Counting:
    """A process group that notes how many elements every message has, whichever collective or send it is."""

    def __init__(self, real, sizes: list[int]):
        self.real, self.sizes = real, sizes

    def __getattr__(self, name):
        found = getattr(self.real, name)
        if not callable(found):
            return found

        def call(*arguments, **options):
            given = [*arguments, *options.values()]
            tensors = [t for a in given for t in (a if isinstance(a, (list, tuple)) else [a])]
            self.sizes.extend(t.size for t in tensors if isinstance(t, paddle.Tensor))
            return found(*arguments, **options)

        return call


def counted(group) -> list[int]:
    """From now on the elements of every message of the group, and of the one of all processes, are noted here."""
    sizes: list[int] = []
    for each in (group, dist.get_group(0)):
        each._pg = Counting(each._pg, sizes)
    return sizes


def check(group, sizes: list[int], V: int, cut: int, transposed: bool) -> list[int]:
    """Values and gradients of one vocabulary, its first part up to `cut`; returns the sizes of the messages."""
    rng = np.random.default_rng(0)
    hidden, weight, bias = (rng.standard_normal(shape).astype("float32") for shape in ([2, 5, 6], [V, 6], [V]))
    labels, g = rng.integers(0, V, [2, 4]), rng.standard_normal([2, 4]).astype("float32")
    want = linear_label_logprobs(hidden, weight, labels, bias=bias, temperature=0.5, g=g)
    part = slice(*[0, cut, V][group.rank : group.rank + 2])
    shard = weight[part].T.copy() if transposed else weight[part]
    h, w, b = leaves = [paddle.to_tensor(x, stop_gradient=False) for x in (hidden, shard, bias[part])]
    sizes.clear()
    logprobs = vocab_parallel_logprobs_of_labels(
        h, w, paddle.to_tensor(labels), group=group, bias=b, temperature=0.5, transposed_weight=transposed,
        backend="paddle",
    )  # fmt: skip
    logprobs.backward(paddle.to_tensor(g))
    exchanged = list(sizes)
    dh, dw, db = (leaf.grad.numpy() for leaf in leaves)
    np.testing.assert_allclose(logprobs.numpy(), want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dh, want[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw.T if transposed else dw, want[2][part], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(db, want[3][part], rtol=1e-5, atol=1e-5)
    return exchanged


def main() -> None:
    dist.init_parallel_env()
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    sizes = counted(group)
    for transposed in (False, True):
        few = check(group, sizes, 40, 13, transposed)
        many = check(group, sizes, 5000, 1700, transposed)
        # Two numbers per label, and the gradient of the hidden states: nothing that grows with the vocabulary.
        assert max(many) <= 2 * 5 * 6, f"a message of {max(many)} elements: {many}"
        assert len(many) >= 3 and many == few, f"{many} with 5000 tokens, {few} with 40"
    print("equal to one process, and no message grows with the vocabulary:", many)


if __name__ == "__main__":
    main()
    end_process(0)
