# SPDX-License-Identifier: Apache-2.0
"""Two passes: log-sum-exp first, gradients by computing the probabilities again, 8BND operations. Any dtype.

    forward     lse_i = log sum_j exp(z_ij) over the others of one or many blocks; only [B] numbers are kept
    backward    P_ij = factor_i * exp(z_ij - lse_i)             a chunk at a time, stored in the inputs' dtype
                dleft = scale * P @ right,   dright = scale * P^T @ left,   own terms apart, in fp32

The chunk is cut in rows, and in columns as well when the budget is small, so that the sums of dright are read and
written seldom. fp16 can't hold the range of P: there the factors are scaled so that the largest is 2^15.
"""

from __future__ import annotations

import paddle

from .dispatch import launch
from .driver import empty
from .gradients import Gradient
from .launch import LSE, Similarity, cdiv, product
from .one_pass import finish
from .rows import factor_kernel, merge_kernel, sum_kernel
from .tiles import PROB
from .views import empty_rows, number, rows_from, vectors

# Scratch of the forward: a sum and a maximum for every row and tile.
_LSE_SCRATCH = 32 << 20
_ROWS = 2048


def streaming_lse(s: Similarity, scale, out, *, merge: bool, budget: int) -> None:
    """out_i = log-sum-exp over the block's entries that are neither own nor dropped, merged into `out` if asked.

    Args:
        s: the block.
        scale: number or tensor, 1/T.
        out: [B] fp32.
        merge: whether `out` already holds a log-sum-exp over other entries.
        budget: bytes of scratch.
    """
    tile = s.tile("lse")
    tiles = cdiv(s.N, tile.BN)
    rows = min(budget, _LSE_SCRATCH) // (8 * tiles) // tile.BM * tile.BM
    rows = min(s.B, max(rows, tile.BM))
    part_sum, part_max = vectors([tiles * rows] * 2, s.left)
    for r0 in range(0, s.B, rows):
        r1 = min(r0 + rows, s.B)
        s.launch(LSE, scale, (r0, r1), (0, s.N), kind="lse", part_sum=part_sum, part_max=part_max,
                 part_stride=rows)  # fmt: skip
        launch(
            merge_kernel, (cdiv(r1 - r0, 32),), part_sum, part_max, rows_from(out, r0), r1 - r0, tiles, rows,
            MERGE=merge, ROWS=32, BT=64 if s.arch else 8, num_warps=4,
        )  # fmt: skip


def row_factors(s: Similarity, lse, own_similarity, scale, weight, weight_factor: float, incoming):
    """What the tiles need to compute P again.

    Args:
        lse: [B] fp32, over the others (own_similarity given) or over everything.
        weight: number or [B] fp32, times weight_factor and the tensor `incoming` (or None).

    Returns:
        (reference [B], factor [B], own_coefficient [B] or None, gain: tensor or None): see `factor_kernel`.
    """
    fp32 = paddle.float32
    reference, factor, own_coefficient = vectors([s.B] * 3, lse)
    if own_similarity is None:
        own_coefficient = None
    largest = gain = None
    if s.dtype == paddle.float16:
        gain = empty([1], fp32, lse)
        if isinstance(weight, float):
            largest = number(abs(weight))
        else:
            largest = empty([1], fp32, lse)
            launch(sum_kernel, (1,), weight, largest, s.B, 1.0, LARGEST=True, BLOCK=1024)
    launch(
        factor_kernel, (cdiv(s.B, 256),), lse, own_similarity, scale, weight, weight_factor, incoming, largest,
        reference, factor, own_coefficient, gain, s.B, ROWS=256,
    )  # fmt: skip
    return reference, factor, own_coefficient, gain


def chunk(s: Similarity, budget: int) -> tuple[int, int, int]:
    """(rows, columns, splits) of a piece of P whose scratch stays within `budget` bytes."""
    rows = min(s.B, _ROWS)
    tile = s.tile("prob")
    rows = max(rows, min(s.B, budget // (s.N * s.itemsize) // tile.BM * tile.BM))
    tiles = cdiv(rows, 128) * cdiv(s.D, 256)
    splits = 1 if s.arch == 0 else max(1, min(4, s.sms // tiles))
    left = budget - splits * (cdiv(rows, 256) * 256) * s.D * 4
    columns = max(left // (rows * s.itemsize), budget // 2 // (rows * s.itemsize)) // tile.BN * tile.BN
    return rows, min(s.N, max(columns, tile.BN)), splits


def gradients(
    s: Similarity, scale, reference, factor, own_coefficient, gain, *, left: Gradient | None, right: Gradient | None,
    terms=None, add_terms: bool = False, budget: int,
) -> None:  # fmt: skip
    """Adds a block's part to dleft, dright and dscale.

    Args:
        s: the block.
        scale: number or tensor, 1/T.
        reference, factor, own_coefficient, gain: from `row_factors`.
        left, right: take dleft and dright; None: not wanted.
        terms: [B] fp32, gets each row's part of dL/dscale (added if add_terms); None: not wanted.
        budget: bytes of scratch.
    """
    B, N, D = s.B, s.N, s.D
    rows, columns, splits = chunk(s, budget)
    P = empty_rows(rows, columns, s.dtype, s.left)
    wants_left = left is not None or terms is not None
    sums = empty_rows(splits * cdiv(rows, 256) * 256, D, paddle.float32, s.left) if wants_left else None
    add_left, add_right = left is not None and left.written, right is not None and right.written
    for r0 in range(0, B, rows):
        r1 = min(r0 + rows, B)
        used = split_rows = 0
        for c0 in range(0, N, columns):
            c1 = min(c0 + columns, N)
            s.launch(
                PROB, scale, (r0, r1), (c0, c1), kind="prob", out=P, reference=reference, factor=factor
            )  # fmt: skip
            if wants_left:
                shape = {"M": r1 - r0, "N": D, "K": c1 - c0, "gain": gain, "b_start": c0}
                if c0 == 0:
                    used, split_rows = product("left", s, P, s.right, sums, scale, splits=splits, **shape)
                else:
                    product("left", s, P, s.right, sums, scale, splits=used, accumulate=True, **shape)
            if right is not None:
                product(
                    "right_once" if right.once else "right", s, P, rows_from(s.left, r0), rows_from(right.buffer, c0),
                    scale, M=c1 - c0, N=D, K=r1 - r0, transposed=True, gain=gain,
                    accumulate=add_right or r0 > 0,
                )  # fmt: skip
        finish(
            s, scale, r0, r1, sums, used, split_rows, None,
            None if own_coefficient is None or s.own is None else rows_from(own_coefficient, r0),
            left=left, right=right, terms=terms, accumulate=add_left, add_terms=add_terms,
        )  # fmt: skip
    for gradient in (left, right):
        if gradient is not None:
            gradient.written = True
