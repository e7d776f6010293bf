# SPDX-License-Identifier: Apache-2.0
"""The streaming log-sum-exp and its gradient, in plain Paddle operators, for any device.

Rows are taken in chunks that fit a memory budget; a chunk sees all the columns of all blocks of a group at once. For
a chunk, with c_i the largest logit over the others (own and dropped entries are -inf):

    E_ij   = exp(z_ij - c_i)                  l_i = sum_j E_ij         lse_others_i = c_i + log l_i
    loss_i = softplus(lse_others_i - own_i)
    f_i    = w_i exp(c_i - logaddexp(lse_others_i, own_i))
    dleft  = scale f (E' @ right)             dright += E'^T @ (scale f left)

where E' is E with -l_i at the own entry: f_i E'_ij is then the gradient of every logit, the own one among them, and
the own coefficient is never formed as P - 1. Nothing else of size rows x columns is stored, and the gradients are
ready when the loss is: the backward pass only multiplies them by the incoming gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.tiles import accumulation_dtype, other_logits, own_logits, set_own

CPU_BUDGET = 8 * 2**20
DEVICE_BUDGET = 256 * 2**20


def default_budget(groups: Sequence[Sequence[Block]]) -> int:
    """Bytes for the tile of one chunk: 8 MiB on a CPU, near its caches; elsewhere 256 MiB or the inputs' size."""
    first = groups[0][0].left
    if first.place.is_cpu_place():
        return CPU_BUDGET
    tensors, _ = distinct_sides(groups)
    return max(DEVICE_BUDGET, sum(t.size * t.element_size() for t in tensors))


def distinct_sides(groups: Sequence[Sequence[Block]]) -> tuple[list[Tensor], list[list[tuple[int, int]]]]:
    """The distinct tensors of all blocks, and for every block the places of its left and right among them."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def place(tensor: Tensor) -> int:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return places[id(tensor)]

    sides = [[(place(block.left), place(block.right)) for block in group] for group in groups]
    return tensors, sides


def chunk_rows(groups: Sequence[Sequence[Block]], memory_budget: int | None) -> int:
    """Rows per chunk so that the logits of the widest group fit the budget; at least one."""
    budget = default_budget(groups) if memory_budget is None else memory_budget
    itemsize = 8 if groups[0][0].left.dtype == paddle.float64 else 4
    widest = max(sum(block.right.shape[0] * _bytes_per_entry(block, itemsize) for block in group) for group in groups)
    return max(1, int(budget // max(widest, 1)))


def _bytes_per_entry(block: Block, itemsize: int) -> int:
    """Logits, a guide's similarities, hardness weights, and the masks on their way to one."""
    arrays = 1 + (block.guide is not None) + 2 * (block.hardness is not None)
    return arrays * itemsize + 3 * block.masks


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)) elementwise, exact for arguments that are far apart or -inf (both: -inf)."""
    top = paddle.maximum(a, b)
    safe = paddle.where(paddle.isinf(top), paddle.zeros_like(top), top)
    return safe + paddle.log(paddle.exp(a - safe) + paddle.exp(b - safe))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) elementwise with full relative precision, 0 at -inf."""
    return paddle.clip(x, min=0.0) + paddle.log1p(paddle.exp(-paddle.abs(x)))


class GroupChunk:
    """The others' exponentials of some rows of a group, and what follows from them.

    Attributes:
        start, stop: the rows.
        exps: per block [rows, N] E, 0 at own and dropped entries; `with_own_entries` puts -l at own.
        top: [rows] c.
        total: [rows] l.
        own: [rows] own logits.
    """

    def __init__(self, group: Sequence[Block], sides: list, cast: list[Tensor], scale: Tensor, rows: slice):
        self.group, self.sides, self.start, self.stop = group, sides, rows.start, rows.stop
        lefts = [cast[left][rows] for left, _ in sides]
        self.own = None
        for block, left, (_, r) in zip(group, lefts, sides, strict=True):
            if block.own is not None:
                logits = own_logits(block, left, cast[r], scale, self.start)
                self.own = logits if self.own is None else paddle.maximum(self.own, logits)
        self.exps = [
            other_logits(block, left, cast[r], scale, self.start)
            for block, left, (_, r) in zip(group, lefts, sides, strict=True)
        ]
        top = self.exps[0].max(axis=1)
        for logits in self.exps[1:]:
            top = paddle.maximum(top, logits.max(axis=1))
        # A row without any other candidate: exp(-inf - 0) = 0, and its sum is 0.
        self.top = paddle.where(top == float("-inf"), paddle.zeros_like(top), top)
        self.total = paddle.zeros_like(self.top)
        for exps in self.exps:
            exps.subtract_(self.top.unsqueeze(1)).exp_()
            # As a product: several times faster on a CPU than a sum over a long axis.
            ones = paddle.ones([exps.shape[1], 1], dtype=exps.dtype)
            self.total.add_(paddle.matmul(exps, ones).squeeze(1))

    def lse_others(self) -> Tensor:
        """[rows] log-sum-exp over the others, -inf where there are none."""
        return self.top + paddle.log(self.total)

    def losses(self) -> Tensor:
        """[rows] unweighted losses."""
        return softplus(self.lse_others() - self.own)

    def factors(self, weights: Tensor) -> Tensor:
        """[rows] f, given the rows' weights."""
        return weights * paddle.exp(self.top - logaddexp(self.lse_others(), self.own))

    def with_own_entries(self) -> list[Tensor]:
        """Per block [rows, N] E': E with -l at the own entry."""
        for block, exps in zip(self.group, self.exps, strict=True):
            if block.own is not None:
                set_own(exps, block.own[self.start : self.stop], -self.total)
        return self.exps


