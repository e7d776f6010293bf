# SPDX-License-Identifier: Apache-2.0
"""The margin rule that keeps a row's own hard negatives, against its definition in float64 NumPy."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.functional import inf_cl_loss, qwen3_loss
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.qwen3 import qwen3_groups
from paddle_infcl.losses import InfCLLoss
from tests import oracle

BACKENDS = ["paddle", "dense"]
T = 0.2


def run(loss, arrays):
    """Value and gradients of loss(tensors)."""
    tensors = [paddle.to_tensor(a, stop_gradient=False) for a in arrays]
    value = loss(*tensors)
    value.backward()
    return float(value), [t.grad.numpy() for t in tensors]


def compare(loss, value, arrays):
    got, gradients = run(loss, arrays)
    assert got == pytest.approx(value(arrays), rel=1e-10, abs=1e-12)
    for grad, want in zip(gradients, oracle.numeric_gradients(value, arrays), strict=True):
        np.testing.assert_allclose(grad, want, rtol=1e-6, atol=1e-7)


def random_batch(rng, counts, width=3):
    """q, p and own of rows with as many hard negatives as `counts` says; all lie near their queries."""
    q = rng.standard_normal((len(counts), width))
    own = np.cumsum([0, *(1 + n for n in counts[:-1])])
    p = np.repeat(q, [1 + n for n in counts], axis=0)
    return q, 0.4 * p + 0.6 * rng.standard_normal(p.shape), own


def infonce_rows(q, p, own, margin, keep, ids=None):
    """[B] losses, entry by entry."""
    losses, s = [], q @ p.T
    owner = np.searchsorted(own, np.arange(len(p)), side="right") - 1
    for i, mine in enumerate(own):
        others = [
            s[i, j]
            for j in range(len(p))
            if j != mine
            and (s[i, j] <= s[i, mine] + margin + 1e-12 or (keep and owner[j] == i))
            and (ids is None or ids[0][i] != ids[1][j] or ids[0][i] < 0)
        ]
        losses.append(np.log1p(sum(np.exp((x - s[i, mine]) / T) for x in others)))
    return np.array(losses)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), counts=st.lists(st.integers(0, 2), min_size=1,
    max_size=4), margin=st.sampled_from([0.0, 0.1]), keep=st.booleans(), with_ids=st.booleans(),
    weighted=st.booleans(), chunk=st.integers(1, 4),
)  # fmt: skip
def test_infonce_is_its_definition(seed, backend, counts, margin, keep, with_ids, weighted, chunk):
    """Rows with different numbers of hard negatives, ids that drop own ones as well, weights."""
    rng = np.random.default_rng(seed)
    q, p, own = random_batch(rng, counts)
    ids = (rng.integers(-1, 3, len(q)), rng.integers(-1, 3, len(p))) if with_ids else None
    weights = rng.random(len(q)) if weighted else np.full(len(q), 1 / len(q))
    options = {} if ids is None else {"q_ids": paddle.to_tensor(ids[0]), "p_ids": paddle.to_tensor(ids[1])}
    compare(
        lambda q, p: inf_cl_loss(
            q, p, temperature=T, own=paddle.to_tensor(own), margin=margin, keep_own_negatives=keep, backend=backend,
            row_weights=paddle.to_tensor(weights), memory_budget=chunk * len(p) * 16, **options
        ),
        lambda arrays: weights @ infonce_rows(*arrays, own, margin, keep, ids),
        [q, p],
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", ["infonce", "qwen3"])
def test_own_ones_above_the_margin_stay_and_those_of_others_go(loss, backend):
    """Row 0: own .6; its hard negative at .8 and row 1's positive at 1 are above the limit of .7."""
    q = np.array([[1.0, 0.0], [0.0, -1.0]])
    p = np.array([[0.6, 0.8], [0.8, 0.6], [1.0, 0.0], [-1.0, 0.0]])

    options = {
        "temperature": 1.0, "margin": 0.1, "backend": backend,
        "row_weights": paddle.to_tensor([1.0, 0.0], dtype="float64"),
    }  # fmt: skip

    def first_row(keep):
        """Its loss, and the passages' gradients."""
        if loss == "infonce":
            value, (_, dp) = run(lambda q, p: inf_cl_loss(q, p, keep_own_negatives=keep, **options), [q, p])
            return value, dp
        alone = {"query_to_query": False, "doc_to_doc": False, "keep_own_negatives": keep}
        value, gradients = run(lambda *c: qwen3_loss(c, **alone, **options), [q, p[::2], p[1::2]])
        return value, np.stack(gradients[1:], axis=1).reshape([-1, 2])

    # Of InfoNCE's passages row 1's hard negative at -1 is below the limit; to Qwen3-Embedding it is another row's.
    far = np.exp(-1.0) if loss == "infonce" else 0.0
    value, dp = first_row(keep=False)
    assert value == pytest.approx(np.log((np.exp(0.6) + far) / np.exp(0.6)), rel=1e-12)
    assert not dp[1].any() and not dp[2].any()
    value, dp = first_row(keep=True)
    assert value == pytest.approx(np.log((np.exp(0.6) + np.exp(0.8) + far) / np.exp(0.6)), rel=1e-12)
    assert dp[1].any() and not dp[2].any()


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), rows=st.integers(1, 4),
    negatives=st.integers(0, 2), margin=st.sampled_from([None, 0.0]),
)  # fmt: skip
def test_qwen3_is_its_definition(seed, backend, rows, negatives, margin):
    q, p, _ = random_batch(np.random.default_rng(seed), [negatives] * rows)
    columns = [q, *(p[k :: 1 + negatives] for k in range(1 + negatives))]
    compare(
        lambda *c: qwen3_loss(c, temperature=T, margin=margin, keep_own_negatives=True, backend=backend),
        lambda c: oracle.qwen3_rows(c, T, margin, keep_own_negatives=True).mean(),
        columns,
    )


