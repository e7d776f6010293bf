# SPDX-License-Identifier: Apache-2.0
"""The objectives' layers on one process: the functions' values, from options to gradients."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import (
    distillation_loss,
    guided_inf_cl_loss,
    inf_cl_loss,
    multiple_negatives_ranking_loss,
    qwen3_loss,
)
from paddle_infcl.functional.vectors import l2_normalize
from paddle_infcl.losses import InfCLLoss
from paddle_infcl.objectives import (
    OBJECTIVES,
    Distillation,
    GuidedObjective,
    InfoNCEObjective,
    ObjectiveLoss,
    Qwen3Objective,
    RankingObjective,
    build_objective,
    objective_from,
    own_candidates,
)

NEGATIVES = 2


def columns(seed=0, rows=5, width=6, negatives=NEGATIVES):
    rng = np.random.default_rng(seed)
    return [l2_normalize(paddle.to_tensor(rng.standard_normal((rows, width)))) for _ in range(2 + negatives)]


def flat(vectors):
    """(q, p) of columns: each row's passages follow each other."""
    p = paddle.stack(vectors[1:], axis=1).reshape([-1, vectors[0].shape[1]])
    q, p = vectors[0].detach(), p.detach()
    q.stop_gradient = p.stop_gradient = False
    return q, p


def options(**values):
    base = {
        "inf_cl_loss": True, "inf_cl_backend": "paddle", "embedding_temperature": 0.1, "negatives_strategy": "auto",
        "false_negative_margin": None, "embedding_matryoshka_dims": None, "embedding_matryoshka_weights": None,
    }  # fmt: skip
    return SimpleNamespace(**base | values)


def test_every_objective_is_its_function():
    vectors, guides = columns(), columns(seed=1, width=3)
    (q, p), (gq, gp) = flat(vectors), flat(guides)
    t = {"temperature": 0.1, "backend": "paddle"}
    wanted = {
        "infonce": inf_cl_loss(q, p, margin=0.3, keep_own_negatives=True, **t),
        "guided": guided_inf_cl_loss(
            vectors, guides, margin_strategy="relative", margin=0.3, contrast_anchors=False,
            keep_own_negatives=True, **t
        ),
        "ranking": multiple_negatives_ranking_loss(
            vectors, directions=("query_to_doc", "doc_to_doc"), hardness_mode="hard_negatives",
            hardness_strength=2.0, **t
        ),
        "symmetric": multiple_negatives_ranking_loss(
            vectors, directions=("query_to_doc", "doc_to_query"), partition="per_direction", **t
        ),
        "qwen3": qwen3_loss(vectors, margin=0.3, doc_to_doc=False, keep_own_negatives=True, **t),
    }  # fmt: skip
    arguments = options(
        false_negative_margin=0.3, guide_margin_strategy="relative", guide_margin=0.3, guide_contrast_anchors=False,
        guide_keep_own_negatives=True, ranking_directions=["query_to_doc", "doc_to_doc"],
        hardness_mode="hard_negatives", hardness_strength=2.0, qwen3_doc_to_doc=False,
        false_negative_keep_own_negatives=True,
    )  # fmt: skip
    assert set(wanted) == set(OBJECTIVES)
    for name, want in wanted.items():
        arguments.objective = name
        layer = build_objective(arguments)
        extra = {"guide_q": gq, "guide_p": gp} if name == "guided" else {}
        loss = layer(q, p, **extra)
        loss.backward()
        assert float(loss) == pytest.approx(float(want), rel=1e-12), name
        assert np.isfinite(q.grad.numpy()).all() and p.grad.numpy().any()
        assert 0 < layer.effective_negatives(q, p, **extra) <= 3 * 15


def test_pairs_alone_share_the_similarities():
    q, p = flat(columns(negatives=0))
    want = multiple_negatives_ranking_loss(
        [q, p], directions=("query_to_doc", "doc_to_query"), partition="per_direction", temperature=0.1,
        backend="paddle",
    )  # fmt: skip
    assert float(build_objective(options(objective="symmetric"))(q, p)) == pytest.approx(float(want), rel=1e-12)


