# SPDX-License-Identifier: Apache-2.0
"""The logits of some rows of a block, masked: what the plain Paddle backends compute tile by tile."""

from __future__ import annotations

import paddle
from paddle import Tensor

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


def other_logits(block: Block, left: Tensor, right_t: Tensor, scale: Tensor, start: int) -> Tensor:
    """Logits of the rows start ... start + len(left), with -inf at own and dropped entries.

    Args:
        right_t: [D, N], the columns transposed once: on a CPU a product with a transposed factor is slower.

    Returns:
        [rows, N], freshly allocated: callers write into it.
    """
    rows = left.shape[0]
    if not block.masks:
        logits = paddle.matmul(left * scale, right_t)
    else:
        similarity = paddle.matmul(left, right_t)
        dropped = _dropped(block, similarity, start)
        if block.hardness is None:
            logits = similarity.multiply_(scale)
        else:
            logits = similarity * (scale + block.hardness.strength * _hardened(block, rows, start, similarity.dtype))
        if dropped is not None:
            logits.masked_fill_(dropped, _NEGATIVE_INFINITY)
    if block.own is not None:
        _fill_columns(logits, block.own[start : start + rows], _NEGATIVE_INFINITY)
    return logits


def _fill_columns(matrix: Tensor, columns: Tensor, value: float) -> None:
    """matrix[i, columns[i]] = value, in place, where columns[i] >= 0."""
    rows, N = matrix.shape
    index = columns.clip(min=0).unsqueeze(1)
    values = paddle.full([rows, 1], value, dtype=matrix.dtype)
    if int(columns.min()) < 0:
        flat = (paddle.arange(rows, dtype="int64") * N).unsqueeze(1) + index
        kept = matrix.reshape([-1]).index_select(flat.reshape([-1])).unsqueeze(1)
        values = paddle.where(columns.unsqueeze(1) < 0, kept, values)
    matrix.put_along_axis_(index, values, 1)


def set_own(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """matrix[i, columns[i]] = values[i], in place, where columns[i] >= 0; rows without an own entry hold 0 there.

    Args:
        matrix: [rows, N].
        columns: [rows] int64.
        values: [rows].
    """
    index = columns.clip(min=0).unsqueeze(1)
    if int(columns.min()) < 0:
        rows, N = matrix.shape
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


def _dropped(block: Block, similarity: Tensor, start: int) -> Tensor | None:
    """[rows, N] bool, or None when no rule drops anything. The own entry may be marked: the caller drops it anyway."""
    rows = similarity.shape[0]
    part = slice(start, start + rows)
    masks = []
    if block.self_column is not None:
        columns = paddle.arange(similarity.shape[1], dtype="int64").unsqueeze(0)
        masks.append(columns == block.self_column[part].unsqueeze(1))
    if block.row_ids is not None:
        row_ids, column_ids = as_columns(block.row_ids)[part], as_columns(block.column_ids)
        for k in range(row_ids.shape[1]):
            a, b = row_ids[:, k].unsqueeze(1), column_ids[:, k].unsqueeze(0)
            masks.append((a == b).logical_and_(a >= 0))
    mine = None
    if block.owner is not None:
        mine = block.owner.unsqueeze(0) == _row_numbers(block, rows, start)
    if block.owner_rule == "only":
        masks.append((~mine).logical_and_(block.owner.unsqueeze(0) >= 0))
    elif block.owner_rule == "exclude":
        masks.append(mine)
    if block.limit is not None:
        limit = block.limit[part].astype(similarity.dtype).unsqueeze(1)
        masks.append(similarity > limit + slack(similarity.dtype))
    if block.guide is not None:
        guide = block.guide
        dtype = accumulation_dtype(guide.left.dtype)
        seen = paddle.matmul(_as(guide.left[part], dtype), _as(guide.right, dtype), transpose_y=True)
        false_negative = seen > guide.threshold[part].astype(dtype).unsqueeze(1) + slack(dtype)
        masks.append(false_negative.logical_and_(~mine) if guide.keep_own else false_negative)
    if not masks:
        return None
    dropped = masks[0]
    for mask in masks[1:]:
        dropped = dropped.logical_or_(mask)
    return dropped
