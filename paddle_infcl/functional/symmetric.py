# SPDX-License-Identifier: Apache-2.0
"""The symmetric loss of CLIP (Radford et al. 2021, arXiv 2103.00020): both directions from the same similarities.

Queries against passages and passages against queries are softmaxes over the rows and over the columns of one matrix.
Column sums are complete only when all rows have been seen, so there are two sweeps; both directions share them:

    sweep 1   E_ij = exp(z_ij - reference),  row sums, and column sums merged from chunk to chunk
    sweep 2   C_ij = (f_i + g_j) E_ij with the factors of both losses;  dq = scale C @ p,  dp = scale C^T @ q

Four products of B x B x D for both directions, where two separate losses take six.
"""

from __future__ import annotations

from collections.abc import Iterator

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl import kernels
from paddle_infcl.functional.blocks import Block, check_groups
from paddle_infcl.functional.budget import default_budget
from paddle_infcl.functional.contrastive import as_scale, info_nce
from paddle_infcl.functional.row_losses import InfoNCE, logaddexp
from paddle_infcl.functional.streaming import Plan, Sides, kept_gradients, reference, row_sums, safe_without_reference
from paddle_infcl.functional.tiles import exponentials_, other_logits, set_own


def symmetric_groups(q: Tensor, p: Tensor, q_ids: Tensor | None, p_ids: Tensor | None) -> list[list[Block]]:
    """The symmetric loss as a list of blocks: two groups with one block each."""
    own = paddle.arange(q.shape[0], dtype="int64")
    return [
        [Block(q, p, own=own, row_ids=q_ids, column_ids=p_ids)],
        [Block(p, q, own=own, row_ids=p_ids, column_ids=q_ids)],
    ]


