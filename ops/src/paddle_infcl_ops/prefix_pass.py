# SPDX-License-Identifier: Apache-2.0
"""A group of blocks of the Matryoshka loss, chunk by chunk: what is launched, and in which order. See prefixes.py."""

from __future__ import annotations

from collections.abc import Sequence

import paddle

from . import hopper, prefix_plan, tuning
from .dispatch import launch
from .driver import empty
from .gradients import Gradient
from .launch import FLAG_ROWS, OWNER_RULES, Similarity, cdiv, precision, row_block, upcast
from .prefix_kernels import blend_kernel, segments_kernel, sweep_kernel
from .prefix_rows import (
    check_prefix_kernel,
    column_sum_kernel,
    finish_prefix_kernel,
    own_prefix_kernel,
    reference_prefix_kernel,
    state_prefix_kernel,
)
from .tiles import match_kernel
from .views import can_describe, describe, empty_rows, row_stride, rows_from, vectors

_SAMPLES = 128


def whole_rows(dims: Sequence[int]) -> dict:
    """Options of the kernels that read a row once for all prefixes."""
    block = row_block(dims[-1])
    return {"DIMS": dims, "M": len(dims), "BLOCKS": cdiv(dims[-1], block), "BD": block, "num_warps": 1}


class Side:
    """A tensor of vectors, which any number of blocks may have on either side.

    Attributes:
        x: [n, D].
        inverse: [M, n] fp32, 1 / lengths of its prefixes, see `length_kernel`.
        gradient: None: not wanted.
        radial: [M, n] fp32, for the lengths' part of the gradient: sums of G z over the rows of all blocks that have
            it on the right; None: nobody wants it. (On the left a row's sum is complete when its chunk is.)
        begun: whether `radial` has been written.
    """

    def __init__(self, x):
        self.x, self.begun = x, False
        self.gradient: Gradient | None = None
        self.inverse = self.radial = None


class PrefixBlock:
    """A block: its sides, its masks, its tiles, and a chunk's scratch that is its own.

    Attributes:
        E: [M * padded, N] in the dtype of the vectors.
        before: tiles of the blocks before it, among which its parts of the sums lie.
    """

    def __init__(self, s: Similarity, left: Side, right: Side, dims: Sequence[int]):
        self.s, self.left, self.right, self.limited = s, left, right, s.limit is not None
        self.sweep, self.described = prefix_plan.sweep_tile(s.arch, dims, s.fp32, s.described)
        self.lefts, self.rights = (
            prefix_plan.groups(kind, s.arch, dims, s.fp32, s.described) for kind in ("left", "right")
        )
        self.by_hand = hopper.takes_segments(s, dims)
        if self.by_hand:
            self.lefts = prefix_plan.by_hand(dims)
        self.E, self.padded, self.before, self.hits = None, 0, 0, None

    @property
    def tiles(self) -> int:
        return cdiv(self.s.N, self.sweep.BN)


