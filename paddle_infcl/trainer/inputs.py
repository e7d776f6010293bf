# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: who makes them, and what an empty one becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paddle_infcl.arguments import EmbeddingArgument
from paddle_infcl.data.collator import PairCollator


def pair_collator(tokenizer, arguments: EmbeddingArgument, pad_to_multiple_of: int | None = None) -> PairCollator:
    """The collator that the options ask for."""
    return PairCollator(
        tokenizer,
        max_query_len=arguments.max_query_len,
        max_passage_len=arguments.max_passage_len,
        query_template=arguments.query_template,
        passage_template=arguments.passage_template,
        group_size=arguments.group_size,
        pad_negatives=arguments.pad_negatives,
        pad_to_multiple_of=pad_to_multiple_of,
        ids_from_text=arguments.ids_from_text,
    )


class WithoutSeeds:
    """A collator that knows nothing of the seeds that `WindowLoader` gives with every row. Picklable, for workers."""

    def __init__(self, collator: Callable):
        self.collator = collator

    def __call__(self, rows):
        return self.collator([row for row, _ in rows])


def first_row(batch: Any) -> Any:
    """One query and one passage of a micro-batch, without targets."""
    if isinstance(batch, dict):
        targets = {"own": np.zeros([0], dtype=np.int64)}
        ids = {name: batch[name][:0] for name in ("q_ids", "p_ids") if batch.get(name) is not None}
        sides = {side: {k: v[:1] for k, v in batch[side].items()} for side in ("query", "passages")}
        return {**sides, **targets, **ids}
    raise TypeError(f"a micro-batch is a dict with 'query' and 'passages', got {type(batch).__name__}")
