# SPDX-License-Identifier: Apache-2.0
"""One pass: the loss of one block and both of its gradients, 6BND operations. bf16 and fp32.

For a chunk of rows, c a guess at each row's largest logit (a few sampled columns and the own entry):

    E_ij = exp(z_ij - c_i), 0 at own and dropped entries          one product, stored in the inputs' dtype
    l_i  = sum_j E_ij, loss_i and the coefficients                 rows.py
    dleft_i = coefficient_i * sum_j E_ij right_j - own             second product
    dright += E^T @ (left * coefficient) - own                     third product, fp32 sums

Rows whose l_i says that the guess was bad (outside 2^-40 .. 2^80) are computed again before anything uses them, with
the true largest logit, which the first run has found on its way. That launch is always made and looks at flags, so
the host never waits; in the usual case it does nothing.

Saved for the backward: the gradients, which it multiplies with the incoming one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import paddle

from . import tuning
from .dispatch import launch
from .driver import empty
from .gradients import Gradient
from .launch import EXP, FLAG_ROWS, Similarity, cdiv, precision, product, row_block, upcast
from .rows import check_kernel, finish_kernel, own_kernel, reference_kernel, state_kernel
from .views import empty_rows, row_stride, rows_from, vectors

_SAMPLES = 128
#: Chunks shorter than this spend their time on adding up dright; two passes are faster then.
FEWEST_ROWS = 512


@dataclass(frozen=True)
class Plan:
    """How a one-pass loss is cut.

    Attributes:
        rows: rows per chunk.
        splits: ranges of columns that the second product sums apart, so that every multiprocessor has work.
    """

    rows: int
    splits: int


def plan(s: Similarity, budget: int) -> Plan | None:
    """The fastest cut whose scratch stays within `budget` bytes; None when chunks would be too short."""
    left = tuning.choose("left", s.arch, s.D, s.fp32, s.described)
    return _plan(s.B, s.N, s.D, s.itemsize, s.sms * max(1, left.per_sm), s.tile("exp"), left, budget, FEWEST_ROWS)


@functools.lru_cache(maxsize=256)
def _plan(
    B: int, N: int, D: int, itemsize: int, slots: int, exp: tuning.Tile, left: tuning.Tile, budget: int, fewest: int
) -> Plan | None:
    parts = cdiv(N, exp.BN) * 8

    def scratch(rows, splits):
        return rows * (N * itemsize + parts + D * itemsize + splits * D * 4)

    largest = budget // scratch(1, 1)
    if largest < min(B, fewest):
        return None
    step = exp.BM
    sizes = {B} if largest >= B else set(range(largest // step * step, max(largest * 5 // 8, 1), -step))
    best = None
    for rows in sizes or {largest}:
        for splits in (1, 2, 3, 4, 6, 8):
            if splits > 1 and (scratch(rows, splits) > budget or N // splits < 8 * left.BK):
                continue
            full, rest = divmod(B, rows)
            cost = full * _cost(D, left, slots, rows, splits) + (_cost(D, left, slots, rest, splits) if rest else 0)
            if best is None or cost < best[0]:
                best = (cost, Plan(rows, splits))
    return best[1]


def _cost(D: int, left: tuning.Tile, slots: int, rows: int, splits: int) -> float:
    """Time of a chunk, in units of multiplying one more row once: the second product runs in waves of tiles."""
    tiles = cdiv(rows, left.BM) * cdiv(D, left.BN) * splits
    second = cdiv(tiles, slots) * slots / splits * left.BM * left.BN / D
    # Adding up dright and the small kernels cost as much as multiplying 500 rows more; splits cost their sums.
    return 2 * rows + second + 500 + 16 * splits


def loss_and_gradients(
    s: Similarity, scale, weight, weight_factor: float, loss, budget_plan: Plan, *,
    left: Gradient | None, right: Gradient | None, terms=None, add_terms: bool = False,
):  # fmt: skip
    """Runs the passes over all rows of a block.

    Args:
        s: the block, with `own`.
        scale: number or tensor, 1/T.
        weight: number or [B] fp32 tensor, times weight_factor: the weight of each row's loss.
        loss: [B] fp32, gets the weighted losses.
        budget_plan: from `plan`.
        left, right: take dleft and dright; None: not wanted.
        terms: [B] fp32, gets each row's part of dL/dscale (added if add_terms); None: not wanted.
    """
    B, N, D, fp32 = s.B, s.N, s.D, paddle.float32
    exp = s.tile("exp")
    tiles, rows = cdiv(N, exp.BN), min(budget_plan.rows, B)
    flag_rows = min(FLAG_ROWS, exp.BM)
    own_similarity, reference, part_sum, part_max, total, coefficient, own_coefficient = vectors(
        [B, B, tiles * rows, tiles * rows, rows, rows, rows], s.left
    )
    own_similarity_of(s, own_similarity)
    launch(
        reference_kernel, (cdiv(B, 64),), s.left, s.right, own_similarity, s.own, s.self_column, scale, reference,
        B, N, D, row_stride(s.left), row_stride(s.right),
        BM=64, SAMPLES=_SAMPLES if s.arch else 16, BK=32 if s.fp32 else 64, PRECISION=precision(s.dtype),
        UPCAST=upcast(s.dtype), num_warps=4,
    )  # fmt: skip
    E = empty_rows(rows, N, s.dtype, s.left)
    flags = empty([cdiv(rows, flag_rows)], "int32", s.left)
    scaled = empty_rows(rows, D, s.dtype, s.left) if right is not None else None
    wants_left = left is not None or terms is not None
    splits = budget_plan.splits
    sums = empty_rows(splits * cdiv(rows, 256) * 256, D, fp32, s.left) if wants_left else None
    for r0 in range(0, B, rows):
        r1 = min(r0 + rows, B)
        count = r1 - r0
        ends = {"out": E, "reference": reference, "part_sum": part_sum, "part_max": part_max}
        ends["part_stride"] = rows
        s.launch(EXP, scale, (r0, r1), (0, N), kind="exp", **ends)
        launch(
            check_kernel, (cdiv(count, flag_rows),), part_sum, part_max, total, rows_from(reference, r0), flags,
            count, tiles, rows, ROWS=flag_rows, BT=256 if s.arch else 8, num_warps=8,
        )  # fmt: skip
        s.launch(EXP, scale, (r0, r1), (0, N), kind="exp", flags=flags, **ends)
        launch(
            state_kernel, (cdiv(count, 8),), part_sum, total, rows_from(reference, r0), flags,
            rows_from(own_similarity, r0), scale, rows_from(weight, r0) if not isinstance(weight, float) else weight,
            weight_factor, rows_from(loss, r0), coefficient, own_coefficient, rows_from(s.left, r0), scaled,
            count, tiles, D, rows, row_stride(s.left), 0 if scaled is None else row_stride(scaled),
            FLAG_ROWS=flag_rows, ROWS=8, BT=64 if s.arch else 8, BD=min(512, row_block(D)), num_warps=4,
        )  # fmt: skip
        used = split_rows = 0
        if wants_left:
            used, split_rows = product("left", s, E, s.right, sums, 1.0, M=count, N=D, K=N, splits=splits)
        if right is not None:
            product(
                "right", s, E, scaled, right.buffer, 1.0, M=N, N=D, K=count, transposed=True,
                accumulate=right.written,
            )  # fmt: skip
            right.written = True
        finish(
            s, scale, r0, r1, sums, used, split_rows, coefficient, own_coefficient, left=left, right=right,
            terms=terms, accumulate=left is not None and left.written, add_terms=add_terms,
        )  # fmt: skip
    if left is not None:
        left.written = True


def finish(
    s: Similarity, scale, r0: int, r1: int, sums, splits: int, split_rows: int, coefficient, own_coefficient, *,
    left: Gradient | None, right: Gradient | None, terms, accumulate: bool, add_terms: bool,
) -> None:  # fmt: skip
    """The own terms of rows r0 ... r1, and what is left to do for dleft; see `finish_kernel`.

    `sums` and the coefficients are the chunk's own; all may be None.
    """
    out = None if left is None else left.buffer
    right_out = None if right is None or own_coefficient is None else right.buffer
    if sums is None and right_out is None:
        return
    launch(
        finish_kernel, (cdiv(r1 - r0, 4),), sums, splits, split_rows, 0 if sums is None else row_stride(sums),
        coefficient, own_coefficient, rows_from(s.own, r0), s.right, row_stride(s.right), rows_from(s.left, r0),
        row_stride(s.left), rows_from(out, r0), s.D, right_out, rows_from(terms, r0), scale, r1 - r0, s.D,
        ACCUMULATE=accumulate, ADD_TERMS=add_terms, ROWS=4, BD=row_block(s.D), num_warps=4,
    )  # fmt: skip


def own_similarity_of(s: Similarity, out, keep: bool = False):
    """out_i = <left_i, right_own(i)>; -inf where the row has no own entry in this block, or what is there if `keep`.

    Args:
        out: [B] fp32.
    """
    launch(
        own_kernel, (cdiv(s.B, 4),), s.left, s.right, s.own, out, s.B, s.D, row_stride(s.left), row_stride(s.right),
        KEEP=keep, ROWS=4, BD=row_block(s.D), num_warps=4,
    )  # fmt: skip
    return out