class GroupPass:
    """The losses of a group and its gradients, over all rows.

    Args:
        blocks: of one softmax; one has `own`.
        dims: widths of the prefixes.
        scale: number or tensor, 1/T.
        margin: for blocks with a limit, see `prefix_info_nce`.
        weight: number or [B] fp32 tensor: the weight of each row's loss.
        prefix_weights: per prefix, times that.
        losses: [B] fp32, gets the weighted losses.
        terms: [B] fp32, gets each row's part of dL/dscale, added if add_terms; None: not wanted.
        plan: from `prefix_plan.cut`.
    """

    def __init__(
        self, blocks: Sequence[PrefixBlock], dims, scale, margin, weight, prefix_weights, losses, terms, add_terms,
        plan,
    ):  # fmt: skip
        self.blocks, self.dims, self.starts, self.M = blocks, dims, (0, *dims[:-1]), len(dims)
        self.scale, self.margin, self.weight, self.prefix_weights = scale, margin, weight, prefix_weights
        self.losses, self.terms, self.add_terms = losses, terms, add_terms
        self.rows, self.splits = plan.rows, plan.splits
        s = self.first = blocks[0].s
        self.blend = prefix_plan.blend(s.arch)
        sides = {id(side): side for b in blocks for side in (b.left, b.right)}.values()
        self.differentiates = terms is not None or any(side.gradient is not None for side in sides)
        self._allocate()

    def _allocate(self) -> None:
        s, M, blocks, dims, rows = self.first, self.M, self.blocks, self.dims, self.rows
        self.tiles = 0
        for block in blocks:
            block.before, self.tiles = self.tiles, self.tiles + block.tiles
        self.flag_rows = min(FLAG_ROWS, *(b.sweep.BM for b in blocks))
        lefts = {id(b.left): b.left for b in blocks}
        widest = max(b.s.N for b in blocks)
        blend_tiles, blend_rows = cdiv(widest, self.blend.BN), cdiv(rows, self.blend.BR)
        gradients, rights = self.differentiates, [b for b in blocks if b.right.gradient is not None]
        (
            self.cosine, self.reference, self.part_sum, self.part_max, self.total, self.coefficient,
            self.own_coefficient, self.row_parts, self.column_parts, *per_row,
        ) = vectors(
            [M * s.B, M * s.B, *[M * self.tiles * rows] * 2, *[M * rows] * 3,
             prefix_plan.padded(M) * blend_tiles * rows if gradients else 1,
             blend_rows * M * widest if rights else 1, *[3 * M * rows if gradients else 1] * len(lefts)],
            s.left,
        )  # fmt: skip
        self.flags = empty([M * cdiv(rows, self.flag_rows)], "int32", s.left)
        # Per left side the factors of its rows, and the rows with their last segment times them, for the right sides.
        scaled_of = {id(b.left) for b in rights}
        self.of_left = {
            key: (side, factors, empty_rows(rows, dims[-1], s.dtype, s.left) if key in scaled_of
                  else None)
            for (key, side), factors in zip(lefts.items(), per_row, strict=True)
        }  # fmt: skip
        self.sums = None
        if not gradients:
            return
        for block in blocks:
            block.padded = cdiv(rows, block.sweep.BM) * block.sweep.BM
            block.E = empty_rows(M * block.padded, block.s.N, s.dtype, s.left)
        if any(b.left.gradient is not None for b in blocks):
            split_rows = cdiv(rows, 128) * 128
            self.sums = empty_rows(self.splits * split_rows, dims[-1], paddle.float32, s.left)

    def run(self) -> None:
        rows, B = self.rows, self.first.B
        self._row_wise()
        for r0 in range(0, B, rows):
            count = min(rows, B - r0)
            for block in self.blocks:
                self._sweep(block, r0, count, None)
            launch(
                check_prefix_kernel, (cdiv(count, self.flag_rows), self.M), self.part_sum, self.part_max, self.total,
                rows_from(self.reference, r0), self.flags, count, self.tiles, rows, B,
                ROWS=self.flag_rows, BT=256 if self.first.arch else 8, num_warps=8,
            )  # fmt: skip
            for block in self.blocks:
                self._sweep(block, r0, count, self.flags)
            # The same numbers each time, for another left side.
            for side, per_row, scaled in self.of_left.values():
                self._states(side, per_row, scaled, r0, count)
                if not self.differentiates:
                    break
            if self.differentiates:
                begun: set[int] = set()
                for block in self.blocks:
                    self._gradients(block, r0, count, begun)
        for block in self.blocks:
            if block.left.gradient is not None:
                block.left.gradient.written = True

    def _row_wise(self) -> None:
        """Own cosines and references of all rows at all prefixes."""
        for block in self.blocks:
            s, left, right = block.s, block.left, block.right
            if s.own is not None:
                launch(
                    own_prefix_kernel, (s.B,), s.left, s.right, s.own, left.inverse, right.inverse, self.cosine, s.N,
                    row_stride(s.left), row_stride(s.right), s.B, **whole_rows(self.dims),
                )  # fmt: skip
        for k, block in enumerate(self.blocks):
            s, left, right = block.s, block.left, block.right
            launch(
                reference_prefix_kernel, (cdiv(s.B, 64),), s.left, s.right, left.inverse, right.inverse,
                self.cosine, s.own, s.self_column, self.scale, self.reference, s.B, s.N, row_stride(s.left),
                row_stride(s.right), s.B, MERGE=k > 0, DIMS=self.dims, M=self.M, BM=64,
                SAMPLES=_SAMPLES if s.arch else 16, BK=32 if s.fp32 else 64, PRECISION=precision(s.dtype),
                UPCAST=upcast(s.dtype), num_warps=4,
            )  # fmt: skip

    def _sweep(self, block: PrefixBlock, r0: int, count: int, flags) -> None:
        """Every prefix's exponentials of a block, with their sums; with flags only where a row has one."""
        s, tile, width, N = block.s, block.sweep, self.dims[-1], block.s.N
        parts = [rows_from(x, block.before * self.rows) for x in (self.part_sum, self.part_max)]
        if block.E is not None and flags is None and hopper.takes_sweep(s, self.dims, tile):
            args, meta = hopper.sweep_launch(
                s, self.scale, self.dims, (r0, r0 + count), block.E, block.padded, block.left.inverse,
                block.right.inverse, self.reference, *parts, self.rows, self.tiles,
            )  # fmt: skip
            launch(*args, **meta)
            return
        left, right = rows_from(s.left, r0), s.right
        guide_left, guide_right = rows_from(s.guide_left, r0), s.guide_right
        DG = guide_left_stride = guide_right_stride = 0
        if guide_left is not None:
            DG, guide_left_stride, guide_right_stride = (
                s.guide_left.shape[1], row_stride(s.guide_left), row_stride(s.guide_right)
            )  # fmt: skip
        if block.described:
            left = describe(left, count, width, row_stride(s.left), [tile.BM, tile.BK])
            right = describe(right, N, width, row_stride(s.right), [tile.BN, tile.BK])
            if guide_left is not None:
                guide_left = describe(guide_left, count, DG, guide_left_stride, [tile.BM, tile.BK])
                guide_right = describe(guide_right, N, DG, guide_right_stride, [tile.BN, tile.BK])
        out, out_stride = block.E, 0
        tma_out = out is not None and block.described and tile.tma_out
        if out is not None:
            out_stride = row_stride(out)
            if tma_out:
                out = describe(out, self.M * block.padded, N, out_stride, [tile.BM, tile.BN // tile.parts])
        tiles = cdiv(count, tile.BM) * cdiv(N, tile.BN)
        row_ids = rows_from(s.row_ids, r0)
        if s.ids and flags is None:  # the repair runs over the same tiles again
            block.hits = empty([tiles], "int32", s.left)
            launch(
                match_kernel, (tiles,), row_ids, s.column_ids, block.hits, count, N, IDS=s.ids, BM=tile.BM, BN=tile.BN
            )
        launch(
            sweep_kernel, (tiles if flags is None else min(tiles, 2 * s.sms),),
            left, right, out, self.scale, rows_from(block.left.inverse, r0), block.right.inverse,
            rows_from(self.reference, r0), rows_from(self.cosine, r0), rows_from(s.own, r0),
            rows_from(s.self_column, r0), row_ids, s.column_ids, block.hits if s.ids else None,
            s.owner, float(self.margin or 0.0), guide_left, guide_right, rows_from(s.threshold, r0), flags, *parts,
            count, N, DG, s.block.row_offset + r0, row_stride(s.left), row_stride(s.right), out_stride, block.padded,
            guide_left_stride, guide_right_stride, s.B, self.rows, self.tiles,
            DIMS=self.dims, M=self.M, TMA=block.described, OUT_TMA=tma_out, IDS=s.ids,
            OWNER_RULE=OWNER_RULES[s.block.owner_rule], KEEP_OWN=s.guide_left is not None and s.block.guide.keep_own,
            MARGIN=block.limited, EVEN_N=N % tile.BN == 0, FLAG_ROWS=self.flag_rows, FLAG_BLOCK=256, PARTS=tile.parts,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.group, PRECISION=precision(s.dtype),
            UPCAST=upcast(s.dtype), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def _states(self, side: Side, per_row, scaled, r0: int, count: int) -> None:
        """Losses, coefficients, and the factors of the rows of a left side."""
        first, width = self.first, row_block(self.dims[-1])
        weight = self.weight if isinstance(self.weight, float) else rows_from(self.weight, r0)
        launch(
            state_prefix_kernel, (count,), self.part_sum, self.total, rows_from(self.reference, r0), self.flags,
            rows_from(self.cosine, r0), self.scale, weight, rows_from(self.losses, r0), self.coefficient,
            self.own_coefficient, per_row if self.differentiates else None, rows_from(side.inverse, r0),
            rows_from(side.x, r0), scaled, self.tiles, self.rows, first.B, row_stride(side.x),
            0 if scaled is None else row_stride(scaled), WEIGHTS=self.prefix_weights, START=self.starts[-1],
            END=self.dims[-1], M=self.M, MP=prefix_plan.padded(self.M), FLAG_ROWS=self.flag_rows,
            BT=128 if first.arch else 8, BD=width, num_warps=max(width // 256, 1),
        )  # fmt: skip

    def _gradients(self, block: PrefixBlock, r0: int, count: int, begun: set[int]) -> None:
        """What a block adds to the gradients, once a chunk's coefficients are there.

        Args:
            begun: sides whose rows of this chunk have been written.
        """
        s, M, E, N, blend = block.s, self.M, block.E, block.s.N, self.blend
        left, right = block.left, block.right
        _, per_row, scaled = self.of_left[id(left)]
        launch(
            blend_kernel, (cdiv(N, blend.BN) * cdiv(count, blend.BR),), E, per_row, right.inverse, self.row_parts,
            None if right.gradient is None else self.column_parts, count, N, row_stride(E), block.padded, self.rows,
            M=M, MP=prefix_plan.padded(M), BR=blend.BR, BN=blend.BN, FAST=s.arch > 0, num_warps=blend.warps,
        )  # fmt: skip
        used = split_rows = 0
        if left.gradient is not None:
            used, split_rows = self._products(block, s.right, self.sums, rows=count, K=N, splits=self.splits)
        if right.gradient is not None:
            self._products(
                block, scaled, right.gradient.buffer, rows=N, K=count, transposed=True,
                accumulate=right.gradient.written,
            )  # fmt: skip
            right.gradient.written = True
            launch(
                column_sum_kernel, (cdiv(M * N, 256),), self.column_parts, right.radial, cdiv(count, blend.BR), M * N,
                ACCUMULATE=right.begun, BT=32, BLOCK=256, num_warps=8,
            )  # fmt: skip
            right.begun = True
        self._finish(block, r0, count, used, split_rows, accumulate=id(left) in begun)
        begun.add(id(left))

    def _products(self, block, b, out, *, rows, K, transposed=False, accumulate=False, splits=1):
        """out[:, segment s] (+)= C_s @ b[:, segment s], or C_s^T @ b, for all segments.

        Returns:
            (splits that were used, rows from one split to the next).
        """
        s, done = block.s, (1, rows)
        if block.by_hand:
            args, meta, *done = hopper.matmul_launch(
                s.sms, block.E, b, out, 1.0, rows, self.dims[-1], K, transposed=transposed, accumulate=accumulate,
                splits=splits, ends=self.dims, a_rows=block.padded,
            )  # fmt: skip
            launch(*args, **meta)
            return done
        for group in block.rights if transposed else block.lefts:
            done = self._segments(
                block, group, b, out, rows=rows, K=K, transposed=transposed, accumulate=accumulate, splits=splits
            )
        return done

    def _segments(self, block, group, b, out, *, rows, K, transposed, accumulate, splits):
        """`_products` for a group of segments, see `segments_kernel`."""
        a = block.E
        s, first, last, tile = block.s, group.first, group.last, group.tile
        starts, ends = self.starts[first:last], self.dims[first:last]
        # The copy engine takes columns from a multiple of 16 bytes on (another start is an illegal instruction).
        described = can_describe(s.arch, a, b) and all(start * s.itemsize % 16 == 0 for start in starts)
        if not described and s.described:
            tile = tuning.choose("left", s.arch, s.D, s.fp32, False)
        firsts, num_n = prefix_plan.firsts(starts, ends, tile.BN)
        per_split = cdiv(cdiv(K, splits), tile.BK) * tile.BK
        splits = cdiv(K, per_split)
        split_rows = cdiv(rows, tile.BM) * tile.BM if splits > 1 else rows
        a_stride, b_stride = row_stride(a), row_stride(b)
        if described:
            length, cols = (K, rows) if transposed else (rows, K)
            a = describe(a, (last - 1) * block.padded + length, cols, a_stride,
                         [tile.BK, tile.BM] if transposed else [tile.BM, tile.BK])  # fmt: skip
            b = describe(b, K, ends[-1], b_stride, [tile.BK, tile.BN])
        launch(
            segments_kernel, (cdiv(rows, tile.BM) * num_n * splits,), a, b, out, rows, K, block.padded, per_split,
            a_stride, b_stride, row_stride(out), split_rows,
            STARTS=starts, ENDS=ends, FIRSTS=firsts, S=last - first, MATRIX=first, NUM_N=num_n,
            TRANS_A=transposed, TMA=described, ACCUMULATE=accumulate, PARTS=tile.parts, BM=tile.BM, BN=tile.BN,
            BK=tile.BK, GROUP=tile.group, PRECISION=precision(s.dtype), UPCAST=upcast(s.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        return splits, split_rows

    def _finish(self, block: PrefixBlock, r0: int, count: int, used: int, split_rows: int, accumulate: bool) -> None:
        """The ends of a block's gradients, see `finish_prefix_kernel`."""
        s, left, right = block.s, block.left, block.right
        out = None if left.gradient is None else left.gradient.buffer
        right_out = None if right.gradient is None or s.own is None else right.gradient.buffer
        accumulate = accumulate or (out is not None and left.gradient.written)
        add_terms, block_size = self.add_terms or block is not self.blocks[0], row_block(s.D)

        def run(out, right_out, terms):
            if out is None and right_out is None and terms is None:
                return
            sums = None if out is None else self.sums
            launch(
                finish_prefix_kernel, (count,), sums, used, split_rows, 0 if sums is None else row_stride(sums),
                self.row_parts, cdiv(s.N, self.blend.BN), self.coefficient, self.own_coefficient,
                rows_from(self.cosine, r0), rows_from(left.inverse, r0), right.inverse, rows_from(s.own, r0), s.right,
                rows_from(s.left, r0), rows_from(out, r0), right_out, None if right_out is None else right.radial,
                rows_from(terms, r0), self.scale, s.N, s.D, row_stride(s.right), row_stride(s.left), s.D, s.D,
                self.rows, s.B, ACCUMULATE=accumulate, ADD_TERMS=add_terms, DIMS=self.dims, M=self.M,
                MP=prefix_plan.padded(self.M), BD=block_size, BT=128 if s.arch else 8,
                num_warps=max(block_size // 256, 1),
            )  # fmt: skip

        if out is not None and out is right_out:
            # One tensor on both sides: a program would store its rows while others add own terms to them.
            run(out, None, self.terms)
            run(None, right_out, None)
        else:
            run(out, right_out, self.terms)
