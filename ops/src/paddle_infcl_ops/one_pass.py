# SPDX-License-Identifier: Apache-2.0
"""One pass: the loss of a group of blocks and all of its gradients, 6BND operations each. bf16 and fp32.

For a chunk of rows, c a guess at each row's largest logit (a few sampled columns of each block and the own entry):

    E_ij = exp(z_ij - c_i), 0 at own and dropped entries          one product, stored in the inputs' dtype
    l_i  = sum_j E_ij over all blocks, loss_i, the coefficients    rows.py
    dleft_i = coefficient_i * sum_j E_ij right_j - own             second product
    dright += E^T @ (left * coefficient) - own                     third product, fp32 sums

E of all blocks is held at once: a chunk has so many fewer rows.

Rows whose l_i says that the guess was bad (outside 2^-40 .. 2^80) are computed again before anything uses them, with
the true largest logit, which the first run has found on its way. That launch is always made and looks at flags, so
the host never waits; in the usual case it does nothing.

Saved for the backward: the gradients, which it multiplies with the incoming one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import paddle

from . import hopper, tuning
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


def plan(group: Sequence[Similarity], budget: int) -> Plan | None:
    """The fastest cut whose scratch stays within `budget` bytes; None when chunks would be too short.

    All blocks of the group are cut alike.
    """
    first = group[0]
    left = tuning.choose("left", first.arch, first.D, first.fp32, first.described)
    slots = first.sms * max(1, left.per_sm)
    if first.described and hopper.takes(first.arch, first.dtype):
        left, slots = tuning.HOPPER_TILES["left"], 2 * first.sms
    columns = tuple((s.N, s.tile("exp").BN) for s in group)
    lefts = len({id(s.left_source) for s in group})
    return _plan(first.B, columns, first.D, lefts, first.itemsize, slots, first.tile("exp").BM, left, budget,
                 FEWEST_ROWS)  # fmt: skip


@functools.lru_cache(maxsize=256)
def _plan(
    B: int, columns: tuple, D: int, lefts: int, itemsize: int, slots: int, step: int,
    left: tuning.Tile | tuning.HopperTile, budget: int, fewest: int,
) -> Plan | None:  # fmt: skip
    per_row = sum(N * itemsize + cdiv(N, BN) * 8 for N, BN in columns) + lefts * D * itemsize
    N = min(N for N, _ in columns)

    def scratch(rows, splits):
        return rows * (per_row + splits * D * 4)

    largest = budget // scratch(1, 1)
    if largest < min(B, fewest):
        return None
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


def _cost(D: int, left: tuning.Tile | tuning.HopperTile, slots: int, rows: int, splits: int) -> float:
    """Time of a chunk, in units of multiplying one more row once: the second product runs in waves of tiles."""
    tiles = cdiv(rows, left.BM) * cdiv(D, left.BN) * splits
    second = cdiv(tiles, slots) * slots / splits * left.BM * left.BN / D
    # Adding up dright and the small kernels cost as much as multiplying 500 rows more; splits cost their sums.
    return 2 * rows + second + 500 + 16 * splits


def loss_and_gradients(
    group: Sequence[Similarity], scale, weight, weight_factor: float, loss, budget_plan: Plan, *,
    lefts: Sequence[Gradient | None], rights: Sequence[Gradient | None], terms=None, add_terms: bool = False,
):  # fmt: skip
    """Runs the passes over all rows of a group.

    Args:
        group: the blocks of one softmax, at least one with `own`.
        scale: number or tensor, 1/T.
        weight: number or [B] fp32 tensor, times weight_factor: the weight of each row's loss.
        loss: [B] fp32, gets the weighted losses.
        budget_plan: from `plan`.
        lefts, rights: per block, take dleft and dright; None: not wanted. Where a tensor is a left side of one block
            and a right side of another its gradient must have been started (`Gradient.written`).
        terms: [B] fp32, gets each row's part of dL/dscale (added if add_terms); None: not wanted.
    """
    first = group[0]
    B, fp32, dtype, rows = first.B, paddle.float32, first.dtype, min(budget_plan.rows, first.B)
    tiles, pitch = [cdiv(s.N, s.tile("exp").BN) for s in group], cdiv(rows, 4) * 4  # every block's parts are aligned
    flag_rows = min(FLAG_ROWS, *(s.tile("exp").BM for s in group))
    own_similarity, reference, part_sum, part_max, total, coefficient, own_coefficient = vectors(
        [B, B, sum(tiles) * pitch, sum(tiles) * pitch, rows, rows, rows], first.left
    )
    _references(group, scale, own_similarity, reference)
    E = [empty_rows(rows, s.N, dtype, s.left) for s in group]
    flags = empty([cdiv(rows, flag_rows)], "int32", first.left)
    # left * coefficient, once for every left side that a right side's gradient is made of.
    sources = {id(s.left_source): s for s, right in zip(group, rights, strict=True) if right is not None}
    scaled = {key: empty_rows(rows, s.D, dtype, s.left) for key, s in sources.items()}
    wants_left = [left is not None or terms is not None for left in lefts]
    splits, widest = budget_plan.splits, max(s.D for s in group)
    sums = empty_rows(splits * cdiv(rows, 256) * 256, widest, fp32, first.left) if any(wants_left) else None
    for r0 in range(0, B, rows):
        r1 = min(r0 + rows, B)
        count = r1 - r0

        def exponentials(r0=r0, r1=r1, **repair):
            before = 0
            for s, out, n in zip(group, E, tiles, strict=True):
                s.launch(
                    EXP, scale, (r0, r1), (0, s.N), kind="exp", out=out, reference=reference,
                    part_sum=rows_from(part_sum, before), part_max=rows_from(part_max, before), part_stride=pitch,
                    **repair,
                )  # fmt: skip
                before += n * pitch

        exponentials()
        launch(
            check_kernel, (cdiv(count, flag_rows),), part_sum, part_max, total, rows_from(reference, r0), flags,
            count, sum(tiles), pitch, ROWS=flag_rows, BT=256 if first.arch else 8, num_warps=8,
        )  # fmt: skip
        exponentials(flags=flags)
        for key in scaled or [None]:  # the same numbers each time, for another left side
            s, out = (first, None) if key is None else (sources[key], scaled[key])
            launch(
                state_kernel, (cdiv(count, 8),), part_sum, total, rows_from(reference, r0), flags,
                rows_from(own_similarity, r0), scale,
                rows_from(weight, r0) if not isinstance(weight, float) else weight, weight_factor,
                rows_from(loss, r0), coefficient, own_coefficient, rows_from(s.left, r0), out,
                count, sum(tiles), s.D, pitch, row_stride(s.left), 0 if out is None else row_stride(out),
                FLAG_ROWS=flag_rows, ROWS=8, BT=64 if s.arch else 8, BD=min(512, row_block(s.D)), num_warps=4,
            )  # fmt: skip
        begun = set()
        for k, (s, e, left, right) in enumerate(zip(group, E, lefts, rights, strict=True)):
            used = split_rows = 0
            if wants_left[k]:
                used, split_rows = product("left", s, e, s.right, sums, 1.0, M=count, N=s.D, K=s.N, splits=splits)
            if right is not None:
                product(
                    "right", s, e, scaled[id(s.left_source)], right.buffer, 1.0, M=s.N, N=s.D, K=count,
                    transposed=True, accumulate=right.written,
                )  # fmt: skip
                right.written = True
            finish(
                s, scale, r0, r1, sums if wants_left[k] else None, used, split_rows, coefficient,
                None if s.own is None else own_coefficient, left=left, right=right, terms=terms,
                accumulate=left is not None and (left.written or id(left) in begun), add_terms=add_terms or k > 0,
            )  # fmt: skip
            begun.add(id(left))
    for left in lefts:
        if left is not None:
            left.written = True


def _references(group: Sequence[Similarity], scale, own_similarity, reference) -> None:
    """The own similarities of all rows, and a guess at each row's largest logit over all blocks."""
    found = False
    for s in group:
        if s.own is not None:
            own_similarity_of(s, own_similarity, keep=found)
            found = True
    for k, s in enumerate(group):
        launch(
            reference_kernel, (cdiv(s.B, 64),),
            s.left, s.right, own_similarity, s.own, s.self_column, scale, reference,
            s.B, s.N, s.D, row_stride(s.left), row_stride(s.right), MERGE=k > 0,
            BM=64, SAMPLES=_SAMPLES if s.arch else 16, BK=32 if s.fp32 else 64, PRECISION=precision(s.dtype),
            UPCAST=upcast(s.dtype), num_warps=4,
        )  # fmt: skip


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

    def run(sums, out, right_out, terms):
        launch(
            finish_kernel, (cdiv(r1 - r0, 4),), sums, splits, split_rows, 0 if sums is None else row_stride(sums),
            coefficient, own_coefficient, rows_from(s.own, r0), s.right, row_stride(s.right), rows_from(s.left, r0),
            row_stride(s.left), rows_from(out, r0), s.D, right_out, rows_from(terms, r0), scale, r1 - r0, s.D,
            ACCUMULATE=accumulate, ADD_TERMS=add_terms, ROWS=4, BD=row_block(s.D), num_warps=4,
        )  # fmt: skip

    if sums is not None and out is not None and out is right_out:
        # One tensor on both sides: a program would store its rows while others add own terms to them.
        run(sums, out, None, terms)
        run(None, None, right_out, None)
    else:
        run(sums, out, right_out, terms)


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
