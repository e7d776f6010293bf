# SPDX-License-Identifier: Apache-2.0
"""Distillation against its definition, row by row."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import distillation_loss, inf_cl_loss
from tests import oracle


def setting(seed=0, B=4, G=3, D=5):
    rng = np.random.default_rng(seed)
    q, p = rng.standard_normal((B, D)), rng.standard_normal((B * G, D))
    candidates = np.arange(B * G).reshape(B, G)
    candidates[1, 2] = candidates[2, 1] = candidates[2, 2] = -1
    return q, p, candidates, 5 * rng.standard_normal((B, G))


def rows(q, p, candidates, scores, kind, temperature, teacher_temperature):
    losses = []
    for i, columns in enumerate(candidates):
        there = [g for g in range(len(columns)) if columns[g] >= 0]
        s = np.array([q[i] @ p[columns[g]] for g in there])
        t = np.array([scores[i, g] for g in there])
        if kind == "kl":
            log_s = s / temperature - np.logaddexp.reduce(s / temperature)
            log_t = t / teacher_temperature - np.logaddexp.reduce(t / teacher_temperature)
            losses.append((np.exp(log_t) * (log_t - log_s)).sum())
        else:
            losses.append(np.mean([((s[0] - a) - (t[0] - b)) ** 2 for a, b in zip(s[1:], t[1:], strict=True)] or [0]))
    return np.array(losses)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_it_is_its_definition(kind):
    q, p, candidates, scores = setting()
    weights = np.array([0.1, 0.4, 0.3, 0.2])
    tq, tp = (paddle.to_tensor(x, stop_gradient=False) for x in (q, p))
    loss = distillation_loss(
        tq, tp, paddle.to_tensor(candidates), paddle.to_tensor(scores), kind=kind, temperature=0.3,
        teacher_temperature=2.0, row_weights=paddle.to_tensor(weights),
    )  # fmt: skip
    loss.backward()

    def value(arrays):
        return (weights * rows(*arrays, candidates, scores, kind, 0.3, 2.0)).sum()

    assert float(loss) == pytest.approx(value([q, p]), rel=1e-12)
    for tensor, want in zip((tq, tp), oracle.numeric_gradients(value, [q, p]), strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), want, rtol=1e-6, atol=1e-8)


def test_scores_far_apart_do_not_saturate():
    """A teacher that is 100 logits sure of the positive, and a student that is 100 sure of the negative: KL 100."""
    q, p = paddle.to_tensor([[1.0]]), paddle.to_tensor([[0.0], [1.0]])
    columns, scores = paddle.to_tensor([[0, 1]]), paddle.to_tensor([[0.0, -100.0]])
    assert float(distillation_loss(q, p, columns, scores, temperature=0.01)) == pytest.approx(100.0, rel=1e-6)


def test_a_teacher_equal_to_the_student_costs_nothing_beside_the_contrastive_term():
    q, p, candidates, _ = setting()
    candidates = np.abs(candidates)
    scores = (q[:, None] * p[candidates]).sum(-1) / 0.05
    tq, tp, columns = paddle.to_tensor(q, stop_gradient=False), paddle.to_tensor(p), paddle.to_tensor(candidates)
    extra = distillation_loss(tq, tp, columns, paddle.to_tensor(scores), temperature=0.05)
    assert float(extra) == pytest.approx(0.0, abs=1e-12)
    loss = inf_cl_loss(tq, tp, temperature=0.05, backend="paddle") + 0.5 * extra
    loss.backward()
    assert np.isfinite(tq.grad.numpy()).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "mse"}, "'mse' is none of kl, margin_mse"),
        ({"teacher_scores": paddle.zeros([4, 2])}, "must both be"),
        ({"teacher_temperature": 0.0}, "teacher_temperature: must be positive"),
        ({"candidates": paddle.full([4, 3], -1, "int64")}, "the first of a row is its positive"),
        ({"candidates": paddle.full([4, 3], 12, "int64")}, "must be below 12"),
    ],
)
def test_errors(change, message):
    q, p, candidates, scores = setting()
    arguments = {
        "q": paddle.to_tensor(q), "p": paddle.to_tensor(p), "candidates": paddle.to_tensor(candidates),
        "teacher_scores": paddle.to_tensor(scores), **change,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        distillation_loss(**arguments)


def test_an_empty_batch_has_a_graph():
    q, p = paddle.zeros([0, 3]), paddle.zeros([2, 3])
    q.stop_gradient = p.stop_gradient = False
    loss = distillation_loss(q, p, paddle.zeros([0, 2], "int64"), paddle.zeros([0, 2]))
    loss.backward()
    assert float(loss) == 0.0
