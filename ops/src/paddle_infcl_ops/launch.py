# SPDX-License-Identifier: Apache-2.0
"""The three matrix-sized launches, each with its grid and tile: similarities, and the two products of the backward."""

from __future__ import annotations

import paddle

from . import hopper, tuning
from .dispatch import launch
from .driver import empty, is_interpreting
from .products import product_kernel
from .tiles import (
    EXP,
    HARDNESS_ALL,
    HARDNESS_NONE,
    HARDNESS_OTHERS,
    HARDNESS_OWN,
    LSE,
    OWNER_EXCLUDE,
    OWNER_NONE,
    OWNER_ONLY,
    match_kernel,
    similarity_kernel,
)
from .views import can_describe, contiguous_rows, dense, describe, number, row_stride, rows_from

#: `owner_rule` of a block as kernels take it.
OWNER_RULES = {None: OWNER_NONE, "only": OWNER_ONLY, "exclude": OWNER_EXCLUDE}
_HARDNESS = {"own": HARDNESS_OWN, "others": HARDNESS_OTHERS, "all": HARDNESS_ALL}
#: Rows that share one flag of the repair.
FLAG_ROWS = 16


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def precision(dtype) -> str:
    """How fp32 operands are multiplied: three tf32 products, as good as fp32; said here, never left to a default."""
    return "tf32x3" if dtype == paddle.float32 else "ieee"


def upcast(dtype) -> bool:
    """The interpreter computes bf16 wrongly, so kernels convert right after the load there."""
    return is_interpreting() and dtype != paddle.float32


def _grid(tiles: int, tile: tuning.Tile, sms: int) -> tuple[int]:
    return (min(tiles, tile.per_sm * sms) if tile.per_sm else tiles,)


