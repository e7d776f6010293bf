# SPDX-License-Identifier: Apache-2.0
"""Examples to a micro-batch: the choice of passages, token ids, the column of each row's positive, ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_infcl.data.hashing import text_id
from paddle_infcl.data.rows import NO_ID, DataError, Example
from paddle_infcl.data.templates import TextTokenizer


def draw_passages(
    example: Example, rng: random.Random, group_size: int | None, pad_negatives: str
) -> tuple[int, list[int]]:
    """Chooses the positive and the negatives of a row.

    With `pad_negatives="repeat"` these are the draws of PaddleNLP's embedding data set for the same generator.

    Args:
        example: the row.
        rng: where chance comes from.
        group_size: G, the positive included: at most G - 1 negatives, without replacement; None takes all.
        pad_negatives: a row with fewer than G - 1 negatives, but not without any, gives "none": the ones it has,
            "repeat": G - 1, each at least floor((G - 1) / n) times.

    Returns:
        Index of the positive and indices of the negatives. A passage that is a positive of the row, by text or by
        id, is never a negative.
    """
    positive = rng.choice(range(len(example.positives)))
    allowed = example.allowed_negatives()
    if group_size is None or not allowed:
        return positive, allowed
    wanted = group_size - 1
    if len(allowed) >= wanted:
        return positive, rng.sample(allowed, wanted)
    if pad_negatives == "none":
        return positive, allowed
    copies, rest = divmod(wanted, len(allowed))
    negatives = allowed * copies + rng.sample(allowed, rest)
    rng.shuffle(negatives)
    return positive, negatives


class PairCollator:
    """Makes a micro-batch of NumPy int64 arrays from examples.

    The batch, for B examples with N passages in all:

    - `query`: `input_ids` and `attention_mask` [B, Lq]; `passages`: the same [N, Lp]. Padded to the longest;
      1 = token, 0 = padding.
    - `own` [B]: the column of each row's positive. Passages of a row are consecutive, its positive first, so rows
      may have different numbers of negatives.
    - `q_ids` [B, 2] and `p_ids` [N, 2]: (document id, query id), when the data has ids or `ids_from_text` is on. A
      row's document id is that of its drawn positive. A hard negative's query id is -1, and so is whatever is not
      known; -1 matches nothing.
    - `teacher_scores` [B, G] float32, when asked for: of each row's passages, its positive first; 0 beyond them.
    - `guide`, with a guide: `query` and `passages` as above, by the guide's tokenizer; or, with `guide_from_data`,
      `query_vectors` [B, Dg] and `passage_vectors` [N, Dg] float32.

    Args:
        tokenizer: any PaddleNLP tokenizer.
        max_query_len, max_passage_len: limits in tokens, template and special tokens included.
        query_template, passage_template: contain {text} once.
        group_size: passages per query, the positive included; None takes every negative.
        pad_negatives: "none" or "repeat"; see `draw_passages`.
        pad_to_multiple_of: round padded lengths up, but not beyond the limits.
        padding_side: "right" or "left".
        ids_from_text: give every text without an id one that is made from the text.
        guide: what makes a guide's ids of queries and of passages; None without a guide.
        guide_from_data: the guide's vectors come with the data.
        teacher_scores: the data has a teacher's scores, and the batch gets them.

    Raises:
        ValueError: an option is wrong or a template leaves no room.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_query_len: int,
        max_passage_len: int,
        query_template: str = "{text}",
        passage_template: str = "{text}",
        group_size: int | None = None,
        pad_negatives: str = "none",
        pad_to_multiple_of: int | None = None,
        padding_side: str = "right",
        ids_from_text: bool = False,
        guide: tuple[TextTokenizer, TextTokenizer] | None = None,
        guide_from_data: bool = False,
        teacher_scores: bool = False,
    ):
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size is {group_size}; at least 1 (the positive alone), or none for all negatives")
        if pad_negatives not in ("none", "repeat"):
            raise ValueError(f"pad_negatives is {pad_negatives!r}; none or repeat")
        if pad_negatives == "repeat" and group_size is None:
            raise ValueError("pad_negatives: repeat fills up to group_size, which is not set")
        padding = {"pad_to_multiple_of": pad_to_multiple_of, "padding_side": padding_side}
        self.query = TextTokenizer(tokenizer, max_query_len, query_template, name="query", **padding)
        self.passage = TextTokenizer(tokenizer, max_passage_len, passage_template, name="passage", **padding)
        self.group_size = group_size
        self.pad_negatives = pad_negatives
        self.ids_from_text = ids_from_text
        self.guide, self.guide_from_data, self.teacher_scores = guide, guide_from_data, teacher_scores

    def __call__(self, examples: Sequence[Example | tuple[Example, int]]) -> dict[str, Any]:
        """Makes the batch.

        Args:
            examples: B examples, or pairs (example, seed of its choices). An example without a seed always draws the
                same.

        Returns:
            The batch described in the class.
        """
        pairs = [item if isinstance(item, tuple) else (item, text_id(item.query)) for item in examples]
        with_ids = self.ids_from_text or any(example.has_ids for example, _ in pairs)
        texts: list[str] = []
        own, q_ids, p_ids, drawn = [], [], [], []
        for example, seed in pairs:
            positive, negatives = draw_passages(example, random.Random(seed), self.group_size, self.pad_negatives)
            own.append(len(texts))
            drawn.append((example, positive, negatives))
            texts.append(example.positives[positive])
            texts.extend(example.negatives[k] for k in negatives)
            if with_ids:
                document = self._id(example.positive_ids, positive, example.positives)
                query = self._id(None if example.query_id is None else [example.query_id], 0, [example.query])
                q_ids.append((document, query))
                p_ids.append((document, query))
                p_ids.extend((self._id(example.negative_ids, k, example.negatives), NO_ID) for k in negatives)
        batch = {
            "query": self.query([example.query for example, _ in pairs]),
            "passages": self.passage(texts),
            "own": np.array(own, dtype=np.int64),
        }
        if with_ids:
            batch["q_ids"] = np.array(q_ids, dtype=np.int64).reshape(-1, 2)
            batch["p_ids"] = np.array(p_ids, dtype=np.int64).reshape(-1, 2)
        if self.teacher_scores:
            batch["teacher_scores"] = _scores(drawn)
        if self.guide_from_data:
            batch["guide"] = _guide_vectors(drawn)
        elif self.guide is not None:
            of_query, of_passage = self.guide
            batch["guide"] = {"query": of_query([e.query for e, _ in pairs]), "passages": of_passage(texts)}
        return batch

    def _id(self, ids: Sequence[int] | None, k: int, texts: Sequence[str]) -> int:
        number = NO_ID if ids is None else ids[k]
        return text_id(texts[k]) if number < 0 and self.ids_from_text else number


