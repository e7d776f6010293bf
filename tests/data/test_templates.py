# SPDX-License-Identifier: Apache-2.0
"""Template, special tokens, truncation and padding, for every kind of tokenizer."""

import json

import numpy as np
import pytest

from paddle_infcl.data.templates import TextTokenizer, pad, padding_id, required_vocabulary
from tests.data.tokenizers import KINDS, byte_level

TEXTS = ["the cat sat on a mat", "hello", "hello world answer other red blue", "cat"]


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_template_it_is_the_tokenizers_own_sequence(make_tokenizer, kind):
    tokenizer = make_tokenizer(kind)
    rows = TextTokenizer(tokenizer, 64).ids(TEXTS)
    for text, row in zip(TEXTS, rows, strict=True):
        own = list(tokenizer(text)["input_ids"])
        # Qwen2 adds nothing by itself; PaddleNLP's embedding data appends the end of sequence.
        assert row == ([*own, tokenizer.eos_token_id] if kind.startswith("qwen2") else own)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["{text}", "query : {text}", "{text} . answer", "find {text} this"])
def test_parts_and_truncation(make_tokenizer, kind, template):
    tokenizer = make_tokenizer(kind)
    ids = {p: list(tokenizer(p, add_special_tokens=False)["input_ids"]) if p else [] for p in template.split("{text}")}
    before, after = ids.values() if len(ids) == 2 else ([], [])
    left, right = ([], []) if kind.startswith("qwen2") else ([tokenizer.cls_token_id], [tokenizer.sep_token_id])
    if kind.startswith("qwen2") and not after:
        right = [tokenizer.eos_token_id]
    around = len(left) + len(before) + len(after) + len(right)
    for room in (1, 2, 3, 50):
        tokenize = TextTokenizer(tokenizer, around + room, template)
        assert tokenize.room == room
        for text, row in zip(TEXTS, tokenize.ids(TEXTS), strict=True):
            inner = list(tokenizer(text, add_special_tokens=False)["input_ids"])[:room]
            assert row == left + before + inner + after + right


def test_upstreams_ids_for_qwen2(make_tokenizer):
    import random

    from paddlenlp.datasets.embedding_dataset import EmbeddingIterableDataset, Example

    tokenizer = make_tokenizer("qwen2")
    for template in ("{text}", "Instruct: {text}", "{text}<|endoftext|>", "a {text} b"):
        upstream = EmbeddingIterableDataset(
            [], tokenizer, max_query_len=20, max_passage_len=24, query_template=template, passage_template=template
        )
        ours = TextTokenizer(tokenizer, 20, template), TextTokenizer(tokenizer, 24, template)
        for text in TEXTS:
            pair = upstream._postprocess_sequence(Example(text, [text], []), random.Random(0))
            assert ours[0].ids([text]) == [pair.query.token_ids]
            assert ours[1].ids([text]) == [pair.passages[0].token_ids]


@pytest.mark.parametrize("kind", ["bert", "qwen2"])
def test_a_template_longer_than_the_limit(make_tokenizer, kind):
    # Upstream gives 8 tokens for a limit of 4.
    tokenizer = make_tokenizer(kind)
    template = "query : {text} . answer"
    with pytest.raises(ValueError) as caught:
        TextTokenizer(tokenizer, 4, template, name="query")
    needed = len(TextTokenizer(tokenizer, 99, template).prefix) + len(TextTokenizer(tokenizer, 99, template).suffix)
    assert f"takes {needed} tokens" in str(caught.value)
    assert "max_query_len is 4" in str(caught.value)
    with pytest.raises(ValueError, match="no token"):
        TextTokenizer(tokenizer, needed, template)
    assert TextTokenizer(tokenizer, needed + 1, template).room == 1


@pytest.mark.parametrize(
    "options, message",
    [
        ({"template": "no place"}, "exactly once"),
        ({"template": "{text} {text}"}, "exactly once"),
        ({"padding_side": "middle"}, "right or left"),
        ({"pad_to_multiple_of": 0}, "at least 1"),
        ({"max_length": 0}, "from 1 on"),
        ({"max_length": 1.5}, "from 1 on"),
        ({"max_length": 2}, "no token"),
        ({"max_length": 0}, "^max_length is 0"),
        ({"template": "x"}, "^template is 'x'"),
        ({"max_length": 0, "name": "query"}, "^max_query_len is 0"),
        ({"template": "x", "name": "query"}, "^query_template is 'x'"),
    ],
)
def test_wrong_options(bert, options, message):
    with pytest.raises(ValueError, match=message):
        TextTokenizer(bert, **{"max_length": 8, **options})


