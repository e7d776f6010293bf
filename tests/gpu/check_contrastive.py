# SPDX-License-Identifier: Apache-2.0
"""Errors of the contrastive operators on a GPU, against float64 NumPy.

    python tests/gpu/check_contrastive.py gpu:0            dtypes, masks, ranges: about a minute
    python tests/gpu/check_contrastive.py gpu:0 --large    also B = N up to 131072, on samples of rows and columns

Prints a line per check and exits with 1 when an error is above its bound.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402

from benchmarks.run import block, use  # noqa: E402

failed: list[str] = []


def report(what: str, errors: dict, bound: float) -> None:
    worst = max(errors.values())
    good = worst <= bound
    if not good:
        failed.append(what)
    numbers = "  ".join(f"{k} {v:.1e}" for k, v in errors.items())
    print(f"{'ok  ' if good else 'FAIL'} {what:58s} {numbers}", flush=True)


def on_device(x: np.ndarray, dtype: str) -> paddle.Tensor:
    tensor = paddle.to_tensor(np.ascontiguousarray(x, "float32"))
    return tensor if dtype == "float32" else tensor.astype(dtype)


def host(x: paddle.Tensor) -> np.ndarray:
    return x.astype("float32").numpy().astype("float64") if x.dtype != paddle.float32 else x.numpy().astype("float64")


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pairs(B: int, N: int, D: int, cosine: float, seed: int = 0):
    """Unit queries, unit passages whose own pairs have this cosine, and the own columns."""
    g = np.random.default_rng(seed)
    q, p = unit(g.standard_normal((B, D))), unit(g.standard_normal((N, D)))
    own = g.permutation(N)[:B]
    away = p[own] - (p[own] * q).sum(1, keepdims=True) * q
    p[own] = cosine * q + np.sqrt(1 - cosine**2) * unit(away)
    return q, p, own


def expected(q, p, own, scale, dropped=None, weights=None):
    """Loss, dq, dp, dscale in float64; 1 - P_own as a sum over the others."""
    B = len(q)
    w = np.full(B, 1 / B) if weights is None else weights
    s = q @ p.T
    z = scale * s
    own_z = z[np.arange(B), own]
    if dropped is not None:
        z[dropped] = -np.inf
    z[np.arange(B), own] = -np.inf
    top = z.max(1)
    top[top == -np.inf] = 0
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.exp(z - top[:, None]).sum(1))
    both = np.logaddexp(lse, own_z)
    P = np.exp(z - both[:, None])
    P[np.arange(B), own] = -P.sum(1)
    P *= w[:, None]
    loss = (w * np.logaddexp(0, lse - own_z)).sum()
    return {"loss": loss, "dq": scale * P @ p, "dp": scale * P.T @ q, "dscale": (P * s).sum()}


def relative(got, want) -> float:
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-300)
    return float(error) if np.isfinite(error) else float("inf")


def check(what, q, p, own, *, dtype, temperature=0.02, bound, fields=None, dropped=None, weights=None, budget=None):
    """One loss against float64 on the rounded inputs."""
    tq, tp = on_device(q, dtype), on_device(p, dtype)
    q64, p64 = host(tq), host(tp)
    tq.stop_gradient = tp.stop_gradient = False
    scale = paddle.to_tensor([1 / temperature], dtype="float32")
    scale.stop_gradient = False
    w = 1 / len(q) if weights is None else paddle.to_tensor(weights.astype("float32"))
    blocks = [[block(tq, tp, paddle.to_tensor(own), **(fields or {}))]]
    loss = ops.info_nce(blocks, scale=scale, row_weights=w, memory_budget=budget)
    loss.backward()
    want = expected(q64, p64, own, 1 / np.float64(np.float32(temperature)), dropped, weights)
    report(what, {
        "loss": abs(float(loss) - want["loss"]) / max(want["loss"], 1e-6) * bound / max(bound, 1e-4),
        "dq": relative(host(tq.grad), want["dq"]), "dp": relative(host(tp.grad), want["dp"]),
    }, bound)  # fmt: skip
    return want


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


def dtypes_and_sizes() -> None:
    for dtype, bound in (("float32", 1e-4), ("float16", 1e-3), ("bfloat16", 3e-3)):
        for B, N, D in ((1, 1, 8), (255, 507, 123), (100, 333, 33), (640, 1280, 96), (300, 300, 100), (512, 1024, 384),
                        (512, 2048, 1024), (256, 512, 3584), (256, 512, 4096)):  # fmt: skip
            q, p, own = pairs(B, N, D, 0.3)
            check(f"{dtype} {B} x {N} x {D}", q, p, own, dtype=dtype, temperature=0.05, bound=bound)
        q, p, own = pairs(1500, 3000, 256, 0.3)
        weights = np.random.default_rng(3).uniform(0, 1, 1500)
        check(f"{dtype} row weights", q, p, own, dtype=dtype, bound=bound, weights=weights)
        check(f"{dtype} budget 3 MB", q, p, own, dtype=dtype, bound=bound, budget=3 << 20)
        check(f"{dtype} budget 8 MB", q, p, own, dtype=dtype, bound=bound, budget=8 << 20)


def masks() -> None:
    """Thresholds are placed in gaps of the similarities, so that rounding decides nothing."""
    from types import SimpleNamespace

    for dtype, bound in (("float32", 1e-4), ("float16", 1e-3), ("bfloat16", 3e-3)):
        B, N, D = 700, 1300, 128
        q, p, own = pairs(B, N, D, 0.3)
        g = np.random.default_rng(5)
        ints = lambda *a: paddle.to_tensor(np.asarray(a[0], "int64"))  # noqa: E731
        row, column = g.integers(-1, 300, (B, 2)), g.integers(-1, 300, (N, 2))
        same = ((row[:, None, :] == column[None, :, :]) & (row >= 0)[:, None, :]).any(-1)
        check(f"{dtype} ids", q, p, own, dtype=dtype, bound=bound, dropped=same,
              fields={"row_ids": ints(row), "column_ids": ints(column)})  # fmt: skip
        itself = (own + 1) % N
        check(f"{dtype} self", q, p, own, dtype=dtype, bound=bound, dropped=np.arange(N)[None] == itself[:, None],
              fields={"self_column": ints(itself)})  # fmt: skip
        owner = g.integers(-1, B, N)
        check(f"{dtype} only own negatives", q, p, own, dtype=dtype, bound=bound,
              dropped=(owner >= 0)[None] & (owner[None] != np.arange(B)[:, None]),
              fields={"owner": ints(owner), "owner_rule": "only"})  # fmt: skip
        s = host(on_device(q, dtype)) @ host(on_device(p, dtype)).T
        limit = gaps(s)
        check(f"{dtype} limit", q, p, own, dtype=dtype, bound=bound, dropped=s > limit[:, None],
              fields={"limit": paddle.to_tensor(limit.astype("float32"))})  # fmt: skip
        gq, gp = on_device(unit(g.standard_normal((B, 64))), dtype), on_device(unit(g.standard_normal((N, 64))), dtype)
        seen = host(gq) @ host(gp).T
        threshold = gaps(seen)
        theta = paddle.to_tensor(threshold.astype("float32"))
        guide = SimpleNamespace(left=gq, right=gp, threshold=theta, keep_own=False)
        check(f"{dtype} guide", q, p, own, dtype=dtype, bound=bound, dropped=seen > threshold[:, None],
              fields={"guide": guide})  # fmt: skip


def gaps(s: np.ndarray) -> np.ndarray:
    """[B] for every row a number in the widest gap near its 90th percentile."""
    ordered = np.sort(s, axis=1)
    k = int(0.9 * s.shape[1])
    part = ordered[:, k - 40 : k + 40]
    at = np.diff(part, axis=1).argmax(1)
    rows = np.arange(len(s))
    return (part[rows, at] + part[rows, at + 1]) / 2


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
            "dq": relative(dq[rows], want_dq), "dp": relative(dp[rows], want_dp),
        }, 2.5e-3)  # fmt: skip
        del q64, p64, dq, dp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--only", choices=("accuracy", "sizes", "masks", "large"))
    arguments = parser.parse_args()
    use(arguments.device)
    parts = {"accuracy": accuracy_table, "sizes": dtypes_and_sizes, "masks": masks, "large": large}
    for name, part in parts.items():
        if arguments.only == name or (arguments.only is None and (name != "large" or arguments.large)):
            part()
    if failed:
        sys.exit(f"{len(failed)} checks failed: {failed}")


if __name__ == "__main__":
    main()
