# SPDX-License-Identifier: Apache-2.0
"""All prefixes of a Matryoshka loss from one sweep over the similarities, in plain Paddle operators.

With x_d the first d numbers of a vector, r_d = 1 / |x_d|, and prefixes d_1 < ... < d_m:

    dot_d,ij = sum of the segments' products up to d           cumulative: all prefixes cost one product of width d_m
    z_d,ij   = scale r_d,i r_d,j dot_d,ij
    G_d      = weight_d dL_d / dz_d                            the core's coefficients, own entries included
    C_s      = sum over d that contain segment s of scale r_d,i G_d,ij r_d,j
    dleft[:, s] = C_s @ right[:, s],    dright[:, s] = C_s^T @ left[:, s]
    and, for the length of a prefix:    dx[:d] -= x[:d] r_d^2 sum_j G_d,ij z_d,ij      (columns likewise)

so the gradients, too, cost two products of width d_m, not two per prefix. Vectors are scaled to length 1 at d_m first,
by Paddle's autograd: the widest prefix needs no factors. Masks that don't look at the similarity, a guide's among
them, are computed once for all prefixes. A chunk of rows sees all columns, so losses and gradients are made in one
sweep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import default_budget
from paddle_infcl.functional.matryoshka import Matryoshka, own_cosines, prefix_groups
from paddle_infcl.functional.row_losses import RowLoss
from paddle_infcl.functional.streaming import Plan, Sides, kept_gradients, own_entries, reference, row_sums
from paddle_infcl.functional.tiles import exponentials_, fixed_mask, masked_logits, set_own


class _Prefixes:
    """What a chunk needs of the prefixes.

    Attributes:
        segments: (from, to) of every segment, ascending.
        weights: per prefix.
        inverse: per tensor and prefix but the widest [n] 1 / length, 0 for zero vectors.
        radial: per tensor and prefix but the widest [n] sum_j G_ij z_ij, as far as it is known.
        limits: per group, block and prefix the limit of the margin rule, or None.
    """

    def __init__(self, dims: Sequence[int], weights: Sequence[float], values: Sequence[Tensor], limits):
        self.segments = list(zip([0, *dims[:-1]], dims, strict=True))
        self.weights, self.limits = weights, limits
        self.inverse = [[_inverse_length(t[:, :dim]) for dim in dims[:-1]] for t in values]
        self.radial = [[paddle.zeros_like(r) for r in per_tensor] for per_tensor in self.inverse]


def _inverse_length(vectors: Tensor) -> Tensor:
    square = vectors.square().sum(axis=1)
    zero = square <= 0
    return paddle.where(zero, square, paddle.rsqrt(paddle.where(zero, paddle.ones_like(square), square)))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """[rows, N] a_i b_j. As a product: multiplying a tile by a row vector is slow in Paddle on a CPU."""
    return paddle.matmul(a.unsqueeze(1), b.unsqueeze(0))


class _Chunk:
    """Some rows of a group, at every prefix."""

    def __init__(self, group, row_loss, places, sides: Sides, prefixes: _Prefixes, limits, scale, rows, referred):
        self.group, self.places, self.sides, self.prefixes = group, places, sides, prefixes
        self.scale, self.rows = scale, rows
        m = len(prefixes.segments)
        self.exps: list[list[Tensor]] = [[] for _ in range(m)]
        self.similarities: list[list[Tensor]] = [[] for _ in range(m - 1)]
        own: list[Tensor | None] = [None] * m
        for b, (block, (l, r)) in enumerate(zip(group, places, strict=True)):
            if block.own is not None:
                for s, logits in enumerate(self._own_logits(block, l, r)):
                    own[s] = logits if own[s] is None else paddle.maximum(own[s], logits)
            self._logits(block, l, r, limits[b])
        self.terms, self.totals = [], []
        for s in range(m):
            top = reference(self.exps[s]) if referred else paddle.zeros([], dtype=scale.dtype)
            total = paddle.zeros([rows.stop - rows.start], dtype=scale.dtype)
            for block, exps in zip(group, self.exps[s], strict=True):
                if referred:
                    exps.subtract_(top.unsqueeze(1))
                exponentials_(block, exps, rows.start)
                total.add_(row_sums(exps))
            self.totals.append(total)
            self.terms.append(row_loss(top + paddle.log(total), own[s], rows))

    def _own_logits(self, block: Block, l: int, r: int) -> list[Tensor]:
        own = block.own[self.rows]
        index = own.clip(min=0)
        products = self.sides.values[l][self.rows] * self.sides.values[r].index_select(index)
        absent = paddle.full(own.shape, float("-inf"), dtype=products.dtype)
        out, dot = [], 0.0
        for s, (start, stop) in enumerate(self.prefixes.segments):
            dot = dot + products[:, start:stop].sum(axis=1)
            logits = dot * self.scale
            if s < len(self.prefixes.segments) - 1:
                inverse = self.prefixes.inverse
                logits = logits * inverse[l][s][self.rows] * inverse[r][s].index_select(index)
            out.append(paddle.where(own < 0, absent, logits))
        return out

    def _logits(self, block: Block, l: int, r: int, limits) -> None:
        left, right_t = self.sides.values[l][self.rows], self.sides.transposed[r]
        fixed = fixed_mask(block, self.rows.start, left.shape[0], left.dtype) if block.masks else None
        dot = None
        for s, (start, stop) in enumerate(self.prefixes.segments):
            segment = left[:, start:stop].contiguous()
            if dot is None:
                dot = paddle.matmul(segment, right_t[start:stop])
            else:
                dot.addmm_(segment, right_t[start:stop])
            logits = dot
            if s < len(self.similarities):
                similarity = _outer(self.prefixes.inverse[l][s][self.rows], self.prefixes.inverse[r][s])
                similarity.multiply_(dot)
                self.similarities[s].append(similarity)
                logits = similarity.clone() if block.masks else similarity * self.scale
            elif not block.masks:
                logits.multiply_(self.scale)
            if block.masks:
                at_prefix = block if block.limit is None else dataclasses.replace(block, limit=limits[s])
                logits = masked_logits(at_prefix, logits, self.scale, self.rows.start, fixed)
            elif block.own is not None:
                set_own(logits, block.own[self.rows], float("-inf"))
            self.exps[s].append(logits)

    def loss(self, weights: Tensor) -> Tensor:
        """0-d weighted sum over prefixes and rows."""
        pairs = zip(self.prefixes.weights, self.terms, strict=True)
        return sum(weight * (weights * terms.losses).sum() for weight, terms in pairs)

    def add_gradients(self, weights: Tensor) -> Tensor:
        """Adds the chunk's gradients to those of `sides` and `prefixes.radial`; returns that of the scale."""
        sides, prefixes, rows = self.sides, self.prefixes, self.rows
        entries = [own_entries(terms, total) for terms, total in zip(self.terms, self.totals, strict=True)]
        factors = [weight * self.scale * weights * f for weight, (_, f) in zip(prefixes.weights, entries, strict=True)]
        dscale = paddle.zeros([], dtype=self.scale.dtype)
        for weight, terms in zip(prefixes.weights, self.terms, strict=True):
            if terms.dscale is not None:
                dscale = dscale + weight * (weights * terms.dscale).sum()
        for b, (block, (l, r)) in enumerate(zip(self.group, self.places, strict=True)):
            left, merged, dlefts = sides.values[l][rows], None, []
            for s in reversed(range(len(prefixes.segments))):
                exps = self.exps[s][b]
                if block.own is not None:
                    set_own(exps, block.own[rows], entries[s][0])
                if s < len(self.similarities):
                    products = self.similarities[s][b].multiply_(exps)
                    prefixes.radial[l][s][rows].add_(factors[s] * row_sums(products))
                    prefixes.radial[r][s].add_(paddle.matmul(factors[s].unsqueeze(0), products).squeeze(0))
                    exps.multiply_(_outer(factors[s] * prefixes.inverse[l][s][rows], prefixes.inverse[r][s]))
                else:
                    exps.multiply_(factors[s].unsqueeze(1))
                merged = exps if merged is None else merged.add_(exps)
                start, stop = prefixes.segments[s]
                dlefts.append(paddle.matmul(merged, sides.transposed[r][start:stop], transpose_y=True))
                if sides.dright[r] is not None:
                    sides.dright[r][start:stop].addmm_(left[:, start:stop].T.contiguous(), merged)
            dleft = paddle.concat(dlefts[::-1], axis=1)
            # Before the lengths' part: sum over prefixes of sum_j G_ij z_ij, times scale / scale.
            dscale = dscale + (dleft * left).sum() / self.scale
            if sides.dleft[l] is not None:
                sides.dleft[l][rows].add_(dleft)
        return dscale