def add_gradients(
    chunk: GroupChunk, factors: Tensor, scale: Tensor, cast: list[Tensor], grads: list[Tensor | None]
) -> Tensor:
    """Adds a chunk's gradients to `grads`, in place.

    Args:
        chunk: the chunk, own entries not yet set.
        factors: [rows] f.
        scale: 0-d.
        cast: the distinct tensors in the accumulation dtype.
        grads: their gradients, same shapes; None where none is wanted.

    Returns:
        0-d, the chunk's part of the gradient of `scale`.
    """
    rows = slice(chunk.start, chunk.stop)
    weight = (scale * factors).unsqueeze(1)
    dscale = paddle.zeros([], dtype=scale.dtype)
    for exps, (l, r) in zip(chunk.with_own_entries(), chunk.sides, strict=True):
        left = cast[l][rows]
        dleft = paddle.matmul(exps, cast[r]).multiply_(weight)
        # sum_j dz_ij <left_i, right_j> = <left_i, dleft_i> / scale: no product of its own.
        dscale = dscale + (dleft * left).sum() / scale
        if grads[l] is not None:
            grads[l][rows].add_(dleft)
        del dleft
        if grads[r] is not None:
            grads[r].add_(paddle.matmul(exps, left * weight, transpose_x=True))
    return dscale


class Plan:
    """What a PyLayer of the plain backends needs beside the tensors that Paddle tracks.

    An object on purpose: Paddle looks into tuples and lists of arguments for tensors to differentiate.

    Attributes:
        groups: the checked groups.
        tensors, sides: see `distinct_sides`.
        row_weights: float or [B].
        memory_budget: bytes or None.
        wanted: per tensor, whether its gradient is wanted; wants_scale: the same for 1/T.
    """

    def __init__(self, groups: Sequence[Sequence[Block]], scale: Tensor, row_weights, memory_budget: int | None):
        self.groups, self.row_weights, self.memory_budget = groups, row_weights, memory_budget
        self.tensors, self.sides = distinct_sides(groups)
        on = paddle.is_grad_enabled()
        self.wanted = [on and not t.stop_gradient for t in self.tensors]
        self.wants_scale = on and not scale.stop_gradient

    @property
    def rows(self) -> int:
        return self.groups[0][0].left.shape[0]

    @property
    def differentiates(self) -> bool:
        return self.wants_scale or any(self.wanted)


def prepare(plan: Plan, tensors: Sequence[Tensor], scale: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Inputs, scale and the rows' weights in one group, in the accumulation dtype; fp32 and fp64 are not copied."""
    dtype = accumulation_dtype(tensors[0].dtype)
    cast = [t if t.dtype == dtype else t.astype(dtype) for t in tensors]
    if isinstance(plan.row_weights, Tensor):
        weights = plan.row_weights.astype(dtype)
    else:
        weights = paddle.full([plan.rows], plan.row_weights, dtype=dtype)
    return cast, scale.detach().astype(dtype).reshape([]), weights / len(plan.groups)


class _Streaming(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, *tensors):
        cast, s, weights = prepare(plan, tensors, scale)
        loss = paddle.zeros([], dtype=s.dtype)
        dscale = paddle.zeros([], dtype=s.dtype)
        grads = [paddle.zeros_like(t) if want else None for t, want in zip(cast, plan.wanted, strict=True)]
        step = chunk_rows(plan.groups, plan.memory_budget)
        for group, places in zip(plan.groups, plan.sides, strict=True):
            for start in range(0, plan.rows, step):
                rows = slice(start, min(start + step, plan.rows))
                chunk = GroupChunk(group, places, cast, s, rows)
                loss = loss + (weights[rows] * chunk.losses()).sum()
                if plan.differentiates:
                    dscale = dscale + add_gradients(chunk, chunk.factors(weights[rows]), s, cast, grads)
        ctx.plan, ctx.grads, ctx.dscale = plan, grads, dscale
        ctx.dtypes, ctx.scale_like = [t.dtype for t in tensors], scale
        return loss

    @staticmethod
    def backward(ctx, dloss):
        # In place: the gradients are this layer's own, and Paddle walks the graph of a PyLayer once only.
        grads, ctx.grads = ctx.grads, None
        out = [
            None if g is None else g.multiply_(dloss.astype(g.dtype)).astype(dtype)
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        dscale = (ctx.dscale * dloss).astype(ctx.scale_like.dtype).reshape(ctx.scale_like.shape)
        return (dscale if ctx.plan.wants_scale else None, *out)


def streaming_info_nce(
    groups: Sequence[Sequence[Block]], scale: Tensor, row_weights: float | Tensor, memory_budget: int | None = None
) -> Tensor:
    """The mean over groups of sum_i w_i loss_i, streamed: the `paddle` backend.

    Args:
        groups: checked groups of blocks.
        scale: one element, 1/T; gets its gradient when it wants one.
        row_weights: w, a float or [B].
        memory_budget: bytes that the logits of a chunk may take; None: `default_budget`.

    Returns:
        0-d float32 (float64 for float64 inputs).
    """
    plan = Plan(groups, scale, row_weights, memory_budget)
    return _Streaming.apply(plan, scale, *plan.tensors)
