# SPDX-License-Identifier: Apache-2.0
"""Errors of the Matryoshka operator on a GPU, against float64 NumPy.

    python tests/gpu/check_prefixes.py gpu:0
    TRITON_INTERPRET=1 python tests/gpu/check_prefixes.py cpu --tiny           without a GPU

Prints a line per check, relative errors of the loss, both gradients and that of the scale, and exits with 1 when one
is above its bound.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

from paddle_infcl_ops import prefixes  # noqa: E402

from benchmarks.groups import block  # noqa: E402
from benchmarks.run import use  # noqa: E402
from tests.gpu.reference import Spec, exact  # noqa: E402

BOUNDS = {"float32": 1e-4, "float16": 5e-4, "bfloat16": 5e-3}
TINY_BOUNDS = {"float32": 1e-4, "float16": 5e-4, "bfloat16": 2e-2}  # the interpreter cuts bf16 off

# dtype, B, N, D, dims, T, rules, budget in MiB
CASES = [
    ("bfloat16", 2048, 2048, 1024, (128, 256, 512, 1024), 0.02, (), None),
    ("bfloat16", 2048, 2048, 1024, (128, 256, 512, 1024), 0.005, ("duplicate",), 16),
    ("bfloat16", 1000, 1500, 768, (64, 256, 640), 0.05, ("zeros",), 8),
    ("bfloat16", 1000, 1500, 768, (256, 512, 768), 0.02, ("ids", "margin"), 8),
    ("bfloat16", 600, 700, 384, (96, 384), 0.05, (), None),
    ("bfloat16", 600, 701, 101, (33, 70), 0.05, ("ids",), 4),
    ("bfloat16", 600, 701, 128, (33, 128), 0.05, ("zeros",), 4),
    ("float32", 1000, 1500, 512, (128, 512), 0.02, ("zeros",), 16),
    ("float32", 600, 701, 101, (33, 70), 0.005, ("duplicate", "margin"), None),
    ("float16", 600, 700, 256, (64, 256), 0.02, (), None),
]


def data(B: int, N: int, D: int, rules) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    q, p = (generator.standard_normal((n, D)) for n in (B, N))
    own = generator.permutation(N)[:B]
    p[own] += 0.3 * q
    if "duplicate" in rules:  # of a query, in a column that no sample sees
        p[(own[3] + 1) % N] = 2 * q[3]
    if "zeros" in rules:
        q[5], p[own[6]], q[7, :64], p[own[8], :64] = 0, 0, 0, 0
    return q, p, own


def expected(arrays: dict, own, dims, temperature: float, ids, margin) -> tuple[float, dict, float]:
    """Loss, gradients of the arrays and of the scale: `exact` at every prefix, and the chain rule of x / |x|."""
    loss, dscale, grads = 0.0, 0.0, {k: np.zeros_like(x) for k, x in arrays.items()}
    for dim in dims:
        length = {k: np.linalg.norm(x[:, :dim], axis=1, keepdims=True) for k, x in arrays.items()}
        inverse = {k: np.where(r > 0, 1 / np.where(r > 0, r, 1), 0) for k, r in length.items()}
        units = {k: x[:, :dim] * inverse[k] for k, x in arrays.items()}
        dropped = np.zeros((len(own), len(arrays["p"])), bool)
        if ids is not None:
            dropped |= ids[0][:, None] == ids[1][None, :]
        if margin is not None:
            s = units["q"] @ units["p"].T
            dropped |= s > s[np.arange(len(own)), own][:, None] + margin + 2.0**-20
        found = exact(units, [[Spec("q", "p", own, dropped)]], 1 / temperature, np.ones(len(own)))
        loss += found["loss"]
        dscale += found["dscale"]
        for k, u in units.items():
            g = found[f"d{k}"]
            grads[k][:, :dim] += (g - u * (g * u).sum(1, keepdims=True)) * inverse[k]
    return loss, grads, dscale


def run(dtype, B, N, D, dims, temperature, rules, budget) -> dict:
    """Relative errors."""
    q, p, own = data(B, N, D, rules)
    tensors = {}
    for name, x in (("q", q), ("p", p)):
        tensor = paddle.to_tensor(x.astype("float32"))
        tensors[name] = tensor if dtype == "float32" else tensor.astype(dtype)
        tensors[name].stop_gradient = False

    def host(x):
        return (x if x.dtype == paddle.float32 else x.astype("float32")).numpy().astype("float64")

    generator = np.random.default_rng(1)
    ids = [generator.integers(0, N // 2, n) for n in (B, N)] if "ids" in rules else None
    margin = 0.05 if "margin" in rules else None
    fields = {} if ids is None else {"row_ids": paddle.to_tensor(ids[0]), "column_ids": paddle.to_tensor(ids[1])}
    if margin is not None:
        fields["limit"] = paddle.to_tensor(np.zeros(B, "float32"))  # says that there is one
    scale = paddle.to_tensor(np.array([1 / temperature], "float32"))
    scale.stop_gradient = False
    loss = prefixes.prefix_info_nce(
        [[block(tensors["q"], tensors["p"], paddle.to_tensor(own), **fields)]], dims, [1.0] * len(dims), scale=scale,
        row_weights=1.0, margin=margin, memory_budget=None if budget is None else budget << 20,
    )  # fmt: skip
    loss.backward()
    exact_inputs = {name: host(tensor) for name, tensor in tensors.items()}
    value, grads, dscale = expected(exact_inputs, own, dims, temperature, ids, margin)
    errors = {"loss": abs(float(loss) - value) / value}
    for name, tensor in tensors.items():
        errors[f"d{name}"] = np.linalg.norm(host(tensor.grad) - grads[name]) / np.linalg.norm(grads[name])
    errors["dscale"] = abs(scale.grad.item() - dscale) / abs(dscale) / 10  # it cancels
    return {k: float(e) if np.isfinite(e) else float("inf") for k, e in errors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, a CUDA-like custom device, or cpu under the interpreter")
    parser.add_argument("--tiny", action="store_true", help="a tenth of the rows and columns, for the interpreter")
    arguments = parser.parse_args()
    use(arguments.device)
    prefixes.FEWEST_ROWS, failed = 64, 0
    for dtype, B, N, D, dims, temperature, rules, budget in CASES:
        if arguments.tiny:
            B, N, budget = B // 20, N // 20, None
        what = f"{dtype} {B} x {N} dims {dims} T {temperature} {' '.join(rules)}"
        try:
            errors = run(dtype, B, N, D, dims, temperature, rules, budget)
            # At T = .005 a handful of rows have all the gradient, and rounding doesn't average out.
            bound = (TINY_BOUNDS if arguments.tiny else BOUNDS)[dtype] * (10 if temperature < 0.01 else 1)
            good = max(errors.values()) <= bound
            numbers = "  ".join(f"{k} {v:.1e}" for k, v in errors.items())
        except Exception as error:
            good, numbers = False, f"{type(error).__name__}: {str(error)[:200]}"
        failed += not good
        print(f"{'ok  ' if good else 'FAIL'} {what:72s} {numbers}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