# An example, its drawn positive and its drawn negatives.
_Drawn = tuple[Example, int, list[int]]


def _all_have(drawn: Sequence[_Drawn], name: str, fields: str) -> None:
    """Raises DataError: a row without."""
    for example, _, _ in drawn:
        if getattr(example, name) is None:
            raise DataError(f"{example.source or 'a row'} has no {fields}, which the options ask for")


def _scores(drawn: Sequence[_Drawn]) -> np.ndarray:
    _all_have(drawn, "scores", "pos_scores and neg_scores")
    scores = np.zeros([len(drawn), max(1 + len(negatives) for _, _, negatives in drawn)], dtype=np.float32)
    for i, (example, positive, negatives) in enumerate(drawn):
        of_positives, of_negatives = example.scores
        scores[i, 0] = of_positives[positive]
        scores[i, 1 : 1 + len(negatives)] = [of_negatives[k] for k in negatives]
    return scores


def _guide_vectors(drawn: Sequence[_Drawn]) -> dict[str, np.ndarray]:
    _all_have(drawn, "guide", "query_guide, pos_guide and neg_guide")
    queries = [example.guide[0] for example, _, _ in drawn]
    passages = []
    for example, positive, negatives in drawn:
        passages.append(example.guide[1][positive])
        passages.extend(example.guide[2][k] for k in negatives)
    widths = {len(vector) for vector in (*queries, *passages)}
    if len(widths) > 1:
        raise ValueError(f"the guide's vectors of a batch have widths {sorted(widths)}; one width is needed")
    return {
        "query_vectors": np.array(queries, dtype=np.float32),
        "passage_vectors": np.array(passages, dtype=np.float32),
    }
