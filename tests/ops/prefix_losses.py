# SPDX-License-Identifier: Apache-2.0
"""The Matryoshka operator and what it must give: the float64 oracle at every prefix, and the chain rule of x / |x|."""

from __future__ import annotations

import numpy as np
import paddle
from paddle_infcl_ops import prefixes

from tests import oracle
from tests.ops.blocks import TOLERANCE, close, number, prepare, rng, vectors


def pair(B=37, N=71, D=70, seed=0, cosine=0.4):
    """Queries and passages of any length, whose own pairs agree somewhat."""
    g = rng(seed)
    q, p = vectors(g, B, D, 1.5), vectors(g, N, D, 0.7)
    own = g.permutation(N)[:B] if N >= B else g.integers(0, N, B)
    p[own] = cosine * q + (1 - cosine) * p[own]
    return {"q": q, "p": p}, own


def unit(x):
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return np.where(length > 0, x / np.where(length > 0, length, 1), 0), length


def _with_limits(group, units, margin):
    """The group with the margin rule's limits at this prefix, in blocks that have a limit."""
    (own,) = (d for d in group if d.get("own") is not None)
    limit = (units[own["left"]] * units[own["right"]][own["own"]]).sum(1) + margin
    return [d if d.get("limit") is None else d | {"limit": limit, "slack": 1e-6} for d in group]


def expected(arrays, groups, dims, weights, temperature, row_weights=None, margin=None):
    """Loss, gradients and that of the scale.

    Args:
        arrays: the sides of the blocks, by name.
        groups: as the oracle takes them.
    """
    loss, dtemperature = 0.0, 0.0
    grads = {name: np.zeros(x.shape) for name, x in arrays.items()}
    for dim, weight in zip(dims, weights, strict=True):
        cut = {name: unit(x[:, :dim]) for name, x in arrays.items()}
        units = {name: u for name, (u, _) in cut.items()}
        here = groups if margin is None else [_with_limits(group, units, margin) for group in groups]
        found = oracle.info_nce(units, here, temperature, row_weights)
        loss += weight * found["loss"]
        dtemperature += weight * found["dtemperature"]
        for name, (u, length) in cut.items():
            g = found["grads"][name]
            g = np.where(length > 0, (g - u * (g * u).sum(1, keepdims=True)) / np.where(length > 0, length, 1), 0)
            grads[name][:, :dim] += weight * g
    return loss, grads, -dtemperature * temperature**2


def compare(arrays, groups, dims, weights=None, dtype="float32", *, temperature=0.1, row_weights=None, budget=None,
            margin=None, tolerance=None, learns=None):  # fmt: skip
    """Runs the operator and the oracle, and asserts that loss and gradients agree.

    Args:
        groups: lists of descriptions, see `blocks.block`. With a margin every block has a limit.
        learns: names of the arrays that want a gradient; None: all sides.
    """
    weights = weights or [1.0 + 0.5 * k for k in range(len(dims))]
    if margin is not None:  # says that there is a limit; its value is that of each prefix
        groups = [[d | {"limit": np.zeros(len(arrays[d["left"]]))} for d in group] for group in groups]
    tensors, blocks, exact, told = prepare(arrays, groups, dtype)
    names = {name for group in groups for d in group for name in (d["left"], d["right"])}
    for name, tensor in tensors.items():
        tensor.stop_gradient = name not in (names if learns is None else learns)
    rows = blocks[0][0].left.shape[0]
    scale = paddle.to_tensor([1.0 / temperature], dtype="float32", stop_gradient=False)
    given = 1.0 / rows if row_weights is None else number(row_weights)
    assert prefixes.sweeps(blocks)
    loss = prefixes.prefix_info_nce(
        blocks, dims, weights, scale=scale, row_weights=given, margin=margin, memory_budget=budget
    )
    loss.backward()
    sides = {name: exact[name] for name in names}
    value, grads, dscale = expected(sides, told, dims, weights, temperature, row_weights, margin)
    tolerance = tolerance or TOLERANCE[dtype]
    assert loss.shape == [] and loss.dtype == paddle.float32
    np.testing.assert_allclose(float(loss), value, rtol=2e-5, atol=2e-6)
    for name, tensor in tensors.items():
        if tensor.stop_gradient:
            assert tensor.grad is None
            continue
        assert tensor.grad.dtype == tensor.dtype and tensor.grad.shape == tensor.shape
        close(tensor.grad, grads[name], tolerance, name)
        assert not tensor.grad.astype("float32").numpy()[:, dims[-1] :].any()
    # The sum cancels.
    size = sum(np.abs(x).max() for x in sides.values()) * np.abs(grads[groups[0][0]["left"]]).sum() * temperature
    assert abs(float(scale.grad) - dscale) <= tolerance * max(10 * abs(dscale), size) + 1e-9
    return loss
