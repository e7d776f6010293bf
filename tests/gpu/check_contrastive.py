# SPDX-License-Identifier: Apache-2.0
"""Errors of the contrastive operators on a GPU, against float64 NumPy.

    python tests/gpu/check_contrastive.py gpu:0            dtypes, masks, ranges
    python tests/gpu/check_contrastive.py gpu:0 --large    also B = N up to 131072, on samples of rows and columns
    TRITON_INTERPRET=1 python tests/gpu/check_contrastive.py cpu --only masks --tiny           without a GPU

Prints a line per check and exits with 1 when an error is above its bound. Masks come with the error of a textbook
cross-entropy of the same type ("dense"), which is allowed where it is larger. Most of the time goes into compiling, so
parts are processes side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402

from benchmarks.bf16_gradients import bf16  # noqa: E402
from benchmarks.groups import block  # noqa: E402
from benchmarks.run import use  # noqa: E402
from paddle_infcl.functional import inf_cl_loss  # noqa: E402
from tests.gpu import mask_cases  # noqa: E402
from tests.gpu.mask_cases import pairs, unit  # noqa: E402
from tests.gpu.reference import Spec, exact, textbook  # noqa: E402

failed: list[str] = []
ROUNDED = {"bfloat16": bf16, "float16": lambda x: x.astype("float16").astype("float64")}
BOUNDS = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 2.5e-3}
# Gradients of a mean over many rows are so small that fp16 has few digits for them.
QUANTA = {"float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}
# The interpreter cuts bf16 off where a GPU rounds it.
TINY_BOUNDS = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2}


def report(what: str, errors: dict, bounds: float | dict, beside: str = "") -> None:
    bounds = bounds if isinstance(bounds, dict) else dict.fromkeys(errors, bounds)
    good = all(error <= bounds[name] for name, error in errors.items())
    if not good:
        failed.append(what)
    numbers = "  ".join(f"{k} {v:.1e}" for k, v in errors.items())
    print(f"{'ok  ' if good else 'FAIL'} {what:46s} {numbers}  {beside}".rstrip(), flush=True)


def on_device(x: np.ndarray, dtype: str) -> paddle.Tensor:
    tensor = paddle.to_tensor(np.ascontiguousarray(x, "float32"))
    return tensor if dtype == "float32" else tensor.astype(dtype)


def host(x: paddle.Tensor) -> np.ndarray:
    return x.astype("float32").numpy().astype("float64") if x.dtype != paddle.float32 else x.numpy().astype("float64")


def relative(got, want, quantum: float = 0.0) -> float:
    """|got - want| / |want|, less what rounding every entry to a multiple of `quantum` may come to."""
    error = max(np.linalg.norm(got - want) - quantum / 2 * np.sqrt(np.size(want)), 0.0)
    error /= max(np.linalg.norm(want), 1e-300)
    return float(error) if np.isfinite(error) else float("inf")


def check(what, q, p, own, *, dtype, temperature=0.02, bound, weights=None, budget=None):
    """One loss without masks."""
    check_groups(what, {"q": q, "p": p}, lambda _: [[Spec("q", "p", own)]], dtype=dtype, temperature=temperature,
                 bound=bound, weights=weights, budget=budget)  # fmt: skip


def check_groups(
    what, arrays, listed, *, dtype, temperature=0.02, bound, weights=None, budget=None, tau=None, dense=False
):
    """A loss against float64 on the rounded inputs.

    Args:
        arrays: by name; gradients are taken of those that are sides of blocks.
        listed: the arrays as the device holds them -> groups of `Spec`.
        tau: the debiased loss, through the package's function.
        dense: print the error of the textbook loss as well.
    """
    tensors = {name: on_device(x, dtype) for name, x in arrays.items()}
    held = {name: host(x) for name, x in tensors.items()}
    groups = listed(held)
    sides = sorted({name for group in groups for b in group for name in (b.left, b.right)})
    for name in sides:
        tensors[name].stop_gradient = False
    B = len(held[groups[0][0].left])
    scale = paddle.to_tensor([1 / temperature], dtype="float32")
    scale.stop_gradient = False
    blocks = [[as_block(b, tensors) for b in group] for group in groups]
    if tau is None:
        w = 1 / B if weights is None else paddle.to_tensor(weights.astype("float32"))
        loss = ops.info_nce(blocks, scale=scale, row_weights=w, memory_budget=budget)
    else:
        b = blocks[0][0]
        loss = inf_cl_loss(b.left, b.right, own=b.own, temperature=temperature, tau_plus=tau, backend="triton")
    loss.backward()
    exactly = {name: held[name] for name in sides}, groups, 1 / np.float64(np.float32(temperature))
    weights = np.full(B, 1 / B) if weights is None else weights
    want = exact(*exactly, weights, tau)
    errors = {"loss": abs(float(loss) - want["loss"]) / max(want["loss"], 1e-6) * bound / max(bound, 1e-4)}
    errors |= {f"d{name}": relative(host(tensors[name].grad), want[f"d{name}"], QUANTA[dtype]) for name in sides}
    beside, bounds = "", dict.fromkeys(errors, bound)
    if dense and dtype in ROUNDED:
        rough = textbook(*exactly, weights, ROUNDED[dtype])
        theirs = {f"d{name}": relative(rough[f"d{name}"], want[f"d{name}"]) for name in sides}
        bounds |= {name: max(bound, error) for name, error in theirs.items()}
        beside = "dense " + "  ".join(f"{error:.1e}" for error in theirs.values())
    report(what, errors, bounds, beside)


def as_block(b: Spec, tensors: dict):
    """A block as the operators take it."""

    def tensor(name, x):
        return paddle.to_tensor(np.asarray(x, "float32" if name in ("limit", "threshold") else "int64"))

    fields = {name: tensor(name, x) if isinstance(x, np.ndarray) else x for name, x in b.fields.items()}
    if "guide" in fields:
        g = fields["guide"]
        fields["guide"] = SimpleNamespace(
            left=tensors[g.left], right=tensors[g.right], threshold=tensor("threshold", g.threshold),
            keep_own=g.keep_own,
        )  # fmt: skip
    own = None if b.own is None else tensor("own", b.own)
    return block(tensors[b.left], tensors[b.right], own, **fields)


def accuracy_table() -> None:
    """The table of the README: bf16, B = 2048, D = 512."""
    for cosine in (0.12, 0.5, 0.9):
        for temperature in (0.02, 0.05):
            q, p, own = pairs(2048, 2048, 512, cosine)
            what = f"bf16 own cosine {cosine} T {temperature}"
            check(what, q, p, own, dtype="bfloat16", temperature=temperature, bound=2.5e-3)
    q, p, own = pairs(2048, 2048, 512, 0.12)
    for temperature in (0.005, 0.01):
        check(f"bf16 T {temperature}", q, p, own, dtype="bfloat16", temperature=temperature, bound=2.5e-3)
    for norm in (5.0, 30.0):
        check(f"bf16 norm {norm}", norm * q, norm * p, own, dtype="bfloat16", bound=2.5e-3)
    long = p.copy()
    long[77] *= 10
    for temperature in (0.02, 0.05):
        what = f"bf16 one passage 10 x longer T {temperature}"
        check(what, q, long, own, dtype="bfloat16", temperature=temperature, bound=2.5e-3)


def dtypes_and_sizes(dtypes) -> None:
    for dtype in dtypes:
        bound = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 3e-3}[dtype]
        for B, N, D in ((1, 1, 8), (255, 507, 123), (100, 333, 33), (640, 1280, 96), (300, 300, 100), (512, 1024, 384),
                        (512, 2048, 1024), (256, 512, 3584), (256, 512, 4096)):  # fmt: skip
            q, p, own = pairs(B, N, D, 0.3)
            check(f"{dtype} {B} x {N} x {D}", q, p, own, dtype=dtype, temperature=0.05, bound=bound)
        q, p, own = pairs(1500, 3000, 256, 0.3)
        weights = np.random.default_rng(3).uniform(0, 1, 1500)
        check(f"{dtype} row weights", q, p, own, dtype=dtype, bound=bound, weights=weights)
        check(f"{dtype} budget 3 MB", q, p, own, dtype=dtype, bound=bound, budget=3 << 20)
        check(f"{dtype} budget 8 MB", q, p, own, dtype=dtype, bound=bound, budget=8 << 20)


def masks(dtypes, tiny: bool) -> None:
    B, N, D = (70, 130, 32) if tiny else (700, 1300, 128)
    q, p, own = pairs(B, N, D, 0.3)
    g = np.random.default_rng(4)
    guides = {"gq": unit(g.standard_normal((B, 64))), "gp": unit(g.standard_normal((N, 64)))}
    arrays = {"q": q, "p": p, "o": p[own], **guides, "go": guides["gp"][own]}
    for dtype in dtypes:
        bound = (TINY_BOUNDS if tiny else BOUNDS)[dtype]
        for name in mask_cases.CASES:
            listed = lambda held, name=name: getattr(mask_cases.Cases(held, own), name)()  # noqa: E731
            attempt(f"{dtype} {name}", arrays, listed, dtype=dtype, bound=bound, dense=True)
        for tau in (0.02, 0.4):  # without and with rows at the floor
            plain = lambda held: [[Spec("q", "p", own)]]  # noqa: E731
            attempt(f"{dtype} debiased, tau_plus {tau}", {"q": q, "p": p}, plain, dtype=dtype, bound=bound, tau=tau)


def attempt(what, *args, **options) -> None:
    """`check_groups`, and goes on after an error."""
    try:
        check_groups(what, *args, **options)
    except Exception as error:
        failed.append(what)
        print(f"FAIL {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def large() -> None:
    """Samples of rows and columns; the log-sum-exps of the other rows come from the operator, checked on the rows."""
    g = np.random.default_rng(9)
    for B, D, dtype in ((131072, 1024, "bfloat16"), (131072, 384, "float16"), (32768, 1024, "float32")):
        x = g.standard_normal((B, D), dtype="float32")
        y = g.standard_normal((B, D), dtype="float32")
        y += 0.5 * x
        q, p = on_device(unit(x), dtype), on_device(unit(y), dtype)
        del x, y
        own = paddle.to_tensor(np.arange(B))
        q.stop_gradient = p.stop_gradient = False
        one = block(q, p, own)
        ops.info_nce([[one]], scale=50.0, row_weights=1 / B).backward()
        lse, own_s = ops.block_lse(one, 50.0).numpy().astype("float64"), ops.own_similarity(q, p, own).numpy()
        q64, p64, dq, dp = q.astype("float32").numpy(), p.astype("float32").numpy(), host(q.grad), host(p.grad)
        rows = np.sort(g.permutation(B)[:48])
        z = 50 * (q64[rows].astype("float64") @ p64.T.astype("float64"))
        own_z = z[np.arange(48), rows].copy()
        z[np.arange(48), rows] = -np.inf
        want = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
        P = np.exp(z - np.logaddexp(want, own_z)[:, None])
        P[np.arange(48), rows] = -P.sum(1)
        want_dq = 50 / B * P @ p64.astype("float64")
        zc = 50 * (q64.astype("float64") @ p64[rows].T.astype("float64"))
        total = np.logaddexp(lse, 50.0 * own_s.astype("float64"))
        P = np.exp(zc - total[:, None])
        P[rows, np.arange(48)] = -np.exp(lse[rows] - total[rows])
        want_dp = 50 / B * P.T @ q64.astype("float64")
        report(f"{dtype} {B} x {B} x {D}, samples", {
            "lse": float(np.abs(lse[rows] - want).max()) * 1e-3,
            "dq": relative(dq[rows], want_dq, QUANTA[dtype]), "dp": relative(dp[rows], want_dp, QUANTA[dtype]),
        }, 2.5e-3)  # fmt: skip
        del q64, p64, dq, dp


PARTS = ("accuracy", "sizes", "masks", "large")


def run_part(name: str, dtypes: list[str], tiny: bool) -> None:
    if name == "accuracy":
        accuracy_table()
    elif name == "sizes":
        dtypes_and_sizes(dtypes)
    elif name == "masks":
        masks(dtypes, tiny)
    else:
        large()


def side_by_side(arguments) -> None:
    """A process for each part, or for each of its types; their output one after the other."""
    jobs = [("accuracy", "bfloat16")] + [(part, dtype) for part in ("sizes", "masks") for dtype in BOUNDS]
    jobs += [("large", "bfloat16")] if arguments.large else []
    command = [sys.executable, __file__, arguments.device]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [subprocess.Popen([*command, "--only", part, "--dtypes", dtype], **pipes) for part, dtype in jobs]
    for job, process in zip(jobs, started, strict=True):
        output, _ = process.communicate()
        lines = [line for line in output.splitlines() if process.returncode or line.startswith("ok")]
        print("\n".join(lines[-60:]), flush=True)
        if process.returncode:
            failed.append(" ".join(job))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device; cpu under the interpreter")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", choices=PARTS, help="one part, in this process")
    parser.add_argument("--dtypes", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--tiny", action="store_true", help="masks at a size for the interpreter")
    arguments = parser.parse_args()
    if arguments.only:
        use(arguments.device)
        run_part(arguments.only, arguments.dtypes, arguments.tiny)
    else:
        side_by_side(arguments)
    if failed:
        sys.exit(f"{len(failed)} checks failed: {failed}")


if __name__ == "__main__":
    main()
