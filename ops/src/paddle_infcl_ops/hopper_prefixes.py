# SPDX-License-Identifier: Apache-2.0
"""When the Matryoshka loss takes the hand-scheduled kernels for sm_90, and their launches. See hopper.py."""

from __future__ import annotations

from . import hopper, tuning
from .views import Rows, can_describe, row_stride, rows_from

#: Whether the sweep takes its hand-scheduled kernel, which has been compiled, but not run yet.
SWEEP = False
#: In how many parts a tile of E leaves.
_PIECES = 4


def takes_sweep(s, dims: tuple[int, ...], BN: int) -> bool:
    """Whether a block (a `Similarity`) takes `hopper_sweep_kernel`: bf16, no rules, segments of whole steps.

    BN: columns of the general kernel's tile, which does the repair: it puts its sums in the same places.
    """
    tile = tuning.HOPPER_TILES["pingpong"]
    return SWEEP and hopper.takes_block(s) and tile.BN == BN and all(dim % tile.BK == 0 for dim in dims[:-1])


def sweep_launch(s, dims: tuple[int, ...], scale, r0: int, count: int, E, out_rows: int, per_row, per_column, parts):
    """The launch of E over rows [r0, r0 + count); see `prefixes._Job`.

    Args:
        per_row: inverse lengths and references of the rows, [M * B] each; per_column: inverse lengths [M * N].
        parts: (row sums, row maxima, stride of the parts).

    Returns:
        (positional arguments of `dispatch.launch`, constants and options).
    """
    from .hopper_prefix_kernels import hopper_sweep_kernel

    tile, M = tuning.HOPPER_TILES["pingpong"], len(dims)
    tiles = -(-count // tile.BM) * -(-s.N // tile.BN)
    left = hopper._described(rows_from(s.left, r0), count, dims[-1], row_stride(s.left), (tile.BM, tile.BK))
    right = hopper._described(s.right, s.N, dims[-1], row_stride(s.right), (tile.BN, tile.BK))
    out = hopper._described(E, M * out_rows, s.N, row_stride(E), (tile.BM, tile.BN // _PIECES))
    to = tuple(-(-dim // tile.BK) for dim in dims)
    inverse_left, reference = per_row
    part_sum, part_max, part_stride = parts
    args = (hopper_sweep_kernel, (min(s.sms, tiles),), left, right, out, scale, rows_from(inverse_left, r0),
            per_column, rows_from(reference, r0), rows_from(s.own, r0), part_sum, part_max, count, s.N, out_rows, s.B,
            part_stride)  # fmt: skip
    return args, {"FROM": (0, *to[:-1]), "TO": to, "M": M, "PIECES": _PIECES, **hopper._constants(tile)}


def columns_from(tensor, start: int):
    """`tensor` from column `start` on."""
    view = Rows(tensor, 0)
    view._bytes += start * tensor.element_size()
    return view


def takes_product(s, a, b, out, starts: tuple[int, ...]) -> bool:
    """Whether dright's products take `right_kernel`, a segment at a time."""
    aligned = all(start % 8 == 0 for start in starts)
    return aligned and hopper.takes(s.arch, s.dtype) and can_describe(s.arch, a, b, out)
