# SPDX-License-Identifier: Apache-2.0
"""The published objectives: golden values, and random settings against definitions written entry by entry."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.functional import (
    guided_inf_cl_loss,
    inf_cl_loss,
    multiple_negatives_ranking_loss,
    qwen3_loss,
)
from tests import oracle
from tests.functional import golden

BACKENDS = ["paddle", "dense"]
BOTH = ("query_to_doc", "doc_to_query")
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def run(loss, columns):
    """Value, and gradients as arrays, of loss(columns as tensors)."""
    tensors = [paddle.to_tensor(np.asarray(c, "float64"), stop_gradient=False) for c in columns]
    value = loss(tensors)
    value.backward()
    return float(value), [t.grad.numpy() if t.grad is not None else np.zeros(t.shape) for t in tensors]


def constants(columns):
    return [paddle.to_tensor(np.asarray(c, "float64")) for c in columns]


def norms(gradients):
    return [np.linalg.norm(g) for g in gradients]


GUIDED = [
    ({"temperature": 0.05}, 0.0624122079, (0.19362765, 0.05347724, 0.55722583)),
    ({"temperature": 0.05, "margin": 0.1}, 0.0274564610, (0.12491080, 0.04691276, 0.52498690)),
    (
        {"temperature": 0.05, "contrast_anchors": False, "contrast_positives": False},
        0.0624074428,
        (0.19363606, 0.05347343, 0.55723176),
    ),
]
RANKING = [
    ({}, 0.0624074428, (0.19363606, 0.05347343, 0.55723176)),
    ({"temperature": 1 / 50}, 0.0041444174, (0.03702558, 0.00903439, 0.09010404)),
    ({"directions": BOTH, "partition": "per_direction"}, 0.0312040755, (0.09681772, 0.02673655, 0.27861588)),
    (
        {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
        0.6914179092,
        (1.05383943, 0.19663656, 1.39951632),
    ),
]
# Rows of a chunk -> budget in bytes: a tile holds 5 rows x (two to four blocks of 5) of float64 and masks.
CHUNKS = [1, 2, 3, 5]


def budget_for(rows, blocks, guided):
    return rows * blocks * 5 * (8 * (1 + guided) + 3 * guided)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("options", "value", "gradient_norms"), GUIDED)
def test_golden_guided(options, value, gradient_norms, backend, chunk):
    guides = constants(golden.guide())
    blocks = 2 + options.get("contrast_anchors", True) + options.get("contrast_positives", True)
    got, gradients = run(
        lambda c: guided_inf_cl_loss(
            c, guides, backend=backend, memory_budget=budget_for(chunk, blocks, True), **options
        ),
        golden.student(),
    )
    assert got == pytest.approx(value, abs=1e-9)
    np.testing.assert_allclose(norms(gradients), gradient_norms, atol=1e-8)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("options", "value", "gradient_norms"), RANKING)
def test_golden_ranking(options, value, gradient_norms, backend, chunk):
    got, gradients = run(
        lambda c: multiple_negatives_ranking_loss(
            c, backend=backend, memory_budget=budget_for(chunk, 2, False), **options
        ),
        golden.student(),
    )
    assert got == pytest.approx(value, abs=1e-9)
    np.testing.assert_allclose(norms(gradients), gradient_norms, atol=1e-8)


def random_columns(rng, rows, negatives, width):
    a = rng.standard_normal((rows, width))
    return [a, 0.6 * a + rng.standard_normal((rows, width))] + [
        0.3 * a + rng.standard_normal((rows, width)) for _ in range(negatives)
    ]


def compare(loss, value, columns):
    """Loss and gradients of the package against a definition, whose gradients are differences."""
    got, gradients = run(loss, columns)
    assert got == pytest.approx(value(columns), rel=1e-10, abs=1e-12)
    wanted = oracle.numeric_gradients(value, columns)
    largest = max(np.abs(w).max() for w in wanted)
    for grad, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(grad, want, rtol=1e-6, atol=1e-7 * largest + 1e-9)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), rows=st.integers(1, 4),
    negatives=st.integers(0, 2), strategy=st.sampled_from(["absolute", "relative"]),
    margin=st.sampled_from([0.0, 0.1, -0.2]), anchors=st.booleans(), positives=st.booleans(),
    diagonals=st.booleans(), keep=st.booleans(), chunk=st.integers(1, 4),
)  # fmt: skip
def test_guided_is_its_definition(
    seed, backend, rows, negatives, strategy, margin, anchors, positives, diagonals, keep, chunk
):
    rng = np.random.default_rng(seed)
    columns, guides = random_columns(rng, rows, negatives, 3), random_columns(rng, rows, negatives, 2)
    options = {
        "margin_strategy": strategy, "margin": margin, "contrast_anchors": anchors, "contrast_positives": positives,
        "published_diagonals": diagonals, "keep_own_negatives": keep,
    }  # fmt: skip
    compare(
        lambda c: guided_inf_cl_loss(
            c, constants(guides), temperature=0.2, backend=backend, memory_budget=chunk * rows * 40, **options
        ),
        lambda c: oracle.guided_rows(
            c, guides, 0.2, strategy=strategy, margin=margin, anchors=anchors, positives=positives,
            published_diagonals=diagonals, keep_own_negatives=keep,
        ).mean(),
        columns,
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), rows=st.integers(1, 4),
    negatives=st.integers(0, 2), directions=st.sampled_from([("query_to_doc",), BOTH, FOUR, FOUR[:2], FOUR[::3]]),
    split=st.booleans(), mode=st.sampled_from([None, "hard_negatives", "in_batch_negatives", "all_negatives"]),
    strength=st.sampled_from([0.0, 5.0, -1.0]), chunk=st.integers(1, 4),
)  # fmt: skip
def test_ranking_is_its_definition(seed, backend, rows, negatives, directions, split, mode, strength, chunk):
    rng = np.random.default_rng(seed)
    columns = random_columns(rng, rows, negatives, 3)
    partition = "per_direction" if split and set(directions) <= set(BOTH) else "joint"
    options = {"directions": directions, "partition": partition, "hardness_mode": mode}
    compare(
        lambda c: multiple_negatives_ranking_loss(
            c, temperature=0.2, hardness_strength=strength, backend=backend, memory_budget=chunk * rows * 30, **options
        ),
        lambda c: oracle.ranking_rows(c, 0.2, strength=strength, bonus_from=columns, **options).mean(),
        columns,
    )


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), rows=st.integers(1, 4),
    negatives=st.integers(0, 2), margin=st.sampled_from([None, 0.0, 0.1]), qq=st.booleans(), dd=st.booleans(),
)  # fmt: skip
def test_qwen3_is_its_definition(seed, backend, rows, negatives, margin, qq, dd):
    columns = random_columns(np.random.default_rng(seed), rows, negatives, 3)
    compare(
        lambda c: qwen3_loss(
            c, temperature=0.2, margin=margin, query_to_query=qq, doc_to_doc=dd, backend=backend, memory_budget=200
        ),
        lambda c: oracle.qwen3_rows(c, 0.2, margin, qq, dd).mean(),
        columns,
    )


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), rows=st.integers(1, 5),
    extra=st.integers(0, 3), tau=st.sampled_from([0.0, 0.05, 0.5, "rows"]), masked=st.booleans(),
    temperature=st.sampled_from([0.2, 1.0]),
)  # fmt: skip
def test_debiased_is_its_definition(seed, backend, rows, extra, tau, masked, temperature):
    rng = np.random.default_rng(seed)
    q, p = random_columns(rng, rows + extra, 0, 3)
    q = q[:rows]
    q, p = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, p))
    ids = (rng.integers(-1, 3, rows), rng.integers(-1, 3, rows + extra)) if masked else (None, None)
    dropped = (ids[0][:, None] == ids[1][None, :]) & (ids[0][:, None] >= 0) if masked else None
    tau = rng.random(rows) * 0.9 if tau == "rows" else tau
    compare(
        lambda c: inf_cl_loss(
            c[0], c[1], temperature=temperature, own=paddle.arange(rows), backend=backend, memory_budget=100,
            tau_plus=tau if isinstance(tau, float) else paddle.to_tensor(tau),
            q_ids=paddle.to_tensor(ids[0]) if masked else None, p_ids=paddle.to_tensor(ids[1]) if masked else None,
        ),
        lambda c: oracle.debiased_rows(c[0], c[1], temperature, tau, dropped).mean(),
        [q, p],
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_debiased_keeps_precision_and_learns_its_temperature(backend):
    """Rows at the floor depend on T through the floor as well; the derivative is that of the value."""
    rng = np.random.default_rng(0)
    q, p = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in random_columns(rng, 6, 0, 4))
    for tau in (0.05, 0.6):

        def value(t, tau=tau):
            return inf_cl_loss(paddle.to_tensor(q), paddle.to_tensor(p), temperature=t, tau_plus=tau, backend=backend)

        t = paddle.to_tensor([0.3], dtype="float64", stop_gradient=False)
        value(t).backward()
        difference = (float(value(0.3 + 1e-6)) - float(value(0.3 - 1e-6))) / 2e-6
        assert float(t.grad) == pytest.approx(difference, rel=1e-6)
    # tau 0 is InfoNCE wherever the negatives are above the floor, to the last digits, in float32 too.
    for dtype in ("float32", "float64"):
        tq, tp = (paddle.to_tensor(x.astype(dtype), stop_gradient=False) for x in (q, q))
        a = inf_cl_loss(tq, tp, temperature=0.05, tau_plus=0.0, backend=backend)
        b = inf_cl_loss(tq, tp, temperature=0.05, backend=backend)
        assert float(a) == pytest.approx(float(b), rel=1e-5 if dtype == "float32" else 1e-12)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31), backend=st.sampled_from(BACKENDS), rows=st.integers(1, 5), extra=st.integers(0, 3),
    e=st.sampled_from([0.1, 0.5]), masked=st.booleans(), chunk=st.integers(1, 5),
)  # fmt: skip
def test_label_smoothing_is_its_definition(seed, backend, rows, extra, e, masked, chunk):
    rng = np.random.default_rng(seed)
    q, p = random_columns(rng, rows + extra, 0, 3)
    q = q[:rows]
    ids = (rng.integers(-1, 3, rows), rng.integers(-1, 3, rows + extra)) if masked else (None, None)
    dropped = (ids[0][:, None] == ids[1][None, :]) & (ids[0][:, None] >= 0) if masked else None
    compare(
        lambda c: inf_cl_loss(
            c[0], c[1], temperature=0.5, own=paddle.arange(rows), backend=backend, label_smoothing=e,
            memory_budget=chunk * (rows + extra) * 12,
            q_ids=paddle.to_tensor(ids[0]) if masked else None, p_ids=paddle.to_tensor(ids[1]) if masked else None,
        ),
        lambda c: oracle.smoothed_rows(c[0], c[1], 0.5, e, dropped).mean(),
        [q, p],
    )  # fmt: skip


def test_label_smoothing_learns_its_temperature():
    q, p = (paddle.to_tensor(x) for x in random_columns(np.random.default_rng(1), 5, 0, 4))
    t = paddle.to_tensor([0.7], dtype="float64", stop_gradient=False)
    inf_cl_loss(q, p, temperature=t, label_smoothing=0.2, backend="paddle").backward()
    values = [
        float(inf_cl_loss(q, p, temperature=0.7 + h, label_smoothing=0.2, backend="paddle")) for h in (1e-6, -1e-6)
    ]
    assert float(t.grad) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_guide_that_can_not_tell_anchor_from_positive(backend, chunk):
    """The guide embeds anchor and positive identically and the other rows apart: t = 1, nothing is dropped but the
    diagonals. Kept, as published, they compete with similarity 1; the right loss has none of them."""
    x = np.eye(5)
    columns, guides = [x, -x], constants([x, x])  # a positive that is nowhere near its anchor
    options = {"temperature": 1.0, "backend": backend, "memory_budget": budget_for(chunk, 3, True)}
    right, _ = run(lambda c: guided_inf_cl_loss(c, guides, **options), columns)
    published, _ = run(lambda c: guided_inf_cl_loss(c, guides, published_diagonals=True, **options), columns)
    assert right == pytest.approx(oracle.guided_rows(columns, [x, x], 1.0).mean(), abs=1e-12)
    assert published == pytest.approx(oracle.guided_rows(columns, [x, x], 1.0, published_diagonals=True).mean())
    assert published - right > 0.3


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_masked_costs_nothing(backend):
    """All rows are the same text: the guide finds everything as similar as the own pair, above it less a margin."""
    rng = np.random.default_rng(0)
    columns = random_columns(rng, 40, 1, 6)
    same = constants([np.ones((40, 3))] * 3)
    value, gradients = run(lambda c: guided_inf_cl_loss(c, same, margin=0.1, backend=backend), columns)
    assert value == 0.0
    assert not any(g.any() for g in gradients)
    # Without a margin duplicates are as similar as the own pair, not more, and stay: ids are what catches them.
    value, _ = run(lambda c: guided_inf_cl_loss(c, same, backend=backend), columns)
    assert value > 1.0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_zero_vectors_have_similarity_and_gradient_zero(backend, dtype):
    columns = random_columns(np.random.default_rng(1), 4, 1, 5)
    columns[0][1] = columns[1][2] = columns[2][3] = 0.0
    tensors = [paddle.to_tensor(c.astype(dtype), stop_gradient=False) for c in columns]
    guided_inf_cl_loss(tensors, constants(golden_like(4)), temperature=0.05, backend=backend).backward()
    for tensor, row in zip(tensors, (1, 2, 3), strict=True):
        grad = tensor.grad.numpy()
        assert np.isfinite(grad).all() and not grad[row].any() and np.abs(grad).max() < 1e3
    got, _ = run(
        lambda c: guided_inf_cl_loss(c, constants(golden_like(4)), temperature=0.05, backend=backend), columns
    )
    assert got == pytest.approx(oracle.guided_rows(columns, golden_like(4), 0.05).mean(), rel=1e-10)


def golden_like(rows):
    return [g[:rows] for g in golden.guide()]


def test_relative_margins_of_negative_similarities_lower_the_threshold():
    """t = -0.2, m = 0.05: the threshold is -0.21. A negative at -0.205 is dropped, one at -0.215 stays."""
    angle = np.arccos([-0.2, -0.205, -0.215])
    anchor, positive, near, far = (np.array([[np.cos(t), np.sin(t)]]) for t in (0.0, *angle))
    columns = random_columns(np.random.default_rng(2), 1, 2, 3)
    value, gradients = run(
        lambda c: guided_inf_cl_loss(
            c, constants([anchor, positive, near, far]), margin_strategy="relative", margin=0.05, temperature=1.0,
            backend="paddle",
        ),
        columns,
    )  # fmt: skip
    assert value > 0
    assert not gradients[2].any() and gradients[3].any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: guided_inf_cl_loss(c[:1], c[:1]), "anchors and positives are needed at least, got 1"),
        (lambda c: guided_inf_cl_loss(c, c[:2]), "guide_columns: 2 of"),
        (lambda c: guided_inf_cl_loss(c, c, margin_strategy="both"), "'both' is none of absolute, relative"),
        (lambda c: qwen3_loss([c[0], c[1][:2]]), r"columns\[1\]: has .* of shape \[2, 4\]"),
        (lambda c: multiple_negatives_ranking_loss(c, directions=("up",)), "must be one or more of query_to_doc"),
        (lambda c: multiple_negatives_ranking_loss(c, partition="each"), "'each' is none of joint, per_direction"),
        (lambda c: multiple_negatives_ranking_loss(c, directions=("query_to_query",)), "lacks query_to_doc"),
        (
            lambda c: multiple_negatives_ranking_loss(c, directions=FOUR, partition="per_direction"),
            "per_direction can't be with query_to_query",
        ),
        (lambda c: multiple_negatives_ranking_loss(c, hardness_mode="hard"), "'hard' is none of hard_negatives"),
        (lambda c: inf_cl_loss(c[0], c[1], tau_plus=1.0), "tau_plus: must be between 0 and 1"),
        (lambda c: inf_cl_loss(c[0], c[1], tau_plus=paddle.zeros([2])), "tau_plus: needs shape"),
        (lambda c: inf_cl_loss(c[0], c[1], label_smoothing=1.0), "label_smoothing: must be between 0 and 1"),
    ],
)
def test_errors_name_the_option(call, message):
    with pytest.raises(ValueError, match=message):
        call([paddle.ones([3, 4]) for _ in range(3)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("objective", ["guided", "ranking", "qwen3"])
def test_ids_drop_what_similarity_can_not_see(objective, backend):
    """Rows 0 and 2 have the same positive, which no margin of 0 drops: with its number the two don't compete, and the
    loss of row 0 is that of the batch without row 2."""
    columns = random_columns(np.random.default_rng(5), 4, 1, 6)
    columns[1][2] = columns[1][0]
    guides = [np.eye(4), np.eye(4), np.eye(4)]
    guides[1] = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    ids = [paddle.to_tensor(x) for x in ([7, 1, 7, 3], [7, 1, 7, 3], [-1, -1, -1, -1])]
    weights = paddle.to_tensor([1.0, 0.0, 0.0, 0.0], dtype="float64")

    def loss(columns, rows, **options):
        part = [c[rows] for c in columns]
        options |= {"temperature": 0.3, "row_weights": weights[: len(rows)], "backend": backend}
        if objective == "guided":
            return guided_inf_cl_loss(part, constants([g[rows] for g in guides]), margin=-2.0, **options)
        if objective == "qwen3":
            return qwen3_loss(part, margin=None, **options)
        return multiple_negatives_ranking_loss(part, directions=("query_to_doc", "query_to_query"), **options)

    everything, without = [0, 1, 2, 3], [0, 1, 3]
    masked, gradients = run(lambda c: loss(c, everything, column_ids=ids), columns)
    assert masked < run(lambda c: loss(c, everything), columns)[0]
    assert not gradients[0][2].any() and not gradients[1][2].any()
    # Row 2's hard negative is not row 0's document, and stays (for Qwen3-Embedding it was never there).
    if objective == "qwen3":
        assert masked == pytest.approx(run(lambda c: loss(c, without), columns)[0], rel=1e-12)
    else:
        assert gradients[2][2].any()


def test_ids_are_for_all_columns():
    columns = [paddle.ones([2, 3])] * 3
    with pytest.raises(ValueError, match="column_ids: 2 of them for 3 columns"):
        qwen3_loss(columns, column_ids=[paddle.arange(2)] * 2)
