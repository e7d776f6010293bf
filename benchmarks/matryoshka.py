# SPDX-License-Identifier: Apache-2.0
"""Matryoshka prefixes from one sweep against separate losses and the full-width loss alone.

    OMP_NUM_THREADS=1 python benchmarks/matryoshka.py [rows ...]      plain Paddle backend, on the CPU
    python benchmarks/matryoshka.py --device gpu:0 [rows ...]         Triton kernels, bf16, T = .02, by the clock

On the CPU times are the process's CPU seconds for loss and gradients, the best of some runs: on a shared machine they
say more than the clock. Before timing, values and gradients are compared.

On a GPU they are medians, through the operators alone. Separate losses get prefixes that are normalised already, in
bf16, and their gradients are left at that: what is timed is less than a user would wait for. The sweep's gradients are
compared with those of separate losses in fp32, whose normalisation is undone on the host.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

from paddle_infcl.functional import Block, Guide, Matryoshka, info_nce  # noqa: E402
from paddle_infcl.functional.matryoshka import unit_prefixes  # noqa: E402
from paddle_infcl.functional.vectors import l2_normalize  # noqa: E402

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


def on_cpu(sizes: list[int]) -> None:
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


def unit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return x / length, length


def median_ms(run, tensors) -> float:
    """Milliseconds of some losses (`run` gives a list) with their gradients."""
    one = paddle.to_tensor(1.0)  # the incoming gradient: making one can wait for the device

    def once():
        losses = run()
        for loss in losses:
            loss.backward(one)
        for tensor in tensors:
            tensor.clear_gradient(False)
        return losses[-1]

    once().numpy()
    start = time.perf_counter()
    once().numpy()
    rough = time.perf_counter() - start
    inner, times = max(1, int(0.05 / rough)), []
    for _ in range(max(3, min(15, int(1.0 / (rough * inner))))):
        start = time.perf_counter()
        for _ in range(inner):
            loss = once()
        loss.numpy()
        times.append((time.perf_counter() - start) / inner)
    return 1e3 * float(np.median(times))


def leaf(x: np.ndarray, dtype: str) -> paddle.Tensor:
    tensor = paddle.to_tensor(np.ascontiguousarray(x, "float32"))
    tensor = tensor if dtype == "float32" else tensor.astype(dtype)
    tensor.stop_gradient = False
    return tensor


def host(x: paddle.Tensor) -> np.ndarray:
    return (x if x.dtype == paddle.float32 else x.astype("float32")).numpy()


def on_gpu(device: str, sizes: list[int]) -> None:
    import paddle_infcl_ops as ops
    from paddle_infcl_ops.prefixes import prefix_info_nce

    from benchmarks.groups import block
    from benchmarks.run import use

    use(device)
    print(
        "| rows | full width, ms | separate, ms | one sweep, ms | 256 MiB, ms | one sweep / full | dq, dp differ by |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for rows in sizes:
        generator = np.random.default_rng(0)
        q, noise = (generator.standard_normal((rows, DIMS[-1]), dtype="float32") for _ in range(2))
        pair = [leaf(x, "bfloat16") for x in (unit(q)[0], unit(noise + 0.12 * q)[0])]
        q, p = (host(x) for x in pair)  # as bf16 holds them
        own, options = paddle.to_tensor(np.arange(rows)), {"scale": 1 / 0.02, "row_weights": 1 / rows}
        weights = [1.0] * len(DIMS)

        def sweep(budget=None, pair=pair, own=own, options=options, weights=weights):
            return prefix_info_nce([[block(*pair, own)]], DIMS, weights, memory_budget=budget, **options)

        def plain(pairs, own=own, options=options):
            return [ops.info_nce([[block(a, b, own)]], **options) for a, b in pairs]

        loss = sweep()
        loss.backward()
        got = [host(x.grad) for x in pair]
        value, want = 0.0, [np.zeros_like(x) for x in got]
        for dim in DIMS:
            units = [unit(x[:, :dim]) for x in (q, p)]
            leaves = [leaf(u, "float32") for u, _ in units]
            separate = ops.info_nce([[block(*leaves, own)]], **options)
            separate.backward()
            value += float(separate)
            for sums, x, (u, length) in zip(want, leaves, units, strict=True):
                g = host(x.grad)
                sums[:, :dim] += (g - u * (g * u).sum(1, keepdims=True)) / length
        assert abs(float(loss) - value) <= 1e-4 * value, (float(loss), value)
        errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)]
        del got, want
        for x in pair:
            x.clear_gradient(False)
        full = median_ms(lambda pairs=(pair,), run=plain: run(pairs), pair)
        together, small = (median_ms(lambda b=b, run=sweep: [run(b)], pair) for b in (None, 256 << 20))
        prefixes = [[leaf(unit(x[:, :dim])[0], "bfloat16") for x in (q, p)] for dim in DIMS]
        apart = median_ms(lambda pairs=prefixes, run=plain: run(pairs), [x for two in prefixes for x in two])
        print(
            f"| {rows} | {full:.2f} | {apart:.2f} | {together:.2f} | {small:.2f} | {together / full:.2f} "
            f"| {errors[0]:.1e}, {errors[1]:.1e} |", flush=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("rows", type=int, nargs="*")
    parser.add_argument("--device", help="gpu:0, or a CUDA-like custom device; without it, the CPU")
    arguments = parser.parse_args()
    if arguments.device:
        on_gpu(arguments.device, arguments.rows or [32768])
    else:
        on_cpu(arguments.rows or [2048, 4096])


if __name__ == "__main__":
    main()