class _OneSweep(PyLayer):
    @staticmethod
    def forward(ctx, plan, dims, prefix_weights, limits, scale, *tensors):
        sides = Sides(plan, tensors)
        dtype = sides.values[0].dtype
        prefixes = _Prefixes(dims, prefix_weights, sides.values, limits)
        s, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        referred = not _safe_without_reference(plan, s)
        sides.make_room()
        loss, dscale = paddle.zeros([], dtype=dtype), paddle.zeros([], dtype=dtype)
        step = _chunk_rows(plan, len(dims))
        for g, (group, row_loss, places) in enumerate(zip(plan.groups, plan.row_losses, plan.sides, strict=True)):
            for start in range(0, plan.rows, step):
                rows = slice(start, min(start + step, plan.rows))
                chunk = _Chunk(group, row_loss, places, sides, prefixes, limits[g], s, rows, referred)
                loss = loss + chunk.loss(weights[rows])
                if plan.differentiates:
                    dscale = dscale + chunk.add_gradients(weights[rows])
                del chunk
        values = sides.values
        grads = sides.gradients()
        for grad, value, inverse, radial in zip(grads, values, prefixes.inverse, prefixes.radial, strict=True):
            if grad is not None:
                for dim, r, sums in zip(dims[:-1], inverse, radial, strict=True):
                    grad[:, :dim] = grad[:, :dim] - value[:, :dim] * (sums * r.square()).unsqueeze(1)
        ctx.plan, ctx.grads, ctx.dscale = plan, grads, dscale
        ctx.dtypes, ctx.scale_like = [t.dtype for t in tensors], scale
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return kept_gradients(ctx, dloss)


