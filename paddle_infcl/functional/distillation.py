# SPDX-License-Identifier: Apache-2.0
"""Learning from a teacher's scores, row by row: nothing here grows with the batch squared."""

from __future__ import annotations

import paddle
from paddle import Tensor

from paddle_infcl.functional.contrastive import as_scale
from paddle_infcl.functional.options import check_positive
from paddle_infcl.functional.tiles import accumulation_dtype

DISTILLATIONS = ("kl", "margin_mse")


def candidate_similarity(q: Tensor, p: Tensor, candidates: Tensor) -> Tensor:
    """[B, G] <q_i, p_candidates(i, g)> in the accumulation dtype, with gradient; 0 where a candidate is -1.

    Args:
        q: [B, D].
        p: [N, D].
        candidates: [B, G] int64 columns of p; -1 for none.
    """
    dtype = accumulation_dtype(q.dtype)
    terms = []
    for g in range(candidates.shape[1]):  # one [B, D] at a time, not [B, G, D]
        chosen = p.index_select(candidates[:, g].clip(min=0)).astype(dtype)
        terms.append((q.astype(dtype) * chosen).sum(axis=1))
    similarity = paddle.stack(terms, axis=1)
    return paddle.where(candidates < 0, paddle.zeros_like(similarity), similarity)


def distillation_loss(
    q: Tensor,
    p: Tensor,
    candidates: Tensor,
    teacher_scores: Tensor,
    *,
    kind: str = "kl",
    temperature: float | Tensor = 0.02,
    teacher_temperature: float = 1.0,
    row_weights: float | Tensor | None = None,
) -> Tensor:
    """The distance of a row's scores of its own candidates from a teacher's.

    - "kl": sum_g t_g (log t_g - log s_g), with s = softmax(<q_i, p> / T) and t = softmax(scores / T_teacher) over the
      row's candidates. Rows with a single candidate cost nothing.
    - "margin_mse" (Hofstätter et al. 2020, arXiv 2010.02666): the mean over a row's negatives of
      ((<q, p_0> - <q, p_g>) - (score_0 - score_g))^2; both temperatures are unused.

    Args:
        q: [B, D].
        p: [N, D].
        candidates: [B, G] int64, columns of p: the row's positive first, then its negatives; -1 fills up short rows.
        teacher_scores: [B, G], any finite numbers; ignored where a candidate is -1.
        kind: "kl" or "margin_mse".
        temperature: T. A tensor of one element gets its gradient.
        teacher_temperature: T_teacher.
        row_weights: weights of the rows, a float or [B]; None is 1/B.

    Returns:
        0-d.

    Raises:
        ValueError: shapes that don't fit, a row without a positive, or an unknown kind.
    """
    if kind not in DISTILLATIONS:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(DISTILLATIONS)}")
    B = q.shape[0]
    if candidates.ndim != 2 or candidates.shape[0] != B or candidates.shape != teacher_scores.shape:
        raise ValueError(
            f"candidates {list(candidates.shape)} and teacher_scores {list(teacher_scores.shape)} must both be "
            f"[{B}, G], one row per query"
        )
    check_positive("teacher_temperature", teacher_temperature)
    scale = as_scale(temperature, q.dtype).reshape([])
    if B == 0:
        return (q.sum() + p.sum()).astype(scale.dtype) * 0.0
    if int(candidates[:, 0].min()) < 0 or int(candidates.max()) >= p.shape[0]:
        raise ValueError(f"candidates: the first of a row is its positive, and all must be below {p.shape[0]}")
    similarity = candidate_similarity(q, p, candidates)
    there = candidates >= 0
    scores = paddle.where(there, teacher_scores.astype(similarity.dtype), paddle.zeros_like(similarity))
    if kind == "kl":
        # A number, not -inf: 0 * -inf is NaN.
        absent = paddle.full_like(similarity, -1e30)
        student = _log_softmax(paddle.where(there, similarity * scale, absent))
        teacher = _log_softmax(paddle.where(there, scores / teacher_temperature, absent))
        rows = paddle.where(there, paddle.exp(teacher) * (teacher - student), paddle.zeros_like(student)).sum(axis=1)
    else:
        wide, negatives = similarity.dtype, there[:, 1:].astype(similarity.dtype)
        difference = (similarity[:, :1] - similarity[:, 1:]) - (scores[:, :1] - scores[:, 1:])
        count = paddle.clip(negatives.sum(axis=1), min=1.0).astype(wide)
        rows = (difference.square() * negatives).sum(axis=1) / count
    weights = 1.0 / B if row_weights is None else row_weights
    return (rows * weights).sum()


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the last axis. Paddle's own stops at -64 on a CPU."""
    shifted = logits - logits.max(axis=-1, keepdim=True).detach()
    return shifted - paddle.log(paddle.exp(shifted).sum(axis=-1, keepdim=True))
