# SPDX-License-Identifier: Apache-2.0
"""How many candidates a row has left after all rules: what is logged as the number of effective negatives."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import chunk_rows
from paddle_infcl.functional.tiles import accumulation_dtype, other_logits


@paddle.no_grad()
def count_negatives(group: Sequence[Block], memory_budget: int | None = None) -> Tensor:
    """Candidates of every row of a group that are neither its own entry nor dropped.

    Blocks without rules are counted without looking at their vectors; the others cost their logits once.

    Args:
        group: the blocks of one softmax.
        memory_budget: as for the losses.

    Returns:
        [B] float32.
    """
    B = group[0].left.shape[0]
    counts = paddle.zeros([B])
    for block in group:
        if not block.masks:
            counts += block.right.shape[0]
            if block.own is not None:
                counts -= (block.own >= 0).astype("float32")
            continue
        dtype = accumulation_dtype(block.left.dtype)
        left, right_t = block.left.astype(dtype), block.right.astype(dtype).T.contiguous()
        step = chunk_rows([[block]], memory_budget)
        for start in range(0, B, step):
            rows = slice(start, min(start + step, B))
            logits = other_logits(block, left[rows], right_t, paddle.ones([], dtype), start)
            counts[rows] += (logits > float("-inf")).astype("float32").sum(axis=1)
    return counts
