# SPDX-License-Identifier: Apache-2.0
"""Texts to vectors: in memory, and from files to .npy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import paddle
from tqdm import tqdm

from paddle_infcl.data.templates import TextTokenizer
from paddle_infcl.modeling import SentenceEncoder
from paddle_infcl.paths import same_path

BLOCK = 16384
"""Texts that are tokenised, sorted by length and encoded together."""

SHOWN = 10
"""How many bad lines an error spells out; all of them are counted."""


def encode_texts(
    model,
    tokenizer,
    texts: Sequence[str],
    *,
    max_length: int | None = None,
    template: str = "{text}",
    batch_size: int = 32,
    show_progress: bool = False,
) -> np.ndarray:
    """Embeds texts, in their order.

    Inside, texts are sorted by their number of tokens, so that a batch has little padding. Dropout is off, no graph
    is kept, and every layer is afterwards in the mode it was in.

    Args:
        model: a `SentenceEncoder`, also inside paddle.DataParallel, or PaddleNLP's Qwen2SentenceEmbedding.
        tokenizer: the model's tokenizer.
        texts: n texts; none is a result of shape [0, D].
        max_length: longer texts are cut, in tokens, template and special tokens included. None: the model's limit.
        template: what every text is put into; contains {text} once.
        batch_size: texts per forward pass.
        show_progress: a bar on stderr that counts texts.

    Returns:
        [n, D] float32.

    Raises:
        ValueError: no limit is known, a wrong limit, template or batch size, or an embedding that is NaN or infinite.
        TypeError: one string in place of a list, or something in the list that is no string.
    """
    if isinstance(texts, str):
        raise TypeError("texts is one string; a list of strings is right")
    return _encode(model, tokenizer, texts, len(texts), None, max_length, template, batch_size, show_progress)


def encode_file(
    model,
    tokenizer,
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    field: str = "text",
    max_length: int | None = None,
    template: str = "{text}",
    batch_size: int = 32,
    show_progress: bool = False,
) -> tuple[int, int]:
    """Embeds the texts of a file into a .npy file: row i is the i-th line's.

    The result is written through a memory map, a block of texts at a time, and appears under its name only when it is
    complete: neither the texts nor the vectors need to fit into memory. All lines are checked before the first one is
    encoded.

    Args:
        model, tokenizer, max_length, template, batch_size, show_progress: as in `encode_texts`.
        source: .jsonl or .json with one object per line, anything else is text, one per line.
        target: the .npy file, float32, replaced if it exists.
        field: where the text is in a JSON object.

    Returns:
        (n, D), the shape of the result.

    Raises:
        ValueError: lines that cannot be used (all counted, the first ones listed), an empty file, a target that is
            the source or no file, or as `encode_texts`.
    """
    source, target = Path(source), Path(target)
    if source.exists() and same_path(source, target):
        raise ValueError(f"{target}: is the source {source} itself, which the result would replace: name another file")
    if target.exists() and not target.is_file():
        raise ValueError(f"{target}: is there and no file, so it can't be replaced by the result: name a .npy file")
    count = sum(1 for _ in _lines(source, field))
    if not count:
        raise ValueError(f"{source}: no texts in it")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        shape = _encode(
            model, tokenizer, _lines(source, field), count, partial, max_length, template, batch_size, show_progress
        ).shape
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return shape


def _lines(path: Path, field: str) -> Iterator[str]:
    """The texts of a file. Raises ValueError at its end, with every bad line counted."""
    is_json = path.suffix in (".jsonl", ".json")
    bad, shown = 0, []
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                text = _field(line, field) if is_json else line
                if not text.strip():
                    raise ValueError("no text" if not is_json else f"`{field}` is blank")
            except ValueError as error:
                bad += 1
                if len(shown) < SHOWN:
                    shown.append(f"  {path}:{number}: {error}")
                continue
            yield text
    if bad:
        more = f"\n  ... and {bad - SHOWN:,} more" if bad > SHOWN else ""
        raise ValueError(
            f"{bad:,} lines of {path} cannot be encoded; none is left out, or the rows of the result would not be "
            "the lines of the file:\n" + "\n".join(shown) + more
        )


def _field(line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    if field not in row:
        raise ValueError(f"no field `{field}`; there are {', '.join(map(repr, row)) or 'none'}")
    if not isinstance(row[field], str):
        raise ValueError(f"`{field}` is {type(row[field]).__name__}, not a string")
    return row[field]


def _encode(model, tokenizer, texts: Iterable[str], count, path, max_length, template, batch_size, show_progress):
    """Encodes `count` texts, into memory or, given a path, into a memory-mapped .npy file."""
    encoder = SentenceEncoder.wrap(model)
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; at least 1")
    if max_length is None:
        max_length = encoder.max_seq_length
    elif max_length < 1:
        raise ValueError(f"max_length is {max_length}; at least 1 token, or None for the model's limit")
    if max_length is None:
        raise ValueError("max_length: neither given nor known from the model")
    if encoder.positions and max_length > encoder.positions:
        raise ValueError(f"max_length is {max_length}, and the model has positions for {encoder.positions} tokens")
    tokenize = TextTokenizer(tokenizer, max_length, template)
    shape = (count, encoder.embedding_dim)
    out = np.empty(shape, np.float32) if path is None else np.lib.format.open_memmap(path, "w+", np.float32, shape)
    modes = [(layer, layer.training) for layer in encoder.sublayers(include_self=True)]
    encoder.eval()
    texts, done = iter(texts), 0
    try:
        with paddle.no_grad(), tqdm(total=count, unit="text", desc="encode", disable=not show_progress) as bar:
            while block := list(islice(texts, BLOCK)):
                _encode_block(encoder, tokenize, block, out[done : done + len(block)], done, batch_size, bar)
                done += len(block)
    finally:
        for layer, mode in modes:
            layer.training = mode
    return out


def _encode_block(encoder, tokenize, texts, out, first, batch_size, bar) -> None:
    wrong = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
    if wrong is not None:
        raise TypeError(f"text {first + wrong} is {type(texts[wrong]).__name__}, not a string")
    rows = tokenize.ids(texts)
    # The longest first: a batch too large for the memory fails at once, and the time left is never underestimated.
    order = np.argsort([-len(row) for row in rows], kind="stable")
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = tokenize.pad([rows[i] for i in chosen])
        vectors = encoder.encode(**batch).astype("float32").numpy()
        finite = np.isfinite(vectors).all(axis=1)
        if not finite.all():
            at = chosen[~finite].min()
            raise ValueError(f"the embedding of text {first + at} is NaN or infinite: {texts[at][:80]!r}")
        out[chosen] = vectors
        bar.update(len(chosen))
