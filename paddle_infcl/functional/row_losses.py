# SPDX-License-Identifier: Apache-2.0
"""From the softmax of a row to its loss: functions of two numbers, the others' log-sum-exp and the own logit.

A row loss gets lse_others and own of some rows of a group and returns their losses with both derivatives. The core
does the rest: w dothers times the softmax over the others, and w down at the own entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import paddle
from paddle import Tensor

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.counting import count_negatives
from paddle_infcl.functional.options import check_number


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)) elementwise, exact for arguments that are far apart or -inf (both: -inf)."""
    top = paddle.maximum(a, b)
    safe = paddle.where(paddle.isinf(top), paddle.zeros_like(top), top)
    return safe + paddle.log(paddle.exp(a - safe) + paddle.exp(b - safe))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) elementwise with full relative precision, 0 at -inf."""
    # Not exp(-inf): vectorised, that is the smallest normal number, not 0.
    small = paddle.where(paddle.isinf(x), paddle.zeros_like(x), paddle.exp(-paddle.abs(x)))
    return paddle.clip(x, min=0.0) + paddle.log1p(small)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) elementwise with full relative precision for large negative x, 0 at -inf."""
    small = paddle.where(paddle.isinf(x), paddle.zeros_like(x), paddle.exp(-paddle.abs(x)))
    return paddle.where(x < 0, small, paddle.ones_like(x)) / (1.0 + small)


class RowTerms(NamedTuple):
    """Losses of some rows and their derivatives.

    Attributes:
        losses: [rows].
        dothers: [rows] derivative by lse_others.
        down: [rows] derivative by the own logit.
        dscale: [rows] derivative by 1/T where the loss depends on it otherwise than through the logits, or None.
        balanced: down == -dothers in every row.
    """

    losses: Tensor
    dothers: Tensor
    down: Tensor
    dscale: Tensor | None = None
    balanced: bool = False


class RowLoss(Protocol):
    """What the core asks of a row loss."""

    #: down == -dothers in every row, always.
    balanced: bool

    def bind(
        self, group: Sequence[Block], scale: Tensor, memory_budget: int | None, counts: Tensor | None = None
    ) -> RowLoss:
        """The row loss of one group: what depends on its blocks is computed once.

        Args:
            group: the blocks of the softmax.
            scale: one element, 1/T.
            memory_budget: as for the losses.
            counts: [B] negatives of each row, where the caller knows better than the blocks: they may be spread over
                processes. None: counted here.
        """

    def __call__(self, lse_others: Tensor, own: Tensor, rows: slice) -> RowTerms:
        """Terms of some rows of the bound group."""


class InfoNCE:
    """logsumexp over everything minus own = softplus(lse_others - own)."""

    balanced = True

    def bind(self, group, scale, memory_budget, counts=None) -> InfoNCE:
        return self

    def __call__(self, lse_others: Tensor, own: Tensor, rows: slice) -> RowTerms:
        difference = lse_others - own
        dothers = sigmoid(difference)
        return RowTerms(softplus(difference), dothers, -dothers, balanced=True)


class Debiased:
    """The debiased contrastive loss (Chuang et al. 2020): negatives that are no negatives are subtracted.

    With n negatives in a row, tau_plus the chance that one of them is in truth a positive, S their sum of exp(z):

        loss = log(1 + n g / exp(own)),   n g = max( (S - n tau_plus exp(own)) / (1 - tau_plus),  n exp(-1/T) )

    The floor n exp(-1/T) is what n negatives give at the least when all vectors have length 1.

    Args:
        tau_plus: a number, or [B], one per row; 0 is InfoNCE but for the floor.

    Raises:
        ValueError: tau_plus is neither a tensor nor a number in [0, 1), or a tensor on a CPU with an entry that is
            not. Elsewhere the device would have to be waited for: there such an entry is not noticed.
    """

    balanced = False

    def __init__(self, tau_plus: float | Tensor):
        if not isinstance(tau_plus, Tensor):
            check_number("tau_plus", tau_plus, "must be between 0 and 1 (without 1)", lambda tau: 0 <= tau < 1)
        elif tau_plus.place.is_cpu_place():
            values = tau_plus.astype("float64").numpy().reshape(-1)
            wrong = ~((values >= 0) & (values < 1))
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(f"tau_plus[{row}]: must be between 0 and 1 (without 1), got {values[row]}")
        self.tau_plus = tau_plus

    def bind(self, group, scale, memory_budget, counts=None) -> Debiased:
        bound = Debiased(self.tau_plus)
        counts = count_negatives(group, memory_budget) if counts is None else counts
        bound.log_count = paddle.log(counts.astype(scale.dtype))
        bound.floor = bound.log_count - scale.reshape([])
        if isinstance(self.tau_plus, Tensor):
            if list(self.tau_plus.shape) != list(bound.floor.shape):
                raise ValueError(f"tau_plus: needs shape {bound.floor.shape}, has {self.tau_plus.shape}")
            tau = self.tau_plus.astype(scale.dtype)
        else:
            tau = paddle.full_like(bound.floor, self.tau_plus)
        bound.log_tau, bound.log_rest = paddle.log(tau), paddle.log1p(-tau)
        return bound

    def __call__(self, lse_others: Tensor, own: Tensor, rows: slice) -> RowTerms:
        log_count, floor, log_rest = self.log_count[rows], self.floor[rows], self.log_rest[rows]
        none = paddle.isinf(lse_others)
        zeros, ones = paddle.zeros_like(own), paddle.ones_like(own)
        # The share of S that is subtracted; -inf for tau_plus = 0.
        share = paddle.exp(paddle.where(none, zeros, log_count + self.log_tau[rows] + own - lse_others))
        share = paddle.where(paddle.isinf(self.log_tau[rows]), zeros, share)
        above = paddle.log1p(-paddle.clip(share, max=1.0)) + lse_others - log_rest
        floored = paddle.logical_or(share >= 1, above <= floor)
        logit = paddle.where(none, lse_others, paddle.where(floored, floor, above))
        kept = paddle.where(floored, zeros, ones / (1.0 - paddle.where(floored, zeros, share)))
        weight = sigmoid(logit - own)
        return RowTerms(
            softplus(logit - own),
            weight * kept,
            -weight * (1.0 + kept * paddle.where(floored, zeros, share)),
            -weight * floored.astype(weight.dtype) if floored.any() else None,
        )
