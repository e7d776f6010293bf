# SPDX-License-Identifier: Apache-2.0
"""Field names, values and ids of one row."""

import pytest

from paddle_infcl.data.hashing import text_id
from paddle_infcl.data.rows import BadRow, Example, parse_row

FULL = Example("q", ["p"], ["n1", "n2"])


def parsed(**row) -> Example:
    return parse_row(row)[0]


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "pos_passage": ["p"], "neg_passage": ["n1", "n2"]},
        {"query": "q", "pos_passage": "p", "neg_passage": ["n1", "n2"]},
        {"query": "q", "pos": ["p"], "neg": ["n1", "n2"]},
        {"query": "q", "positive": "p", "negatives": ["n1", "n2"]},
        {"query": "q", "positives": ["p"], "negatives": ["n1", "n2"]},
        {"anchor": "q", "positive": "p", "negative": ["n1", "n2"]},
        {"anchor": "q", "positive": "p", "negative_1": "n1", "negative_2": "n2"},
        {"anchor": "q", "negative_10": "n2", "positive": "p", "negative_2": "n1"},
        {"anchor": "q", "positive": "p", "negative_1": "n1", "negative_2": None, "negative_3": "n2"},
    ],
)
def test_all_names_give_the_same_example(row):
    assert parse_row(row)[0] == FULL


@pytest.mark.parametrize("absent", [{}, {"neg": None}, {"neg": []}])
def test_no_negatives(absent):
    # FlagEmbedding 970, 945; upstream asserts or raises a TypeError.
    assert parsed(query="q", pos="p", **absent) == Example("q", ["p"], [])


def test_a_string_negative_is_one_negative():
    assert parsed(query="q", pos="p", neg="n").negatives == ["n"]


@pytest.mark.parametrize(
    "row, reason, part",
    [
        (["q", "p"], "not a JSON object", "one object per line"),
        ({"query": "q", "pos": "p", "neg": ""}, "blank negative", "[] or null"),
        ({"query": "q", "pos": "p", "neg": ["n", "  "]}, "blank negative", "neg[1]"),
        ({"query": "q", "pos": "p", "neg": [None]}, "wrong type", "neg[0]"),
        ({"query": "", "pos": "p", "neg": []}, "blank query", "query"),
        ({"query": "q", "pos": "\t", "neg": []}, "blank positive", "pos"),
        ({"query": "q", "pos": [], "neg": ["n"]}, "no positive", "pos"),
        ({"query": "q", "pos": None}, "no positive", "pos"),
        ({"query": "q"}, "no positive", "pos_passage"),
        ({"pos": "p"}, "no query", "anchor"),
        ({"query": ["q"], "pos": "p"}, "wrong type", "a string"),
        ({"query": "q", "pos": 5}, "wrong type", "list of strings"),
        ({"query": "q", "pos": {"text": "p"}}, "wrong type", "list of strings"),
        ({"query": "q", "pos": "p", "neg_passage": "n"}, "mixed naming schemes", "`pos`"),
        ({"query": "q", "pos": "p", "pos_passage": "p"}, "mixed naming schemes", "`pos_passage`"),
        ({"query": "q", "anchor": "q", "positive": "p"}, "mixed naming schemes", "`anchor`"),
        ({"anchor": "q", "pos": "p"}, "mixed naming schemes", "`anchor`"),
        ({"query": "q", "pos": "p", "negative_1": "n"}, "mixed naming schemes", "`negative_1`"),
        ({"query": "q", "positive": "p", "negative": "n", "negatives": ["n"]}, "mixed naming schemes", "`negatives`"),
        ({"query": "q", "positive": "p", "negative": "n", "negative_1": "n"}, "mixed naming schemes", "`negative`"),
        ({"query": "q", "pos": "p", "pos_id": 1, "pos_ids": [1]}, "mixed naming schemes", "`pos_ids`"),
    ],
)
def test_refused(row, reason, part):
    with pytest.raises(BadRow) as caught:
        parse_row(row)
    assert caught.value.reason == reason
    assert part in caught.value.detail


