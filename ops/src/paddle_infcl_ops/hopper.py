# SPDX-License-Identifier: Apache-2.0
"""When the hand-scheduled kernels for sm_90 are taken, and their launches. See hopper_kernels.py.

They do the plain case only; everything else, and every other GPU, takes the general kernels, which mean the same by
every number. `tuning.HOPPER = False` switches them off.
"""

from __future__ import annotations

import functools

import paddle

from . import tuning
from .views import can_describe, describe, row_stride, rows_from

#: In how many parts a tile of fp32 sums leaves: 32 columns are 128 bytes, the widest that the copy engine swizzles.
_PIECES = 4
_OPTIONS = {"num_warps": 4, "maxnreg": 168}


@functools.cache
def available() -> bool:
    """Whether this Triton has what the kernels are made of: Gluon is experimental and differs between versions."""
    try:
        import triton

        if not triton.__version__.startswith("3.6."):
            return False
        from . import hopper_kernels  # noqa: F401
    except Exception:  # whatever a Triton that is built otherwise raises: the general kernels run there
        return False
    return True


def takes(arch: int, dtype) -> bool:
    """Whether the kernels run on a device of this architecture (exactly 9.0; 0 is the interpreter) and dtype."""
    return tuning.HOPPER and arch == 90 and dtype == paddle.bfloat16 and available()


def takes_block(s) -> bool:
    """Whether a block (a `Similarity`) takes `exp_kernel` for its E: through descriptors, no rule but one column out.

    That is the row's own, or where the block has none the row itself, or none at all.
    """
    others = (s.limit, s.row_ids, s.guide_left, s.block.owner_rule, s.block.hardness)
    one = s.own is None or s.self_column is None
    return s.described and one and all(x is None for x in others) and takes(s.arch, s.dtype)


def takes_product(arch: int, dtype, kind: str, a, b, out, *, gain, b_transposed) -> bool:
    """Whether a product (see `launch.product`) takes `matmul_kernel`: into fp32 sums, through descriptors."""
    return (
        kind in ("left", "right") and not b_transposed and gain is None and out.dtype == paddle.float32
        and takes(arch, dtype) and can_describe(arch, a, b, out)
    )  # fmt: skip


