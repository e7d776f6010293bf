# SPDX-License-Identifier: Apache-2.0
"""The evaluator: from dictionaries, pairs and BEIR files; what is wrong is named and counted."""

import json
import logging

import numpy as np
import pytest

from paddle_infcl.data.rows import DataError
from paddle_infcl.evaluation.metrics import METRICS
from paddle_infcl.evaluation.retrieval import RetrievalEvaluator


def write_lines(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


class Encoder:
    """Vectors from a table by text; remembers what it was called with."""

    def __init__(self, table):
        self.table, self.calls = table, []

    def __call__(self, texts, kind):
        self.calls.append((kind, list(texts)))
        return np.array([self.table[text] for text in texts], "float32")


def unit(*angles):
    return [[np.cos(a), np.sin(a)] for a in angles]


def test_a_small_case_by_hand():
    queries = {"q1": "one", "q2": "two"}
    corpus = {"a": "A", "b": "B", "c": "C"}
    vectors = dict(zip(["one", "two", "A", "B", "C"], unit(0.0, 1.0, 0.1, 0.5, 1.2), strict=True))
    # Rankings: q1: A B C; q2: C B A.
    evaluator = RetrievalEvaluator(queries, corpus, {"q1": {"b": 1, "c": 0}, "q2": ["c", "a"]}, corpus_chunk=2)
    encoder = Encoder(vectors)
    found = evaluator(encoder)
    assert tuple(found) == METRICS
    assert found["mrr@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert found["recall@1"] == pytest.approx((0 + 1 / 2) / 2)
    assert found["recall@10"] == found["recall@100"] == 1
    assert found["map"] == pytest.approx((1 / 2 + (1 + 2 / 3) / 2) / 2)
    ideal = 1 + 1 / np.log2(3)
    assert found["ndcg@10"] == pytest.approx((1 / np.log2(3) + (1 + 1 / 2) / ideal) / 2)
    assert encoder.calls == [("query", ["one", "two"]), ("passage", ["A", "B"]), ("passage", ["C"])]
    assert evaluator(encoder) == found
    assert repr(evaluator) == "RetrievalEvaluator('', 2 queries, 3 documents)"


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_nothing(chunk):
    generator = np.random.default_rng(0)
    texts = [f"d{i}" for i in range(60)]
    table = {text: generator.standard_normal(8) for text in texts}
    queries = {f"q{i}": f"d{i}?" for i in range(20)}
    table |= {f"d{i}?": table[f"d{i}"] + generator.standard_normal(8) for i in range(20)}
    qrels = {f"q{i}": [i, 59 - i] for i in range(20)}
    results = [RetrievalEvaluator(queries, texts, qrels, corpus_chunk=c)(Encoder(table)) for c in (chunk, 60)]
    assert results[0] == results[1]
    scores = np.stack([table[q] for q in queries.values()]) @ np.stack([table[t] for t in texts]).T
    order = np.argsort(-scores, 1)
    first = [min(list(order[i]).index(i), list(order[i]).index(59 - i)) + 1 for i in range(20)]
    assert results[0]["mrr@10"] == pytest.approx(np.mean([1 / r if r <= 10 else 0 for r in first]))


def test_everything_wrong_is_named_at_once():
    queries = {**{f"q{i}": "text" for i in range(8)}, "blank": " "}
    qrels = {"q0": {"d": 1}, "q1": {"d": 0}, "nobody": {"d": 1}, "blank": ["x1", "x2", "d"]}
    with pytest.raises(ValueError) as info:
        RetrievalEvaluator(queries, {"d": "D", "e": ""}, qrels, name="dev", groups={"q0": "g"})
    assert str(info.value).splitlines() == [
        "cannot evaluate dev:",
        "  7 queries have no relevant document: q1, q2, q3, q4, q5, ...",
        "  1 queries are judged but unknown: nobody",
        "  2 judged documents are not in the corpus: x1, x2",
        "  1 queries are blank: blank",
        "  1 documents are blank: e",
        "  8 queries have no group: q1, q2, q3, q4, q5, ...",
    ]
    with pytest.raises(ValueError, match="the corpus is empty\n  there are no queries"):
        RetrievalEvaluator({}, {}, {})
    with pytest.raises(ValueError, match="corpus_chunk is 0"):
        RetrievalEvaluator(["q"], ["d"], {0: [0]}, corpus_chunk=0)


@pytest.mark.parametrize(
    ("encode", "text"),
    [
        (lambda texts, kind: np.ones((1, 3)), r"shape \[1, 3\] for query texts; \[2, D\]"),
        (lambda texts, kind: np.ones((len(texts), len(texts))), r"shape \[3, 3\] for passage texts; \[3, 2\]"),
        (lambda texts, kind: np.ones(len(texts)), r"shape \[2\] for query"),
        (lambda texts, kind: np.full((len(texts), 2), np.nan), "2 of 2 query vectors are NaN or infinite, .*'first'"),
    ],
)
def test_vectors_that_cannot_be_right_are_refused(encode, text):
    evaluator = RetrievalEvaluator(["first", "second"], ["A", "B", "C"], {0: [0], 1: [1]})
    with pytest.raises(ValueError, match=text):
        evaluator(encode)


PAIRS = [
    {"query": "red", "pos_passage": ["rouge"], "neg_passage": ["bleu", "noir"], "package": "fr"},
    {"query": "blue", "pos_passage": ["bleu", "azur"], "neg_passage": [], "package": "fr"},
    {"query": "red", "pos_passage": ["rosso"], "neg_passage": None, "package": "it"},
    "",
    {"query": "black", "pos_passage": "noir", "package": "de"},
]


def test_from_pairs_merges_equal_texts(tmp_path):
    path = write_lines(tmp_path / "dev.jsonl", PAIRS)
    extra = write_lines(tmp_path / "more.jsonl", [{"text": "vert"}, {"text": "noir"}, {"title": "t", "text": "x"}])
    evaluator = RetrievalEvaluator.from_pairs(path, corpus=extra, group_field="package")
    assert evaluator.name == "dev"
    assert evaluator.query_ids == ["red", "blue", "black"]
    angles = {"rouge": 0.0, "bleu": 1.0, "azur": 1.3, "noir": 2.0, "rosso": 0.1, "vert": 0.5, "t x": 3.0}
    angles |= {"red": 0.0, "blue": 0.6, "black": 2.0}
    encoder = Encoder({text: unit(a)[0] for text, a in angles.items()})
    result = evaluator.evaluate(encoder)
    assert encoder.calls[1] == ("passage", ["rouge", "bleu", "noir", "azur", "rosso", "vert", "t x"])
    # red: rouge, rosso first; blue: vert, bleu (.4), rosso, rouge (.6), azur (.7); black: noir.
    assert result.per_query["mrr@10"].tolist() == [1, 0.5, 1]
    assert result.per_query["map"].tolist() == pytest.approx([1, (1 / 2 + 2 / 5) / 2, 1])
    assert result.groups["fr"]["queries"] == 2 and result.groups["de"]["queries"] == 1
    assert result.groups["fr"]["mrr@10"] == 0.75 and result.groups["de"]["recall@1"] == 1
    assert set(result.groups) == {"fr", "de"}
    assert result.metrics["mrr@10"] == pytest.approx(2.5 / 3)


def test_from_pairs_says_what_is_wrong(tmp_path):
    path = write_lines(tmp_path / "dev.jsonl", [*PAIRS, {"query": "green", "pos_passage": ["vert"]}])
    with pytest.raises(ValueError, match=r"1 lines of .*dev\.jsonl.*\n.*dev\.jsonl:6: no field `package`"):
        RetrievalEvaluator.from_pairs(path, group_field="package")
    with pytest.raises(DataError, match=r"dev\.jsonl:1"):
        RetrievalEvaluator.from_pairs(write_lines(path, [{"query": "red", "pos_passage": []}]))
    extra = write_lines(tmp_path / "more.jsonl", [{"body": "vert"}])
    with pytest.raises(ValueError, match=r"more\.jsonl:1: a string `text` is needed; there are 'body'"):
        RetrievalEvaluator.from_pairs(write_lines(path, PAIRS), corpus=extra)
    with pytest.raises(ValueError, match=r"corpus .*more\.jsonl: no documents in it; an object with `text` on every"):
        RetrievalEvaluator.from_pairs(path, corpus=write_lines(extra, ["", ""]))


def beir(tmp_path, queries=None, corpus=None, qrels="query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td2\t1\n"):
    rows = queries or [{"_id": f"q{i}", "text": f"query {i}"} for i in (1, 2, 3)]
    documents = corpus or [{"_id": "d1", "title": "Title", "text": "one"}, {"_id": "d2", "title": "", "text": "two"}]
    (tmp_path / "qrels.tsv").write_text(qrels)
    files = write_lines(tmp_path / "queries.jsonl", rows), write_lines(tmp_path / "corpus.jsonl", documents)
    return (*files, tmp_path / "qrels.tsv")


def test_from_files_as_beir_has_them(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("paddle_infcl"), "propagate", True)
    with caplog.at_level(logging.INFO):
        evaluator = RetrievalEvaluator.from_files(*beir(tmp_path))
    assert "1 of 3 queries are not judged" in caplog.text
    assert evaluator.query_ids == ["q1", "q2"] and evaluator.corpus_ids == ["d1", "d2"]
    encoder = Encoder(dict(zip(["query 1", "query 2", "Title one", "two"], unit(0, 1, 0.2, 0.9), strict=True)))
    assert evaluator(encoder) == dict.fromkeys(METRICS, 1.0)


def test_qrels_in_trecs_columns(tmp_path):
    evaluator = RetrievalEvaluator.from_files(*beir(tmp_path, qrels="q1 0 d1 1\nq2 0 d2 1\n\n"))
    assert evaluator.query_ids == ["q1", "q2"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"qrels": "q1\td9\t1\n"}, "1 judged documents are not in the corpus: d9"),
        ({"qrels": "q9\td1\t1\nq1\td1\t1\n"}, "1 queries are judged but unknown: q9"),
        ({"qrels": "q1\td1\t0\n"}, "1 queries have no relevant document: q1"),
        ({"qrels": "q1\td1\tyes\nq1\td1\n"}, r"2 lines of .*\n.*qrels\.tsv:1: query, document and a whole number"),
        (
            {"qrels": f"q1\td1\t1\nq1\td2\t{'9' * 30}\nq2\td1\t1.5\nq2\td2\tnan\n"},
            r"3 lines of .*\n.*qrels\.tsv:2: query, document and a whole number up to 10,000,000 .* 'q1\\td2\\t9{30}"
            r"(.|\n)*qrels\.tsv:3: .*1\.5'\n.*qrels\.tsv:4: .*nan'",
        ),
        ({"qrels": f"q1 0 d1 {2**63 - 1}\n"}, r"qrels\.tsv:1: .*a whole number up to 10,000,000"),
        (
            {"corpus": [""]},
            r"^corpus .*corpus\.jsonl: no documents in it; an object with `_id` and `text` on every line",
        ),
        ({"qrels": "q1\td1\t1\nq1\td1\t2\n"}, r"qrels\.tsv:2: q1 and d1 were judged 1 before"),
        ({"queries": [{"_id": "q1", "text": "a"}, {"_id": "q1", "text": "b"}]}, r"queries\.jsonl:2: the id 'q1' was"),
        ({"corpus": ["[1]", "{", {"text": "x"}]}, r"3 lines(.|\n)*:1: not a JSON(.|\n)*:2: not JSON(.|\n)*`_id` and"),
    ],
)
def test_files_that_are_wrong(tmp_path, change, text):
    with pytest.raises(ValueError, match=text):
        RetrievalEvaluator.from_files(*beir(tmp_path, **change))