def test_infonce_without_more_is_the_plain_layer():
    layer = build_objective(options(learnable_temperature=True))
    assert type(layer) is InfCLLoss
    assert build_objective(options(objective="qwen3", learnable_temperature=True)).log_temperature is not None
    q, p = flat(columns())
    debiased = build_objective(options(tau_plus=0.1, label_smoothing=0.2))
    want = inf_cl_loss(q, p, temperature=0.1, tau_plus=0.1, label_smoothing=0.2, backend="paddle")
    assert float(debiased(q, p)) == pytest.approx(float(want), rel=1e-12)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_matryoshka_is_the_sum_over_prefixes(name):
    q, p = flat(columns())
    guides = dict(zip(("guide_q", "guide_p"), flat(columns(seed=1, width=3)), strict=True)) if name == "guided" else {}
    dims, weights = [6, 2], [1.0, 0.5]
    margin = 0.2 if name in ("infonce", "qwen3") else None
    arguments = options(objective=name, false_negative_margin=margin, guide_margin=0.2)
    whole = options(**vars(arguments) | {"embedding_matryoshka_dims": dims, "embedding_matryoshka_weights": weights})
    loss = ObjectiveLoss(
        objective_from(whole), 0.1, matryoshka_dims=dims, matryoshka_weights=weights, backend="paddle"
    )(q, p, **guides)
    loss.backward()
    together = q.grad.numpy().copy()
    q.clear_gradient()
    separate = build_objective(arguments)
    want = sum(
        w * separate(l2_normalize(q[:, :d]), l2_normalize(p[:, :d]), **guides)
        for d, w in zip(dims, weights, strict=True)
    )
    want.backward()
    assert float(loss) == pytest.approx(float(want), rel=1e-11)
    np.testing.assert_allclose(together, q.grad.numpy(), rtol=1e-8, atol=1e-12)
    assert build_objective(whole).effective_negatives(q, p, **guides) > 0


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_distillation_goes_beside_the_contrastive_term(kind):
    q, p = flat(columns())
    scores = paddle.to_tensor(np.random.default_rng(2).standard_normal((5, 3)))
    rows = own_candidates(5, 15, None, 3)
    layer = build_objective(
        options(
            distillation=kind, distillation_weight=0.5, contrastive_weight=2.0, distillation_teacher_temperature=3.0
        )
    )
    loss = layer(q, p, teacher_scores=scores)
    want = 2.0 * inf_cl_loss(q, p, temperature=0.1, backend="paddle") + 0.5 * distillation_loss(
        q, p, rows, scores, kind=kind, temperature=0.1, teacher_temperature=3.0
    )
    assert float(loss) == pytest.approx(float(want), rel=1e-12)
    alone = build_objective(options(distillation=kind, contrastive_weight=0.0, distillation_teacher_temperature=3.0))
    assert float(alone(q, p, teacher_scores=scores)) < float(loss)
    with pytest.raises(ValueError, match="needs teacher_scores"):
        layer(q, p)


def test_candidates_of_uneven_rows():
    own = paddle.to_tensor([0, 1, 4])
    np.testing.assert_array_equal(own_candidates(3, 6, own, 3).numpy(), [[0, -1, -1], [1, 2, 3], [4, 5, -1]])
    with pytest.raises(ValueError, match="has 2 scores per row, a row has 3 passages"):
        own_candidates(3, 6, own, 2)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_process_without_rows_gives_a_loss_of_zero_with_a_graph(name):
    q, p = paddle.zeros([0, 4]), paddle.zeros([0, 4])
    q.stop_gradient = p.stop_gradient = False
    extra = {"guide_q": paddle.zeros([0, 3]), "guide_p": paddle.zeros([0, 3])} if name == "guided" else {}
    layer = build_objective(options(objective=name))
    loss = layer(q, p, **extra)
    loss.backward()
    assert float(loss) == 0.0 and layer.effective_negatives(q, p, **extra) == 0.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: objective_from(options(objective="triplet")), "'triplet' is none of infonce, guided"),
        (lambda: GuidedObjective("both"), "margin_strategy: 'both'"),
        (lambda: RankingObjective(("doc_to_doc",)), "lacks query_to_doc"),
        (lambda: Distillation("mse"), "distillation: 'mse'"),
        (lambda: Distillation(weight=0.0), "must be positive"),
        (lambda: ObjectiveLoss(Qwen3Objective(), label_smoothing=1.0), "label_smoothing"),
        (lambda: ObjectiveLoss(InfoNCEObjective(), tau_plus=2.0), "tau_plus"),
        (
            lambda: ObjectiveLoss(GuidedObjective(), backend="paddle")(*flat(columns())),
            "needs the guide's vectors of the queries and of the passages",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()