class Similarity:
    """A block's operands and masks, checked and ready to launch over any of its rows and columns.

    Args:
        block: an object with the attributes of a block (see the package's README).
        left, right: stand for the block's own tensors (detached ones, say).
    """

    def __init__(self, block, left=None, right=None):
        self.left_source = block.left if left is None else left
        self.right_source = block.right if right is None else right
        left, right = contiguous_rows(self.left_source), contiguous_rows(self.right_source)
        if left.dtype != right.dtype:
            raise ValueError(f"left is {left.dtype}, right is {right.dtype}: cast one of them")
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
            raise ValueError(f"left {left.shape} and right {right.shape} must be [B, D] and [N, D]")
        self.block, self.left, self.right = block, left, right
        self.B, self.D = left.shape
        self.N = right.shape[0]
        self.dtype, self.itemsize = left.dtype, left.element_size()
        self.arch, self.sms = tuning.device(left)
        guide = block.guide
        self.guide_left = None if guide is None else contiguous_rows(guide.left)
        self.guide_right = None if guide is None else contiguous_rows(guide.right)
        if guide is not None and self.guide_left.dtype != self.dtype:
            raise ValueError(
                f"the guide's vectors are {self.guide_left.dtype}, the block's {self.dtype}: one type, please"
            )
        flat = {
            name: dense(getattr(block, name))
            for name in ("own", "self_column", "owner", "limit", "row_ids", "column_ids")
        }
        self.own, self.self_column, self.owner, self.limit = (
            flat[name] for name in ("own", "self_column", "owner", "limit")
        )
        self.row_ids, self.column_ids = flat["row_ids"], flat["column_ids"]
        self.threshold = None if guide is None else dense(guide.threshold)
        self.ids = 0 if self.row_ids is None else (1 if self.row_ids.ndim == 1 else self.row_ids.shape[1])
        self.hits = None
        hardness = block.hardness
        self.hardness = HARDNESS_NONE if hardness is None else _HARDNESS[hardness.columns]
        self.strength = 0.0 if hardness is None else float(hardness.strength)
        self.described = can_describe(self.arch, left, right, self.guide_left, self.guide_right)
        self.fp32 = self.dtype == paddle.float32
        self.hopper = hopper.takes_block(self)

    def tile(self, kind: str) -> tuning.Tile:
        """The tile of "lse", "exp" or "prob" over this block."""
        if kind == "exp" and self.hopper:
            return tuning.beside_hopper()
        kind = "guide" if self.guide_left is not None else kind
        return tuning.choose(kind, self.arch, self.D, self.fp32, self.described)

    def launch(
        self, mode: int, scale, rows: tuple[int, int], columns: tuple[int, int], *, kind, out=None, reference=None,
        factor=None, flags=None, part_sum=None, part_max=None, part_stride=0,
    ):  # fmt: skip
        """One launch over rows [r0, r1) and columns [c0, c1).

        `out`, `flags` and the parts are the chunk's own; everything else is the block's, addressed from r0 or c0 on.
        """
        (r0, r1), (c0, c1) = rows, columns
        if self.hopper and mode == EXP and flags is None and (c0, c1) == (0, self.N):
            args, meta = hopper.exp_launch(self, scale, rows, out, reference, part_sum, part_max, part_stride)
            launch(*args, **meta)
            return
        block, tile, D = self.block, self.tile(kind), self.D
        count, N = r1 - r0, c1 - c0
        left, right = rows_from(self.left, r0), rows_from(self.right, c0)
        left_stride, right_stride = row_stride(self.left), row_stride(self.right)
        guide_left, guide_right, DG = rows_from(self.guide_left, r0), rows_from(self.guide_right, c0), 0
        guide_left_stride = guide_right_stride = 0
        threshold = None
        if guide_left is not None:
            DG = self.guide_left.shape[1]
            guide_left_stride, guide_right_stride = row_stride(self.guide_left), row_stride(self.guide_right)
            threshold = rows_from(self.threshold, r0)
        tma_out = out is not None and tile.tma_out and self.described
        out_stride = 0 if out is None else row_stride(out)
        if self.described:
            left = describe(left, count, D, left_stride, [tile.BM, tile.BK])
            right = describe(right, N, D, right_stride, [tile.BN, tile.BK])
            if guide_left is not None:
                guide_left = describe(guide_left, count, DG, guide_left_stride, [tile.BM, tile.BK])
                guide_right = describe(guide_right, N, DG, guide_right_stride, [tile.BN, tile.BK])
        if tma_out:
            out = describe(out, count, N, out_stride, [tile.BM, tile.BN // tile.parts])
        tiles = cdiv(count, tile.BM) * cdiv(N, tile.BN)
        row_ids, column_ids = rows_from(self.row_ids, r0), rows_from(self.column_ids, c0)
        if self.ids and flags is None:  # the repair runs over the same tiles again
            self.hits = empty([tiles], "int32", self.left)
            launch(
                match_kernel, (tiles,), row_ids, column_ids, self.hits, count, N, IDS=self.ids, BM=tile.BM,
                BN=tile.BN,
            )  # fmt: skip
        launch(
            similarity_kernel, _grid(tiles, tile, self.sms) if flags is None else (min(tiles, 2 * self.sms),),
            left, right, out, scale, rows_from(reference, r0), rows_from(factor, r0),
            rows_from(self.own, r0), rows_from(self.self_column, r0),
            row_ids, column_ids, self.hits, rows_from(self.owner, c0), rows_from(self.limit, r0),
            guide_left, guide_right, threshold, self.strength, flags, part_sum, part_max,
            count, N, c0, D, DG, block.row_offset + r0, left_stride, right_stride, out_stride,
            guide_left_stride, guide_right_stride, part_stride,
            MODE=mode, TMA=self.described, OUT_TMA=tma_out, GUIDE_TMA=self.described,
            IDS=self.ids, OWNER_RULE=OWNER_RULES[block.owner_rule],
            KEEP_OWN=block.guide is not None and block.guide.keep_own, HARDNESS=self.hardness,
            EVEN_N=N % tile.BN == 0, FLAG_ROWS=min(FLAG_ROWS, tile.BM), FLAG_BLOCK=256, PARTS=tile.parts,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.group, FLATTEN=tile.flatten and flags is None,
            PRECISION=precision(self.dtype), UPCAST=upcast(self.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def row_block(D: int) -> int:
    """How many entries of a row a row-wise kernel takes at a time."""
    return min(1024, 1 << max(4, (D - 1).bit_length()))


def product(kind: str, like: Similarity, a, b, out, alpha, *, M, N, K, transposed=False, b_transposed=False, gain=None,
            accumulate=False, splits=1, b_start=0):  # fmt: skip
    """out (+)= alpha * gain / 2^15 * A @ B, see products.py.

    Args:
        kind: "left", "right" or "right_once": picks the tile.
        a: [M, K], or [K, M] if transposed; b: [K, N], or [N, K] if b_transposed, from row `b_start` on; out: [splits *
            split_rows, N].
        splits: how many ranges of K are summed apart.

    Returns:
        (splits that were used, rows from one split to the next).
    """
    if hopper.takes_product(like.arch, like.dtype, kind, a, b, out, gain=gain, b_transposed=b_transposed):
        args, meta, *used = hopper.matmul_launch(
            like.sms, a, rows_from(b, b_start), out, alpha, M, N, K, transposed=transposed, accumulate=accumulate,
            splits=splits,
        )  # fmt: skip
        launch(*args, **meta)
        return tuple(used)
    described = can_describe(like.arch, a, b)
    tile = tuning.choose(kind, like.arch, like.D, like.fp32, described)
    per_split = cdiv(cdiv(K, splits), tile.BK) * tile.BK
    splits = cdiv(K, per_split)
    split_rows = cdiv(M, tile.BM) * tile.BM if splits > 1 else M
    a_stride, b_stride, out_stride = row_stride(a), row_stride(b), row_stride(out)
    tma_out = described and tile.tma_out and can_describe(like.arch, out)
    b = rows_from(b, b_start)
    if described:
        a = describe(a, K if transposed else M, M if transposed else K, a_stride,
                     [tile.BK, tile.BM] if transposed else [tile.BM, tile.BK])  # fmt: skip
        b = describe(b, N if b_transposed else K, K if b_transposed else N, b_stride,
                     [tile.BN, tile.BK] if b_transposed else [tile.BK, tile.BN])  # fmt: skip
    if tma_out:
        out = describe(out, (splits - 1) * split_rows + M, N, out_stride, [tile.BM, tile.BN // tile.parts])
    tiles = cdiv(M, tile.BM) * cdiv(N, tile.BN) * splits
    launch(
        product_kernel, _grid(tiles, tile, like.sms),
        a, b, out, number(alpha), gain, M, N, K, per_split, a_stride, b_stride, out_stride, split_rows,
        TRANS_A=transposed, TMA=described, OUT_TMA=tma_out, ACCUMULATE=accumulate, PARTS=tile.parts,
        BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.group, FLATTEN=tile.flatten,
        PRECISION=precision(like.dtype), UPCAST=upcast(like.dtype), TRANS_B=b_transposed,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return splits, split_rows


__all__ = [
    "EXP",
    "FLAG_ROWS",
    "LSE",
    "OWNER_RULES",
    "Similarity",
    "cdiv",
    "precision",
    "product",
    "row_block",
    "upcast",
]
