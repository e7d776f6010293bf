# SPDX-License-Identifier: Apache-2.0
"""Micro-batches: whose passage is where, which negatives are drawn, ids."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.data.collator import PairCollator, draw_passages
from paddle_infcl.data.hashing import row_seed, text_id
from paddle_infcl.data.rows import Example

WORDS = ["cat", "mat", "red", "blue", "hello", "world", "this", "find"]
MIXED = [
    Example("the cat", ["cat"], []),
    Example("a mat", ["mat"], ["red", "blue", "world"]),
    Example("hello", ["hello"], ["this"]),
]


def collator(tokenizer, **options) -> PairCollator:
    return PairCollator(tokenizer, **{"max_query_len": 16, "max_passage_len": 16, **options})


def texts_of(tokenizer, side) -> list[str]:
    return [
        tokenizer.decode(row[mask.astype(bool)].tolist(), skip_special_tokens=True)
        for row, mask in zip(side["input_ids"], side["attention_mask"], strict=True)
    ]


def test_rows_with_different_numbers_of_negatives(bert):
    # Upstream takes N / B passages for every row and mislabels these.
    batch = collator(bert)(MIXED)
    assert texts_of(bert, batch["query"]) == ["the cat", "a mat", "hello"]
    assert texts_of(bert, batch["passages"]) == ["cat", "mat", "red", "blue", "world", "hello", "this"]
    assert batch["own"].tolist() == [0, 1, 5]
    assert set(batch) == {"query", "passages", "own"}
    assert all(a.dtype == np.int64 for a in (batch["own"], *batch["query"].values(), *batch["passages"].values()))


def test_fewer_negatives_than_wanted(bert):
    # ms-swift 5600: fewer columns; upstream's repetition on request; never the positive.
    group = [e for e in MIXED if e.query != "a mat"]
    assert texts_of(bert, collator(bert, group_size=4)(group)["passages"]) == ["cat", "hello", "this"]
    batch = collator(bert, group_size=4, pad_negatives="repeat")(group)
    assert texts_of(bert, batch["passages"]) == ["cat", "hello", "this", "this", "this"]
    assert batch["own"].tolist() == [0, 1]


def test_limits_templates_and_sides_reach_both_kinds(bert):
    make = collator(
        bert,
        max_query_len=5,
        max_passage_len=7,
        query_template="query {text}",
        passage_template="{text} answer",
        padding_side="left",
        pad_to_multiple_of=4,
    )
    batch = make([Example("the cat sat on a mat", ["the cat sat on a mat the cat sat"]), Example("hello", ["world"])])
    assert texts_of(bert, batch["query"]) == ["query the cat", "query hello"]
    assert texts_of(bert, batch["passages"]) == ["the cat sat on answer", "world answer"]
    assert batch["query"]["attention_mask"].tolist()[1] == [0, 1, 1, 1, 1]
    # As wide as the longest of the batch, whatever the limit: no L x L anything.
    assert batch["query"]["attention_mask"].ndim == 2


@st.composite
def examples(draw):
    positives = draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True))
    return Example("q", positives, draw(st.lists(st.sampled_from(WORDS), max_size=6)))


@given(examples(), st.one_of(st.none(), st.integers(1, 9)), st.sampled_from(["none", "repeat"]), st.integers(0, 2**64))
@settings(max_examples=300, deadline=None)
def test_draws(example, group_size, pad_negatives, seed):
    pad_negatives = pad_negatives if group_size else "none"
    positive, negatives = draw_passages(example, random.Random(seed), group_size, pad_negatives)
    assert (positive, negatives) == draw_passages(example, random.Random(seed), group_size, pad_negatives)
    assert 0 <= positive < len(example.positives)
    assert not {example.negatives[k] for k in negatives} & set(example.positives)
    allowed = [k for k, text in enumerate(example.negatives) if text not in example.positives]
    counts = Counter(negatives)
    if group_size is None:
        assert negatives == allowed
    elif pad_negatives == "none" or not allowed:
        assert len(negatives) == min(group_size - 1, len(allowed))
        assert max(counts.values(), default=0) <= 1
    else:
        assert len(negatives) == group_size - 1
        assert all(counts[k] in ((group_size - 1) // len(allowed) + d for d in (0, 1)) for k in allowed)


def test_repeat_draws_what_upstream_draws(make_tokenizer):
    from paddlenlp.datasets.embedding_dataset import EmbeddingIterableDataset
    from paddlenlp.datasets.embedding_dataset import Example as UpstreamExample

    tokenizer = make_tokenizer("qwen2")
    for group_size in (1, 2, 4, 9):
        upstream = EmbeddingIterableDataset([], tokenizer, max_query_len=16, max_passage_len=16, group_size=group_size)
        for count in (0, 1, 2, 3, 8):
            for seed in range(4):
                example = Example("q", ["pos", "other"], WORDS[:count])
                pair = upstream._postprocess_sequence(
                    UpstreamExample("q", list(example.positives), list(example.negatives)), random.Random(seed)
                )
                ours = collator(tokenizer, group_size=group_size, pad_negatives="repeat")([(example, seed)])
                width = ours["passages"]["input_ids"].shape[1]
                theirs = [p.token_ids + [tokenizer.pad_token_id] * (width - len(p.token_ids)) for p in pair.passages]
                assert ours["passages"]["input_ids"].tolist() == theirs


def test_every_positive_and_negative_gets_its_turn():
    example = Example("q", ["p1", "p2"], ["n1", "n2", "n3"])
    draws = [draw_passages(example, random.Random(row_seed(0, epoch, 5)), 2, "none") for epoch in range(60)]
    assert len({(positive, *negatives) for positive, negatives in draws}) == 6


def test_ids(bert):
    rows = [Example("a", ["cat", "mat"], ["red"], 1, [10, 11], [12]), Example("b", ["blue"], ["this"], -1, [11], [-1])]
    batch = collator(bert)([(rows[0], 3), (rows[1], 4)])
    drawn = 10 if texts_of(bert, batch["passages"])[0] == "cat" else 11
    assert batch["q_ids"].tolist() == [[drawn, 1], [11, -1]]
    assert batch["p_ids"].tolist() == [[drawn, 1], [12, -1], [11, -1], [-1, -1]]
    assert batch["q_ids"].dtype == batch["p_ids"].dtype == np.int64


def test_two_rows_that_share_a_document_or_a_query_are_seen(bert):
    # sentence-transformers 2756, 3260: the texts decide, not similarities that dropout disturbs.
    rows = [Example("a", ["cat"], ["mat"]), Example("b", ["cat"]), Example("a", ["red"]), Example("c", ["mat"])]
    batch = collator(bert, ids_from_text=True)(rows)
    q, p = batch["q_ids"], batch["p_ids"]
    same = ((q[:, None] == p[None]) & (p[None] >= 0)).any(-1)
    assert texts_of(bert, batch["passages"]) == ["cat", "mat", "cat", "red", "mat"]
    assert same.astype(int).tolist() == [
        [1, 0, 1, 1, 0],  # own, the same text, the same query's
        [1, 0, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [0, 1, 0, 0, 1],  # a hard negative of the first row is this row's positive
    ]


def test_given_ids_go_before_those_from_texts(bert):
    batch = collator(bert, ids_from_text=True)([Example("a", ["cat"], ["mat"], -1, [5], [-1])])
    assert batch["q_ids"].tolist() == [[5, text_id("a")]]
    assert batch["p_ids"].tolist() == [[5, text_id("a")], [text_id("mat"), -1]]


def test_changes_with_a_hard_negative(bert):
    # contrastors 48
    a, b = (collator(bert)([Example("q", ["cat"], [word])])["passages"]["input_ids"] for word in ("red", "blue"))
    assert (a[0] == b[0]).all() and (a[1] != b[1]).any()


def test_calls_do_not_change_what_they_get(bert):
    # sentence-transformers 3944
    make = collator(bert, group_size=3)
    pairs = [(example, n) for n, example in enumerate(MIXED)]
    first, second = make(pairs), make(pairs)
    for name in ("query", "passages"):
        assert (first[name]["input_ids"] == second[name]["input_ids"]).all()
    again = make(MIXED)
    assert (again["passages"]["input_ids"] == make(MIXED)["passages"]["input_ids"]).all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"group_size": 0}, "at least 1"),
        ({"pad_negatives": "all"}, "none or repeat"),
        ({"pad_negatives": "repeat"}, "group_size"),
        ({"max_query_len": 2}, "max_query_len is 2"),
        ({"max_passage_len": 2}, "max_passage_len is 2"),
        ({"passage_template": "x"}, "passage_template"),
    ],
)
def test_wrong_options(bert, options, message):
    with pytest.raises(ValueError, match=message):
        collator(bert, **options)