def test_without_hard_negatives_there_is_no_block_more():
    q, p, _ = (paddle.to_tensor(x) for x in random_batch(np.random.default_rng(0), [0] * 4))
    for make in (
        lambda keep: info_nce_groups(q, p, margin=0.1, keep_own_negatives=keep),
        lambda keep: qwen3_groups(Candidates.from_passages(q, p), margin=0.1, keep_own_negatives=keep),
    ):
        (without,), (kept,) = make(False), make(True)
        assert len(without) == len(kept)
        for a, b in zip(without, kept, strict=True):
            assert a.left is b.left and a.right is b.right and a.local == b.local
            np.testing.assert_array_equal(a.limit.numpy(), b.limit.numpy())
    # The same list without a margin, also where there are hard negatives.
    (group,) = info_nce_groups(q[:2], p, keep_own_negatives=True)
    assert len(group) == 1 and group[0].owner is None and group[0].limit is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_matryoshka_and_counts(backend):
    """At every prefix the limit is that prefix's own; the kept ones have none at any."""
    q, p, own = random_batch(np.random.default_rng(3), [1, 2, 0, 2], width=5)
    layer = InfCLLoss(
        T, margin=0.0, keep_own_negatives=True, matryoshka_dims=[2, 5], matryoshka_weights=[0.5, 1.0], backend=backend
    )

    def unit(x):
        return x / np.linalg.norm(x, axis=1, keepdims=True)

    compare(
        lambda q, p: layer(q, p, paddle.to_tensor(own)),
        lambda a: sum(
            w * infonce_rows(unit(a[0][:, :d]), unit(a[1][:, :d]), own, 0.0, True).mean()
            for d, w in ((2, 0.5), (5, 1))
        ),
        [q, p],
    )
    s = (unit(q) @ unit(p).T).astype("float32")
    owner = np.searchsorted(own, np.arange(len(p)), side="right") - 1
    counted = (s <= s[np.arange(4), own][:, None] + 1e-6) | (owner[None, :] == np.arange(4)[:, None])
    counted[np.arange(4), own] = False
    seen = layer.effective_negatives(paddle.to_tensor(q), paddle.to_tensor(p), paddle.to_tensor(own))
    assert seen == pytest.approx(counted.sum() / 4)


def test_whose_negatives_are_whose_must_be_known():
    q, p, _ = (paddle.to_tensor(x) for x in random_batch(np.random.default_rng(0), [1, 1]))
    with pytest.raises(ValueError, match="own: must increase from 0"):
        inf_cl_loss(q, p, own=paddle.to_tensor([1, 3]), margin=0.1, keep_own_negatives=True, backend="paddle")