def exp_launch(s, scale, rows: tuple[int, int], out, reference, part_sum, part_max, part_stride: int):
    """The launch of E over rows [r0, r1) and all columns of a block that `takes_block`; see `Similarity.launch`.

    Returns:
        (positional arguments of `dispatch.launch`, constants and options).
    """
    from .hopper_kernels import exp_kernel

    r0, r1 = rows
    tile, count = tuning.HOPPER_TILES["exp"], r1 - r0
    tiles = -(-count // tile.BM) * -(-s.N // tile.BN)
    left = _described(rows_from(s.left, r0), count, s.D, row_stride(s.left), (tile.BM, tile.BK))
    right = _described(s.right, s.N, s.D, row_stride(s.right), (tile.BN, tile.BK))
    e = _described(out, count, s.N, row_stride(out), (tile.BM, tile.BN // 2))
    out_of_sum = s.self_column if s.own is None else s.own
    args = (exp_kernel, (min(s.sms, tiles),), left, right, e, scale, rows_from(reference, r0),
            rows_from(out_of_sum, r0), part_sum, part_max, count, s.N, s.D, part_stride)  # fmt: skip
    return args, _constants(tile)


def takes_sweep(s, dims: tuple[int, ...], tile) -> bool:
    """Whether a Matryoshka loss takes `prefix_kernel` for a block's E: as `takes_block`, and steps end at prefixes.

    Args:
        tile: of the general kernel, which does the repair: it puts its sums in the same places.
    """
    by_hand = tuning.HOPPER_TILES["sweep"]
    whole = all(dim % by_hand.BK == 0 for dim in dims[:-1])
    return s.hopper and whole and (tile.BM, tile.BN) == (by_hand.BM, by_hand.BN)


def sweep_launch(
    s, scale, dims: tuple[int, ...], rows: tuple[int, int], out, out_rows: int, inverse_left, inverse_right, reference,
    part_sum, part_max, part_stride: int, part_tiles: int,
):  # fmt: skip
    """The launch of every prefix's E over rows [r0, r1) and all columns of a block that `takes_sweep`.

    Returns:
        As `exp_launch`.
    """
    from .hopper_prefix_kernels import prefix_kernel

    r0, r1 = rows
    tile, count = tuning.HOPPER_TILES["sweep"], r1 - r0
    tiles = -(-count // tile.BM) * -(-s.N // tile.BN)
    left = _described(rows_from(s.left, r0), count, dims[-1], row_stride(s.left), (tile.BM, tile.BK))
    right = _described(s.right, s.N, dims[-1], row_stride(s.right), (tile.BN, tile.BK))
    e = _described(out, len(dims) * out_rows, s.N, row_stride(out), (tile.BM, tile.BN // _PIECES))
    out_of_sum = s.self_column if s.own is None else s.own
    args = (prefix_kernel, (min(s.sms, tiles),), left, right, e, scale, rows_from(inverse_left, r0), inverse_right,
            rows_from(reference, r0), rows_from(out_of_sum, r0), part_sum, part_max, count, s.N, out_rows, s.B,
            part_stride, part_tiles)  # fmt: skip
    return args, {"DIMS": tuple(dims), "M": len(dims), "PIECES": _PIECES, **_constants(tile)}


def takes_segments(s, dims: tuple[int, ...]) -> bool:
    """Whether the products of a Matryoshka loss over a block take `matmul_kernel`: tiles end at prefixes."""
    width = tuning.HOPPER_TILES["left_segments"].BN
    return s.described and takes(s.arch, s.dtype) and all(dim % width == 0 for dim in dims[:-1])


def matmul_launch(
    sms: int, a, b, out, alpha, M: int, N: int, K: int, *, transposed: bool, accumulate: bool, splits: int = 1,
    ends: tuple[int, ...] = (), a_rows: int = 0,
):  # fmt: skip
    """The launch of a product that `takes_product`; see `launch.product`.

    Args:
        ends: where the columns of b and out end that one of several matrices A is for, multiples of the tile's width
            but for the last; () for one A.
        a_rows: rows from one A to the next.

    Returns:
        (positional arguments of `dispatch.launch`, constants and options, splits that are used, rows from one split
        to the next).
    """
    from .hopper_kernels import matmul_kernel

    kind, matrices = "right" if transposed else "left", max(len(ends), 1)
    tile = tuning.HOPPER_TILES[f"{kind}_segments" if ends else kind]
    steps = -(-K // tile.BK)
    split_steps = -(-steps // splits)
    splits = -(-steps // split_steps)
    split_rows = -(-M // tile.BM) * tile.BM if splits > 1 else M
    tiles = -(-M // tile.BM) * -(-N // tile.BN) * splits
    length, width = (K, M) if transposed else (M, K)
    block = (tile.BK, tile.BM) if transposed else (tile.BM, tile.BK)
    a = _described(a, (matrices - 1) * a_rows + length, width, row_stride(a), block)
    b = _described(b, K, N, row_stride(b), (tile.BK, tile.BN))
    rows = (splits - 1) * split_rows + M
    out = _described(out, rows, N, row_stride(out), (tile.BM, tile.BN // _PIECES), bits=32)
    scaled = not (isinstance(alpha, float) and alpha == 1.0)
    args = (matmul_kernel, (min(sms, tiles),), a, b, out, alpha, M, N, K, a_rows, splits, split_steps, split_rows)
    meta = {"TRANS_A": transposed, "ENDS": tuple(ends), "MATRICES": matrices, "SCALED": scaled,
            "ACCUMULATE": accumulate, "PIECES": _PIECES, **_constants(tile)}  # fmt: skip
    return args, meta, splits, split_rows


def _constants(tile: tuning.HopperTile) -> dict:
    return {"BM": tile.BM, "BN": tile.BN, "BK": tile.BK, "S": tile.stages, "GROUP": tile.group, **_OPTIONS}


def _described(source, rows: int, cols: int, stride: int, block: tuple[int, int], bits: int = 16):
    """A descriptor as Gluon takes it: with the layout that the block has in shared memory."""
    kind, layout = _kind_and_layout(min(128, block[1] * bits // 8), bits)
    descriptor = describe(source, rows, cols, stride, list(block), kind)
    descriptor.layout = layout
    return descriptor


@functools.cache
def _kind_and_layout(swizzle: int, bits: int):
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor, gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=bits, rank=2)
