# SPDX-License-Identifier: Apache-2.0
"""Any row loss in two passes over block functions: for backends whose own `info_nce` knows InfoNCE alone.

Forward keeps a log-sum-exp and an own logit per row and group; backward computes the softmax again, weighted with the
row loss's derivatives (`row_losses`).
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.hops import BlockFunctions, add_own_grads, own_of_block
from paddle_infcl.functional.row_losses import RowLoss
from paddle_infcl.functional.streaming import Plan
from paddle_infcl.functional.tiles import accumulation_dtype


class _TwoPass(PyLayer):
    @staticmethod
    def forward(ctx, plan, functions, scale, *tensors):
        dtype = accumulation_dtype(tensors[0].dtype)
        s, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        loss = paddle.zeros([], dtype=dtype)
        ctx.terms = []
        rows = slice(0, plan.rows)
        for group, row_loss in zip(plan.groups, plan.row_losses, strict=True):
            lse = own = None
            for block in group:
                lse = functions.lse(block, s, out=lse, memory_budget=plan.memory_budget)
                if block.own is not None:
                    logits = own_of_block(block, s)
                    own = logits if own is None else paddle.maximum(own, logits)
            terms = row_loss(lse, own, rows)
            loss = loss + (weights * terms.losses).sum()
            ctx.terms.append((lse, terms))
        ctx.plan, ctx.functions, ctx.s, ctx.scale_like = plan, functions, s, scale
        return loss

    @staticmethod
    def backward(ctx, dloss):
        plan, s = ctx.plan, ctx.s
        weights = plan.weights(s.dtype) * dloss.astype(s.dtype)
        sums: list[Tensor | None] = [None] * len(plan.tensors)
        dscale = paddle.zeros([], dtype=s.dtype)

        def add(place: int, part: Tensor) -> None:
            sums[place] = part if sums[place] is None else sums[place].add_(part)

        for group, places, (lse, terms) in zip(plan.groups, plan.sides, ctx.terms, strict=True):
            for block, (left, right) in zip(group, places, strict=True):
                # A row without others has weight 0; exp(z - 0) then stays in range.
                alone = paddle.isinf(lse)
                dleft, dright, slopes = ctx.functions.grads(
                    block,
                    s,
                    paddle.where(alone, paddle.zeros_like(lse), lse),
                    paddle.where(alone, paddle.zeros_like(lse), weights * terms.dothers),
                    memory_budget=plan.memory_budget,
                )
                if block.own is not None:
                    add_own_grads(block, s, weights * terms.down, dleft, dright, slopes)
                dscale = dscale + slopes.sum()
                add(left, dleft)
                add(right, dright)
            if terms.dscale is not None:
                dscale = dscale + (weights * terms.dscale).sum()
        out = [g.astype(t.dtype) if want else None for g, t, want in zip(sums, plan.tensors, plan.wanted, strict=True)]
        dscale = dscale.astype(ctx.scale_like.dtype).reshape(ctx.scale_like.shape)
        return (dscale if plan.wants_scale else None, *out)


def two_pass_loss(
    groups: Sequence[Sequence[Block]],
    scale: Tensor,
    row_weights: float | Tensor,
    memory_budget: int | None,
    row_loss: RowLoss,
    functions: BlockFunctions,
) -> Tensor:
    """As `streaming_info_nce`, over the given block functions."""
    plan = Plan(groups, scale, row_weights, memory_budget, row_loss)
    return _TwoPass.apply(plan, functions, scale, *plan.tensors)
