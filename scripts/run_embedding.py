# SPDX-License-Identifier: Apache-2.0
"""Trains an embedding model; what PaddleNLP's llm/run_embedding.py does, with its options and ours.

    python scripts/run_embedding.py CONFIG.yaml [--option value ...]
    python -m paddle.distributed.launch --gpus 0,1,2,3 scripts/run_embedding.py CONFIG.yaml [--option value ...]

The same as `paddle-infcl train`.
"""

import sys

from paddle_infcl.cli import program

if __name__ == "__main__":
    program(["train", *sys.argv[1:]])
