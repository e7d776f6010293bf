# SPDX-License-Identifier: Apache-2.0
"""One process of a run on two nodes: that of the second one dies, that of the first waits for nothing that fails."""

import os
import time

import paddle.distributed as dist

from paddle_infcl.distributed.watch import ending_together

if __name__ == "__main__":
    dist.init_parallel_env()
    with ending_together(grace=1.0):
        if dist.get_rank() == 1:
            os._exit(3)
        time.sleep(60)
