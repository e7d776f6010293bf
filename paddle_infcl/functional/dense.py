# SPDX-License-Identifier: Apache-2.0
"""The textbook loss: all logits of a group at once, kept until the backward pass.

One B x N array per block is held, the softmax numerator, and nothing else of that size. It is the reference for the
streaming backends and the right choice for small batches; the own entry is set apart as everywhere (`blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.row_losses import RowLoss
from paddle_infcl.functional.streaming import GroupChunk, Plan, Sides


class _Dense(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, *tensors):
        ctx.plan, ctx.sides = plan, Sides(plan, tensors)
        dtype = ctx.sides.values[0].dtype
        ctx.scale, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        loss = paddle.zeros([], dtype=dtype)
        ctx.chunks = []
        ctx.weights = weights
        for group, row_loss, places in zip(plan.groups, plan.row_losses, plan.sides, strict=True):
            rows = slice(0, plan.rows)
            fresh = [None] * len(group)  # all of them are kept
            chunk = GroupChunk(group, row_loss, places, ctx.sides, ctx.scale, rows, referred=True, tiles=fresh)
            loss = loss + (weights * chunk.losses()).sum()
            if plan.differentiates:
                ctx.chunks.append(chunk)
        ctx.sides.transposed = None
        ctx.dtypes, ctx.scale_like = [t.dtype for t in tensors], scale
        return loss

    @staticmethod
    def backward(ctx, dloss):
        chunks, ctx.chunks = ctx.chunks, None
        dscale = paddle.zeros([], dtype=ctx.scale.dtype)
        dloss = dloss.astype(ctx.scale.dtype)
        ctx.sides.make_room()
        while chunks:
            chunk = chunks.pop()
            dscale = dscale + chunk.add_gradients(ctx.weights * dloss, ctx.scale, ctx.sides)
            del chunk
        out = [
            None if g is None else g.astype(dtype) for g, dtype in zip(ctx.sides.gradients(), ctx.dtypes, strict=True)
        ]
        dscale = dscale.astype(ctx.scale_like.dtype).reshape(ctx.scale_like.shape)
        return (dscale if ctx.plan.wants_scale else None, *out)


def dense_info_nce(
    groups: Sequence[Sequence[Block]], scale: Tensor, row_weights: float | Tensor, row_loss: RowLoss | None = None
) -> Tensor:
    """As `streaming_info_nce`, with all the logits of a group in memory: the `dense` backend."""
    plan = Plan(groups, scale, row_weights, None, row_loss)
    return _Dense.apply(plan, scale, *plan.tensors)
