# SPDX-License-Identifier: Apache-2.0
"""Label smoothing for losses whose logits are never stored.

The target of a row is 1 - e at its own entry plus e spread evenly over all its n + 1 candidates, dropped entries not
among them. The cross-entropy is then

    lse - (1 - e) own - e mean_j z_ij  =  InfoNCE + e (own - mean_j z_ij)

and the second term is linear in the logits: with M_ij = 1 at the others, -n_i at the own entry and 0 at dropped ones,

    own_i - mean_j z_ij = -sum_j M_ij z_ij / (n_i + 1).

So its gradient takes two products with M, and its value is <left, dleft>.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import chunk_rows
from paddle_infcl.functional.streaming import Plan, Sides, kept_gradients, row_sums
from paddle_infcl.functional.tiles import other_logits, set_own


class _OwnAboveMean(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, *tensors):
        sides = Sides(plan, tensors)
        dtype = sides.values[0].dtype
        s, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        sides.make_room()
        value = paddle.zeros([], dtype=dtype)
        step = chunk_rows(plan.groups, plan.memory_budget)
        for group, places in zip(plan.groups, plan.sides, strict=True):
            for start in range(0, plan.rows, step):
                rows = slice(start, min(start + step, plan.rows))
                value = value + _add_chunk(group, places, sides, s, rows, weights[rows])
        ctx.grads, ctx.dscale = sides.gradients(), value / s
        ctx.plan, ctx.dtypes, ctx.scale_like = plan, [t.dtype for t in tensors], scale
        return value

    @staticmethod
    def backward(ctx, dvalue):
        return kept_gradients(ctx, dvalue)


def _add_chunk(group: Sequence[Block], places: list, sides: Sides, scale: Tensor, rows: slice, weights) -> Tensor:
    """Adds the gradients of some rows to those of `sides`; returns their part of the value."""
    matrices = []
    count = paddle.zeros_like(weights)
    for block, (left, right) in zip(group, places, strict=True):
        logits = other_logits(block, sides.values[left][rows], sides.transposed[right], scale, rows.start)
        matrix = (logits > float("-inf")).astype(logits.dtype)
        del logits
        count = count + row_sums(matrix)
        matrices.append(matrix)
    factors = (-scale * weights / (count + 1.0)).unsqueeze(1)
    value = paddle.zeros([], dtype=scale.dtype)
    for block, matrix, (left, right) in zip(group, matrices, places, strict=True):
        if block.own is not None:
            set_own(matrix, block.own[rows], -count)
        vectors = sides.values[left][rows]
        dleft = paddle.matmul(matrix, sides.values[right]).multiply_(factors)
        value = value + (dleft * vectors).sum()
        if sides.dleft[left] is not None:
            sides.dleft[left][rows].add_(dleft)
        if sides.dright[right] is not None:
            sides.dright[right].addmm_((vectors * factors).T.contiguous(), matrix)
    return value


def own_above_mean(
    groups: Sequence[Sequence[Block]], scale: Tensor, row_weights: float | Tensor, memory_budget: int | None = None
) -> Tensor:
    """The mean over groups of sum_i w_i (own_i - mean of the row's logits, its own among them).

    In plain Paddle operators on any device, three products like the loss itself. Arguments as for
    `streaming_info_nce`.

    Returns:
        0-d float32 (float64 for float64 inputs).
    """
    plan = Plan(groups, scale, row_weights, memory_budget)
    return _OwnAboveMean.apply(plan, scale, *plan.tensors)
