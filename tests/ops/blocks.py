# SPDX-License-Identifier: Apache-2.0
"""Losses for the kernel tests: one description gives the blocks of the operators and the oracle's answer."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle

from tests import oracle

_FIELDS = ("own", "self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
_GUARD = 64
# The interpreter cuts bf16 off where a GPU rounds it, so its errors are twice a GPU's and all of one sign.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2, "float16": 2e-3}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def vectors(generator, rows: int, width: int, norm: float = 1.0) -> np.ndarray:
    """[rows, width] float32 of the given length."""
    x = generator.standard_normal((rows, width))
    return (norm * x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32")


def guarded(x: np.ndarray, dtype: str) -> paddle.Tensor:
    """A matrix as a strided view into a larger one that is NaN everywhere else: reads outside poison the result."""
    rows, width = x.shape
    frame = np.full((rows + 4, width + _GUARD), np.nan, "float32")
    frame[2 : 2 + rows, 16 : 16 + width] = x
    frame = paddle.to_tensor(frame).astype(dtype)
    view = frame[2 : 2 + rows, 16 : 16 + width]
    assert view.data_ptr() != frame.data_ptr() and view.strides[0] == width + _GUARD
    return view


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x as `dtype` holds it, in float64."""
    return paddle.to_tensor(x).astype(dtype).astype("float32").numpy().astype("float64")


def index(x) -> paddle.Tensor | None:
    return None if x is None else paddle.to_tensor(np.asarray(x, "int64"))


def number(x) -> paddle.Tensor | None:
    return None if x is None else paddle.to_tensor(np.asarray(x, "float32"))


def block(description: dict, tensors: dict) -> SimpleNamespace:
    """What the operators take: any object with these attributes."""
    given = {name: description.get(name) for name in _FIELDS}
    for name in ("own", "self_column", "row_ids", "column_ids", "owner"):
        given[name] = index(given[name])
    given["limit"] = number(given["limit"])
    if given["guide"] is not None:
        guide = given["guide"]
        given["guide"] = SimpleNamespace(
            left=tensors[guide["left"]], right=tensors[guide["right"]], threshold=number(guide["threshold"]),
            keep_own=guide.get("keep_own", False),
        )  # fmt: skip
    if given["hardness"] is not None:
        given["hardness"] = SimpleNamespace(**given["hardness"])
    left, right = tensors[description["left"]], tensors[description["right"]]
    return SimpleNamespace(left=left, right=right, row_offset=description.get("row_offset", 0), **given)


def prepare(arrays: dict, groups: list, dtype: str):
    """(tensors by name with gradients on, groups of blocks, arrays and groups for the oracle)."""
    tensors = {name: guarded(x, dtype) for name, x in arrays.items()}
    exact = {name: rounded(x, dtype) for name, x in arrays.items()}
    for tensor in tensors.values():
        tensor.stop_gradient = False
    blocks = [[block(description, tensors) for description in group] for group in groups]
    told = []
    for group in groups:
        told.append([])
        for description in group:
            description = dict(description)
            if description.get("guide") is not None:
                guide = dict(description["guide"])
                guide["left"], guide["right"] = exact[guide["left"]], exact[guide["right"]]
                description["guide"] = guide
            if description.get("limit") is not None:
                description["slack"] = 1e-6
            told[-1].append(description)
    return tensors, blocks, exact, told


def compare(ops, arrays, groups, dtype, *, temperature=0.1, weights=None, budget=None, learn=True, tolerance=None):
    """Runs the operator and the oracle, and asserts that loss and gradients agree."""
    tensors, blocks, exact, told = prepare(arrays, groups, dtype)
    used = {name for group in groups for d in group for name in (d["left"], d["right"])}
    B = tensors[groups[0][0]["left"]].shape[0]
    scale = paddle.to_tensor([1.0 / temperature], dtype="float32")
    scale.stop_gradient = not learn
    row_weights = 1.0 / B if weights is None else number(weights)
    loss = ops.info_nce(blocks, scale=scale, row_weights=row_weights, memory_budget=budget)
    loss.backward()
    expected = oracle.info_nce(exact, told, temperature, weights)
    tolerance = tolerance or TOLERANCE[dtype]
    assert loss.shape == [] and loss.dtype == paddle.float32
    np.testing.assert_allclose(float(loss), expected["loss"], rtol=2e-5, atol=2e-6)
    for name in sorted(used):
        got = tensors[name].grad
        assert got.dtype == tensors[name].dtype and got.shape == tensors[name].shape
        close(got, expected["grads"][name], tolerance, name)
    if learn:
        close(scale.grad, -expected["dtemperature"] * temperature**2, max(10 * tolerance, 2e-4), "scale")  # it cancels
    return loss


def close(got: paddle.Tensor, expected, tolerance: float, what: str = "") -> None:
    """Relative error in the Frobenius norm; NaN and leftovers of uninitialised memory never pass."""
    got, expected = got.astype("float32").numpy().astype("float64"), np.asarray(expected, "float64")
    assert np.isfinite(got).all(), f"{what}: not finite"
    error = np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-30)
    if np.linalg.norm(expected) < 1e-12:
        error = np.linalg.norm(got)
    assert error <= tolerance, f"{what}: relative error {error:.2e} > {tolerance:.0e}"
