# SPDX-License-Identifier: Apache-2.0
"""From hidden states to one vector per text: the order of padding, and pooling."""

from __future__ import annotations

import paddle

POOLINGS = ("cls", "mean", "last")


def pad_right(input_ids, attention_mask):
    """Moves the tokens of every row to its left end, keeping their order.

    A batch padded on the left (or with gaps) becomes the batch padded on the right. Every backbone then sees the same
    positions and the same causal neighbours for a text, whatever side its tokenizer pads on, so the embeddings are
    equal by construction and no backbone needs position ids.

    Args:
        input_ids: [B, L] int64.
        attention_mask: [B, L] int64, 1 = token, 0 = padding.

    Returns:
        (input_ids, attention_mask), both [B, L].
    """
    order = paddle.argsort(attention_mask, axis=1, descending=True, stable=True)
    return paddle.take_along_axis(input_ids, order, axis=1), paddle.take_along_axis(attention_mask, order, axis=1)


def pool(hidden, attention_mask, pooling: str):
    """One vector per row of hidden states that are padded on the right.

    Padded positions never reach the result, not even when they hold NaN. A row without any token gives the zero
    vector.

    Args:
        hidden: [B, L, D], any floating dtype.
        attention_mask: [B, L] int64, 1 = token, 0 = padding, padded on the right.
        pooling: "cls" (first token), "mean" (of the tokens; summed in fp32) or "last" (last token).

    Returns:
        [B, D] in the dtype of `hidden`.

    Raises:
        ValueError: an unknown pooling.
    """
    count = attention_mask.sum(axis=1, keepdim=True)  # [B, 1]
    if pooling == "mean":
        wide = hidden if hidden.dtype == paddle.float64 else hidden.astype("float32")
        kept = paddle.where(attention_mask.unsqueeze(-1) > 0, wide, paddle.zeros_like(wide))
        return (kept.sum(axis=1) / count.clip(min=1).astype(wide.dtype)).astype(hidden.dtype)
    if pooling == "cls":
        picked = hidden[:, 0]
    elif pooling == "last":
        index = (count - 1).clip(min=0).unsqueeze(-1).expand([-1, 1, hidden.shape[-1]])
        picked = paddle.take_along_axis(hidden, index, axis=1).squeeze(1)
    else:
        raise ValueError(f"pooling '{pooling}' is unknown; there are {', '.join(POOLINGS)}")
    return paddle.where(count > 0, picked, paddle.zeros_like(picked))
