# SPDX-License-Identifier: Apache-2.0
"""Matryoshka prefixes from one sweep against separate losses and the full-width loss alone, plain Paddle backend.

    OMP_NUM_THREADS=1 python benchmarks/matryoshka.py [rows ...]

Times are the process's CPU seconds for loss and gradients, the best of some runs: on a shared machine they say more
than the clock. Before timing, values and gradients are compared.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import paddle

from paddle_infcl.functional import Block, Guide, Matryoshka, info_nce
from paddle_infcl.functional.matryoshka import unit_prefixes
from paddle_infcl.functional.vectors import l2_normalize

DIMS = (128, 256, 512, 1024)
T = 0.05


def groups_of(q, p, guided: bool):
    """InfoNCE's list of blocks, with or without a guide of 384 numbers."""
    guide = None
    if guided:
        vectors = l2_normalize(paddle.randn([q.shape[0], 384]))
        guide = Guide(vectors, vectors, paddle.full([q.shape[0]], 0.1))
    return [[Block(q, p, own=paddle.arange(q.shape[0]), guide=guide)]]


def best_time(run, tensors, repeats: int = 3) -> tuple[float, list]:
    """Seconds of the best run, and (loss, gradients)."""
    best, result = float("inf"), []
    for _ in range(repeats):
        for tensor in tensors:
            tensor.clear_gradient()
        begin = time.process_time()
        loss = run()
        loss.backward()
        best = min(best, time.process_time() - begin)
        result = [float(loss), *(tensor.grad.numpy().copy() for tensor in tensors)]
    return best, result


def main(sizes: list[int]) -> None:
    paddle.seed(0)
    print("| rows | guide | full width, s | separate, s | one sweep, s | one sweep / full | gradient difference |")
    print("|---|---|---|---|---|---|---|")
    for rows in sizes:
        for guided in (False, True):
            q, p = (l2_normalize(paddle.randn([rows, DIMS[-1]])) for _ in range(2))
            q.stop_gradient = p.stop_gradient = False
            groups = groups_of(q, p, guided)
            options = {"temperature": T, "backend": "paddle"}
            full, _ = best_time(lambda g=groups, o=options: info_nce(g, **o), [q, p])
            separate, want = best_time(
                lambda g=groups, o=options: sum(info_nce(unit_prefixes(g, dim), **o) for dim in DIMS), [q, p]
            )
            together, got = best_time(
                lambda g=groups, o=options: info_nce(g, matryoshka=Matryoshka(DIMS), **o), [q, p]
            )
            error = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got[1:], want[1:], strict=True))
            assert error < 1e-4, error
            print(
                f"| {rows} | {'yes' if guided else 'no'} | {full:.2f} | {separate:.2f} | {together:.2f} "
                f"| {together / full:.2f} | {error:.1e} |"
            )


if __name__ == "__main__":
    main([int(a) for a in sys.argv[1:]] or [2048, 4096])