def symmetric_loss(
    q: Tensor,
    p: Tensor,
    *,
    temperature: float | Tensor = 0.05,
    q_ids: Tensor | None = None,
    p_ids: Tensor | None = None,
    row_weights: float | Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """The mean of InfoNCE of queries among passages and of passages among queries.

    The same as `multiple_negatives_ranking_loss` with both of these directions, one softmax each; for one process and
    without hard negatives. The `paddle` backend shares the similarities between the directions.

    Args:
        q: [B, D], taken as they are: normalise them before for cosines.
        p: [B, D], p_i the positive of q_i.
        temperature: T. A tensor of one element gets its gradient.
        q_ids: [B] or [B, K] int64; see `inf_cl_loss`.
        p_ids: [B] or [B, K] int64.
        row_weights: weights of the pairs, a float or [B]; None is 1/B, the mean.
        backend: as in `inf_cl_loss`.
        memory_budget: as in `inf_cl_loss`.

    Returns:
        0-d loss.

    Raises:
        ValueError: other numbers of passages than of queries, or a malformed argument.

    Example:
        >>> import paddle
        >>> round(float(symmetric_loss(paddle.eye(2), paddle.eye(2), temperature=1.0, backend="paddle")), 4)
        0.3133
    """
    if q.shape[0] != p.shape[0]:
        raise ValueError(f"p has {p.shape[0]} rows for {q.shape[0]} of q: the symmetric loss is over pairs")
    groups = symmetric_groups(q, p, q_ids, p_ids)
    if kernels.choose_backend(backend, q) != "paddle" or q.shape[0] == 0 or q is p:
        return info_nce(
            groups, temperature=temperature, row_weights=row_weights, backend=backend, memory_budget=memory_budget
        )
    rows = check_groups(groups)
    weights = 1.0 / rows if row_weights is None else row_weights
    scale = as_scale(temperature, q.dtype)
    plan = Plan(groups[:1], scale, 0.5 * weights, memory_budget)
    return _Shared.apply(plan, scale, q, p)


class _Shared(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, q, p):
        sides = Sides(plan, [q, p])
        dtype = sides.values[0].dtype
        s, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        block = plan.groups[0][0]
        own = (sides.values[0] * sides.values[1]).sum(axis=1) * s
        referred = not safe_without_reference(plan, sides.values, s)
        lses = _log_sum_exps(plan, block, sides, s, referred)
        by_row, by_column = (InfoNCE()(lse, own, slice(0, plan.rows)) for lse in lses)
        ctx.plan, ctx.grads, ctx.dscale = plan, [None, None], paddle.zeros([], dtype=dtype)
        if plan.differentiates:
            sides.make_room()
            factors = (weights * by_row.dothers, weights * by_column.dothers)
            down = weights * (by_row.down + by_column.down)
            ctx.dscale = _add_gradients(plan, block, sides, s, lses, factors, down, referred)
            ctx.grads = sides.gradients()
        ctx.dtypes, ctx.scale_like = [q.dtype, p.dtype], scale
        return (weights * (by_row.losses + by_column.losses)).sum()

    @staticmethod
    def backward(ctx, dloss):
        return kept_gradients(ctx, dloss)


def _chunks(plan: Plan, block: Block) -> Iterator[slice]:
    budget = default_budget(plan.groups) if plan.memory_budget is None else plan.memory_budget
    itemsize = 8 if plan.tensors[0].dtype == paddle.float64 else 4
    step = max(1, int(budget // (plan.rows * (3 * itemsize + 3 * block.masks))))
    for start in range(0, plan.rows, step):
        yield slice(start, min(start + step, plan.rows))


def _tile(columns: Tensor, like: Tensor) -> Tensor:
    """[rows, N] of a row vector. As a product: broadcasting it against a tile is slow in Paddle on a CPU."""
    return paddle.matmul(paddle.ones([like.shape[0], 1], dtype=like.dtype), columns.unsqueeze(0))


def _log_sum_exps(plan: Plan, block: Block, sides: Sides, scale: Tensor, referred: bool) -> tuple[Tensor, Tensor]:
    """[B] over the others of every row, and of every column."""
    rows, columns = [], paddle.full([plan.rows], float("-inf"), dtype=scale.dtype)
    for part in _chunks(plan, block):
        logits = other_logits(block, sides.values[0][part], sides.transposed[1], scale, part.start)
        ones = paddle.ones([1, logits.shape[0]], dtype=scale.dtype)
        if referred:
            top = reference([logits])
            exps = exponentials_(block, logits - top.unsqueeze(1), part.start)
            rows.append(top + paddle.log(row_sums(exps)))
            del exps
            top = logits.max(axis=0)
            top = paddle.where(top == float("-inf"), paddle.zeros_like(top), top)
            exps = exponentials_(block, logits.subtract_(_tile(top, logits)), part.start)
        else:
            top = paddle.zeros([], dtype=scale.dtype)
            exps = exponentials_(block, logits, part.start)
            rows.append(paddle.log(row_sums(exps)))
        columns = logaddexp(columns, top + paddle.log(paddle.matmul(ones, exps).squeeze(0)))
        del exps, logits
    return paddle.concat(rows), columns


def _add_gradients(plan, block, sides, scale, lses, factors, down, referred: bool) -> Tensor:
    """Adds the gradients of both directions to those of `sides`; returns that of the scale.

    Args:
        lses: [B] twice, by row and by column.
        factors: [B] twice, the gradients of these.
        down: [B] the gradients of the own logits.
    """
    dscale = paddle.zeros([], dtype=scale.dtype)
    lses = [paddle.where(paddle.isinf(lse), paddle.zeros_like(lse), lse) for lse in lses]
    if not referred:
        # exp(z) f exp(-lse): no exponential of its own for either direction.
        factors = [f * paddle.exp(-lse) for f, lse in zip(factors, lses, strict=True)]
    for part in _chunks(plan, block):
        left = sides.values[0][part]
        logits = other_logits(block, left, sides.transposed[1], scale, part.start)
        if referred:
            exps = exponentials_(block, logits - lses[0][part].unsqueeze(1), part.start)
            exps.multiply_(factors[0][part].unsqueeze(1))
            by_column = exponentials_(block, logits.subtract_(_tile(lses[1], logits)), part.start)
            exps.add_(by_column.multiply_(_tile(factors[1], by_column)))
            del by_column
        else:
            exps = exponentials_(block, logits, part.start)
            f = paddle.stack([factors[0][part], paddle.ones_like(factors[0][part])], axis=1)
            g = paddle.stack([paddle.ones_like(factors[1]), factors[1]], axis=0)
            exps.multiply_(paddle.matmul(f, g))  # f_i + g_j
        del logits
        set_own(exps, block.own[part], down[part])
        dleft = paddle.matmul(exps, sides.values[1]).multiply_(scale)
        dscale = dscale + (dleft * left).sum() / scale
        if sides.dleft[0] is not None:
            sides.dleft[0][part].add_(dleft)
        if sides.dright[1] is not None:
            sides.dright[1].addmm_((left * scale).T.contiguous(), exps)
        del exps
    return dscale
