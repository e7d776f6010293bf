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
from paddle_infcl.functional.streaming import GroupChunk, Plan, add_gradients, prepare


class _Dense(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, *tensors):
        ctx.plan = plan
        ctx.cast, ctx.scale, weights = prepare(plan, tensors, scale)
        loss = paddle.zeros([], dtype=ctx.scale.dtype)
        ctx.chunks = []
        for group, places in zip(plan.groups, plan.sides, strict=True):
            chunk = GroupChunk(group, places, ctx.cast, ctx.scale, slice(0, plan.rows))
            loss = loss + (weights * chunk.losses()).sum()
            if plan.differentiates:
                ctx.chunks.append((chunk, chunk.factors(weights)))
        ctx.dtypes, ctx.scale_like = [t.dtype for t in tensors], scale
        return loss

    @staticmethod
    def backward(ctx, dloss):
        chunks, ctx.chunks = ctx.chunks, None
        grads = [paddle.zeros_like(t) if want else None for t, want in zip(ctx.cast, ctx.plan.wanted, strict=True)]
        dscale = paddle.zeros([], dtype=ctx.scale.dtype)
        dloss = dloss.astype(ctx.scale.dtype)
        while chunks:
            chunk, factors = chunks.pop()
            dscale = dscale + add_gradients(chunk, factors * dloss, ctx.scale, ctx.cast, grads)
        out = [None if g is None else g.astype(dtype) for g, dtype in zip(grads, ctx.dtypes, strict=True)]
        dscale = dscale.astype(ctx.scale_like.dtype).reshape(ctx.scale_like.shape)
        return (dscale if ctx.plan.wants_scale else None, *out)


def dense_info_nce(groups: Sequence[Sequence[Block]], scale: Tensor, row_weights: float | Tensor) -> Tensor:
    """As `streaming_info_nce`, with all the logits of a group in memory: the `dense` backend."""
    plan = Plan(groups, scale, row_weights, None)
    return _Dense.apply(plan, scale, *plan.tensors)
