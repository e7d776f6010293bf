# SPDX-License-Identifier: Apache-2.0
"""Label log-probabilities on the CPU: ours beside log_softmax + gather and cross_entropy, time and memory.

    OMP_NUM_THREADS=2 python benchmarks/logprobs.py

Forward, and forward with the gradient, on logits [rows, V] float32. `error` is the largest difference to float64 in a
row whose label lies 100 below the largest logit. (Paddle 3.3's log_softmax takes seconds for a large vocabulary on a
CPU: its time grows with rows x V x V. It is left out there.) GPU: tests/gpu/logprobs_gpu.py and
benchmarks/logprobs_peers.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.base import core

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from paddle_infcl.functional.logprobs import logprobs_of_labels  # noqa: E402

CASES = ((2048, 200), (2048, 1000), (256, 8000), (256, 50257))


def log_softmax_gather(z, y):
    return paddle.take_along_axis(F.log_softmax(z, axis=-1), y.unsqueeze(-1), -1).squeeze(-1)


def cross_entropy(z, y):
    return -F.cross_entropy(z, y, reduction="none", axis=-1).reshape(y.shape)


def ours(z, y):
    return logprobs_of_labels(z, y, backend="paddle")


def forward(function, z, y):
    with paddle.no_grad():
        function(z, y)


def both(function, z, y):
    leaf = z.detach()
    leaf.stop_gradient = False
    function(leaf, y).sum().backward()


def measure(call, *arguments) -> tuple[float, float]:
    """Median milliseconds and peak MiB of a call."""
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    before = core.host_memory_stat_current_value("Allocated", 0)
    call(*arguments)
    peak = core.host_memory_stat_peak_value("Allocated", 0) - before
    times = []
    while len(times) < 3 or (len(times) < 50 and sum(times) < 1):
        start = time.perf_counter()
        call(*arguments)
        times.append(time.perf_counter() - start)
    return round(float(np.median(times)) * 1e3, 2), round(peak / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=";".join(f"{r},{v}" for r, v in CASES), help="rows,V;rows,V")
    arguments = parser.parse_args()
    for case in arguments.cases.split(";"):
        rows, V = map(int, case.split(","))
        paddle.seed(0)
        z = paddle.randn([rows, V]) * 3
        y = paddle.randint(0, V, [rows])
        far = paddle.zeros([1, V])
        far[0, 0] = 100.0
        for function in (ours, cross_entropy, log_softmax_gather):
            if function is log_softmax_gather and rows * V * V > 2e10:
                continue

            error = abs(float(function(far, paddle.ones([1], dtype="int64"))[0]) + 100.0)
            value, gradient = (measure(call, function, z, y) for call in (forward, both))
            row = {"rows": rows, "V": V, "way": function.__name__, "error": round(error, 3)}
            row |= {"forward_ms": value[0], "forward_mib": value[1], "both_ms": gradient[0], "both_mib": gradient[1]}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
