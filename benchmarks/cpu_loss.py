# SPDX-License-Identifier: Apache-2.0
"""Time and memory of loss + both gradients on a CPU: the streaming backend, the dense one, and Paddle's autograd.

Usage: OMP_NUM_THREADS=2 python benchmarks/cpu_loss.py [--batch 8192] [--passages N] [--width 256] [--rounds 7]

Every round runs all of them in turn, so that a busy machine slows all alike; what counts are the ratios of medians and
the peaks. Memory is what Paddle allocated beyond the inputs, gradients included. The autograd row is the textbook
formula in ordinary operators, whose log-softmax is wrong below -64 on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.base import core

from paddle_infcl.functional import inf_cl_loss


def autograd(q, p):
    labels = paddle.arange(q.shape[0], dtype="int64") * (p.shape[0] // q.shape[0])
    return F.cross_entropy(paddle.matmul(q, p, transpose_y=True) / 0.02, labels)


def inputs(batch: int, passages: int, width: int):
    """Unit vectors with own cosine .5."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((batch, width), dtype="float32")
    p = rng.standard_normal((passages, width), dtype="float32")
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    own = p[:: passages // batch]
    own /= np.linalg.norm(own, axis=1, keepdims=True)
    own[:] = own * 0.866 + q * 0.5
    p /= np.linalg.norm(p, axis=1, keepdims=True)
    tensors = paddle.to_tensor(q), paddle.to_tensor(p)
    for tensor in tensors:
        tensor.stop_gradient = False
    return tensors


def once(loss, q, p) -> tuple[float, float]:
    """Seconds and peak MiB of one loss with its gradients."""
    q.clear_gradient(False)
    p.clear_gradient(False)
    before = core.host_memory_stat_current_value("Allocated", 0)
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    start = time.perf_counter()
    loss(q, p).backward()
    seconds = time.perf_counter() - start
    return seconds, (core.host_memory_stat_peak_value("Allocated", 0) - before) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--passages", type=int)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    paddle.set_device("cpu")
    q, p = inputs(args.batch, args.passages or args.batch, args.width)
    losses = {
        "paddle": lambda q, p: inf_cl_loss(q, p, backend="paddle"),
        "paddle, budget 32 MiB": lambda q, p: inf_cl_loss(q, p, backend="paddle", memory_budget=32 * 2**20),
        "dense": lambda q, p: inf_cl_loss(q, p, backend="dense"),
        "autograd": autograd,
    }
    runs = {name: [] for name in losses}
    for _ in range(args.rounds + 1):
        for name, loss in losses.items():
            runs[name].append(once(loss, q, p))
    medians = {name: statistics.median(seconds for seconds, _ in rows[1:]) for name, rows in runs.items()}
    print(f"B={args.batch} N={p.shape[0]} D={args.width} fp32, paddle {paddle.__version__}, "
          f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')} "
          f"MKL_DEBUG_CPU_TYPE={os.environ.get('MKL_DEBUG_CPU_TYPE')}")  # fmt: skip
    for name, rows in runs.items():
        row = {
            "backend": name,
            "seconds": round(medians[name], 3),
            "of_dense": round(medians[name] / medians["dense"], 2),
            "peak_mib": round(max(peak for _, peak in rows[1:]), 1),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
