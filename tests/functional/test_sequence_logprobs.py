# SPDX-License-Identifier: Apache-2.0
"""Sums and means over answers against NumPy, from logits and from hidden states."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_infcl.functional.sequence_logprobs import sequence_logprobs
from tests.functional.oracle_logprobs import label_logprobs

B, T, D, V = 3, 9, 6, 21


def make(short=0):
    rng = np.random.default_rng(0)
    hidden = paddle.to_tensor(rng.standard_normal([B, T, D], "float32"))
    weight = paddle.to_tensor(rng.standard_normal([V, D], "float32"))
    labels = rng.integers(0, V, [B, T - short])
    mask = rng.random([B, T - short]) < 0.5
    mask[1] = False
    return hidden, weight, paddle.matmul(hidden, weight, transpose_y=True), labels, mask


@pytest.mark.parametrize("source", ["logits", "hidden"])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("short", [0, 1])
def test_masks(source, reduction, short):
    hidden, weight, logits, labels, mask = make(short)
    given = np.where(mask, labels, -100)
    options = {} if source == "logits" else {"weight": weight}
    got = sequence_logprobs(
        logits if source == "logits" else hidden,
        paddle.to_tensor(given),
        paddle.to_tensor(mask),
        reduction=reduction,
        temperature=0.5,
        **options,
    )
    tokens = np.where(mask, label_logprobs(logits.numpy(), labels, temperature=0.5)[0], 0)
    want = {"none": tokens, "sum": tokens.sum(1), "mean": tokens.sum(1) / np.maximum(mask.sum(1), 1)}[reduction]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    assert reduction == "none" or got[1] == 0


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_ranges_in_packed_rows(reduction):
    """Two answers of one prompt in a row, overlapping ones, an empty one; the gradient of a shared token adds up."""
    _, _, logits, labels, _ = make()
    logits.stop_gradient = False
    ranges = np.array([[0, 2, 5], [0, 5, 9], [2, 1, 3], [2, 2, 4], [1, 4, 4]])
    got = sequence_logprobs(
        logits, paddle.to_tensor(labels), ranges=paddle.to_tensor(ranges), reduction=reduction, inplace_backward=False
    )
    tokens = label_logprobs(logits.numpy(), labels)[0]
    scale = [1 if reduction == "sum" else max(end - first, 1) for _, first, end in ranges]
    want = [tokens[row, first:end].sum() / n for (row, first, end), n in zip(ranges, scale, strict=True)]
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-5, atol=1e-6)
    g = np.array([1.0, -2.0, 0.5, 3.0, 7.0])
    got.backward(paddle.to_tensor(g, dtype="float32"))
    spread = np.zeros([B, T])
    for (row, first, end), n, weight in zip(ranges, scale, g, strict=True):
        spread[row, first:end] += weight / n
    np.testing.assert_allclose(logits.grad.numpy(), label_logprobs(logits.numpy(), labels, g=spread)[2], atol=2e-6)


def test_arguments_that_do_not_fit():
    _, _, logits, labels, mask = make()
    y, m = paddle.to_tensor(labels), paddle.to_tensor(mask)
    with pytest.raises(ValueError, match="one of mask and ranges"):
        sequence_logprobs(logits, y)
    with pytest.raises(ValueError, match="reduction: 'max' is none"):
        sequence_logprobs(logits, y, m, reduction="max")
    with pytest.raises(ValueError, match=r"mask: shape \[3, 8\]"):
        sequence_logprobs(logits, y, m[:, 1:])
    with pytest.raises(ValueError, match=r"labels: shape \[B, T\]"):
        sequence_logprobs(logits, y[0], m)
    with pytest.raises(ValueError, match=r"ranges: shape \[S, 3\]"):
        sequence_logprobs(logits, y, ranges=paddle.zeros([2, 4], dtype="int64"))
    for bad in ([3, 0, 1], [0, -1, 2], [0, 1, 10]):
        with pytest.raises(ValueError, match=r"ranges\[1\] is .* outside labels \[3, 9\]"):
            sequence_logprobs(logits, y, ranges=paddle.to_tensor([[0, 0, 1], bad]))
