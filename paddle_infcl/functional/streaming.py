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

    def weights(self, dtype: paddle.dtype) -> Tensor:
        """[B] weights of the rows within one group."""
        weights = self.row_weights
        weights = weights.astype(dtype) if isinstance(weights, Tensor) else paddle.full([self.rows], weights, dtype)
        return weights / len(self.groups)


class Sides:
    """The distinct tensors of a loss in the accumulation dtype, and room for their gradients.

    A tensor's gradient as the right side of blocks is kept transposed: products are then added in place
    (`addmm_`), without a temporary of the tensor's size for every chunk.

    Attributes:
        values: per tensor [n, D].
        transposed: per tensor [D, n], None where it is no right side.
        dleft: per tensor [n, D], None where it is no left side or wants no gradient.
        dright: per tensor [D, n], likewise.
    """

    def __init__(self, plan: Plan, tensors: Sequence[Tensor]):
        dtype = accumulation_dtype(tensors[0].dtype)
        self.values = [t if t.dtype == dtype else t.astype(dtype) for t in tensors]
        self._lefts = {left for places in plan.sides for left, _ in places}
        self._rights = {right for places in plan.sides for _, right in places}
        self._wanted = plan.wanted
        self.transposed = [t.T.contiguous() if k in self._rights else None for k, t in enumerate(self.values)]
        self.dleft: list[Tensor | None] = []
        self.dright: list[Tensor | None] = []

    def make_room(self) -> None:
        """Allocates the gradients that are wanted."""
        for k, (t, want) in enumerate(zip(self.values, self._wanted, strict=True)):
            self.dleft.append(paddle.zeros_like(t) if want and k in self._lefts else None)
            self.dright.append(paddle.zeros(t.shape[::-1], t.dtype) if want and k in self._rights else None)

    def gradients(self) -> list[Tensor | None]:
        """Per tensor its gradient; frees everything else."""
        self.values = self.transposed = None
        out = []
        for k, dleft in enumerate(self.dleft):
            if self.dright[k] is None:
                out.append(dleft)
            else:
                dright, self.dright[k] = self.dright[k].T.contiguous(), None
                out.append(dright if dleft is None else dleft.add_(dright))
        return out


def safe_without_reference(plan: Plan, values: list[Tensor], scale: Tensor) -> bool:
    """Whether all logits are so small that exp(z) needs no reference c: |z| <= scale |left| |right| <= 60.

    Then a chunk saves two of its four passes over the logits. e^60 times any number of columns, and its square in a
    gradient, are far inside the range of float32.
    """
    norms = [float(t.square().sum(axis=1).max()) ** 0.5 for t in values]
    bound = 0.0
    for group, places in zip(plan.groups, plan.sides, strict=True):
        for block, (l, r) in zip(group, places, strict=True):
            strength = abs(block.hardness.strength) if block.hardness else 0.0
            bound = max(bound, norms[l] * norms[r] * (float(scale) + strength))
    return bound <= 60.0  # false for NaN


class GroupChunk:
    """The others' exponentials of some rows of a group, and what follows from them.

    Attributes:
        exps: per block [rows, N] E, 0 at own and dropped entries; `with_own_entries` puts -l at own.
        top: [rows] c, or 0-d 0 without a reference.
        total: [rows] l.
        own: [rows] own logits.
    """

    def __init__(self, group: Sequence[Block], places: list, sides: Sides, scale: Tensor, rows: slice, referred: bool):
        self.group, self.places, self.rows = group, places, rows
        lefts = [sides.values[left][rows] for left, _ in places]
        self.own = None
        for block, left, (_, r) in zip(group, lefts, places, strict=True):
            if block.own is not None:
                logits = own_logits(block, left, sides.values[r], scale, rows.start)
                self.own = logits if self.own is None else paddle.maximum(self.own, logits)
        self.exps = [
            other_logits(block, left, sides.transposed[r], scale, rows.start)
            for block, left, (_, r) in zip(group, lefts, places, strict=True)
        ]
        self.top = self._reference() if referred else paddle.zeros([], dtype=scale.dtype)
        self.total = paddle.zeros([rows.stop - rows.start], dtype=scale.dtype)
        for exps in self.exps:
            if referred:
                exps.subtract_(self.top.unsqueeze(1))
            exps.exp_()
            # As a product: several times faster on a CPU than a sum over a long axis.
            ones = paddle.ones([exps.shape[1], 1], dtype=exps.dtype)
            self.total.add_(paddle.matmul(exps, ones).squeeze(1))

    def _reference(self) -> Tensor:
        top = self.exps[0].max(axis=1)
        for logits in self.exps[1:]:
            top = paddle.maximum(top, logits.max(axis=1))
        # A row without any other candidate: exp(-inf - 0) = 0, and its sum is 0.
        return paddle.where(top == float("-inf"), paddle.zeros_like(top), top)

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
                set_own(exps, block.own[self.rows], -self.total)
        return self.exps

    def add_gradients(self, factors: Tensor, scale: Tensor, sides: Sides) -> Tensor:
        """Adds the chunk's gradients to those of `sides`.

        Args:
            factors: [rows] f.
            scale: 0-d.
            sides: the tensors and their gradients.

        Returns:
            0-d, the chunk's part of the gradient of `scale`.
        """
        weight = (scale * factors).unsqueeze(1)
        dscale = paddle.zeros([], dtype=scale.dtype)
        for exps, (l, r) in zip(self.with_own_entries(), self.places, strict=True):
            left = sides.values[l][self.rows]
            dleft = paddle.matmul(exps, sides.values[r]).multiply_(weight)
            # sum_j dz_ij <left_i, right_j> = <left_i, dleft_i> / scale: no product of its own.
            dscale = dscale + (dleft * left).sum() / scale
            if sides.dleft[l] is not None:
                sides.dleft[l][self.rows].add_(dleft)
            if sides.dright[r] is not None:
                sides.dright[r].addmm_((left * weight).T.contiguous(), exps)
        return dscale


class _Streaming(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, *tensors):
        sides = Sides(plan, tensors)
        dtype = sides.values[0].dtype
        s, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        referred = not safe_without_reference(plan, sides.values, s)
        sides.make_room()
        loss, dscale = paddle.zeros([], dtype=dtype), paddle.zeros([], dtype=dtype)
        step = chunk_rows(plan.groups, plan.memory_budget)
        for group, places in zip(plan.groups, plan.sides, strict=True):
            for start in range(0, plan.rows, step):
                rows = slice(start, min(start + step, plan.rows))
                chunk = GroupChunk(group, places, sides, s, rows, referred)
                loss = loss + (weights[rows] * chunk.losses()).sum()
                if plan.differentiates:
                    dscale = dscale + chunk.add_gradients(chunk.factors(weights[rows]), s, sides)
                del chunk  # its tile, before the next one is made
        ctx.plan, ctx.grads, ctx.dscale = plan, sides.gradients(), dscale
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
