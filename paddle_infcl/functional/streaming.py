# SPDX-License-Identifier: Apache-2.0
"""The streaming log-sum-exp and its gradient, in plain Paddle operators, for any device.

Rows are taken in chunks that fit a memory budget; a chunk sees all the columns of all blocks of a group at once. For
a chunk, with c_i the largest logit over the others (own and dropped entries are -inf):

    E_ij   = exp(z_ij - c_i)                  l_i = sum_j E_ij         lse_others_i = c_i + log l_i
    loss_i, a_i, b_i = row_loss(lse_others_i, own_i)                   InfoNCE: softplus(lse_others_i - own_i)
    f_i    = w_i a_i / l_i
    dleft  = scale f (E' @ right)             dright += E'^T @ (scale f left)

a and b are the derivatives of the row's loss by lse_others and by own, and E' is E with b_i l_i / a_i at the own entry
(-l_i for InfoNCE): f_i E'_ij is then the gradient of every logit, the own one among them, and the own coefficient is
never formed as P - 1. Nothing else of size rows x columns is stored, and the gradients are ready when the loss is: the
backward pass only multiplies them by the incoming gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import chunk_rows, distinct_sides
from paddle_infcl.functional.row_losses import InfoNCE, RowLoss, RowTerms
from paddle_infcl.functional.tiles import accumulation_dtype, exponentials_, other_logits, own_logits, set_own


class Plan:
    """What a PyLayer of the plain backends needs beside the tensors that Paddle tracks.

    An object on purpose: Paddle looks into tuples and lists of arguments for tensors to differentiate.

    Attributes:
        groups: the checked groups.
        row_losses: per group its row loss.
        tensors, sides: see `distinct_sides`.
        row_weights: float or [B].
        memory_budget: bytes or None.
        wanted: per tensor, whether its gradient is wanted; wants_scale: the same for 1/T.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Block]],
        scale: Tensor,
        row_weights,
        memory_budget: int | None,
        row_loss: RowLoss | None = None,
    ):
        self.groups, self.row_weights, self.memory_budget = groups, row_weights, memory_budget
        row_loss = row_loss or InfoNCE()
        self.row_losses = [row_loss.bind(group, scale.detach(), memory_budget) for group in groups]
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
    if not all(row_loss.balanced for row_loss in plan.row_losses):
        return False  # b l / a can be large
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
        exps: per block [rows, N] E, 0 at own and dropped entries; `add_gradients` fills in the own ones.
        top: [rows] c, or 0-d 0 without a reference.
        total: [rows] l, 0 in rows that compete with nothing.
        own: [rows] own logits.
        terms: the rows' losses and their derivatives, unweighted.
    """

    def __init__(
        self,
        group: Sequence[Block],
        row_loss: RowLoss,
        places: list,
        sides: Sides,
        scale: Tensor,
        rows: slice,
        referred: bool,
        tiles: Sequence[Tensor | None],
    ):
        self.group, self.places, self.rows = group, places, rows
        lefts = [sides.values[left][rows] for left, _ in places]
        self.own = None
        for block, left, (_, r) in zip(group, lefts, places, strict=True):
            if block.own is not None:
                logits = own_logits(block, left, sides.values[r], scale, rows.start)
                self.own = logits if self.own is None else paddle.maximum(self.own, logits)
        self.exps = [
            other_logits(block, left, sides.transposed[r], scale, rows.start, tile)
            for block, left, (_, r), tile in zip(group, lefts, places, tiles, strict=True)
        ]
        self.top = reference(self.exps) if referred else paddle.zeros([], dtype=scale.dtype)
        self.total = paddle.zeros([rows.stop - rows.start], dtype=scale.dtype)
        for block, exps in zip(group, self.exps, strict=True):
            if referred:
                exps.subtract_(self.top.unsqueeze(1))
            exponentials_(block, exps, rows.start)
            self.total.add_(row_sums(exps))
        self.terms = row_loss(self.top + paddle.log(self.total), self.own, rows)

    def losses(self) -> Tensor:
        """[rows] unweighted losses."""
        return self.terms.losses

    def add_gradients(self, weights: Tensor, scale: Tensor, sides: Sides) -> Tensor:
        """Adds the chunk's gradients to those of `sides`; the chunk's exponentials are changed by it.

        Args:
            weights: [rows] w.
            scale: 0-d.
            sides: the tensors and their gradients.

        Returns:
            0-d, the chunk's part of the gradient of `scale`.
        """
        own, factors = own_entries(self.terms, self.total)
        weight = (scale * weights * factors).unsqueeze(1)
        dscale = paddle.zeros([], dtype=scale.dtype)
        if self.terms.dscale is not None:
            dscale = (weights * self.terms.dscale).sum()
        for block, exps, (l, r) in zip(self.group, self.exps, self.places, strict=True):
            if block.own is not None:
                set_own(exps, block.own[self.rows], own)
            left = sides.values[l][self.rows]
            dleft = paddle.matmul(exps, sides.values[r]).multiply_(weight)
            # sum_j dz_ij <left_i, right_j> = <left_i, dleft_i> / scale: no product of its own.
            dscale = dscale + (dleft * left).sum() / scale
            if sides.dleft[l] is not None:
                sides.dleft[l][self.rows].add_(dleft)
            if sides.dright[r] is not None:
                sides.dright[r].addmm_((left * weight).T.contiguous(), exps)
        return dscale


def reference(logits: Sequence[Tensor]) -> Tensor:
    """[rows] the largest logit of every row over [rows, N] arrays; 0 in rows without any."""
    top = logits[0].max(axis=1)
    for others in logits[1:]:
        top = paddle.maximum(top, others.max(axis=1))
    return paddle.where(top == float("-inf"), paddle.zeros_like(top), top)


def row_sums(matrix: Tensor) -> Tensor:
    """[rows] sums of [rows, N]. As a product: several times faster on a CPU than a sum over a long axis."""
    return paddle.matmul(matrix, paddle.ones([matrix.shape[1], 1], dtype=matrix.dtype)).squeeze(1)


def own_entries(terms: RowTerms, total: Tensor) -> tuple[Tensor, Tensor]:
    """What to write at the own entries of E, and the factors f / w of the rows: f E' is the logits' gradient.

    Where the loss of a row does not depend on the others, E' would be infinite: there the others keep 1e-12 of the
    own entry's share, which float32 doesn't see.
    """
    zeros = paddle.zeros_like(total)
    if terms.balanced:
        own = -total
        return own, paddle.where(total > 0, terms.dothers / total, zeros)
    alone = total <= 0
    safe = paddle.where(alone, paddle.ones_like(total), total)
    dothers = paddle.maximum(terms.dothers, 1e-12 * paddle.abs(terms.down))
    nothing = paddle.logical_or(alone, dothers <= 0)
    own = paddle.where(nothing, zeros, safe * terms.down / paddle.where(nothing, paddle.ones_like(dothers), dothers))
    return own, paddle.where(nothing, zeros, dothers / safe)


def kept_gradients(ctx, dloss: Tensor) -> tuple:
    """The backward pass of a layer whose forward pass made the gradients: they times the incoming one.

    In place: the gradients are the layer's own, and Paddle walks the graph of a PyLayer once only.

    Args:
        ctx: of the layer, with `plan`, `grads` per tensor in the accumulation dtype (None: not wanted), `dtypes` of
            the tensors, `dscale` 0-d, and `scale_like`, the scale as it was given.
        dloss: 0-d.

    Returns:
        Gradients of the scale (None: not wanted) and of the tensors.
    """
    grads, ctx.grads = ctx.grads, None
    out = [
        None if g is None else g.multiply_(dloss.astype(g.dtype)).astype(dtype)
        for g, dtype in zip(grads, ctx.dtypes, strict=True)
    ]
    dscale = (ctx.dscale * dloss).astype(ctx.scale_like.dtype).reshape(ctx.scale_like.shape)
    return (dscale if ctx.plan.wants_scale else None, *out)


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
        for group, row_loss, places in zip(plan.groups, plan.row_losses, plan.sides, strict=True):
            tiles = [paddle.zeros([min(step, plan.rows), block.right.shape[0]], dtype) for block in group]
            for start in range(0, plan.rows, step):
                rows = slice(start, min(start + step, plan.rows))
                chunk = GroupChunk(group, row_loss, places, sides, s, rows, referred, tiles)
                loss = loss + (weights[rows] * chunk.losses()).sum()
                if plan.differentiates:
                    dscale = dscale + chunk.add_gradients(weights[rows], s, sides)
            del chunk, tiles  # before the next group's are made
        ctx.plan, ctx.grads, ctx.dscale = plan, sides.gradients(), dscale
        ctx.dtypes, ctx.scale_like = [t.dtype for t in tensors], scale
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return kept_gradients(ctx, dloss)


def streaming_info_nce(
    groups: Sequence[Sequence[Block]],
    scale: Tensor,
    row_weights: float | Tensor,
    memory_budget: int | None = None,
    row_loss: RowLoss | None = None,
) -> Tensor:
    """The mean over groups of sum_i w_i loss_i, streamed: the `paddle` backend.

    Args:
        groups: checked groups of blocks.
        scale: one element, 1/T; gets its gradient when it wants one.
        row_weights: w, a float or [B].
        memory_budget: bytes that the logits of a chunk may take; None: `default_budget`.
        row_loss: see `row_losses`; None is InfoNCE.

    Returns:
        0-d float32 (float64 for float64 inputs).
    """
    plan = Plan(groups, scale, row_weights, memory_budget, row_loss)
    return _Streaming.apply(plan, scale, *plan.tensors)
