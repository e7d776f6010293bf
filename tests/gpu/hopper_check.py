# SPDX-License-Identifier: Apache-2.0
"""The hand-scheduled kernels for sm_90 beside the general ones and float64 NumPy, in the real loss.

    python tests/gpu/hopper_check.py gpu:0            errors, about half a minute
    python tests/gpu/hopper_check.py gpu:0 --time     ms per loss of each kind of kernels, at the power limit

Compiled kernels only: Triton's interpreter has no Gluon. Scratch is filled with NaN before anything writes to it.
Cases are processes side by side. Exits with 1 when an error is above its bound or two runs differ in a bit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import triton
import triton.language as tl

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402
from paddle_infcl_ops import (  # noqa: E402
    contrastive,
    dispatch,
    driver,
    gradients,
    hopper,
    launch,
    one_pass,
    tuning,
    two_pass,
)
from paddle_infcl_ops.views import number  # noqa: E402

from benchmarks.groups import block  # noqa: E402
from benchmarks.run import use  # noqa: E402
from benchmarks.vectors import unit_vectors  # noqa: E402
from tests.gpu.mask_cases import pairs  # noqa: E402
from tests.gpu.reference import Spec, exact  # noqa: E402

BOUND = 3e-3
SHAPES = ((100, 507, 128), (300, 1000, 104), (2048, 2048, 512), (1920, 20000, 1024), (1000, 3001, 384))
#: What is compared: kernels that Triton schedules, and those scheduled by hand.
KINDS = ("general", "by hand")
TIMED = ((8192, 8192, 1024), (16384, 131072, 1024), (16384, 131072, 384), (32768, 32768, 1024))
failed: list[str] = []
empty = driver.empty


def select(kind: str) -> None:
    tuning.HOPPER = kind == "by hand"


@triton.jit
def spoil_kernel(out, n, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if out.dtype.element_ty.is_floating():
        tl.store(out + k, tl.full((BLOCK,), float("nan"), tl.float32).to(out.dtype.element_ty), mask=k < n)
    else:
        tl.store(out + k, tl.full((BLOCK,), -(2**31), tl.int32), mask=k < n)


def spoilt(shape, dtype, like):
    """`driver.empty`, filled with NaN; a launch like the others, so that tapes have it as well."""
    out = empty(shape, dtype, like)
    if out.dtype in (paddle.bfloat16, paddle.float32, paddle.int32) and out.size:
        n = int(out.size)
        dispatch.launch(spoil_kernel, (-(-n // 4096),), out, n, BLOCK=4096)
    return out


def host(x) -> np.ndarray:
    return (x if x.dtype == paddle.float32 else x.astype("float32")).numpy().astype("float64")


def relative(got, want) -> float:
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300)
    return float(error) if np.isfinite(error) else float("inf")


def report(what: str, good: bool, text: str) -> None:
    if not good:
        failed.append(what)
    print(f"{'ok  ' if good else 'FAIL'} {what:40s} {text}", flush=True)


def bf16(x: np.ndarray) -> paddle.Tensor:
    return paddle.to_tensor(np.ascontiguousarray(x, "float32")).astype("bfloat16")


def losses(what, q, p, own, *, temperature=0.02, budget=None, learnable=False) -> None:
    """A loss and its gradients by each kind of kernels: errors, and three runs (the third from a tape) bit for bit."""
    q0, p0, own = bf16(q), bf16(p), paddle.to_tensor(own)
    B, arrays = q0.shape[0], {"q": host(q0), "p": host(p0)}
    inverse = np.float64(np.float32(1 / temperature))
    want = exact(arrays, [[Spec("q", "p", own.numpy())]], inverse, np.full(B, 1 / B))
    text, good = [], True
    for kind in KINDS:
        select(kind)
        runs = []
        for _ in range(3):
            q, p = q0.detach(), p0.detach()
            q.stop_gradient = p.stop_gradient = False
            scale = float(inverse)
            if learnable:
                scale = paddle.to_tensor([inverse], dtype="float32")
                scale.stop_gradient = False
            loss = ops.info_nce([[block(q, p, own)]], scale=scale, row_weights=1 / B, memory_budget=budget)
            loss.backward()
            runs.append([host(loss), host(q.grad), host(p.grad), *([host(scale.grad)] if learnable else [])])
        same = all(np.array_equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))
        value, dq, dp, *ds = runs[0]
        errors = [abs(float(value) - want["loss"]) / max(want["loss"], 1e-6), relative(dq, want["dq"]),
                  relative(dp, want["dp"]), *(abs(float(d[0]) / want["dscale"] - 1) for d in ds)]  # fmt: skip
        good &= max(errors) <= BOUND and same
        text.append(f"{kind} " + " ".join(f"{e:.1e}" for e in errors) + ("" if same else " DIFFERS"))
    report(what, good, "   ".join(text))


def numbers(B: int, N: int, D: int) -> None:
    """E, sums and maxima of one launch beside those of the repair's, which the general kernel makes in tiles as wide.

    References are off by up to 2^100, so that the largest exponent is met; one vector has a NaN.
    """
    x, y, own = pairs(B, N, D, 0.5)
    own[::5] = -1
    x[B // 2, 3] = np.nan
    left, right, own = bf16(x), bf16(y), paddle.to_tensor(own)
    guess = (x @ y.T).max(1) * 72.13 + np.random.default_rng(1).uniform(-100, 100, B)
    reference = paddle.to_tensor(np.nan_to_num(guess).astype("float32"))
    r0 = B // 3  # rows from the middle of the block
    select("by hand")
    s = launch.Similarity(block(left, right, own))
    pitch, tiles = -(-(B - r0) // 4) * 4, launch.cdiv(N, s.tile("exp").BN)
    found = []
    for flags in (None, paddle.full([launch.cdiv(B - r0, launch.FLAG_ROWS)], 1, dtype="int32")):
        E = spoilt([B - r0, -(-N // 8) * 8], paddle.bfloat16, left)
        sums, tops = (spoilt([tiles, pitch], paddle.float32, left) for _ in range(2))
        s.launch(launch.EXP, number(50.0), (r0, B), (0, N), kind="exp", out=E, reference=reference, flags=flags,
                 part_sum=sums, part_max=tops, part_stride=pitch)  # fmt: skip
        found.append((host(E)[:, :N], host(sums)[:, : B - r0], host(tops)[:, : B - r0]))
    (E, sums, tops), (E2, sums2, tops2) = found
    same = all(np.array_equal(np.isnan(a), np.isnan(b)) for a, b in ((E, E2), (sums, sums2)))
    row = B // 2 - r0
    same &= bool(np.isnan(sums[:, row]).all())
    fine = np.arange(B - r0) != row
    apart = [
        (np.abs(E - E2) / np.maximum(E2, 1e-35))[fine].max(),
        (np.abs(sums - sums2) / np.maximum(sums2, 1e-35))[:, fine].max(),
        np.abs(tops - tops2)[:, fine].max(),
    ]
    good = s.hopper and same and apart[0] < 0.009 and max(apart[1:]) < 1e-3
    text = "E {:.1e} sums {:.1e} maxima {:.1e} apart, NaN ".format(*apart) + ("alike" if same else "ELSEWHERE")
    report(f"E {B} x {N} x {D}", good, text)


def shape(index: int) -> None:
    B, N, D = SHAPES[index]
    numbers(B, N, D)
    name = f"{B} x {N} x {D}"
    for cosine in (0.12,) if N == 20000 else (0.12, 0.5, 0.9):
        q, p, own = pairs(B, N, D, cosine)
        losses(f"{name}, own cosine {cosine}", q, p, own, learnable=cosine == 0.12 and D in (104, 1024))
    q, p, own = pairs(B, N, D, 0.12, seed=5)
    per_row = 2 * N + 8 * -(-N // 128) + 6 * D
    losses(f"{name}, chunks", q, p, own, budget=per_row * (640 if B > 1024 else 160))
    if N < 20000:
        p[min(77, N - 1)] *= 10
        losses(f"{name}, one passage 10 x longer, T .01", q, p, own, temperature=0.01)
    if D == 104:
        losses(f"{name}, two passes", q, p, own, budget=1)


def check(index: int) -> None:
    arch, _ = tuning.device(paddle.zeros([1]))
    if not hopper.takes(arch, paddle.bfloat16):
        sys.exit("the hand-scheduled kernels are not taken on this device")
    for module in (driver, contrastive, gradients, launch, one_pass, two_pass):
        module.empty = spoilt
    one_pass.FEWEST_ROWS = 128
    try:
        shape(index)
    except Exception as error:
        report(f"shape {SHAPES[index]}", False, f"{type(error).__name__}: {str(error)[:500]}")


def times() -> None:
    """ms per loss with both gradients: kinds in turn, each for a second after a half, twice."""
    for B, N, D in TIMED:
        p = unit_vectors(N, D, "bfloat16", 1)
        q = unit_vectors(B, D, "bfloat16", 2)
        q.stop_gradient = p.stop_gradient = False
        own = paddle.to_tensor(np.arange(B))
        budget = 512 << 20 if N > 100000 else None
        found: dict = {kind: [] for kind in KINDS}
        for kind in KINDS * 2:
            select(kind)
            for seconds in (0.5, 1.0):
                count, start = 0, time.perf_counter()
                while count < 3 or time.perf_counter() - start < seconds:
                    for _ in range(4):
                        loss = ops.info_nce([[block(q, p, own)]], scale=50.0, row_weights=1 / B, memory_budget=budget)
                    float(loss)
                    count += 4
                ms = (time.perf_counter() - start) / count * 1e3
            found[kind].append(ms)
        text = ", ".join(f"{k} {v[0]:.3f}/{v[1]:.3f} ({6e-9 * B * N * D / min(v):.0f})" for k, v in found.items())
        print(f"{B} x {N} x {D}: ms (TFLOP/s) {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--shape", type=int, help="one of the shapes, in this process")
    arguments = parser.parse_args()
    if arguments.time or arguments.shape is not None:
        use(arguments.device)
        times() if arguments.time else check(arguments.shape)
    else:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-W", "ignore", __file__, arguments.device, "--shape"]
        for process in [subprocess.Popen([*command, str(k)], **pipes) for k in range(len(SHAPES))]:
            output, _ = process.communicate()
            lines = [x for x in output.splitlines() if x.startswith(("ok", "FAIL"))] or output.splitlines()[-8:]
            print("\n".join(lines), flush=True)
            if process.returncode:
                failed.append("a shape")
    if failed:
        sys.exit(f"{len(failed)} checks failed: {failed}")


if __name__ == "__main__":
    main()
