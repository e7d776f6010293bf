# SPDX-License-Identifier: Apache-2.0
"""Label smoothing over any list of blocks, on every backend, against its definition."""

from __future__ import annotations

import os

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl import kernels
from paddle_infcl.functional import Block, inf_cl_loss, smoothing
from paddle_infcl.functional.smoothing import EvenShare
from tests import oracle
from tests.functional.random_groups import FIELDS, random_groups
from tests.functional.test_blocks import check, loss_and_gradients

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.triton_status()[0]


def smoothed(arrays, groups, temperature, e):
    """The oracle's loss with label smoothing."""
    plain, term = (f(arrays, groups, temperature) for f in (oracle.info_nce, oracle.own_above_mean))
    return {
        "loss": plain["loss"] + e * term["loss"],
        "dtemperature": plain["dtemperature"] + e * term["dtemperature"],
        "grads": {k: plain["grads"][k] + e * term["grads"][k] for k in arrays},
        "magnitudes": {k: plain["magnitudes"][k] + e * term["magnitudes"][k] for k in arrays},
    }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(["paddle", "dense"]),
    dtype=st.sampled_from(["float32", "float64"]), B=st.integers(1, 7), N=st.integers(1, 9), groups=st.integers(1, 2),
    blocks=st.integers(1, 3), fields=st.sampled_from([(), *((f,) for f in FIELDS), FIELDS]),
    temperature=st.sampled_from([0.05, 1.0]), budget=st.sampled_from([1, 300, None]), e=st.sampled_from([0.1, 0.6]),
)  # fmt: skip
def test_any_blocks(seed, backend, dtype, B, N, groups, blocks, fields, temperature, budget, e):
    rng = np.random.default_rng(seed)
    arrays, made = random_groups(rng, B=B, N=N, D=4, groups=groups, blocks=blocks, fields=fields, dtype=dtype)
    options = {"backend": backend, "memory_budget": budget, "label_smoothing": e}
    check(
        loss_and_gradients(arrays, made, dtype, temperature, **options),
        smoothed(arrays, made, temperature, e), dtype, temperature,
    )  # fmt: skip


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("fields", [(), ("own_rows", "ids", "limit"), FIELDS])
def test_beside_the_triton_kernels(fields):
    arrays, made = random_groups(
        np.random.default_rng(3), B=6, N=7, D=4, groups=2, blocks=2, fields=fields, dtype="float32"
    )
    got = loss_and_gradients(arrays, made, "float32", 0.5, backend="triton", label_smoothing=0.2)
    check(got, smoothed(arrays, made, 0.5, 0.2), "float32", 0.5, magnitude=8.0)


def test_blocks_without_rules_cost_no_product(monkeypatch):
    """Sums over columns and rows are all: neither tiles nor products."""

    def refuse(*_, **__):
        raise AssertionError("a tile")

    q, p = (paddle.randn([n, 4]) for n in (5, 9))
    want = float(inf_cl_loss(q, p, own=paddle.arange(5), label_smoothing=0.3, backend="dense", memory_budget=1))
    monkeypatch.setattr(smoothing, "_candidate_tiles", refuse)
    monkeypatch.setattr(smoothing.paddle, "matmul", refuse)
    even = EvenShare([block := Block(q, p, own=paddle.arange(5))], None)
    even.see("q", block)
    scale = paddle.full([], 50.0)
    np.testing.assert_allclose(
        even.means(scale).numpy(), 50.0 * (q.numpy() @ p.numpy().T).mean(axis=1), rtol=1e-4, atol=1e-4
    )
    monkeypatch.undo()
    rows = oracle.smoothed_rows(q.numpy().astype("float64"), p.numpy().astype("float64"), 0.02, 0.3)
    assert want == pytest.approx(rows.mean(), rel=1e-5)


def test_a_row_alone_has_no_loss_and_parts_add_up():
    """A row whose candidates are all dropped but its own has the mean at its own logit; shards give what all give."""
    q, p = (paddle.randn([n, 4], dtype="float64") for n in (3, 6))
    own, ids = paddle.arange(3), paddle.zeros([6], dtype="int64")
    block = Block(q, p, own=own, row_ids=ids[:3], column_ids=ids)
    even = EvenShare([block], None)
    even.see("q", block)
    scale = paddle.full([], 2.0, dtype="float64")
    assert even.counts.tolist() == [1.0] * 3
    np.testing.assert_allclose(even.means(scale).numpy(), 2.0 * (q * p[:3]).sum(axis=1).numpy(), rtol=1e-12)
    loss = inf_cl_loss(q, p, own=own, q_ids=ids[:3], p_ids=ids, temperature=0.5, label_smoothing=0.4, backend="paddle")
    assert float(loss) == pytest.approx(0.0, abs=1e-14)
    limit = paddle.to_tensor([0.0, -9.0, 9.0], dtype="float64")
    whole = Block(q, p, limit=limit)
    shards = [Block(q, p[:2], limit=limit), Block(q, p[2:], limit=limit)]
    all_of_it, by_parts = (EvenShare([whole], None) for _ in range(2))
    all_of_it.see("q", whole)
    for shard in shards:
        by_parts.see("q", shard)
    assert all_of_it.counts.tolist() == by_parts.counts.tolist() and all_of_it.counts.tolist()[1:] == [0.0, 6.0]
    kept = all_of_it.counts.numpy() > 0
    a, b = (even.means(scale).numpy()[kept] for even in (all_of_it, by_parts))
    np.testing.assert_allclose(a, b, rtol=1e-12)
