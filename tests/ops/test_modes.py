# SPDX-License-Identifier: Apache-2.0
"""The operator where Paddle runs it otherwise: in static graphs, under auto_cast, in recompute."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
import paddle_infcl_ops as ops
from paddle.distributed.fleet.utils import recompute

from tests.ops.blocks import block, rng, vectors

B, N, D = 24, 40, 16


def data():
    g = rng(0)
    q, p = (paddle.to_tensor(vectors(g, n, D)) for n in (B, N))
    q.stop_gradient = p.stop_gradient = False
    scale = paddle.to_tensor([10.0])
    scale.stop_gradient = False
    ids = {"row_ids": g.integers(0, 9, B), "column_ids": g.integers(0, 9, N)}
    return q, p, scale, {"own": g.permutation(N)[:B], **ids}


def loss_of(q, p, scale, fields):
    group = [block({"left": "q", "right": "p", **fields}, {"q": q, "p": p})]
    return ops.info_nce([group], scale=scale, row_weights=1 / B)


def gradients(loss, *tensors):
    loss.backward()
    return [float(loss), *(t.grad.astype("float32").numpy().copy() for t in tensors)]


def same(got, expected, tolerance=1e-5):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def expected():
    q, p, scale, fields = data()
    return gradients(loss_of(q * 2, p * 0.5, scale, fields), q, p, scale)


class Model(paddle.nn.Layer):
    """A loss with something to differentiate around it."""

    def __init__(self, fields):
        super().__init__()
        self.fields = vars(block({"left": "q", "right": "p", **fields}, {"q": None, "p": None}))

    def forward(self, q, p, scale):
        return loss_between(q * 2, p * 0.5, scale, self.fields)


def loss_between(left, right, scale, fields):
    group = [SimpleNamespace(**{**fields, "left": left, "right": right})]
    return ops.info_nce([group], scale=scale, row_weights=1 / B)


@pytest.mark.parametrize("full_graph", [False, True])
def test_to_static(full_graph):
    want = expected()  # before: pytest's import hook must not run inside of to_static
    q, p, scale, fields = data()
    model = paddle.jit.to_static(Model(fields), full_graph=full_graph)
    model.train()
    same(gradients(model(q, p, scale), q, p, scale), want)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_auto_cast(level):
    """Vectors keep the dtype that they come in: fp32 ones are not rounded, bf16 ones not blown up."""
    q, p, scale, fields = data()
    q, p = (paddle.to_tensor(x.numpy(), stop_gradient=False) for x in (q * 2, p * 0.5))
    with paddle.amp.auto_cast(level=level, dtype="bfloat16"):
        inside = gradients(loss_of(q, p, scale, fields), q, p, scale)
    q, p, scale, fields = data()
    q, p = (paddle.to_tensor(x.numpy(), stop_gradient=False) for x in (q * 2, p * 0.5))
    same(inside, gradients(loss_of(q, p, scale, fields), q, p, scale), 1e-6)


def test_recompute():
    q, p, scale, fields = data()

    def loss(q, p, scale):
        return loss_of(q * 2, p * 0.5, scale, fields)

    same(gradients(recompute(loss, q, p, scale), q, p, scale), expected())