@pytest.mark.parametrize(
    "name, meant",
    [
        ("querry", "query"),
        ("Query", "query"),
        ("neg_pasage", "neg_passage"),
        ("neg-passage", "neg_passage"),
        ("negatvie", "negative"),
        ("neg_1", "negative_1"),
        ("negatives_2", "negative_2"),
        ("hard_negative", "negatives"),
        ("hard_negative_3", "negative_3"),
        ("pos_2", "positive"),
        ("negative_passages", "neg_passage"),
        ("NEG", "neg"),
        ("querry_id", "query_id"),
    ],
)
def test_typing_errors_are_refused(name, meant):
    # Ignored, they would drop the negatives without a word.
    with pytest.raises(BadRow) as caught:
        parse_row({"query": "q", "positive": "p", name: "x"})
    assert caught.value.reason == "unknown field that looks like a known one"
    assert f"`{meant}" in caught.value.detail


def test_other_fields_are_let_through_and_named():
    extra = (
        "score",
        "title",
        "position",
        "post",
        "net",
        "pos_scores",
        "neg_scores",
        "type",
        "package",
        "text",
        "prompt",
    )
    example, layout = parse_row({"query": "q", "pos": "p", **dict.fromkeys(extra, 1)})
    assert example == Example("q", ["p"], [])
    assert layout.ignored == extra


def test_ids():
    example = parsed(query="q", pos=["a", "b"], neg=["n"], query_id="7", pos_id=[3, "x"], neg_ids=[None])
    assert (example.query_id, example.positive_ids, example.negative_ids) == (7, [3, text_id("x")], [-1])
    assert example.has_ids
    assert parsed(anchor="q", positive="p", anchor_id=4).query_id == 4
    assert parsed(query="q", pos="p", pos_id=5).positive_ids == [5]
    assert not parsed(query="q", pos="p", neg=[], query_id=None, pos_id=None, neg_ids=[]).has_ids


@pytest.mark.parametrize(
    "ids, reason",
    [
        ({"pos_ids": [1, 2]}, "ids and texts differ in number"),
        ({"neg_ids": [1]}, "ids and texts differ in number"),
        ({"query_id": -3}, "wrong id"),
        ({"query_id": [1]}, "wrong id"),
        ({"query_id": 1.5}, "wrong id"),
        ({"pos_id": True}, "wrong id"),
        ({"pos_id": ""}, "wrong id"),
    ],
)
def test_refused_ids(ids, reason):
    with pytest.raises(BadRow) as caught:
        parse_row({"query": "q", "pos": "p", **ids})
    assert caught.value.reason == reason


def test_missing_ids_are_filled_with_minus_one():
    example = parsed(query="q", pos=["a", "b"], neg=["n"], pos_ids=[1, 2])
    example.fill_ids()
    assert (example.query_id, example.positive_ids, example.negative_ids) == (-1, [1, 2], [-1])


def test_keys_of_duplicates():
    def shared(a: Example, b: Example) -> int:
        return len(set(a.keys()) & set(b.keys()))

    row = Example("q", ["a", "b"], ["n"])
    assert shared(row, Example("q ", ["c"])) == 1
    assert shared(row, Example("r", ["b"])) == 1
    assert shared(row, Example("a", ["q"])) == 0  # a query's text is no passage
    assert shared(row, Example("r", ["n"])) == 0
    with_ids = Example("q", ["a"], [], 1, [2], [])
    assert shared(with_ids, Example("r", ["c"], [], 1, [3], [])) == 1
    assert shared(with_ids, Example("r", ["c"], [], 2, [1], [])) == 0
    assert shared(Example("q", ["a"], [], -1, [-1], []), Example("r", ["c"], [], -1, [-1], [])) == 0


def test_a_positive_is_not_an_allowed_negative():
    # ms-swift 5600
    assert Example("q", ["p", "r"], ["p", "n", " r "]).allowed_negatives() == [1]
    assert Example("q", ["p"], ["n", "m"], -1, [8], [8, -1]).allowed_negatives() == [1]
    assert Example("q", ["p"], ["n"], -1, [-1], [-1]).allowed_negatives() == [0]
