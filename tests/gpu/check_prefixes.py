# SPDX-License-Identifier: Apache-2.0
"""Errors of the Matryoshka operator on a GPU, against float64 NumPy.

    python tests/gpu/check_prefixes.py gpu:0
    TRITON_INTERPRET=1 python tests/gpu/check_prefixes.py cpu --tiny           without a GPU

Prints a line per check, relative errors of the loss, its gradients and that of the scale, and exits with 1 when one
is above its bound.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

from paddle_infcl_ops import prefixes  # noqa: E402

from benchmarks.run import use  # noqa: E402
from tests.gpu.check_contrastive import as_block, host, on_device  # noqa: E402
from tests.gpu.mask_cases import Cases, unit  # noqa: E402
from tests.gpu.reference import Spec, exact  # noqa: E402

BOUNDS = {"float32": 1e-4, "float16": 5e-4, "bfloat16": 5e-3}
TINY_BOUNDS = {"float32": 1e-4, "float16": 5e-4, "bfloat16": 2e-2}  # the interpreter cuts bf16 off
# Blocks that `mask_cases.Cases` lists: one for the first four of these, else several.
LISTED = (
    "guide", "guide_that_keeps_own", "only_own_negatives", "without_own_documents", "guided", "four_directions",
    "qwen3", "symmetric",
)  # fmt: skip

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
    *(("bfloat16", 1000, 1500, 512, (128, 256, 512), 0.05, (name,), 12) for name in LISTED),
    ("bfloat16", 2048, 2048, 1024, (128, 256, 512, 1024), 0.02, ("guided",), None),
    ("bfloat16", 600, 700, 256, (256,), 0.05, ("guided", "zeros"), 4),
    ("bfloat16", 600, 701, 101, (33, 70), 0.05, ("guided",), 4),
    ("float32", 600, 701, 128, (32, 128), 0.02, ("guided", "duplicate"), 6),
    ("float32", 600, 701, 128, (32, 64, 128), 0.05, ("qwen3", "zeros"), 8),
    ("float16", 600, 700, 256, (64, 256), 0.02, ("guided",), None),
]


def data(B: int, N: int, D: int, rules) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Queries, passages, the own ones of these ("o"), a guide's vectors of all; and the own columns."""
    generator = np.random.default_rng(0)
    q, p = (generator.standard_normal((n, D)) for n in (B, N))
    own = generator.permutation(N)[:B]
    p[own] += 0.3 * q
    if "duplicate" in rules:  # of a query, in a column that no sample sees
        p[(own[3] + 1) % N] = 2 * q[3]
    if "zeros" in rules:
        q[5], p[own[6]], q[7, :64], p[own[8], :64] = 0, 0, 0, 0
    guides = {f"g{name}": unit(generator.standard_normal((n, 64))) for name, n in (("q", B), ("p", N))}
    return {"q": q, "p": p, "o": p[own], **guides, "go": guides["gp"][own]}, own


def listed(held: dict, own: np.ndarray, rules) -> list[list[Spec]]:
    """The blocks, with what is dropped at every prefix; one with a limit says that the margin rule holds."""
    named = [rule for rule in rules if rule in LISTED]
    if named:
        groups = getattr(Cases(held, own), named[0])()
        for spec in (spec for group in groups for spec in group if "limit" in spec.fields):
            itself = spec.fields.get("self_column", np.full(len(own), -1))
            spec.dropped = np.arange(len(held[spec.right]))[None] == itself[:, None]
        return groups
    dropped, fields = np.zeros((len(own), len(held["p"])), bool), {}
    if "ids" in rules:
        generator = np.random.default_rng(1)
        row, column = (generator.integers(0, len(held["p"]) // 2, len(held[name])) for name in "qp")
        dropped, fields = row[:, None] == column[None, :], {"row_ids": row, "column_ids": column}
    if "margin" in rules:
        fields["limit"] = np.zeros(len(own))
    return [[Spec("q", "p", own, dropped, fields=fields)]]


def at_prefix(group: list[Spec], units: dict, margin: float) -> list[Spec]:
    """The group with the margin rule's drops at this prefix."""
    (first,) = (spec for spec in group if spec.own is not None)
    limit = (units[first.left] * units[first.right][first.own]).sum(axis=1) + margin + 2.0**-20

    def of(spec):
        if "limit" not in spec.fields:
            return spec
        return replace(spec, dropped=spec.dropped | (units[spec.left] @ units[spec.right].T > limit[:, None]))

    return [of(spec) for spec in group]


def expected(arrays: dict, groups, dims, temperature: float, margin: float) -> tuple[float, dict, float]:
    """Loss, gradients of the arrays and of the scale: `exact` at every prefix, and the chain rule of x / |x|."""
    loss, dscale, grads = 0.0, 0.0, {k: np.zeros_like(x) for k, x in arrays.items()}
    for dim in dims:
        length = {k: np.linalg.norm(x[:, :dim], axis=1, keepdims=True) for k, x in arrays.items()}
        inverse = {k: np.where(r > 0, 1 / np.where(r > 0, r, 1), 0) for k, r in length.items()}
        units = {k: x[:, :dim] * inverse[k] for k, x in arrays.items()}
        here = [at_prefix(group, units, margin) for group in groups]
        rows = len(arrays[groups[0][0].left])
        found = exact(units, here, 1 / temperature, np.ones(rows))
        loss += found["loss"]
        dscale += found["dscale"]
        for k, u in units.items():
            g = found[f"d{k}"]
            grads[k][:, :dim] += (g - u * (g * u).sum(1, keepdims=True)) * inverse[k]
    return loss, grads, dscale


def run(dtype, B, N, D, dims, temperature, rules, budget) -> dict:
    """Relative errors."""
    arrays, own = data(B, N, D, rules)
    tensors = {name: on_device(x, dtype) for name, x in arrays.items()}
    held = {name: host(x) for name, x in tensors.items()}
    groups, margin = listed(held, own, rules), 0.05
    sides = {name for group in groups for spec in group for name in (spec.left, spec.right)}
    for name in sides:
        tensors[name].stop_gradient = False
    scale = paddle.to_tensor(np.array([1 / temperature], "float32"))
    scale.stop_gradient = False
    loss = prefixes.prefix_info_nce(
        [[as_block(spec, tensors) for spec in group] for group in groups], dims, [1.0] * len(dims), scale=scale,
        row_weights=1.0, margin=margin, memory_budget=None if budget is None else budget << 20,
    )  # fmt: skip
    loss.backward()
    value, grads, dscale = expected({name: held[name] for name in sides}, groups, dims, temperature, margin)
    errors = {"loss": abs(float(loss) - value) / value}
    for name in sorted(sides):
        errors[f"d{name}"] = np.linalg.norm(host(tensors[name].grad) - grads[name]) / np.linalg.norm(grads[name])
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
        print(f"{'ok  ' if good else 'FAIL'} {what:76s} {numbers}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