def test_padding_by_hand():
    rows = [[5, 6, 7], [8], [9, 9]]
    right = pad(rows, 1, length=4)
    assert right["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, 1, 1], [9, 9, 1, 1]]
    assert right["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    left = pad(rows, 1, length=4, side="left")
    assert left["input_ids"].tolist() == [[1, 5, 6, 7], [1, 1, 1, 8], [1, 1, 9, 9]]
    assert left["attention_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 1]]
    assert all(a.dtype == np.int64 for side in (right, left) for a in side.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_to_the_longest_with_the_tokenizers_id(make_tokenizer, kind, side):
    tokenizer = make_tokenizer(kind)
    tokenize = TextTokenizer(tokenizer, 64, padding_side=side)
    rows, batch = tokenize.ids(TEXTS), tokenize(TEXTS)
    assert batch["input_ids"].shape == (4, max(map(len, rows)))  # not to the limit, as upstream
    assert batch["attention_mask"].sum(1).tolist() == [len(row) for row in rows]
    for k, row in enumerate(rows):
        real = batch["attention_mask"][k].astype(bool)
        assert batch["input_ids"][k][real].tolist() == row
        assert (batch["input_ids"][k][~real] == tokenizer.pad_token_id).all()
        assert real[0 if side == "right" else -1]


def test_multiples_do_not_pass_the_limit(bert):
    lengths = [
        TextTokenizer(bert, limit, pad_to_multiple_of=8)(["cat " * n])["input_ids"].shape[1]
        for limit, n in ((64, 3), (64, 6), (64, 7), (20, 30), (20, 15))
    ]
    assert lengths == [8, 8, 16, 20, 20]


def test_no_texts(bert):
    assert TextTokenizer(bert, 8)([])["input_ids"].shape == (0, 0)


def test_a_tokenizer_without_a_padding_token(make_tokenizer, caplog, monkeypatch):
    monkeypatch.setattr("paddle_infcl.log.logger.propagate", True)
    qwen2 = make_tokenizer("qwen2")
    qwen2.pad_token = None
    batch = TextTokenizer(qwen2, 64)(["a", "abc"])
    assert batch["input_ids"][0].tolist()[-2:] == [qwen2.eos_token_id] * 2
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert caplog.text.count("no padding token") == 1
    bert = make_tokenizer("bert")
    bert.pad_token = None
    with pytest.raises(ValueError, match=r"neither a padding nor an end-of-sequence token"):
        padding_id(bert)


def test_required_vocabulary_counts_added_tokens(make_tokenizer):
    # len(tokenizer) leaves out <|endoftext|>, with which Qwen2 pads: the id would be one behind the last embedding.
    qwen2 = make_tokenizer("qwen2")
    assert len(qwen2) == qwen2.pad_token_id == 256
    assert required_vocabulary(qwen2) == 257
    bert = make_tokenizer("bert")
    known = required_vocabulary(bert)
    assert known == len(bert)
    bert.add_tokens(["<emb>"])
    assert required_vocabulary(bert) == known + 1
    largest = max(map(max, TextTokenizer(bert, 64).ids(["cat <emb>"])))
    assert largest == known


def test_special_tokens_of_a_file_are_seen(make_tokenizer):
    # A fast tokenizer may append its end of sequence by itself; then it must not come twice.
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer("qwen2_fast")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", tokenizer.eos_token_id)]
    )
    (row,) = TextTokenizer(tokenizer, 64).ids(["abc"])
    assert row == list(tokenizer("abc")["input_ids"])
    assert row.count(tokenizer.eos_token_id) == 1
    (row,) = TextTokenizer(tokenizer, 3).ids(["abc"])
    assert len(row) == 3 and row[-1] == tokenizer.eos_token_id


def test_a_tokenizer_that_shows_its_special_tokens_only_when_asked():
    class Odd:
        pad_token_id = eos_token_id = 9

        def __call__(self, text, **options):
            return {"input_ids": [[5]] if isinstance(text, list) else []}  # nothing for a single text

        def build_inputs_with_special_tokens(self, ids):
            return [1, *ids, 2]

    assert TextTokenizer(Odd(), 8).ids(["x"]) == [[1, 5, 2]]


def test_required_vocabulary_with_a_gap_before_the_added_tokens(tmp_path):
    from paddlenlp.transformers import Qwen2Tokenizer

    byte_level(tmp_path)
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {"special": True}
    added = {"256": {"content": "<|endoftext|>"} | flags, "300": {"content": "<|end|>"} | flags}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "additional_special_tokens": ["<|end|>"]})
    )
    tokenizer = Qwen2Tokenizer.from_pretrained(str(tmp_path))
    assert TextTokenizer(tokenizer, 8).ids(["<|end|>"])[0][0] == 300
    assert len(tokenizer) < required_vocabulary(tokenizer) == 301
