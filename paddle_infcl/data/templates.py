# SPDX-License-Identifier: Apache-2.0
"""Texts to padded token ids: template, special tokens, truncation, padding. For training and for encoding alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_infcl.log import warn_once


def required_vocabulary(tokenizer: Any) -> int:
    """The number of embedding rows that a model needs for this tokenizer: 1 + its highest id.

    `len(tokenizer)` is too small where PaddleNLP leaves added tokens out; the padding id can then equal it.
    """
    special = (getattr(tokenizer, f"{kind}_token_id", None) for kind in ("pad", "eos", "bos", "cls", "sep", "unk"))
    return 1 + max([*tokenizer.get_vocab().values(), *(i for i in special if i is not None)])


def _special_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after a single text by itself: [CLS] and [SEP] for BERT."""
    # Asked with a text: fast tokenizers add what their file says, whatever build_inputs_with_special_tokens returns.
    inner = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    outer = list(tokenizer("a")["input_ids"])
    for start in range(len(outer) - len(inner) + 1):
        if inner and outer[start : start + len(inner)] == inner:
            return outer[:start], outer[start + len(inner) :]
    probe = [-1]
    outer = list(tokenizer.build_inputs_with_special_tokens(probe))
    return outer[: outer.index(-1)], outer[outer.index(-1) + 1 :]


def padding_id(tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's, or its end-of-sequence id (masked anyway) where it has none.

    Raises:
        ValueError: the tokenizer has neither.
    """
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{type(tokenizer).__name__} has neither a padding nor an end-of-sequence token; set tokenizer.pad_token"
        )
    warn_once(
        f"pad token of {type(tokenizer).__name__}",
        f"{type(tokenizer).__name__} has no padding token; {tokenizer.eos_token!r} pads, and the mask leaves it out",
    )
    return int(tokenizer.eos_token_id)


def pad(rows: Sequence[Sequence[int]], pad_id: int, *, length: int, side: str = "right") -> dict[str, np.ndarray]:
    """Pads token ids to one length.

    Args:
        rows: B lists of ids, none longer than `length`.
        pad_id: what to fill with.
        length: L.
        side: where the filling goes, "right" or "left".

    Returns:
        `input_ids` [B, L] int64 and `attention_mask` [B, L] int64, 1 for a token and 0 for filling.
    """
    sizes = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    places = np.arange(length)
    mask = places < sizes[:, None] if side == "right" else places >= length - sizes[:, None]
    ids = np.full((len(rows), length), pad_id, dtype=np.int64)
    ids[mask] = np.fromiter((i for row in rows for i in row), dtype=np.int64, count=int(sizes.sum()))
    return {"input_ids": ids, "attention_mask": mask.astype(np.int64)}


class TextTokenizer:
    """Turns texts into padded ids, under one template and one limit.

    A text becomes `special tokens + prefix + text + suffix + special tokens`, the text cut so that all fits. The
    special tokens are those that the tokenizer adds by itself. Where it adds none at the end and the template has no
    suffix, the end-of-sequence token is appended, as PaddleNLP's embedding data set does: last-token pooling reads it.
    Prefix and suffix are tokenised once, apart from the text.

    Attributes:
        prefix, suffix: the ids around every text, special tokens included.
        room: how many tokens of a text fit.
        pad_id: see `padding_id`.

    Args:
        tokenizer: any PaddleNLP tokenizer.
        max_length: limit for the whole sequence, in tokens.
        template: must contain {text} once.
        name: what the texts are, for messages: the options are then called <name>_template and max_<name>_len.
        pad_to_multiple_of: round the padded length up to a multiple, but not beyond `max_length`.
        padding_side: "right" or "left".

    Raises:
        ValueError: a wrong template or option, or a template that leaves no room for the text.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        template: str = "{text}",
        *,
        name: str | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str = "right",
    ):
        template_option, limit = (f"{name}_template", f"max_{name}_len") if name else ("template", "max_length")
        if template.count("{text}") != 1:
            raise ValueError(f"{template_option} is {template!r}; it must contain {{text}} exactly once")
        if padding_side not in ("right", "left"):
            raise ValueError(f"padding_side is {padding_side!r}; right or left")
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}; at least 1, or none")
        if isinstance(max_length, bool) or int(max_length) != max_length or max_length < 1:
            raise ValueError(f"{limit} is {max_length!r}; a whole number of tokens from 1 on")
        before, after = template.split("{text}")
        left, right = _special_ids(tokenizer)
        prefix, suffix = (
            list(tokenizer(part, add_special_tokens=False)["input_ids"]) if part else [] for part in (before, after)
        )
        if not suffix and not right and tokenizer.eos_token_id is not None:
            right = [tokenizer.eos_token_id]
        self.tokenizer = tokenizer
        self.max_length = int(max_length)
        self.prefix, self.suffix = left + prefix, suffix + right
        self.room = self.max_length - len(self.prefix) - len(self.suffix)
        if self.room < 1:
            raise ValueError(
                f"{template_option} {template!r} takes {len(self.prefix) + len(self.suffix)} tokens "
                f"({len(left) + len(right)} of them special tokens) and {limit} is {self.max_length}: no token "
                f"of the {name or 'text'} would fit. Shorten the template or raise {limit}"
            )
        self.pad_id = padding_id(tokenizer)
        self.pad_to_multiple_of = pad_to_multiple_of
        self.padding_side = padding_side

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of every text, not padded, each at most `max_length` long."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            truncation=True,
            max_length=self.room,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        return [[*self.prefix, *ids[: self.room], *self.suffix] for ids in encoded]

    def pad(self, rows: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
        """Pads to the longest row; see the module's `pad` for what comes back."""
        length = max(map(len, rows), default=0)
        if self.pad_to_multiple_of:
            rounded = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
            length = max(length, min(rounded, self.max_length))
        return pad(rows, self.pad_id, length=length, side=self.padding_side)

    def __call__(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """`input_ids` and `attention_mask` [B, L] int64 of B texts."""
        return self.pad(self.ids(texts))
