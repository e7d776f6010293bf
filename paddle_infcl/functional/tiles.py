# SPDX-License-Identifier: Apache-2.0
"""The logits of some rows of a block, masked: what the plain Paddle backends compute tile by tile."""

from __future__ import annotations

import paddle
from paddle import Tensor
from paddle.nn import functional

from paddle_infcl.functional.blocks import Block, as_columns, slack

_NEGATIVE_INFINITY = float("-inf")


def accumulation_dtype(dtype: paddle.dtype) -> paddle.dtype:
    """float64 for float64, float32 for everything narrower."""
    return paddle.float64 if dtype == paddle.float64 else paddle.float32


def _as(tensor: Tensor, dtype: paddle.dtype) -> Tensor:
    """`astype` that doesn't copy what has the dtype already."""
    return tensor if tensor.dtype == dtype else tensor.astype(dtype)


def own_logits(block: Block, left: Tensor, right: Tensor, scale: Tensor, start: int) -> Tensor:
    """Logits of the own entries of rows start ... start + len(left).

    Args:
        block: the block, with `own`.
        left: [rows, D] its rows, in the accumulation dtype.
        right: [N, D] its columns, in the accumulation dtype.
        scale: 0-d tensor, 1/T.
        start: number of the first row.

    Returns:
        [rows] scale * <left_i, right_own(i)>, -inf where own is -1.
    """
    own = block.own[start : start + left.shape[0]]
    logits = (left * right.index_select(own.clip(min=0))).sum(axis=1) * scale
    return paddle.where(own < 0, paddle.full_like(logits, _NEGATIVE_INFINITY), logits)


def product(left: Tensor, right_t: Tensor, out: Tensor | None = None) -> Tensor:
    """[rows, N] left @ right_t, into the first rows of `out` where it is given.

    On a CPU the pages of a fresh tile cost nearly as much as the product that fills it: loops over chunks keep one.
    """
    if out is None:
        return paddle.matmul(left, right_t)
    return out[: left.shape[0]].addmm_(left, right_t, beta=0.0)


def other_logits(
    block: Block, left: Tensor, right_t: Tensor, scale: Tensor, start: int, out: Tensor | None = None
) -> Tensor:
    """Logits of the rows start ... start + len(left), with -inf at own and dropped entries.

    Args:
        right_t: [D, N], the columns transposed once: on a CPU a product with a transposed factor is slower.
        out: [at least rows, N], memory for the result; None: it is freshly allocated.

    Returns:
        [rows, N]: callers write into it.
    """
    if block.masks:
        similarity = product(left, right_t, out)
        return masked_logits(block, similarity, scale, start, fixed_mask(block, start, left.shape[0], left.dtype))
    logits = product(left * scale, right_t, out)
    if block.own is not None:
        set_own(logits, block.own[start : start + left.shape[0]], _NEGATIVE_INFINITY)
    return logits


def masked_logits(block: Block, similarity: Tensor, scale: Tensor, start: int, fixed: Tensor | None) -> Tensor:
    """Logits from raw similarities of a block with rules.

    Args:
        similarity: [rows, N] <left_i, right_j>; becomes the logits where it can.
        scale: 0-d, or [rows, 1].
        start: number of the first row.
        fixed: what `fixed_mask` says of these rows.

    Returns:
        [rows, N], with -inf at own and dropped entries.
    """
    rows = similarity.shape[0]
    dropped = fixed
    if block.limit is not None:
        limit = block.limit[start : start + rows].astype(similarity.dtype).unsqueeze(1)
        above = similarity > limit + slack(similarity.dtype)
        dropped = _or(fixed, above)
    if block.hardness is None:
        logits = similarity.multiply_(scale)
    else:
        bonus = block.hardness.strength * _hardened(block, rows, start, similarity.dtype)
        logits = similarity.multiply_(scale + bonus)
    if dropped is not None:
        logits.masked_fill_(dropped, _NEGATIVE_INFINITY)
    if block.own is not None:
        set_own(logits, block.own[start : start + rows], _NEGATIVE_INFINITY)
    return logits


