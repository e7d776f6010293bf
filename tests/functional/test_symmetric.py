# SPDX-License-Identifier: Apache-2.0
"""The symmetric loss with shared similarities is that of two separate directions."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.functional import multiple_negatives_ranking_loss, symmetric_loss
from tests import oracle
from tests.functional.random_groups import unit
from tests.functional.test_blocks import allocated_by


def wanted(q, p, temperature, ids=None, weights=None):
    own, ids = np.arange(len(q)), ids or (None, None)
    groups = [
        [{"left": "q", "right": "p", "own": own, "row_ids": ids[0], "column_ids": ids[1]}],
        [{"left": "p", "right": "q", "own": own, "row_ids": ids[1], "column_ids": ids[0]}],
    ]
    return oracle.info_nce({"q": q, "p": p}, groups, temperature, weights)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31), B=st.integers(1, 30), dtype=st.sampled_from(["float32", "float64"]),
    temperature=st.sampled_from([0.005, 0.05, 1.0]), masked=st.booleans(), weighted=st.booleans(),
    budget=st.sampled_from([1, 2000, None]), backend=st.sampled_from(["paddle", "dense"]),
)  # fmt: skip
def test_it_is_the_mean_of_both_directions(seed, B, dtype, temperature, masked, weighted, budget, backend):
    rng = np.random.default_rng(seed)
    q, p = (unit(rng, B, 5).astype(dtype).astype("float64") for _ in range(2))
    ids = [rng.integers(-1, 12, B) for _ in range(2)] if masked else None
    weights = rng.random(B).astype(dtype) if weighted else None
    tq, tp = (paddle.to_tensor(x.astype(dtype), stop_gradient=False) for x in (q, p))
    t = paddle.to_tensor([temperature], dtype=dtype, stop_gradient=False)
    options = {} if ids is None else {"q_ids": paddle.to_tensor(ids[0]), "p_ids": paddle.to_tensor(ids[1])}
    loss = symmetric_loss(
        tq, tp, temperature=t, backend=backend, memory_budget=budget,
        row_weights=None if weights is None else paddle.to_tensor(weights), **options,
    )  # fmt: skip
    (2 * loss).backward()
    want = wanted(q, p, temperature, ids, weights)
    eps = {"float64": 2.0**-52, "float32": 2.0**-23}[dtype]
    tolerance = 100 * eps + 20 * eps / temperature
    assert float(loss) == pytest.approx(want["loss"], rel=tolerance, abs=tolerance)
    for tensor, name in ((tq, "q"), (tp, "p")):
        error = np.abs(tensor.grad.numpy() / 2 - want["grads"][name]).max()
        assert error <= tolerance * max(want["magnitudes"].values()) + 1e-30
    if dtype == "float64":
        assert float(t.grad) / 2 == pytest.approx(want["dtemperature"], rel=1e-8, abs=1e-9 / temperature**2)


def test_it_is_the_ranking_loss_per_direction():
    rng = np.random.default_rng(0)
    q, p = (paddle.to_tensor(unit(rng, 7, 4)) for _ in range(2))
    options = {"temperature": 0.1, "backend": "paddle"}
    other = multiple_negatives_ranking_loss(
        [q, p], directions=("query_to_doc", "doc_to_query"), partition="per_direction", **options
    )
    assert float(symmetric_loss(q, p, **options)) == pytest.approx(float(other), rel=1e-12)


def test_one_tensor_on_both_sides_and_none():
    x = paddle.to_tensor(unit(np.random.default_rng(1), 6, 4), stop_gradient=False)
    symmetric_loss(x, x, temperature=0.2, backend="paddle").backward()
    want = wanted(x.numpy(), x.numpy(), 0.2)["grads"]
    np.testing.assert_allclose(x.grad.numpy(), want["q"] + want["p"], rtol=1e-9, atol=1e-13)
    empty = paddle.zeros([0, 4])
    assert float(symmetric_loss(empty, empty, backend="paddle")) == 0.0


def test_a_trained_pair_keeps_its_gradients_precision():
    rng = np.random.default_rng(2)
    q = unit(rng, 40, 64)
    p = q + 0.2 * unit(rng, 40, 64)
    p /= np.linalg.norm(p, axis=1, keepdims=True)
    q, p = q.astype("float32").astype("float64"), p.astype("float32").astype("float64")
    tq, tp = (paddle.to_tensor(x.astype("float32"), stop_gradient=False) for x in (q, p))
    symmetric_loss(tq, tp, temperature=0.02, backend="paddle").backward()
    want = wanted(q, p, 0.02)
    assert want["loss"] < 1e-10
    error = np.linalg.norm(tq.grad.numpy() - want["grads"]["q"])
    assert error < 1e-4 * np.linalg.norm(want["grads"]["q"])


def test_the_budget_holds():
    rng = np.random.default_rng(3)
    q, p = (paddle.to_tensor(unit(rng, 4096, 16).astype("float32"), stop_gradient=False) for _ in range(2))

    def run():
        symmetric_loss(q, p, temperature=0.05, backend="paddle", memory_budget=2 * 2**20).backward()

    assert allocated_by(run) <= 2 * 2**20 + 10 * q.size * 4


def test_pairs_are_needed():
    with pytest.raises(ValueError, match="p has 4 rows for 2 of q"):
        symmetric_loss(paddle.zeros([2, 3]), paddle.zeros([4, 3]))
