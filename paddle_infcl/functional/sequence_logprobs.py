# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of answers: sums or means over tokens, as DPO, KTO and their kin need them."""

from __future__ import annotations

import paddle
from paddle import Tensor

from paddle_infcl.functional.linear_logprobs import linear_logprobs_of_labels
from paddle_infcl.functional.logprobs import logprobs_of_labels

# A label that no vocabulary has: tokens outside the answers are not computed.
_IGNORED = -100


def sequence_logprobs(
    output: Tensor,
    labels: Tensor,
    mask: Tensor | None = None,
    *,
    ranges: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    transposed_weight: bool = False,
    reduction: str = "sum",
    temperature: float = 1.0,
    inplace_backward: bool = False,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """Log-probability of each answer.

    Args:
        output: the model's logits [B, T, V]; or, with `weight`, its last hidden states [B, T, D].
        labels: [B, T] or [B, T - 1], integers: the label of position t is what the model is to say there (so shifted
            already, as PaddleNLP's data is). Outside the answers they may be anything.
        mask: [B, T] (as `labels`), bool or integers: 1 at the tokens of the row's one answer.
        ranges: [S, 3] integers (row, first position, end): the answers of packed rows. PaddleNLP's
            ``response_indexs`` hold them: columns 0, 1, 2 are the chosen answers, 0, 2, 3 the rejected ones.
        weight, bias, transposed_weight: of the output layer, as `linear_logprobs_of_labels` takes them: the logits are
            then never stored.
        reduction: "sum" over the answer's tokens, "mean", or "none".
        temperature, backend, memory_budget: as in `linear_logprobs_of_labels`.
        inplace_backward: as in `logprobs_of_labels`; for logits.

    Returns:
        [B], or [S] with `ranges`, float32: an answer without tokens has 0. With "none" [B, T], 0 outside the answers.

    Raises:
        ValueError: neither or both of mask and ranges are given, shapes do not fit, a range leaves its row, or the
            reduction is unknown; and what the functions named above raise.
    """
    if (mask is None) == (ranges is None):
        raise ValueError("one of mask and ranges is needed")
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduction: {reduction!r} is none of sum, mean, none")
    if labels.ndim != 2:
        raise ValueError(f"labels: shape [B, T] is needed, got {list(labels.shape)}")
    positions = None
    if ranges is not None:
        positions, mask = _positions(ranges, labels)
    elif list(mask.shape) != list(labels.shape):
        raise ValueError(f"mask: shape {list(mask.shape)} is not that of labels, {list(labels.shape)}")
    mask = mask.astype("bool")
    labels = paddle.where(mask, labels.astype("int64"), paddle.full_like(labels, _IGNORED, dtype="int64"))
    options = {"ignore_index": _IGNORED, "temperature": temperature, "backend": backend}
    if weight is None:
        logprobs = logprobs_of_labels(output, labels, inplace_backward=inplace_backward, **options)
    else:
        logprobs = linear_logprobs_of_labels(
            output,
            weight,
            labels,
            bias=bias,
            transposed_weight=transposed_weight,
            memory_budget=memory_budget,
            **options,
        )
    if reduction == "none":
        return logprobs
    if ranges is None:
        sums, counts = logprobs.sum(axis=1), mask.sum(axis=1)
    else:
        rows = logprobs.index_select(ranges[:, 0].astype("int64"))
        sums, counts = paddle.where(positions, rows, paddle.zeros_like(rows)).sum(axis=1), positions.sum(axis=1)
    return sums if reduction == "sum" else sums / counts.clip(min=1).astype(sums.dtype)


def _positions(ranges: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """[S, T] bool: the positions of every range; and [B, T] bool: those of any."""
    if ranges.ndim != 2 or ranges.shape[1] != 3:
        raise ValueError(f"ranges: shape [S, 3] is needed, got {list(ranges.shape)}")
    B, T = labels.shape
    values = ranges.numpy()
    wrong = (values[:, 0] < 0) | (values[:, 0] >= B) | (values[:, 1] < 0) | (values[:, 2] > T)
    if wrong.any():
        first = int(wrong.argmax())
        raise ValueError(f"ranges[{first}] is {values[first].tolist()} (row, first, end): outside labels [{B}, {T}]")
    t = paddle.arange(T, dtype="int64").unsqueeze(0)
    row, first, end = (ranges[:, k].astype("int64").unsqueeze(1) for k in range(3))
    positions = (t >= first) & (t < end)
    counts = paddle.zeros([B, T], dtype="float32")
    counts = paddle.scatter_nd_add(counts, row, positions.astype("float32"))
    return positions, counts > 0
