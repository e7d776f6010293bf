# SPDX-License-Identifier: Apache-2.0
"""The columns of blocks that are spread over processes: which tensors they are, how many rows each process has.

Objectives list their blocks over the tensors of one process. The columns of a block, all but those marked `local`,
stand for those of all processes; here is what both strategies, gather and ring, need to know to make that so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import paddle
from paddle import Tensor

from paddle_infcl.distributed.gather import gather_constants
from paddle_infcl.distributed.ranks import Ranks, explained
from paddle_infcl.functional.blocks import Block

# Fixed, so that processes that disagree about their blocks still exchange messages of one length.
_MOST_SLOTS = 60
FIELDS = ("right", "guide", "column_ids", "owner")


def column_tensors(block: Block) -> dict[str, Tensor]:
    """The tensors of a block with one row per column, by the names in `FIELDS`."""
    values = (block.right, None if block.guide is None else block.guide.right, block.column_ids, block.owner)
    return {name: t for name, t in zip(FIELDS, values, strict=True) if t is not None}


def with_columns(block: Block, tensor_of: Callable[[str], Tensor], **changes) -> Block:
    """The block with other tensors for its columns.

    Args:
        block: the block.
        tensor_of: from the name of one of its `column_tensors` to what to put there.
        changes: other fields.
    """
    for name in column_tensors(block):
        value = tensor_of(name)
        changes[name] = value if name != "guide" else replace(block.guide, right=value)
    return replace(block, **changes)


@dataclass
class Layout:
    """What is shared, and who has how much of it.

    Two fields of blocks that hold the same tensor share an entry, if they do so on all processes: with hard negatives
    here and none there, passages and positives may be one tensor there and two here.

    Attributes:
        rows: rows (queries) of every process, by `Ranks.rank`.
        entries: this process's tensors, the right sides first.
        rights: how many of `entries` are right sides.
        counts: per process the rows of each entry.
        places: (group, block, name of the field) -> entry.
        differentiates: whether any process wants a gradient.
    """

    rows: list[int]
    entries: list[Tensor]
    rights: int
    counts: list[list[int]]
    places: dict[tuple[int, int, str], int]
    differentiates: bool


def slots_of(groups: Sequence[Sequence[Block]]) -> dict[tuple[int, int, str], Tensor]:
    """(group, block, field) -> tensor, for all columns that are not local; the right sides first."""
    slots = {
        (g, b, name): tensor
        for g, group in enumerate(groups)
        for b, block in enumerate(group)
        if not block.local
        for name, tensor in column_tensors(block).items()
    }
    return dict(sorted(slots.items(), key=lambda slot: slot[0][2] != "right"))


def header_of(groups: Sequence[Sequence[Block]], scale: Tensor) -> list[int]:
    """What a process tells the others: a list of numbers of fixed length. Raises ValueError: too many tensors."""
    slots = list(slots_of(groups).values())
    if len(slots) > _MOST_SLOTS:
        raise ValueError(f"{len(slots)} tensors to share between processes; at most {_MOST_SLOTS} are possible")
    blocks = [block for group in groups for block in group]
    sides = [t for b in blocks for t in (b.left, b.right)]
    wants = paddle.is_grad_enabled() and any(not t.stop_gradient for t in [*sides, scale])
    widths = sum((k + 1) * (t.shape[1] if t.ndim > 1 else 1) for k, t in enumerate(slots))
    kinds = sum((k + 1) * sum(map(ord, str(t.dtype))) for k, t in enumerate(slots))
    same = [next(k for k, other in enumerate(slots) if other is t) for t in slots]
    padding = [0] * (_MOST_SLOTS - len(slots))
    sizes = [t.shape[0] for t in slots]
    return [
        blocks[0].left.shape[0],
        int(wants),
        sum(not block.local for block in blocks),
        len(slots),
        widths,
        kinds,
        *sizes,
        *padding,
        *same,
        *padding,
    ]


def layout_from(groups: Sequence[Sequence[Block]], table: Sequence[Sequence[int]]) -> Layout:
    """The layout, from the headers of all processes.

    Raises:
        ValueError: on all processes alike, when their blocks differ in number, width or dtype.
    """
    compared = ("number of blocks", "number of tensors (ids, guide vectors)", "width", "dtype")
    for place, name in enumerate(compared, start=2):
        values = [line[place] for line in table]
        if len(set(values)) > 1:
            raise ValueError(
                f"the processes' losses differ in the {name} of what they share: {values} by rank. All need the same "
                "options, and ids or guide vectors on all of them or on none"
            )
    slots = slots_of(groups)
    sizes = [line[6 : 6 + len(slots)] for line in table]
    same = [line[6 + _MOST_SLOTS : 6 + _MOST_SLOTS + len(slots)] for line in table]
    entry_of: dict[tuple, int] = {}
    entries, places, first_slots, rights = [], {}, [], 0
    for k, (slot, tensor) in enumerate(slots.items()):
        # Owners are numbered anew (`numbered_owners`); ids that are the same tensor here must stay as they are.
        key = (slot[2] == "owner", *(line[k] for line in same))
        if key not in entry_of:
            entry_of[key] = len(entries)
            entries.append(tensor)
            first_slots.append(k)
            rights += slot[2] == "right"
        places[slot] = entry_of[key]
    counts = [[line[k] for k in first_slots] for line in sizes]
    return Layout([line[0] for line in table], entries, rights, counts, places, any(line[1] for line in table))


def meet(groups: Sequence[Sequence[Block]], ranks: Ranks, scale: Tensor) -> Layout:
    """One small collective in which the processes learn each other's sizes.

    Args:
        groups: checked groups of blocks over this process's tensors.
        ranks: who takes part; all must call.
        scale: 1/T; whether it wants a gradient counts.

    Raises:
        ValueError: see `layout_from`.
        RuntimeError: a process is missing.
    """
    header = paddle.to_tensor([header_of(groups, scale)], dtype="int64")
    with explained("comparing the sizes of the processes' shares"):
        table = gather_constants(header, ranks, [1] * ranks.world).numpy().tolist()
    return layout_from(groups, table)


def numbered_owners(groups: Sequence[Sequence[Block]], layout: Layout, rank: int) -> list[list[Block]]:
    """Blocks whose rows are numbered over all processes, so that owners keep their meaning elsewhere.

    Args:
        groups: blocks over this process's tensors.
        layout: of these blocks; gets the renumbered owners in place of the old.
        rank: this process's `Ranks.rank`.
    """
    first = sum(layout.rows[:rank])
    result = []
    for g, group in enumerate(groups):
        result.append([])
        for b, block in enumerate(group):
            if block.owner is not None:
                owner = paddle.where(block.owner < 0, block.owner, block.owner + first)
                block = replace(block, owner=owner, row_offset=block.row_offset + first)
                if not block.local:
                    layout.entries[layout.places[g, b, "owner"]] = owner
            result[-1].append(block)
    return result
