# SPDX-License-Identifier: Apache-2.0
"""How a Matryoshka loss is cut and tiled; see prefixes.py. Nothing is tuned at run time."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from . import tuning
from .launch import FLAG_ROWS, cdiv
from .tuning import Tile

#: Tiles on sm_90, bf16, measured on an H200; `per_sm` says how many programs a multiprocessor holds. Tiles of 128
#: columns: two programs per multiprocessor, so that one multiplies while the other ends its tile, and segments of 128
#: are not padded.
_SM90 = {
    "sweep": Tile(128, 128, 64, 4, 3, 2, False, False, 1, 16),
    "left": Tile(128, 128, 64, 8, 3, 2, parts=2, group=8),
    "left_wide": Tile(128, 256, 64, 8, 4, 1, parts=4, group=8),
    "right": Tile(128, 128, 64, 4, 3, 2, parts=2, group=8),
    "right_wide": Tile(128, 256, 64, 8, 4, 1, parts=2, group=8),
}


@dataclass(frozen=True)
class Blend:
    """The elementwise kernel's launches: rows and columns per program, warps."""

    BR: int
    BN: int
    warps: int


_BLEND, _BLEND_INTERPRETED = Blend(32, 256, 1), Blend(32, 128, 1)


def padded(M: int) -> int:
    """How many numbers per row the sums of M prefixes take, so that rows can be read several at a time."""
    return 1 << (M - 1).bit_length()


def blend(arch: int) -> Blend:
    """On the GPU, or (0) in the interpreter, where several programs even in a tiny problem are wanted."""
    return _BLEND if arch else _BLEND_INTERPRETED


def sweep_tile(arch: int, dims: Sequence[int], fp32: bool, described: bool) -> tuple[Tile, bool]:
    """The tile of the similarities, and whether they can be read through descriptors.

    Steps of a descriptor end at a prefix, since it has no masks: not every width will do.
    """
    tile = _SM90["sweep"] if described and not fp32 else tuning.choose("exp", arch, 4096, fp32, described)
    if described:
        step = step_between(dims, tile.BK)
        if step is None:
            return tuning.choose("exp", arch, 4096, fp32, False), False
        tile = replace(tile, BK=step)
    return tile, described


@dataclass(frozen=True)
class Group:
    """Segments first ... last - 1, whose products are one launch."""

    first: int
    last: int
    tile: Tile


def groups(kind: str, arch: int, dims: Sequence[int], fp32: bool, described: bool) -> tuple[Group, ...]:
    """The launches of "left" (dleft) or "right" (dright).

    Tiles have 256 columns where that pads a segment by no more than an eighth: the loop over them is faster.
    """
    found: list[Group] = []
    for s, (start, end) in enumerate(zip((0, *dims[:-1]), dims, strict=True)):
        if not described or fp32:
            tile = tuning.choose(kind, arch, 4096, fp32, described)
        else:
            padded = cdiv(end - start, 256) * 256
            tile = _SM90[kind if padded * 8 > (end - start) * 9 else f"{kind}_wide"]
        if found and found[-1].tile == tile:
            found[-1] = replace(found[-1], last=s + 1)
        else:
            found.append(Group(s, s + 1, tile))
    return tuple(found)


def by_hand(dims: Sequence[int]) -> tuple[Group, ...]:
    """The launch of "left" where the hand-scheduled kernel makes it, a tile per warpgroup."""
    tile = tuning.HOPPER_TILES["left_segments"]
    return (Group(0, len(dims), Tile(tile.BM, tile.BN, tile.BK, 4, tile.stages, 2)),)


def step_between(dims: Sequence[int], largest: int) -> int | None:
    """The largest step that ends at every prefix but the widest, which a descriptor fills with zeros."""
    for step in (64, 32, 16):
        if step <= largest and all(dim % step == 0 for dim in dims[:-1]):
            return step
    return None


def firsts(starts: Sequence[int], ends: Sequence[int], BN: int) -> tuple[tuple[int, ...], int]:
    """The first tile of BN columns of every segment, and how many there are."""
    tiles, count = [], 0
    for start, end in zip(starts, ends, strict=True):
        tiles.append(count)
        count += cdiv(end - start, BN)
    return tuple(tiles), count


@dataclass(frozen=True)
class Cut:
    """How a group of blocks is cut: rows per chunk, and ranges of columns that the products for dleft sum apart."""

    rows: int
    splits: int


@functools.lru_cache(maxsize=256)
def cut(
    B: int, columns: tuple[tuple[int, Tile, tuple[Group, ...]], ...], sides: int, dims: tuple[int, ...], itemsize: int,
    sms: int, budget: int, fewest: int, differentiates: bool,
) -> Cut | None:  # fmt: skip
    """The fastest cut whose scratch stays within `budget` bytes; None when chunks would be too short.

    Args:
        columns: per block N, the tile of the sweep, and the launches for dleft.
        sides: how many tensors the blocks have on their left.
        fewest: rows of a chunk that are worth it.
    """
    M, width = len(dims), dims[-1]
    widest, narrowest = max(N for N, _, _ in columns), min(N for N, _, _ in columns)
    per_row = M * sum(cdiv(N, sweep.BN) for N, sweep, _ in columns) * 8
    if differentiates:
        per_row += M * (sum(N for N, _, _ in columns) * itemsize + widest * 4 // _BLEND.BR)
        per_row += padded(M) * cdiv(widest, _BLEND.BN) * 4 + sides * (12 * M + width * itemsize)

    def scratch(splits):
        return per_row + (splits * width * 4 if differentiates else 0)

    if budget // scratch(1) < min(B, fewest):
        return None
    # Room for splits makes chunks a little shorter; without them dleft may leave half of the multiprocessors idle.
    largest = max(budget // scratch(4), min(B, fewest))
    rows = cdiv(B, FLAG_ROWS) * FLAG_ROWS  # as `check_prefix_kernel` wants it
    step = max(sweep.BM for _, sweep, _ in columns)
    if largest < B:
        largest = max(largest // step, 1) * step
        rows = min(largest, cdiv(cdiv(B, cdiv(B, largest)), step) * step)
    best = None
    for splits in range(1, 9):
        if splits > 1 and (rows * scratch(splits) > budget or narrowest // splits < 512):
            continue
        cost = sum(_cost(dims, sms, lefts, rows, splits) for _, _, lefts in columns)
        if best is None or cost < best[0]:
            best = (cost, splits)
    return Cut(rows, best[1])


def _cost(dims: tuple[int, ...], sms: int, lefts: tuple[Group, ...], rows: int, splits: int) -> float:
    """Time of dleft in units of one column of one row: launches run in waves of tiles, and splits cost their sums."""
    total = splits * rows * dims[-1] / 32
    for group in lefts:
        tile, slots = group.tile, max(1, group.tile.per_sm) * sms
        columns = firsts((0, *dims)[group.first : group.last], dims[group.first : group.last], tile.BN)[1]
        tiles = cdiv(rows, tile.BM) * columns * splits
        total += cdiv(tiles, slots) * slots / splits * tile.BM * tile.BN
    return total
