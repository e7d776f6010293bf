# SPDX-License-Identifier: Apache-2.0
"""Matryoshka in one pass: the losses of all prefixes of one block, re-normalised, and their gradients. bf16 and fp32.

With x_d the first d numbers of a vector, r_d = 1 / |x_d|, widths d_1 < ... < d_M, and for a chunk of rows:

    z_d,ij = scale r_d,i r_d,j <left_i[:d], right_j[:d]>     one product of width d_M, whose tiles end once per prefix
    E_d    = exp(z_d - c_d,i), 0 at own and dropped entries  stored in the inputs' dtype, row sums on the way
    G_d    = dL / dz_d = coefficient_d,i E_d                 known with the sums, as are the losses
    C_s    = sum over d >= s of scale r_d,i G_d r_d,j        an elementwise kernel, in E's place, last prefix first
    dleft[:, segment s] = C_s @ right[:, segment s]          one launch for all segments
    dright[:, segment s] += C_s^T @ left[:, segment s]       one launch, fp32 sums
    dx[:d] -= x[:d] r_d^2 sum_j G_d,ij z_d,ij                the lengths' part, own entries included; columns likewise
    dscale = sum over all G z / scale

6BND operations for any number of prefixes, where separate losses take 6BN sum(d); for 128, 256, 512, 1024 that is 1.88
times as many. Instead E is written, read, written again and read: 4 B N bytes per prefix and way in bf16. Recomputing
the similarities once the sums are known (8BND) would save none of it: C_s needs the E of wider prefixes, which a tile
meets later, so it would have to go through memory all the same.

References, repair and the treatment of own entries are those of one_pass.py. Vectors need not have length 1, but the
square of every prefix's length must be a normal fp32 number. Saved for the backward: the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import triton

from . import prefix_plan, static, tuning
from .contrastive import RunsJob, as_it_is
from .dispatch import launch
from .driver import empty, is_interpreting
from .gradients import scaled, scaled_pair
from .launch import FLAG_ROWS, Similarity, cdiv, precision, row_block, upcast
from .prefix_kernels import blend_kernel, segments_kernel, sweep_kernel
from .prefix_rows import (
    check_prefix_kernel,
    column_sum_kernel,
    finish_prefix_kernel,
    length_kernel,
    own_prefix_kernel,
    radial_kernel,
    reference_prefix_kernel,
    state_prefix_kernel,
)
from .rows import sum_kernel
from .tiles import match_kernel
from .views import can_describe, dense, describe, empty_rows, number, row_stride, rows_from, vectors

_LEAST_BUDGET = 256 << 20
_SAMPLES = 128
#: Chunks shorter than this spend their time on adding up dright.
FEWEST_ROWS = 256


@as_it_is
def prefix_info_nce(
    block, dims: Sequence[int], weights: Sequence[float], *, scale, row_weights, margin: float | None = None,
    memory_budget: int | None = None,
):  # fmt: skip
    """sum over prefixes of weight_d times the InfoNCE loss of the re-normalised prefixes.

    Args:
        block: as `info_nce` takes it; see `sweeps` for which ones.
        dims: widths of the prefixes, ascending.
        weights: one per dim.
        scale: 1/T: number, or a tensor of one element, which then gets its gradient.
        row_weights: number, or [B] tensor.
        margin: where the block has a `limit`: drop entries whose cosine is above the own pair's plus this, at every
            prefix.
        memory_budget: bytes of scratch beyond the gradients; None: for each of up to four prefixes the size of the
            inputs, at least 256 MiB (separate losses hold copies of the prefixes and their gradients, which is more).

    Returns:
        Scalar fp32 tensor; None when the budget is too small for chunks of a useful number of rows.
    """
    left, right = block.left, block.right
    if left.dtype == paddle.float16:  # which can't hold the range of E
        left, right = left.astype("float32"), right.astype("float32")
    learns = paddle.is_grad_enabled()
    wanted = [learns and not t.stop_gradient for t in (left, right)]
    learns_scale = learns and isinstance(scale, paddle.Tensor) and not scale.stop_gradient
    job = _Job(block, left.detach(), right.detach(), dims, weights, scale, margin, wanted, learns_scale)
    if isinstance(row_weights, paddle.Tensor):
        row_weights = row_weights.detach()
        job.row_weights = dense(row_weights if row_weights.dtype == paddle.float32 else row_weights.astype("float32"))
    else:
        job.row_weights = float(row_weights)
        if is_interpreting():
            job.row_weights = paddle.full([job.s.B], job.row_weights, dtype="float32")
    if not job.cut(memory_budget):
        return None
    tensors = (scale, left, right) if job.learnable else (left, right)
    with static.Untraced():
        return RunsJob.apply(job, *tensors)


def sweeps(groups) -> bool:
    """Whether `prefix_info_nce` takes these groups.

    It takes one block of two tensors, with no rules but ids, `self_column` and `limit`, in a dynamic graph. Triton 3.3
    can't compile it: it takes no items out of a tuple of constants.
    """
    if triton.__version__.startswith("3.3."):
        return False
    if not paddle.in_dynamic_mode() or len(groups) != 1 or len(groups[0]) != 1:
        return False
    block = groups[0][0]
    others = (block.owner_rule, block.guide, block.hardness)
    return block.left is not block.right and block.own is not None and all(rule is None for rule in others)


class _Job:
    """One evaluation of the loss."""

    def __init__(self, block, left, right, dims, weights, scale, margin, wanted, learns_scale):
        self.s = s = Similarity(block, left, right)
        self.dims, self.starts, self.M, self.margin = tuple(dims), (0, *dims[:-1]), len(dims), margin
        self.limited = block.limit is not None
        self.learnable = isinstance(scale, paddle.Tensor)
        self.scale = scale.detach() if self.learnable else number(float(scale))
        self.weights = tuple(float(weight) for weight in weights)
        self.wanted, self.wanted_scale = wanted, learns_scale
        self.sweep, self.described = prefix_plan.sweep_tile(s.arch, self.dims, s.fp32, s.described)
        self.blend = prefix_plan.blend(s.arch)
        self.lefts, self.rights = (
            prefix_plan.groups(kind, s.arch, self.dims, s.fp32, s.described) for kind in ("left", "right")
        )
        self.dleft = self.dright = self.terms = self.scaled = None

    @property
    def differentiates(self) -> bool:
        return any(self.wanted) or self.wanted_scale

    def cut(self, budget: int | None) -> bool:
        s = self.s
        if budget is None:
            budget = min(self.M, 4) * max(_LEAST_BUDGET, (s.B + s.N) * s.D * s.itemsize)
        self.plan = prefix_plan.cut(
            s.B, s.N, self.dims, s.itemsize, s.sms, self.sweep, self.lefts, budget, FEWEST_ROWS, self.differentiates,
        )  # fmt: skip
        return self.plan is not None

    def forward(self):
        s, M, rows = self.s, self.M, self.plan.rows
        B, N = s.B, s.N
        tiles, flags_rows = cdiv(N, self.sweep.BN), min(FLAG_ROWS, self.sweep.BM)
        last = row_block(self.dims[-1] - self.starts[-1])
        blend_tiles, blend_rows = cdiv(N, self.blend.BN), cdiv(rows, self.blend.BR)
        gradients, right_wanted = self.differentiates, self.wanted[1]
        (
            self.inverse_left, self.inverse_right, self.cosine, self.reference, losses, self.part_sum, self.part_max,
            self.total, self.coefficient, self.own_coefficient, self.per_row, self.row_parts, self.column_parts,
            self.radial,
        ) = vectors(
            [M * B, M * N, M * B, M * B, B, M * tiles * rows, M * tiles * rows, M * rows, M * rows, M * rows,
             3 * M * rows if gradients else 1,
             prefix_plan.padded(M) * blend_tiles * rows if gradients else 1,
             blend_rows * M * N if right_wanted else 1, M * N if right_wanted else 1],
            s.left,
        )  # fmt: skip
        self._row_wise()
        flags = empty([M * cdiv(rows, flags_rows)], "int32", s.left)
        E = sums = None
        if gradients:
            self.padded = cdiv(rows, self.sweep.BM) * self.sweep.BM
            E = empty_rows(M * self.padded, N, s.dtype, s.left)
            if self.wanted[0]:
                split_rows = cdiv(rows, 128) * 128
                sums = empty_rows(self.plan.splits * split_rows, self.dims[-1], paddle.float32, s.left)
                self.dleft = empty([B, s.D], s.dtype, s.left)
            if right_wanted:
                self.dright = empty([N, s.D], paddle.float32, s.left)
                self.scaled = empty_rows(rows, self.dims[-1] - self.starts[-1], s.dtype, s.left)
            if self.wanted_scale:
                self.terms = empty([B], paddle.float32, s.left)
        for r0 in range(0, B, rows):
            count = min(r0 + rows, B) - r0
            self._sweep(r0, count, E, None)
            launch(
                check_prefix_kernel, (cdiv(count, flags_rows), M), self.part_sum, self.part_max, self.total,
                rows_from(self.reference, r0), flags, count, tiles, rows, B,
                ROWS=flags_rows, BT=256 if s.arch else 8, num_warps=8,
            )  # fmt: skip
            self._sweep(r0, count, E, flags)
            weight = self.row_weights if isinstance(self.row_weights, float) else rows_from(self.row_weights, r0)
            launch(
                state_prefix_kernel, (count,), self.part_sum, self.total, rows_from(self.reference, r0),
                flags, rows_from(self.cosine, r0), self.scale, weight, rows_from(losses, r0),
                self.coefficient, self.own_coefficient, self.per_row if gradients else None,
                rows_from(self.inverse_left, r0), rows_from(s.left, r0), self.scaled, tiles, rows, B,
                row_stride(s.left), 0 if self.scaled is None else row_stride(self.scaled), WEIGHTS=self.weights,
                START=self.starts[-1], END=self.dims[-1], M=M, MP=prefix_plan.padded(M), FLAG_ROWS=flags_rows,
                BT=128 if s.arch else 8, BD=last, num_warps=max(last // 256, 1),
            )  # fmt: skip
            if gradients:
                self._gradients(r0, count, E, sums)
        if right_wanted:
            block = row_block(s.D)
            launch(
                radial_kernel, (N,), s.right, self.inverse_right, self.radial, self.dright, s.D, row_stride(s.right),
                s.D, N, DIMS=self.dims, M=M, MP=prefix_plan.padded(M), BD=block, num_warps=max(block // 256, 1),
            )  # fmt: skip
        loss = empty([], paddle.float32, s.left)
        launch(sum_kernel, (1,), losses, loss, B, 1.0, LARGEST=False, BLOCK=4096, num_warps=8)
        for name in _SCRATCH:
            setattr(self, name, None)
        return loss

    def backward(self, incoming):
        s = self.s
        if all(self.wanted):
            dleft, dright = scaled_pair(self.dleft, s.dtype, self.dright, s.dtype, incoming)
        else:
            dleft = scaled(self.dleft, incoming, s.dtype) if self.wanted[0] else None
            dright = scaled(self.dright, incoming, s.dtype) if self.wanted[1] else None
        if not self.learnable:
            return dleft, dright
        dscale = None
        if self.wanted_scale:
            total = empty(self.scale.shape, paddle.float32, self.terms)
            launch(sum_kernel, (1,), self.terms, total, s.B, 1.0, LARGEST=False, BLOCK=4096, num_warps=8)
            dscale = scaled(total, incoming, self.scale.dtype)
        return dscale, dleft, dright

    def _row_wise(self) -> None:
        """Inverse lengths, own cosines and references of all rows at all prefixes."""
        s, M, dims = self.s, self.M, self.dims
        shape = {"DIMS": dims, "M": M}
        block = row_block(dims[-1])
        whole = {"BLOCKS": cdiv(dims[-1], block), "BD": block, "num_warps": 1}
        strides = (row_stride(s.left), row_stride(s.right))
        for x, inverse in ((s.left, self.inverse_left), (s.right, self.inverse_right)):
            launch(
                length_kernel, (x.shape[0],), x, inverse, row_stride(x), x.shape[0], **whole, **shape,
            )  # fmt: skip
        launch(
            own_prefix_kernel, (s.B,), s.left, s.right, s.own, self.inverse_left, self.inverse_right, self.cosine, s.N,
            *strides, s.B, **whole, **shape,
        )  # fmt: skip
        launch(
            reference_prefix_kernel, (cdiv(s.B, 64),), s.left, s.right, self.inverse_left, self.inverse_right,
            self.cosine, s.own, s.self_column, self.scale, self.reference, s.B, s.N, *strides, s.B,
            BM=64, SAMPLES=_SAMPLES if s.arch else 16, BK=32 if s.fp32 else 64, PRECISION=precision(s.dtype),
            UPCAST=upcast(s.dtype), num_warps=4, **shape,
        )  # fmt: skip

    def _sweep(self, r0: int, count: int, E, flags) -> None:
        s, tile, width = self.s, self.sweep, self.dims[-1]
        left, right = rows_from(s.left, r0), s.right
        if self.described:
            left = describe(left, count, width, row_stride(s.left), [tile.BM, tile.BK])
            right = describe(right, s.N, width, row_stride(s.right), [tile.BN, tile.BK])
        out, out_stride, out_rows = E, 0, 0
        tma_out = E is not None and self.described and tile.tma_out
        if E is not None:
            out_stride, out_rows = row_stride(E), self.padded
            if tma_out:
                out = describe(E, self.M * out_rows, s.N, out_stride, [tile.BM, tile.BN // tile.parts])
        tiles = cdiv(count, tile.BM) * cdiv(s.N, tile.BN)
        row_ids = rows_from(s.row_ids, r0)
        if s.ids and flags is None:
            self.hits = empty([tiles], "int32", s.left)
            launch(
                match_kernel, (tiles,), row_ids, s.column_ids, self.hits, count, s.N, IDS=s.ids, BM=tile.BM,
                BN=tile.BN,
            )  # fmt: skip
        launch(
            sweep_kernel, (tiles if flags is None else min(tiles, 2 * s.sms),),
            left, right, out, self.scale, rows_from(self.inverse_left, r0), self.inverse_right,
            rows_from(self.reference, r0), rows_from(self.cosine, r0), rows_from(s.own, r0),
            rows_from(s.self_column, r0), row_ids, s.column_ids, self.hits if s.ids else None,
            None, float(self.margin or 0.0), None, None, None, flags, self.part_sum, self.part_max,
            count, s.N, 0, 0, row_stride(s.left), row_stride(s.right), out_stride, out_rows, 0, 0, s.B,
            self.plan.rows, cdiv(s.N, tile.BN),
            DIMS=self.dims, M=self.M, TMA=self.described, OUT_TMA=tma_out, IDS=s.ids, OWNER_RULE=0, KEEP_OWN=False,
            MARGIN=self.limited,
            EVEN_N=s.N % tile.BN == 0, FLAG_ROWS=min(FLAG_ROWS, tile.BM), FLAG_BLOCK=256, PARTS=tile.parts,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.group, PRECISION=precision(s.dtype),
            UPCAST=upcast(s.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _gradients(self, r0: int, count: int, E, sums) -> None:
        """What follows once a chunk's E and coefficients are there."""
        s, M, rows = self.s, self.M, self.plan.rows
        B, N = s.B, s.N
        blend = self.blend
        right_wanted = self.wanted[1]
        launch(
            blend_kernel, (cdiv(N, blend.BN) * cdiv(count, blend.BR),), E, self.per_row, self.inverse_right,
            self.row_parts, self.column_parts if right_wanted else None, count, N, row_stride(E), self.padded, rows,
            M=M, MP=prefix_plan.padded(M), BR=blend.BR, BN=blend.BN, FAST=s.arch > 0, num_warps=blend.warps,
        )  # fmt: skip
        used, split_rows, block = 0, 0, row_block(s.D)
        if self.wanted[0]:
            for group in self.lefts:
                used, split_rows = self._segments(group, E, s.right, sums, rows=count, K=N, splits=self.plan.splits)
        if right_wanted:
            self._dright(r0, count, E)
            launch(
                column_sum_kernel, (cdiv(M * N, 256),), self.column_parts, self.radial, cdiv(count, blend.BR), M * N,
                ACCUMULATE=r0 > 0, BT=32, BLOCK=256, num_warps=8,
            )  # fmt: skip
        launch(
            finish_prefix_kernel, (count,), sums, used, split_rows, 0 if sums is None else row_stride(sums),
            self.row_parts, cdiv(N, blend.BN), self.coefficient, self.own_coefficient, rows_from(self.cosine, r0),
            rows_from(self.inverse_left, r0), self.inverse_right, rows_from(s.own, r0), s.right,
            rows_from(s.left, r0), rows_from(self.dleft, r0), self.dright, self.radial if right_wanted else None,
            rows_from(self.terms, r0), self.scale, N, s.D, row_stride(s.right), row_stride(s.left), s.D, s.D, rows, B,
            DIMS=self.dims, M=M, MP=prefix_plan.padded(M), BD=block, BT=128 if s.arch else 8,
            num_warps=max(block // 256, 1),
        )  # fmt: skip

    def _dright(self, r0: int, count: int, E) -> None:
        """The chunk's part of dright; the last segment's rows have their factors already."""
        s, left = self.s, rows_from(self.s.left, r0)
        for group in self.rights:
            b, shift = (self.scaled, self.starts[-1]) if group.first == self.M - 1 else (left, 0)
            self._segments(
                group, E, b, self.dright, rows=s.N, K=count, transposed=True, accumulate=r0 > 0, shift=shift
            )

    def _segments(self, group, a, b, out, *, rows, K, transposed=False, accumulate=False, splits=1, shift=0):
        """out[:, segment] (+)= A @ b[:, segment] for a group of segments, see `segments_kernel`.

        Returns:
            (splits that were used, rows from one split to the next): the same for all groups.
        """
        s, first, last, tile = self.s, group.first, group.last, group.tile
        described = can_describe(s.arch, a, b)
        if not described and s.described:
            tile = tuning.choose("left", s.arch, s.D, s.fp32, False)
        starts, ends = self.starts[first:last], self.dims[first:last]
        firsts, num_n = prefix_plan.firsts(starts, ends, tile.BN)
        per_split = cdiv(cdiv(K, splits), tile.BK) * tile.BK
        splits = cdiv(K, per_split)
        split_rows = cdiv(rows, tile.BM) * tile.BM if splits > 1 else rows
        a_stride, b_stride = row_stride(a), row_stride(b)
        if described:
            length, cols = (K, rows) if transposed else (rows, K)
            a = describe(a, (last - 1) * self.padded + length, cols, a_stride,
                         [tile.BK, tile.BM] if transposed else [tile.BM, tile.BK])  # fmt: skip
            b = describe(b, K, ends[-1] - shift, b_stride, [tile.BK, tile.BN])
        launch(
            segments_kernel, (cdiv(rows, tile.BM) * num_n * splits,), a, b, out, rows, K, self.padded, per_split,
            a_stride, b_stride, row_stride(out), split_rows,
            STARTS=starts, ENDS=ends, FIRSTS=firsts, S=last - first, MATRIX=first, SHIFT=shift, NUM_N=num_n,
            TRANS_A=transposed, TMA=described, ACCUMULATE=accumulate, PARTS=tile.parts, BM=tile.BM, BN=tile.BN,
            BK=tile.BK, GROUP=tile.group, PRECISION=precision(s.dtype), UPCAST=upcast(s.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return splits, split_rows


_SCRATCH = (
    "inverse_left", "inverse_right", "cosine", "reference", "part_sum", "part_max", "total", "coefficient",
    "own_coefficient", "per_row", "row_parts", "column_parts", "radial", "scaled", "hits",
)  # fmt: skip


__all__ = ["prefix_info_nce", "sweeps"]
