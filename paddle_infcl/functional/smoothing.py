# SPDX-License-Identifier: Apache-2.0
"""Label smoothing for losses whose logits are never stored.

The target of a row is 1 - e at its own entry plus e spread evenly over all its c candidates, its own entry among
them, dropped entries not. The cross-entropy is then

    lse - (1 - e) own - e mean_j z_ij  =  InfoNCE + e (own - mean_j z_ij)

and the second term is linear in the logits. With M_ij = 1 at candidates and 0 at dropped entries,

    mean_j z_ij = scale <left_i, S_i> / c_i        S_i = sum_j M_ij right_j,   c_i = sum_j M_ij
    dleft_i  = f_i S_i,  dright_j = sum_i f_i M_ij left_i        f_i = scale w_i / c_i

A block without rules has the same S for all rows and the same dright for all columns: sums over columns and rows, no
product at all. With rules M is made again tile by tile, in plain Paddle operators on every backend. S and c add up
over blocks, and over the shards of a ring. Hardness bonuses are constants, and not part of the mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import chunk_rows
from paddle_infcl.functional.hops import add_own_grads, own_of_block
from paddle_infcl.functional.options import check_number
from paddle_infcl.functional.streaming import Plan, kept_gradients, row_sums
from paddle_infcl.functional.tiles import accumulation_dtype, fixed_mask, other_logits, set_own


def check_smoothing(label_smoothing: float) -> None:
    """Raises ValueError where the share is none."""
    check_number("label_smoothing", label_smoothing, "must be between 0 and 1 (without 1)", lambda e: 0 <= e < 1)


def _drops(block: Block) -> bool:
    rules = (block.self_column, block.row_ids, block.owner_rule, block.limit, block.guide)
    return any(rule is not None for rule in rules)


def _candidate_tiles(block: Block, memory_budget: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Yields (rows, M of these rows) of a block with rules."""
    dtype = accumulation_dtype(block.left.dtype)
    if block.limit is not None:  # only this rule looks at the similarities
        left, right_t = block.left.astype(dtype), block.right.astype(dtype).T.contiguous()
    step = chunk_rows([[block]], memory_budget)
    for start in range(0, block.left.shape[0], step):
        rows = slice(start, min(start + step, block.left.shape[0]))
        if block.limit is None:
            matrix = (~fixed_mask(block, start, rows.stop - start, dtype)).astype(dtype)
        else:
            logits = other_logits(block, left[rows], right_t, paddle.ones([], dtype), start)
            matrix = (logits > float("-inf")).astype(dtype)
            del logits
        if block.own is not None:
            set_own(matrix, block.own[rows], 1.0)
        yield rows, matrix


class EvenShare:
    """The part of one group's target that is spread evenly: the mean logit of every row, and its gradients.

    First all blocks of the group are shown (`see`), in parts if they lie on several devices; then there are the means,
    and their gradients, which take the blocks once more.

    Args:
        group: the blocks of the softmax; only the rows count here.
        memory_budget: bytes for a tile.

    Attributes:
        counts: [B] c.
        sides: per left side, under a name that the caller chooses, itself and its S [B, D].
    """

    def __init__(self, group: Sequence[Block], memory_budget: int | None):
        first = group[0].left
        self.memory_budget = memory_budget
        self.counts = paddle.zeros([first.shape[0]], accumulation_dtype(first.dtype))
        self.sides: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @paddle.no_grad()
    def see(self, name: Hashable, block: Block) -> None:
        """Counts and adds up the candidates of a block or of a part of it; `name` is that of its left side."""
        if name not in self.sides:
            left = block.left.detach().astype(self.counts.dtype)
            self.sides[name] = (left, paddle.zeros_like(left))
        sums, right = self.sides[name][1], block.right.astype(self.counts.dtype)
        if not _drops(block):
            self.counts += block.right.shape[0]
            sums.add_(right.sum(axis=0))
            return
        for rows, matrix in _candidate_tiles(block, self.memory_budget):
            self.counts[rows].add_(row_sums(matrix))
            sums[rows].add_(paddle.matmul(matrix, right))

    @paddle.no_grad()
    def means(self, scale: Tensor) -> Tensor:
        """[B] the mean of the logits of every row's candidates."""
        total = paddle.zeros_like(self.counts)
        for left, sums in self.sides.values():
            total.add_((left * sums).sum(axis=1))
        return scale * total / self.counts

    @paddle.no_grad()
    def add_right(self, name: Hashable, block: Block, scale: Tensor, weights: Tensor, dright: Tensor) -> None:
        """Adds the gradient of sum_i weights_i mean_i by the columns of a block, or of a part of it, to `dright`."""
        left = self.sides[name][0] * (scale * weights / self.counts).unsqueeze(1)
        if not _drops(block):
            dright.add_(left.sum(axis=0))
            return
        for rows, matrix in _candidate_tiles(block, self.memory_budget):
            dright.addmm_(matrix.T.contiguous(), left[rows])

    @paddle.no_grad()
    def add_left(self, name: Hashable, scale: Tensor, weights: Tensor, dleft: Tensor) -> None:
        """Adds the gradient of the same by a left side, from all blocks that have it, to `dleft`."""
        dleft.add_(self.sides[name][1] * (scale * weights / self.counts).unsqueeze(1))


class _OwnAboveMean(PyLayer):
    @staticmethod
    def forward(ctx, plan, scale, *tensors):
        dtype = accumulation_dtype(tensors[0].dtype)
        s, weights = scale.detach().astype(dtype).reshape([]), plan.weights(dtype)
        value = paddle.zeros([], dtype=dtype)
        grads = [paddle.zeros(t.shape, dtype) if plan.differentiates else None for t in tensors]
        terms = paddle.zeros_like(weights)
        for group, places in zip(plan.groups, plan.sides, strict=True):
            even, own = EvenShare(group, plan.memory_budget), None
            for block, (left, _) in zip(group, places, strict=True):
                even.see(left, block)
                if block.own is not None:
                    logits = own_of_block(block, s)
                    own = logits if own is None else paddle.maximum(own, logits)
            value = value + (weights * (own - even.means(s))).sum()
            if not plan.differentiates:
                continue
            for left in even.sides:
                even.add_left(left, s, -weights, grads[left])
            for block, (left, right) in zip(group, places, strict=True):
                even.add_right(left, block, s, -weights, grads[right])
                if block.own is not None:
                    add_own_grads(block, s, weights, grads[left], grads[right], terms)
        ctx.grads = [g if want else None for g, want in zip(grads, plan.wanted, strict=True)]
        ctx.plan, ctx.dscale = plan, value / s
        ctx.dtypes, ctx.scale_like = [t.dtype for t in tensors], scale
        return value

    @staticmethod
    def backward(ctx, dvalue):
        return kept_gradients(ctx, dvalue)


def own_above_mean(
    groups: Sequence[Sequence[Block]], scale: Tensor, row_weights: float | Tensor, memory_budget: int | None = None
) -> Tensor:
    """The mean over groups of sum_i w_i (own_i - mean of the row's logits, its own among them).

    Arguments as for `streaming_info_nce`.

    Returns:
        0-d float32 (float64 for float64 inputs).
    """
    plan = Plan(groups, scale, row_weights, memory_budget)
    return _OwnAboveMean.apply(plan, scale, *plan.tensors)
