# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: who makes them, and what an empty one becomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from paddle_infcl.arguments import EmbeddingArgument
from paddle_infcl.data.collator import PairCollator
from paddle_infcl.trainer.guide import Guide


def pair_collator(
    tokenizer, arguments: EmbeddingArgument, pad_to_multiple_of: int | None = None, guide: Guide | None = None
) -> PairCollator:
    """The collator that the options ask for."""
    if tokenizer is None:
        raise ValueError("tokenizer: is needed to make batches from pairs, or a data_collator")
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
        guide=None if guide is None else guide.tokenizers(arguments),
        guide_from_data=arguments.guide_from_data,
        teacher_scores=arguments.distillation is not None,
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
        if missing := [side for side in ("query", "passages") if not isinstance(batch.get(side), dict)]:
            raise ValueError(
                f"a micro-batch has no dict '{missing[0]}', it has {', '.join(map(str, batch))}: the data_collator "
                "must give what the model takes for queries and for passages"
            )
        targets = {"own": np.zeros([0], dtype=np.int64)}
        ids = {name: batch[name][:0] for name in ("q_ids", "p_ids") if batch.get(name) is not None}
        sides = {side: _first(batch[side]) for side in ("query", "passages")}
        if batch.get("guide") is not None:
            sides["guide"] = _first(batch["guide"])
        if batch.get("teacher_scores") is not None:
            targets["teacher_scores"] = batch["teacher_scores"][:0]
        return {**sides, **targets, **ids}
    raise TypeError(f"a micro-batch is a dict with 'query' and 'passages', got {type(batch).__name__}")


def _first(side: dict) -> dict:
    return {name: _first(value) if isinstance(value, dict) else value[:1] for name, value in side.items()}
