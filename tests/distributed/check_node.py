# SPDX-License-Identifier: Apache-2.0
"""One process of a run on several nodes, started by `paddle.distributed.launch`: both strategies equal one process."""

from __future__ import annotations

import os

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.distributed.watch import end_process
from paddle_infcl.losses import InfCLLoss


def main() -> None:
    dist.init_parallel_env()
    ranks = Ranks.current()
    every = [np.random.default_rng(k).standard_normal((2, 3, 8)) for k in range(ranks.world)]
    q, p = (paddle.to_tensor(np.concatenate([part[side] for part in every]), stop_gradient=False) for side in (0, 1))
    want = InfCLLoss(0.5, backend="paddle", ranks=Ranks())(q, p)
    want.backward()
    mine = slice(3 * ranks.rank, 3 * ranks.rank + 3)
    for strategy in ("gather", "ring"):
        x, y = (paddle.to_tensor(every[ranks.rank][side], stop_gradient=False) for side in (0, 1))
        loss = InfCLLoss(0.5, backend="paddle", strategy=strategy, ranks=ranks)(x, y)
        loss.backward()
        total = loss.detach()
        dist.all_reduce(total)
        np.testing.assert_allclose(float(total) / ranks.world, float(want), rtol=1e-12)
        for part, whole in ((x, q), (y, p)):
            np.testing.assert_allclose(
                part.grad.numpy() / ranks.world, whole.grad.numpy()[mine], rtol=1e-9, atol=1e-14
            )
    print(f"equal: process {ranks.rank} of {ranks.world}, {os.environ['PADDLE_LOCAL_SIZE']} on this node", flush=True)


if __name__ == "__main__":
    main()
    end_process(0)