def _safe_without_reference(plan: Plan, scale: Tensor) -> bool:
    """As `streaming.safe_without_reference`, for vectors of length 1."""
    strength = max(abs(b.hardness.strength) if b.hardness else 0.0 for group in plan.groups for b in group)
    return all(row_loss.balanced for row_loss in plan.row_losses) and float(scale) + strength <= 60.0


def _chunk_rows(plan: Plan, prefixes: int) -> int:
    """Rows per chunk: every prefix holds its exponentials and its similarities."""
    budget = default_budget(plan.groups) if plan.memory_budget is None else plan.memory_budget
    itemsize = 8 if plan.tensors[0].dtype == paddle.float64 else 4

    def bytes_per_entry(block: Block) -> int:
        tiles = 2 * prefixes + (block.guide is not None) + 2 * (block.hardness is not None)
        return tiles * itemsize + 4 * block.masks

    widest = max(sum(b.right.shape[0] * bytes_per_entry(b) for b in group) for group in plan.groups)
    return max(1, int(budget // max(widest, 1)))


def prefix_info_nce(
    groups: Sequence[Sequence[Block]],
    matryoshka: Matryoshka,
    scale: Tensor,
    row_weights: float | Tensor,
    memory_budget: int | None = None,
    row_loss: RowLoss | None = None,
) -> Tensor:
    """sum over prefixes of weight_d times the loss of the re-normalised prefixes of all vectors.

    Args:
        groups: checked groups of blocks over whole vectors; they need not have length 1.
        matryoshka: the prefixes; the widest may be less than the vectors' width.
        scale, row_weights, memory_budget, row_loss: as for `streaming_info_nce`.

    Returns:
        0-d float32 (float64 for float64 inputs).
    """
    dims, weights = zip(*matryoshka.by_width(groups[0][0].left.shape[1]), strict=True)
    widest = prefix_groups(groups, dims[-1], matryoshka.margin)
    plan = Plan(widest, scale, row_weights, memory_budget, row_loss)
    limits = []
    for group, unit in zip(groups, widest, strict=True):
        if any(block.limit is not None for block in group):
            of_group = [own_cosines(group, dim) + matryoshka.margin for dim in dims[:-1]]
            limits.append([block.limit if block.limit is None else [*of_group, block.limit] for block in unit])
        else:
            limits.append([None] * len(group))
    return _OneSweep.apply(plan, dims, weights, limits, scale, *plan.tensors)
