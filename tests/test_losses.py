# SPDX-License-Identifier: Apache-2.0
"""The loss layers on one process."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import Block, inf_cl_loss
from paddle_infcl.functional.counting import count_negatives
from paddle_infcl.functional.matryoshka import matryoshka_loss
from paddle_infcl.functional.vectors import l2_normalize
from paddle_infcl.losses import InfCLLoss, build_loss
from tests import oracle


def vectors(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def leaf(array):
    tensor = paddle.to_tensor(array)
    tensor.stop_gradient = False
    return tensor


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_the_layer_is_the_function():
    q, p = unit(vectors(4, 6)), unit(vectors(8, 6, seed=1))
    want = oracle.plain(q, p, 0.05, margin=0.1)
    assert float(InfCLLoss(0.05, margin=0.1)(leaf(q), leaf(p))) == pytest.approx(want["loss"], rel=1e-12)


def test_build_loss_reads_the_options():
    arguments = SimpleNamespace(
        inf_cl_loss=True, embedding_temperature=0.07, inf_cl_backend="paddle", inf_cl_memory_budget=1000,
        false_negative_margin=0.2, embedding_matryoshka_dims=[4, 2], embedding_matryoshka_weights=[1.0, 0.5],
        negatives_strategy="local", learnable_temperature=False,
    )  # fmt: skip
    loss = build_loss(arguments)
    assert (loss.temperature, loss.backend, loss.memory_budget, loss.margin) == (0.07, "paddle", 1000, 0.2)
    assert loss.matryoshka_dims == [4, 2] and loss.matryoshka_weights == [1.0, 0.5] and loss.strategy == "local"
    # PaddleNLP's own arguments: loss_type chooses, and its switch for cross-device negatives keeps its meaning.
    theirs = SimpleNamespace(loss_type="inf_cl", embedding_temperature=0.02, embedding_negatives_cross_device=False)
    assert build_loss(theirs).backend == "auto" and build_loss(theirs).strategy == "auto"
    theirs.loss_type = "contrastive"
    assert build_loss(theirs).backend == "dense" and build_loss(theirs).strategy == "local"


def test_learnable_temperature_is_a_parameter_that_moves():
    q, p = unit(vectors(6, 5)).astype("float32"), unit(vectors(6, 5, seed=1)).astype("float32")
    loss = InfCLLoss(1.0, learnable_temperature=True, backend="paddle")
    value = loss(leaf(q), leaf(p))
    value.backward()
    want = oracle.plain(q, p, 1.0)
    # dL/dlog T = T dL/dT
    assert float(loss.log_temperature.grad) == pytest.approx(want["dtemperature"], rel=1e-5)
    paddle.optimizer.SGD(0.1, parameters=loss.parameters()).step()
    assert loss.temperature == pytest.approx(math.exp(-0.1 * want["dtemperature"]), rel=1e-5)
    assert InfCLLoss(0.05).parameters() == []


@pytest.mark.parametrize("dims", [[6, 2], [2, 6], [3]])
@pytest.mark.parametrize("weights", [None, "given"])
def test_matryoshka_is_the_weighted_sum_over_renormalised_prefixes(dims, weights):
    weights = None if weights is None else [1.0, 0.5][: len(dims)]
    q, p = vectors(5, 6), vectors(10, 6, seed=1)
    qt, pt = leaf(q), leaf(p)
    loss = matryoshka_loss(lambda a, b: inf_cl_loss(a, b, temperature=0.1, backend="paddle"), qt, pt, dims, weights)
    loss.backward()
    total, dq = 0.0, np.zeros_like(q)
    for dim, weight in zip(dims, weights or [1.0] * len(dims), strict=True):
        uq, up = unit(q[:, :dim]), unit(p[:, :dim])
        want = oracle.plain(uq, up, 0.1)
        total += weight * want["loss"]
        g = want["grads"]["q"]
        norm = np.linalg.norm(q[:, :dim], axis=1, keepdims=True)
        dq[:, :dim] += weight * (g - (g * uq).sum(1, keepdims=True) * uq) / norm
    assert float(loss) == pytest.approx(total, rel=1e-12)
    np.testing.assert_allclose(qt.grad.numpy(), dq, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize(
    ("dims", "weights", "message"),
    [
        ([8], None, "8 is not between 1 and 6"),
        ([0], None, "0 is not between 1 and 6"),
        ([4, 4], None, "a dim twice"),
        ([4, 2], [1.0], "1 of them for 2 dims"),
        ([], None, "at least one"),
    ],
)
def test_matryoshka_errors(dims, weights, message):
    with pytest.raises(ValueError, match=message):
        matryoshka_loss(lambda a, b: a.sum(), leaf(vectors(2, 6)), leaf(vectors(2, 6)), dims, weights)


def test_matryoshka_of_half_vectors_is_computed_in_float32():
    q = paddle.to_tensor(vectors(4, 6).astype("float32")).astype("bfloat16")
    seen = []
    matryoshka_loss(lambda a, b: seen.append((a.dtype, a.shape)) or a.sum(), q, q, [6, 2])
    assert seen == [(paddle.float32, [4, 6]), (paddle.float32, [4, 2])]


def test_layer_errors():
    for options, message in [
        ({"temperature": 0.0}, "positive"),
        ({"backend": "x"}, "none of"),
        ({"strategy": "x"}, "negatives_strategy: 'x' is none of"),
        ({"matryoshka_dims": [2, 2]}, "twice"),
    ]:
        with pytest.raises(ValueError, match=message):
            InfCLLoss(**options)
    with pytest.raises(ValueError, match="9 is not between 1 and 6"):
        InfCLLoss(0.1, matryoshka_dims=[9])(leaf(vectors(2, 6)), leaf(vectors(2, 6)))


def test_effective_negatives():
    q, p = unit(vectors(3, 6)), unit(vectors(6, 6, seed=1))
    loss = InfCLLoss(0.1, backend="paddle")
    assert loss.effective_negatives(leaf(q), leaf(p)) == 5.0
    q_ids, p_ids = paddle.to_tensor([1, 2, 3]), paddle.to_tensor([1, -1, 2, -1, 3, 1])
    assert loss.effective_negatives(leaf(q), leaf(p), None, q_ids, p_ids) == pytest.approx((4 + 5 + 5) / 3)
    p[1] = q[0]
    assert InfCLLoss(0.1, margin=0.5).effective_negatives(leaf(q), leaf(p)) < 5.0
    assert loss.effective_negatives(leaf(q[:0]), leaf(p), paddle.zeros([0], "int64")) == 0.0


def test_count_negatives_by_chunks_and_blocks():
    q, p = leaf(vectors(7, 4)), leaf(vectors(9, 4))
    own = paddle.arange(7)
    ids = paddle.to_tensor([1] * 7), paddle.to_tensor([1, 1, 2, 3, 4, 5, 6, 7, 8])
    blocks = [
        Block(q, p, own=own, row_ids=ids[0], column_ids=ids[1]),
        Block(q, q, self_column=own),
        Block(q, p),
    ]  # fmt: skip
    # Rows 0 and 1 have their own column among the two that share an id: one drop fewer.
    want = np.array([9 - 1 - 1, 9 - 1 - 1, *[9 - 1 - 2] * 5]) + 6 + 9
    for budget in (None, 1, 200):
        assert count_negatives(blocks, budget).numpy().tolist() == want.tolist()


def test_l2_normalize_of_zero_tiny_and_huge_rows():
    x = leaf(np.array([[0.0, 0.0], [3e-30, 4e-30], [3e30, 4e30]], dtype="float32"))
    y = l2_normalize(x)
    np.testing.assert_allclose(y.numpy(), [[0, 0], [0.6, 0.8], [0.6, 0.8]], rtol=1e-6)
    (y * paddle.to_tensor([[1.0, 2.0]])).sum().backward()
    assert np.isfinite(x.grad.numpy()).all() and not x.grad.numpy()[0].any()
