# SPDX-License-Identifier: Apache-2.0
"""How the backward pass of log-probabilities from hidden states is cut into pieces, and their tiles. Plain arithmetic.

A piece is P over some rows and some columns of the vocabulary. It costs memory: rows (4 D + columns itemsize) bytes,
the first part for the fp32 sums of dhidden. And pieces cost time beyond their operations: the last wave of tiles of
every product leaves multiprocessors idle; the sums are read and written for every piece of columns; and dweight is
read, written and rounded for every piece of rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import tuning

#: Rows that a piece has at least: with fewer, every product waits for the weight.
FEWEST_ROWS = 2048
#: Pieces of rows whose contributions to dweight are added up in its own dtype; beyond, in fp32.
ROUNDINGS = 4
#: Bytes that the default budget has at least and at most, the latter if the inputs are not larger themselves.
LEAST, MOST = 48 << 20, 256 << 20
#: Columns for which the default budget has room: three full waves of 2048 rows on 132 multiprocessors.
COLUMNS = 6144
# Tables' tiles with one program for each: the persistent ones leave no registers for what happens to labels (sm_90).
_LSE = tuning.Tile(128, 256, 64, 8, 3)
_PROB_BIAS = tuning.Tile(128, 256, 64, 8, 3, 0, False, True, 2)
# Bytes that are moved while every multiprocessor multiplies [128, 64] by [64, 256].
_BYTES_PER_STEP = 3e6


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Problem:
    """What the plan depends on.

    Attributes:
        R, V, D: rows, vocabulary, width.
        itemsize: bytes of an entry of P.
        sms: multiprocessors.
        BM, BN: the tile of P; pieces hold whole ones.
        hidden: whether dhidden is wanted, and so its sums.
    """

    R: int
    V: int
    D: int
    itemsize: int
    sms: int
    BM: int
    BN: int
    hidden: bool = True


def tile(kind: str, arch: int, D: int, fp32: bool, described: bool, bias: bool) -> tuning.Tile:
    """The tile of "lse" or "prob"."""
    if arch and described and not fp32 and D > tuning.SHORT:
        if kind == "lse":
            return _LSE
        if bias:
            return _PROB_BIAS
    return tuning.choose(kind, arch, D, fp32, described)


def default_budget(R: int, D: int, itemsize: int, inputs: int) -> int:
    """Bytes with which the backward pass takes at most a tenth longer than with any number; 56 MiB for 8192 rows of
    4096. Small problems are one piece. Never more than the `inputs` take, or than 256 MiB."""
    rows = cdiv(R, max(1, min(ROUNDINGS, R // FEWEST_ROWS)))
    return min(max(LEAST, rows * (4 * D + COLUMNS * itemsize)), max(MOST, inputs))


@functools.lru_cache(maxsize=256)
def cut(problem: Problem, budget: int) -> tuple[int, int, int]:
    """(rows, columns, splits of the sum over columns) of a piece: of those within the budget the fastest.

    Where nothing fits, the smallest there is. More pieces of rows than `ROUNDINGS` only where fewer do not fit.
    """
    s = problem
    found = []
    for n in range(1, max(1, cdiv(s.R, FEWEST_ROWS)) + 1):
        if n > ROUNDINGS and found:
            break
        rows = max(1, min(s.R, cdiv(cdiv(s.R, n), s.BM) * s.BM))
        sums = rows * s.D * 4 if s.hidden else 0
        splits = max(1, min(4, s.sms // (cdiv(rows, 128) * cdiv(s.D, 256)))) if s.hidden else 1
        for used in {1, splits}:
            room = (budget - used * sums) // (rows * s.itemsize)
            most = s.V if room >= s.V else room // s.BN * s.BN
            if most > 0:
                found += [(_steps(s, rows, columns, used), rows, columns, used) for columns in _widths(s, most)]
    if not found:
        return rows, min(s.V, s.BN), 1
    return min(found)[1:]


def _widths(s: Problem, most: int) -> set[int]:
    """Widths of even pieces, from the fewest pieces on; a short one at the end costs as much as a longer one."""
    fewest = cdiv(s.V, most)
    widths = (cdiv(cdiv(s.V, n), s.BN) * s.BN for n in range(fewest, min(fewest + 8, cdiv(s.V, s.BN)) + 1))
    return {min(s.V, width) for width in widths if min(s.V, width) <= most}


def _steps(s: Problem, rows: int, columns: int, splits: int) -> float:
    """Estimated time of the backward pass, in waves of tiles' steps along the summed dimension."""

    def waves(m: int, n: int, parts: int = 1) -> int:
        return cdiv(cdiv(m, 128) * cdiv(n, 256) * parts, s.sms)

    total = 0.0
    for m, row_pieces in _extents(s.R, rows):
        for n, column_pieces in _extents(s.V, columns):
            steps = waves(m, n) * s.D + waves(n, s.D) * m + waves(m, s.D, splits) * n / splits
            moved = m * n * s.itemsize * 3 + 2 * n * s.D * s.itemsize + (8 * splits * m * s.D if s.hidden else 0)
            total += row_pieces * column_pieces * (steps / 64 + moved / _BYTES_PER_STEP)
    return total


def _extents(whole: int, piece: int) -> list[tuple[int, int]]:
    """(size, how many) of the pieces of a whole."""
    full, rest = divmod(whole, piece)
    return [(size, count) for size, count in ((piece, full), (rest, 1)) if size and count]
