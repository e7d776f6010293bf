# SPDX-License-Identifier: Apache-2.0
"""Matryoshka in one pass: the losses of all prefixes, re-normalised, and their gradients. bf16 and fp32.

With x_d the first d numbers of a vector, r_d = 1 / |x_d|, widths d_1 < ... < d_M, for a chunk of rows and each block:

    z_d,ij = scale r_d,i r_d,j <left_i[:d], right_j[:d]>     one product of width d_M, whose tiles end once per prefix
    E_d    = exp(z_d - c_d,i), 0 at own and dropped entries  stored in the inputs' dtype, row sums on the way
    G_d    = dL / dz_d = coefficient_d,i E_d                 known with the sums over all blocks, as are the losses
    C_s    = sum over d >= s of scale r_d,i G_d r_d,j        an elementwise kernel, in E's place, last prefix first
    dleft[:, segment s] = C_s @ right[:, segment s]          one launch for all segments
    dright[:, segment s] += C_s^T @ left[:, segment s]       one launch, fp32 sums
    dx[:d] -= x[:d] r_d^2 sum_j G_d,ij z_d,ij                the lengths' part, own entries included; columns likewise
    dscale = sum over all G z / scale

6BND operations per block for any number of prefixes, where separate losses take 6BN sum(d); for 128, 256, 512, 1024
that is 1.88 times as many. Instead E is written, read, written again and read: 4 B N bytes per prefix and way in bf16.
Recomputing the similarities once the sums are known (8BND) would save none of it: C_s needs the E of wider prefixes,
which a tile meets later, so it would have to go through memory all the same.

What a guide says of an entry is the same at every prefix: its similarities are a tile's first product, and what it
drops starts the second one's sums at -inf, as do own entries and all others that no prefix counts. Lengths, and their
part of the gradient, belong to a tensor: blocks may share it, on either side.

References, repair and the treatment of own entries are those of one_pass.py. Vectors need not have length 1, but the
square of every prefix's length must be a normal fp32 number. Saved for the backward: the gradients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import paddle
import triton

from . import prefix_plan, static
from .contrastive import RunsJob, as_it_is, as_row_weights, check, distinct, total_of
from .dispatch import launch
from .driver import empty
from .gradients import accumulators, scaled, scaled_results
from .launch import Similarity, row_block
from .prefix_pass import GroupPass, PrefixBlock, Side, whole_rows
from .prefix_rows import length_kernel, radial_kernel
from .rows import sum_kernel
from .views import contiguous_rows, number, row_stride, rows_from, vectors

_LEAST_BUDGET = 256 << 20
#: Chunks shorter than this spend their time on adding up dright.
FEWEST_ROWS = 256


@as_it_is
def prefix_info_nce(
    groups, dims: Sequence[int], weights: Sequence[float], *, scale, row_weights, margin: float | None = None,
    memory_budget: int | None = None,
):  # fmt: skip
    """sum over prefixes of weight_d times the InfoNCE loss of the re-normalised prefixes.

    Args:
        groups: as `info_nce` takes them; see `sweeps` for which ones.
        dims: widths of the prefixes, ascending.
        weights: one per dim.
        scale: 1/T: number, or a tensor of one element, which then gets its gradient.
        row_weights: number, or [B] tensor.
        margin: in blocks with a `limit`: drop entries whose cosine is above that of the row's own pair plus this, at
            every prefix.
        memory_budget: bytes of scratch beyond the gradients; None: for each of up to four prefixes the size of the
            inputs, at least 256 MiB (separate losses hold copies of the prefixes and their gradients, which is more).

    Returns:
        Scalar fp32 tensor; None when the budget is too small for chunks of a useful number of rows.

    Raises:
        TypeError, ValueError: as `info_nce`.
    """
    groups = [list(group) for group in groups]
    tensors = distinct(t for group in groups for block in group for t in (block.left, block.right))
    check(groups, tensors, memory_budget)
    sources = {id(t): k for k, t in enumerate(tensors)}
    if tensors[0].dtype == paddle.float16:  # which can't hold the range of E
        tensors, groups = [t.astype("float32") for t in tensors], _with_wide_guides(groups)
    job = _Job(groups, sources, tensors, dims, weights, scale, margin)
    if not job.cut(memory_budget):
        return None
    job.row_weights = as_row_weights(row_weights, tensors[0].shape[0])
    with static.Untraced():
        return RunsJob.apply(job, scale, *tensors) if job.learnable else RunsJob.apply(job, *tensors)


def sweeps(groups) -> bool:
    """Whether `prefix_info_nce` takes these groups.

    It takes blocks with every rule but hardness, in a dynamic graph, where one block of each group has the own entries
    of all rows. (The lengths' gradients get z out of E, and a hardness bonus is in E, but not in z.) Triton 3.3 can't
    compile it: it takes no items out of a tuple of constants.
    """
    if triton.__version__.startswith("3.3.") or not paddle.in_dynamic_mode():
        return False
    one_own = all(sum(block.own is not None for block in group) == 1 for group in groups)
    return one_own and all(block.hardness is None for group in groups for block in group)


def _with_wide_guides(groups):
    """The groups with their guides' vectors in fp32."""
    wide: dict = {}

    def cast(tensor):
        if id(tensor) not in wide:
            wide[id(tensor)] = tensor.astype("float32")
        return wide[id(tensor)]

    def of(block):
        if block.guide is None:
            return block
        block, guide = copy.copy(block), copy.copy(block.guide)
        guide.left, guide.right = cast(guide.left), cast(guide.right)
        block.guide = guide
        return block

    return [[of(block) for block in group] for group in groups]


class _Job:
    """One evaluation of the loss."""

    def __init__(self, groups, sources, tensors, dims, weights, scale, margin):
        self.dims, self.M, self.margin = tuple(dims), len(dims), margin
        self.weights = tuple(float(weight) / len(groups) for weight in weights)
        learns = paddle.is_grad_enabled()
        self.wanted = [learns and not t.stop_gradient for t in tensors]
        self.learnable = isinstance(scale, paddle.Tensor)
        self.wanted_scale = learns and self.learnable and not scale.stop_gradient
        self.scale = scale.detach() if self.learnable else number(float(scale))
        # detach: the graph of the inputs must not be kept alive from here
        self.sides = [Side(contiguous_rows(t.detach())) for t in tensors]
        self.groups = [[self._block(b, sources[id(b.left)], sources[id(b.right)]) for b in group] for group in groups]
        self.B = self.groups[0][0].s.B
        self.row_weights = self.plans = self.gradients = self.terms = None

    def _block(self, block, left: int, right: int) -> PrefixBlock:
        left, right = self.sides[left], self.sides[right]
        return PrefixBlock(Similarity(block, left.x, right.x), left, right, self.dims)

    def cut(self, budget: int | None) -> bool:
        """Whether chunks of every group fit the budget."""
        if budget is None:
            inputs = sum(math.prod(side.x.shape) * side.x.element_size() for side in self.sides)
            budget = min(self.M, 4) * max(_LEAST_BUDGET, inputs)
        self.plans = [
            prefix_plan.cut(
                self.B, tuple((b.s.N, b.sweep, b.lefts) for b in group), len({id(b.left) for b in group}), self.dims,
                group[0].s.itemsize, group[0].s.sms, budget, FEWEST_ROWS, any(self.wanted) or self.wanted_scale,
            )
            for group in self.groups
        ]  # fmt: skip
        return None not in self.plans

    def forward(self):
        like = self.sides[0].x
        self._begin()
        losses = empty([len(self.groups) * self.B], paddle.float32, like)
        self.terms = empty([self.B], paddle.float32, like) if self.wanted_scale else None
        for k, (blocks, plan) in enumerate(zip(self.groups, self.plans, strict=True)):
            GroupPass(
                blocks, self.dims, self.scale, self.margin, self.row_weights, self.weights,
                rows_from(losses, k * self.B), self.terms, k > 0, plan,
            ).run()  # fmt: skip
        for side in self.sides:
            if side.radial is not None:
                n, D = side.x.shape
                launch(
                    radial_kernel, (n,), side.x, side.inverse, side.radial, side.gradient.buffer, D,
                    row_stride(side.x), D, n, DIMS=self.dims, M=self.M, MP=prefix_plan.padded(self.M), BD=row_block(D),
                    num_warps=max(row_block(D) // 256, 1),
                )  # fmt: skip
        self.groups = self.sides = None  # the backward needs the gradients alone
        return total_of(losses)

    def _begin(self) -> None:
        """Lengths of all vectors, and what gathers for their gradients."""
        M, dims, sides = self.M, self.dims, self.sides
        blocks = [[block.s for block in group] for group in self.groups]
        # A right side is never written only once: the lengths' part of its gradient comes last.
        self.gradients = accumulators(blocks, [side.x for side in sides], self.wanted, lambda s: 2, interleaved=True)
        on_right = {id(block.right) for group in self.groups for block in group}
        sums = [g is not None and id(side) in on_right for side, g in zip(sides, self.gradients, strict=True)]
        sizes = [[M * side.x.shape[0]] * (1 + wanted) for side, wanted in zip(sides, sums, strict=True)]
        pieces = iter(vectors([n for of_side in sizes for n in of_side], sides[0].x))
        for side, gradient, wanted in zip(sides, self.gradients, sums, strict=True):
            side.gradient, side.inverse, side.radial = gradient, next(pieces), next(pieces) if wanted else None
            n = side.x.shape[0]
            launch(length_kernel, (n,), side.x, side.inverse, row_stride(side.x), n, **whole_rows(dims))

    def backward(self, incoming):
        gradients = scaled_results(self.gradients, incoming)
        if not self.learnable:
            return tuple(gradients)
        dscale = None
        if self.wanted_scale:
            total = empty(self.scale.shape, paddle.float32, self.terms)
            launch(sum_kernel, (1,), self.terms, total, self.B, 1.0, LARGEST=False, BLOCK=4096, num_warps=8)
            dscale = scaled(total, incoming, self.scale.dtype)
        return (dscale, *gradients)


__all__ = ["prefix_info_nce", "sweeps"]
