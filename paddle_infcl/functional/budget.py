# SPDX-License-Identifier: Apache-2.0
"""How many rows of a loss are taken at a time: as many as their logits fit a number of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from paddle_infcl.functional.blocks import Block

CPU_BUDGET = 8 * 2**20
DEVICE_BUDGET = 512 * 2**20


def default_budget(groups: Sequence[Sequence[Block]]) -> int:
    """Bytes for the tile of one chunk: 8 MiB on a CPU, near its caches; elsewhere 512 MiB or the inputs' size."""
    first = groups[0][0].left
    if first.place.is_cpu_place():
        return CPU_BUDGET
    tensors, _ = distinct_sides(groups)
    return max(DEVICE_BUDGET, sum(t.size * t.element_size() for t in tensors))


def distinct_sides(groups: Sequence[Sequence[Block]]) -> tuple[list[Tensor], list[list[tuple[int, int]]]]:
    """The distinct tensors of all blocks, and for every block the places of its left and right among them."""
    tensors: list[Tensor] = []
    places: dict[int, int] = {}

    def place(tensor: Tensor) -> int:
        if id(tensor) not in places:
            places[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return places[id(tensor)]

    sides = [[(place(block.left), place(block.right)) for block in group] for group in groups]
    return tensors, sides


def chunk_rows(groups: Sequence[Sequence[Block]], memory_budget: int | None) -> int:
    """Rows per chunk so that the logits of the widest group fit the budget; at least one."""
    budget = default_budget(groups) if memory_budget is None else memory_budget
    itemsize = 8 if groups[0][0].left.dtype == paddle.float64 else 4
    widest = max(sum(block.right.shape[0] * _bytes_per_entry(block, itemsize) for block in group) for group in groups)
    return max(1, int(budget // max(widest, 1)))


def _bytes_per_entry(block: Block, itemsize: int) -> int:
    """Logits, a guide's similarities, hardness weights, and the masks on their way to one."""
    arrays = 1 + (block.guide is not None) + 2 * (block.hardness is not None)
    return arrays * itemsize + 3 * block.masks
