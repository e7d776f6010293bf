# SPDX-License-Identifier: Apache-2.0
"""Blocks: what a row of a contrastive loss competes against, and which entries are dropped.

A loss is a list of groups of blocks. The logits of a block are z_ij = scale * <left_i, right_j> (plus a hardness
bonus that has no gradient); a group is one softmax over all of its blocks; groups are averaged. InfoNCE is one group
with one block, the symmetric loss is two groups, a guided loss is one group with several blocks.

The positive of a row, its *own* entry, is never dropped by a rule and never goes through the softmax sum. With
lse_others the log-sum-exp over everything else,

    loss_i = softplus(lse_others_i - own_i),     d loss_i / d own_i = -sigmoid(lse_others_i - own_i),

which keeps full relative precision where a trained model's positive leads by far and 1 - P_own has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import paddle
from paddle import Tensor

# Thresholds are compared with this many epsilons of the accumulation type of slack: without it exact duplicates are
# dropped or kept by rounding. Every backend uses the same number.
SLACK_EPS = 8
OWNER_RULES = ("only", "exclude")
HARDNESS_COLUMNS = ("own", "others", "all")


def slack(dtype: paddle.dtype) -> float:
    """The slack of threshold comparisons: 8 eps of the type in which similarities of `dtype` are accumulated."""
    return SLACK_EPS * (2.0**-52 if dtype == paddle.float64 else 2.0**-23)


@dataclass(eq=False)
class Guide:
    """Drops entry (i, j) when <left_i, right_j> > threshold_i + slack: a second model's word on false negatives.

    Attributes:
        left: [B, Dg] guide vectors of the rows.
        right: [N, Dg] guide vectors of the columns.
        threshold: [B] float32 (float64 for float64 vectors).
        keep_own: columns whose `Block.owner` is the row are kept whatever the guide says.
    """

    left: Tensor
    right: Tensor
    threshold: Tensor
    keep_own: bool = False


@dataclass(eq=False)
class Hardness:
    """Adds strength * s_ij, without gradient, to the logits of some columns: harder negatives weigh more.

    Attributes:
        strength: factor of the raw similarity.
        columns: "own" (columns whose owner is the row), "others" (whose owner is not), "all"; never the own entry.
    """

    strength: float
    columns: str = "all"


@dataclass(eq=False)
class Block:
    """One matrix of candidates. The same tensor object may serve in several blocks; its gradients add up.

    Attributes:
        left: [B, D] vectors of the rows.
        right: [N, D] vectors of the columns, of the same dtype.
        own: [B] int64, column of the row's positive, -1 where this block doesn't hold it; None: in no row.
        self_column: [B] int64, column that is the row itself and is dropped, -1 for none.
        row_ids: [B] or [B, K] int64. An entry is dropped when row_ids and column_ids agree in any k; negative ids
            match nothing.
        column_ids: [N] or [N, K] int64.
        owner: [N] int64, the row (numbered from `row_offset`) to which a column belongs, -1 for none.
        row_offset: number of the block's first row in `owner`.
        owner_rule: "only" drops columns that belong to another row, "exclude" drops those that belong to the row.
        limit: [B] float32 (float64 for float64 vectors): drop when <left_i, right_j> > limit_i + slack.
        guide: see `Guide`.
        hardness: see `Hardness`.
        local: in training on several processes the columns of a block are those of all processes; True: this one's
            alone. One process does not look at it.
    """

    left: Tensor
    right: Tensor
    own: Tensor | None = None
    self_column: Tensor | None = None
    row_ids: Tensor | None = None
    column_ids: Tensor | None = None
    owner: Tensor | None = None
    row_offset: int = 0
    owner_rule: str | None = None
    limit: Tensor | None = None
    guide: Guide | None = None
    hardness: Hardness | None = None
    local: bool = False

    @property
    def masks(self) -> bool:
        """Whether any rule can drop or change an entry other than the own one."""
        return any(
            x is not None
            for x in (self.self_column, self.row_ids, self.owner_rule, self.limit, self.guide, self.hardness)
        )


def as_columns(ids: Tensor) -> Tensor:
    """[B] or [B, K] ids as [B, K]."""
    return ids.unsqueeze(-1) if ids.ndim == 1 else ids


def check_groups(groups: Sequence[Sequence[Block]]) -> int:
    """Checks shapes, dtypes and options of a list of groups.

    Returns:
        B, the number of rows that all blocks share.

    Raises:
        ValueError: names the block ("groups[g][b]"), the field, what it is and what it should be.
    """
    if not groups or any(not group for group in groups):
        raise ValueError("groups: a loss needs at least one group, and every group at least one block")
    rows, dtype = groups[0][0].left.shape[0], groups[0][0].left.dtype
    for g, group in enumerate(groups):
        owners = 0
        for b, block in enumerate(group):
            _check_block(f"groups[{g}][{b}]", block, rows, dtype)
            owners += block.own is not None
        if owners == 0:
            raise ValueError(f"groups[{g}]: no block says which column is the row's positive (`own`)")
        if owners == 1:
            _check_every_row_has_its_own(f"groups[{g}]", group)
    return rows


def _check_every_row_has_its_own(where: str, group: Sequence[Block]) -> None:
    (own,) = (block.own for block in group if block.own is not None)
    if own.shape[0] and int(own.min()) < 0:
        row = int((own < 0).astype("int32").argmax())
        raise ValueError(
            f"{where}: own[{row}] is -1, and no other block has the positive of row {row}: none is left out"
        )


def _check_block(where: str, block: Block, rows: int, dtype: paddle.dtype) -> None:
    left, right = block.left, block.right
    for name, tensor in (("left", left), ("right", right)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{where}.{name}: needs a Paddle tensor, is a {type(tensor).__name__}")
        if tensor.ndim != 2:
            raise ValueError(f"{where}.{name}: needs two dimensions [rows, width], has shape {list(tensor.shape)}")
        if tensor.dtype not in (paddle.float32, paddle.float64, paddle.float16, paddle.bfloat16):
            raise ValueError(f"{where}.{name}: needs a floating dtype, has {tensor.dtype}")
        if tensor.dtype != dtype:
            raise ValueError(
                f"{where}.{name}: has {tensor.dtype}, the first block's left has {dtype}: cast one of them"
            )
    if left.shape[1] != right.shape[1]:
        raise ValueError(f"{where}: left has width {left.shape[1]}, right has width {right.shape[1]}: must be equal")
    if left.shape[0] != rows:
        raise ValueError(
            f"{where}.left: has {left.shape[0]} rows, the first block has {rows}: blocks share their rows"
        )
    columns = right.shape[0]
    for name, length in (("own", rows), ("self_column", rows), ("owner", columns)):
        _check_index(f"{where}.{name}", getattr(block, name), length)
    for name in ("own", "self_column"):
        _check_range(f"{where}.{name}", getattr(block, name), columns)
    _check_ids(where, block, rows, columns)
    if block.limit is not None and list(block.limit.shape) != [rows]:
        raise ValueError(f"{where}.limit: needs shape [{rows}], has {list(block.limit.shape)}")
    if block.owner_rule is not None and block.owner_rule not in OWNER_RULES:
        raise ValueError(f"{where}.owner_rule: {block.owner_rule!r} is none of {', '.join(OWNER_RULES)}")
    if block.hardness is not None and block.hardness.columns not in HARDNESS_COLUMNS:
        raise ValueError(f"{where}.hardness: {block.hardness.columns!r} is none of {', '.join(HARDNESS_COLUMNS)}")
    wants_owner = (
        block.owner_rule is not None
        or (block.guide is not None and block.guide.keep_own)
        or (block.hardness is not None and block.hardness.columns != "all")
    )
    if wants_owner and block.owner is None:
        raise ValueError(f"{where}.owner: is needed by the block's rules and missing")
    if block.guide is not None:
        _check_guide(f"{where}.guide", block.guide, rows, columns)


def _check_index(where: str, index: Tensor | None, length: int) -> None:
    if index is None:
        return
    if not isinstance(index, Tensor):
        raise TypeError(f"{where}: needs an int64 tensor of shape [{length}], is a {type(index).__name__}")
    if index.dtype != paddle.int64 or list(index.shape) != [length]:
        raise ValueError(f"{where}: needs int64 of shape [{length}], has {index.dtype} of shape {list(index.shape)}")


def _check_range(where: str, index: Tensor | None, columns: int) -> None:
    if index is None or index.shape[0] == 0:
        return
    low, high = int(index.min()), int(index.max())
    if low < -1 or high >= columns:
        bad = high if high >= columns else low
        row = int((index == bad).astype("int32").argmax())
        raise ValueError(f"{where}[{row}]: column {bad} is not between 0 and {columns - 1} (or -1 for none)")


def _check_ids(where: str, block: Block, rows: int, columns: int) -> None:
    if (block.row_ids is None) != (block.column_ids is None):
        given, missing = ("row_ids", "column_ids") if block.column_ids is None else ("column_ids", "row_ids")
        raise ValueError(f"{where}: {given} is given, {missing} is not: a match needs both")
    if block.row_ids is None:
        return
    for name, ids, length in (("row_ids", block.row_ids, rows), ("column_ids", block.column_ids, columns)):
        if ids.dtype != paddle.int64 or ids.ndim not in (1, 2) or ids.shape[0] != length:
            raise ValueError(
                f"{where}.{name}: needs int64 of shape [{length}] or [{length}, K], "
                f"has {ids.dtype} of shape {list(ids.shape)}"
            )
    if as_columns(block.row_ids).shape[1] != as_columns(block.column_ids).shape[1]:
        raise ValueError(
            f"{where}: row_ids {list(block.row_ids.shape)} and column_ids {list(block.column_ids.shape)} "
            "must agree in K, their second dimension"
        )


def _check_guide(where: str, guide: Guide, rows: int, columns: int) -> None:
    if guide.left.ndim != 2 or guide.right.ndim != 2 or guide.left.shape[1] != guide.right.shape[1]:
        raise ValueError(
            f"{where}: left {list(guide.left.shape)} and right {list(guide.right.shape)} must be [rows, width] "
            "of one width"
        )
    if guide.left.shape[0] != rows or guide.right.shape[0] != columns:
        raise ValueError(
            f"{where}: left has {guide.left.shape[0]} rows and right {guide.right.shape[0]}, "
            f"the block has {rows} rows and {columns} columns"
        )
    if list(guide.threshold.shape) != [rows]:
        raise ValueError(f"{where}.threshold: needs shape [{rows}], has {list(guide.threshold.shape)}")


def own_columns(B: int, N: int) -> Tensor:
    """[B] int64: the positive's column when every row brings N/B passages, its positive first.

    Raises:
        ValueError: N is not a multiple of B.
    """
    if B == 0 or N % B:
        raise ValueError(
            f"p has {N} rows for {B} of q: without `own` every query needs the same number of passages, its positive "
            "first; pass own=[B] int64, the column of each row's positive"
        )
    return paddle.arange(B, dtype="int64") * (N // B)
