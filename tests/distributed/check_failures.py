# SPDX-License-Identifier: Apache-2.0
"""One process of a run in which process 1 dies: `python check_failures.py gather|ring forward|backward`."""

from __future__ import annotations

import os
import sys
import time

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.distributed.watch import end_process
from paddle_infcl.losses import InfCLLoss


def main(strategy: str, where: str) -> None:
    dist.init_parallel_env()
    ranks = Ranks.current()
    loss_layer = InfCLLoss(0.1, backend="paddle", strategy=strategy, ranks=ranks)
    for step in range(3):
        x = np.random.default_rng(step).standard_normal((4, 8))
        q, p = (paddle.to_tensor(x, stop_gradient=False) for _ in range(2))
        if step == 1 and ranks.rank == 1 and where == "forward":
            os._exit(3)
        begin = time.time()
        try:
            loss = loss_layer(q, p)
            if step == 1 and ranks.rank == 1:
                os._exit(3)
            loss.backward()
        except BaseException:
            print(f"noticed after {time.time() - begin:.1f} s", flush=True)
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_process(0)