def set_own(matrix: Tensor, columns: Tensor, values: Tensor | float) -> None:
    """matrix[i, columns[i]] = values[i], in place, where columns[i] >= 0.

    Args:
        matrix: [rows, N].
        columns: [rows] int64.
        values: [rows], or one number for all.
    """
    rows, N = matrix.shape
    index = columns.clip(min=0).unsqueeze(1)
    if not isinstance(values, Tensor):
        values = paddle.full([rows], values, dtype=matrix.dtype)
    if int(columns.min()) < 0:
        flat = (paddle.arange(rows, dtype="int64") * N).unsqueeze(1) + index
        kept = matrix.reshape([-1]).index_select(flat.reshape([-1]))
        values = paddle.where(columns < 0, kept, values)
    matrix.put_along_axis_(index, values.unsqueeze(1), 1)


def _row_numbers(block: Block, rows: int, start: int) -> Tensor:
    first = block.row_offset + start
    return paddle.arange(first, first + rows, dtype="int64").unsqueeze(1)


def _hardened(block: Block, rows: int, start: int, dtype: paddle.dtype) -> Tensor:
    """1 at the columns that get the bonus. The own entry is set apart by the caller."""
    if block.hardness.columns == "all":
        return paddle.ones([], dtype=dtype)
    mine = block.owner.unsqueeze(0) == _row_numbers(block, rows, start)
    return (mine if block.hardness.columns == "own" else ~mine).astype(dtype)


def fixed_mask(block: Block, start: int, rows: int, dtype: paddle.dtype) -> Tensor | None:
    """What the rules that don't look at the similarity drop: all but `limit`.

    The own entry may be marked: the caller drops it anyway.

    Returns:
        [rows, N] bool, or None when none of these rules drops anything.
    """
    part = slice(start, start + rows)
    guide, dropped = block.guide, None
    if block.self_column is not None:
        columns = paddle.arange(block.right.shape[0], dtype="int64").unsqueeze(0)
        dropped = columns == block.self_column[part].unsqueeze(1)
    if block.row_ids is not None:
        row_ids, column_ids = as_columns(block.row_ids)[part], as_columns(block.column_ids)
        for k in range(row_ids.shape[1]):
            # Row ids that match nothing become an id that no column has: one pass over the tile less.
            a = paddle.where(row_ids[:, k] < 0, paddle.full_like(row_ids[:, k], -(2**62)), row_ids[:, k])
            dropped = _or(dropped, a.unsqueeze(1) == column_ids[:, k].unsqueeze(0))
    mine = None
    if block.owner_rule is not None or (guide is not None and guide.keep_own):
        mine = block.owner.unsqueeze(0) == _row_numbers(block, rows, start)
    if block.owner_rule == "only":
        dropped = _or(dropped, (~mine).logical_and_(block.owner.unsqueeze(0) >= 0))
    elif block.owner_rule == "exclude":
        dropped = _or(dropped, mine)
    if guide is not None:
        wide = accumulation_dtype(guide.left.dtype)
        seen = paddle.matmul(_as(guide.left[part], wide), _as(guide.right, wide), transpose_y=True)
        above = seen > guide.threshold[part].astype(wide).unsqueeze(1) + slack(wide)
        del seen
        dropped = _or(dropped, above.logical_and_(~mine) if guide.keep_own else above)
    return dropped


def _or(dropped: Tensor | None, mask: Tensor) -> Tensor:
    return mask if dropped is None else mask.logical_or_(dropped)


def exponentials_(block: Block, logits: Tensor, start: int) -> Tensor:
    """exp(logits) in place, with exact zeros at dropped and own entries.

    Vectorised exp(-inf) is the smallest normal number, not 0: a row that competes with nothing would have a loss.

    Args:
        block: the block.
        logits: [rows, N] logits, less than about 80.
        start: number of the first row.

    Returns:
        `logits`.
    """
    logits.exp_()
    if block.masks:
        functional.thresholded_relu_(logits, 1e-37)
    elif block.own is not None:
        set_own(logits, block.own[start : start + logits.shape[0]], 0.0)
    return logits