@pytest.mark.parametrize("score", ["-1", f"-{'9' * 30}"])
def test_scores_below_zero_are_not_relevant(tmp_path, score):
    qrels = f"q1\td1\t{score}\nq1\td2\t10000000\nq2\td2\t1\n"
    evaluator = RetrievalEvaluator.from_files(*beir(tmp_path, qrels=qrels))
    encoder = Encoder(dict(zip(["query 1", "query 2", "Title one", "two"], unit(0, 1, 0.2, 0.9), strict=True)))
    found = evaluator.evaluate(encoder).per_query
    assert found["mrr@10"].tolist() == [0.5, 1] and found["recall@1"].tolist() == [0, 1]
    assert found["ndcg@10"].tolist() == pytest.approx([1 / np.log2(3), 1])
    with pytest.raises(ValueError, match="1 queries have no relevant document: q1"):
        RetrievalEvaluator.from_files(*beir(tmp_path, qrels=f"q1\td1\t{score}\nq2\td2\t1\n"))


def test_relevances_that_are_no_whole_numbers():
    wrong = {"a": 0.5, "b": float("nan"), "c": float("inf"), "d": None, "e": 10**30}
    with pytest.raises(ValueError) as info:
        RetrievalEvaluator(["q"], dict.fromkeys("abcde", "text"), {0: wrong})
    assert str(info.value).splitlines()[1:] == [
        "  5 relevances are no whole numbers up to 10,000,000 (query, document, relevance): "
        f"(0, a, 0.5), (0, b, nan), (0, c, inf), (0, d, None), (0, e, {10**30})"
    ]
    evaluator = RetrievalEvaluator(["q"], {"a": "A", "b": "B"}, {0: {"a": np.float32(2.0), "b": -1.0}})
    assert evaluator(Encoder({"q": [1, 0], "A": [1, 0], "B": [0, 1]})) == dict.fromkeys(METRICS, 1.0)


@pytest.mark.parametrize("place, name", enumerate(["queries.jsonl", "corpus.jsonl", "qrels.tsv"]))
def test_files_in_another_encoding(tmp_path, place, name):
    files = beir(tmp_path)
    with open(files[place], "ab") as stream:
        stream.write("\u00e9\n".encode("latin-1"))
    line = len(open(files[place], "rb").readlines())
    with pytest.raises(ValueError, match=rf"{name}:{line}: not UTF-8: byte 0xe9 at 0; save the file as UTF-8"):
        RetrievalEvaluator.from_files(*files)
