# SPDX-License-Identifier: Apache-2.0
"""One process of a run whose processes watch each other: `python check_watch.py dies|raises|ends|catches`."""

from __future__ import annotations

import os
import sys
import time

import paddle.distributed as dist

from paddle_infcl.distributed.watch import end_process, ending_together

GRACE = 2.0


def main(what: str) -> None:
    dist.init_parallel_env()
    rank = dist.get_rank()
    try:
        with ending_together(GRACE):
            if rank == 1:
                time.sleep(0.5)
                if what == "dies":
                    os._exit(3)
            if (rank == 1 and what == "raises") or what == "catches":
                raise ValueError("on purpose")
            if what in ("dies", "raises"):
                time.sleep(60)  # as in a collective that never ends
    except ValueError:
        if what != "catches":
            raise
    time.sleep(GRACE + 1)  # nobody ends a process that has left
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
    end_process(0)
