# SPDX-License-Identifier: Apache-2.0
"""What the guide of the guided loss decides: per row, for which columns, and that it must be finite to do so."""

from __future__ import annotations

import os

import numpy as np
import paddle
import pytest

from paddle_infcl import kernels
from paddle_infcl.functional import guided_inf_cl_loss, streaming
from tests import oracle
from tests.functional import golden

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.triton_status()[0]
BACKENDS = ["paddle", "dense", *(["triton"] if INTERPRETED else [])]


def run(columns, guides, backend="paddle", **options):
    """Value and gradients of the columns; in float32 for Triton, else in float64."""
    dtype = "float32" if backend == "triton" else "float64"
    tensors = [paddle.to_tensor(np.asarray(c, dtype), stop_gradient=False) for c in columns]
    guides = [paddle.to_tensor(np.asarray(g, dtype)) for g in guides]
    value = guided_inf_cl_loss(tensors, guides, backend=backend, **options)
    value.backward()
    return float(value), [t.grad.numpy() for t in tensors]


# Of the guide below, per row: the thresholds are .90, -.93, .50, .01, .86.
PAIR = (1.0, -0.828, 0.601, 0.110, 0.960)
APART = {"temperature": 0.5, "margin": 0.1}
VALUE, NORMS = 0.8515321349, (0.12205909, 0.07264409, 0.06934274)


def guide_apart():
    """A guide that finds some anchors close to their positives and others far: one threshold does not do for two."""
    anchor, share = golden.guide()[0], np.array([1.0, -0.4, 0.5, 0.0, 0.8])[:, None]
    return [anchor, share * anchor + (1 - abs(share)) * golden.vectors(1, 0.9, 3), golden.vectors(2, 0.8, 3)]


def test_the_guide_apart_is_so():
    anchor, positive, _ = guide_apart()
    np.testing.assert_allclose(np.diag(oracle.cosines(anchor, positive)), PAIR, atol=1e-3)
    want = oracle.guided_rows(golden.student(), guide_apart(), APART["temperature"], margin=APART["margin"]).mean()
    assert want == pytest.approx(VALUE, abs=1e-9)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_golden_thresholds_of_a_chunk_are_those_of_its_rows(chunk, monkeypatch):
    """Rows 2 and on take the thresholds of rows 2 and on, however many of them a chunk has."""
    chunks, real = [], streaming.GroupChunk

    class Seen(real):
        def __init__(self, *args):
            super().__init__(*args)
            chunks.append((self.rows.start, self.rows.stop))

    monkeypatch.setattr(streaming, "GroupChunk", Seen)
    # Four blocks of 5 columns: per entry a logit, a similarity of the guide, and masks.
    value, gradients = run(golden.student(), guide_apart(), memory_budget=chunk * 4 * 5 * (2 * 8 + 3), **APART)
    assert chunks == [(start, min(start + chunk, 5)) for start in range(0, 5, chunk)]
    assert value == pytest.approx(VALUE, abs=1e-9)
    np.testing.assert_allclose([np.linalg.norm(g) for g in gradients], NORMS, atol=1e-8)
    whole = run(golden.student(), guide_apart(), **APART)
    for a, b in zip(gradients, whole[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden_thresholds_on_every_backend(backend):
    value, gradients = run(golden.student(), guide_apart(), backend, **APART)
    tolerance = 1e-6 if backend == "triton" else 1e-8
    assert value == pytest.approx(VALUE, abs=tolerance)
    np.testing.assert_allclose([np.linalg.norm(g) for g in gradients], NORMS, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
def test_curated_negatives_survive_the_guide(backend):
    """A row alone competes with its own hard negative only, which the guide finds closer than the positive: without
    it there is no loss and no gradient, and nothing else could bring one."""
    rng = np.random.default_rng(3)
    columns = [rng.standard_normal((1, 4)) for _ in range(3)]
    guides = [[[1.0, 0.0]], [[0.6, 0.8]], [[1.0, 0.0]]]
    value, gradients = run(columns, guides, backend, temperature=0.5)
    assert value == 0.0 and not any(g.any() for g in gradients)
    value, gradients = run(columns, guides, backend, temperature=0.5, keep_own_negatives=True)
    own, other = (oracle.cosines(columns[0], c)[0, 0] / 0.5 for c in columns[1:])
    assert value == pytest.approx(np.log1p(np.exp(other - own)), rel=1e-5)
    assert all(np.abs(g).max() > 1e-2 for g in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_a_rows_own_negatives_are_curated(backend):
    """Two rows with hard negatives that the guide finds closer than both positives; only row 0 has a weight."""
    rng = np.random.default_rng(4)
    columns = [rng.standard_normal((2, 4)) for _ in range(3)]
    guides = [[[1.0, 0.0]] * 2, [[0.6, 0.8]] * 2, [[1.0, 0.0]] * 2]
    weights = paddle.to_tensor([1.0, 0.0], dtype="float32" if backend == "triton" else "float64")
    options = {"temperature": 0.5, "row_weights": weights, "contrast_anchors": False, "contrast_positives": False}
    _, (_, _, dropped) = run(columns, guides, backend, **options)
    assert not dropped.any()
    _, (_, _, kept) = run(columns, guides, backend, keep_own_negatives=True, **options)
    assert np.abs(kept[0]).max() > 1e-2 and not kept[1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", [0, 1, 2])
def test_a_guide_that_is_not_finite_is_named(column, bad):
    """No similarity is above NaN: the loss would be that without a guide."""
    guides = golden.guide()
    guides[column][3, 1] = bad
    message = rf"guide_columns\[{column}\]: 1 of 5 vectors of the guide are not finite, the first is number 3"
    with pytest.raises(ValueError, match=message):
        run(golden.student(), guides)
