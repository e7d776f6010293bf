# SPDX-License-Identifier: Apache-2.0
"""The guide model of the guided objective, and what else a loss gets of a window beside representations."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

import paddle
from paddle import Tensor

from paddle_infcl.arguments import EmbeddingArgument
from paddle_infcl.data.templates import TextTokenizer
from paddle_infcl.functional.guided import check_finite_guide
from paddle_infcl.functional.vectors import l2_normalize
from paddle_infcl.modeling import SentenceEncoder, encoder_from_pretrained


class Guide:
    """An encoder that is not trained, with a tokenizer of its own.

    Args:
        encoder: anything with `encode(input_ids, attention_mask) -> [n, Dg]`.
        tokenizer: its tokenizer.
        batch_size: texts that go through it at once.
        name: what errors call it.
    """

    def __init__(self, encoder: SentenceEncoder, tokenizer: Any, batch_size: int = 32, name: str = "the guide"):
        self.encoder, self.tokenizer, self.batch_size, self.name = encoder, tokenizer, batch_size, name
        self.encoder.eval()
        for parameter in self.encoder.parameters():
            parameter.stop_gradient = True

    @classmethod
    def from_arguments(cls, arguments: EmbeddingArgument) -> Guide | None:
        """The guide that the options name, or None.

        Raises:
            ValueError: a folder without a model or a tokenizer.
        """
        if arguments.objective != "guided" or not arguments.guide_model_name_or_path:
            return None
        path = os.path.expanduser(arguments.guide_model_name_or_path)
        encoder, tokenizer = encoder_from_pretrained(
            path, pooling=arguments.guide_pooling, dtype=arguments.guide_dtype
        )
        return cls(encoder, tokenizer, arguments.guide_batch_size, f"guide_model_name_or_path {path}")

    def tokenizers(self, arguments: EmbeddingArgument) -> tuple[TextTokenizer, TextTokenizer]:
        """What makes its ids of queries and of passages."""
        most = arguments.guide_max_len
        sides = (
            ("query", arguments.guide_query_template, most or arguments.max_query_len),
            ("passage", arguments.guide_passage_template, most or arguments.max_passage_len),
        )
        query, passage = (
            TextTokenizer(self.tokenizer, length, template, name=f"guide_{name}") for name, template, length in sides
        )
        return query, passage

    @paddle.no_grad()
    def vectors(self, texts: dict) -> Tensor:
        """[n, Dg] vectors of length 1 of n tokenised texts, in mini-batches, without gradient.

        Raises:
            ValueError: vectors are not finite. Looked at once for all n texts.
        """
        parts = []
        for start in range(0, texts["input_ids"].shape[0], self.batch_size):
            part = {name: tensor[start : start + self.batch_size] for name, tensor in texts.items()}
            longest = int(part["attention_mask"].sum(axis=1).max())
            if bool(part["attention_mask"][:, :longest].sum() == part["attention_mask"].sum()):
                part = {name: tensor[:, :longest] for name, tensor in part.items()}  # less padding, where it is right
            parts.append(l2_normalize(self.encoder.encode(part["input_ids"], part["attention_mask"]).detach()))
        vectors = paddle.concat(parts)
        check_finite_guide(self.name, vectors, "; float16 may overflow in it: set guide_dtype to bfloat16 or float32")
        return vectors


def window_extras(
    window: Sequence[dict], wanted: Collection[str], guide: Guide | None, *, empty: bool = False
) -> dict[str, Tensor]:
    """The guide's vectors and the teacher's scores of a window, in the order of its representations.

    Args:
        window: micro-batches.
        wanted: of "guide" and "teacher_scores", what the loss needs.
        guide: runs once over the window's texts; None where its vectors come with the data.
        empty: the window stands for one without rows.

    Returns:
        `guide_q` [B, Dg] and `guide_p` [N, Dg], `teacher_scores` [B, G], as far as they are wanted.

    Raises:
        ValueError: a micro-batch lacks what is wanted, or the guide's vectors are not finite.
    """
    extras = {}
    for name in wanted:
        if any(batch.get(name) is None for batch in window):
            raise ValueError(f"a micro-batch has no {name!r}, which the objective needs: the collator makes it")
    if "guide" in wanted:
        parts = [batch["guide"] for batch in window]
        sides = (
            ("guide_q", "query", "query_vectors", "query_guide"),
            ("guide_p", "passages", "passage_vectors", "pos_guide or neg_guide"),
        )
        for name, side, ready, fields in sides:
            vectors = []
            for part in parts:
                vectors.append(paddle.to_tensor(part[ready]) if ready in part else guide.vectors(part[side]))
                if ready in part:
                    check_finite_guide(f"{fields} of the data", vectors[-1])
            extras[name] = paddle.concat(vectors)[: 0 if empty else None]
    if "teacher_scores" in wanted:
        scores = [paddle.to_tensor(batch["teacher_scores"]) for batch in window]
        widest = max(s.shape[1] for s in scores)
        extras["teacher_scores"] = paddle.concat([_widened(s, widest) for s in scores])
    return extras


def _widened(scores: Tensor, width: int) -> Tensor:
    if scores.shape[1] == width:
        return scores
    filling = paddle.zeros([scores.shape[0], width - scores.shape[1]], dtype=scores.dtype)
    return paddle.concat([scores, filling], axis=1)
