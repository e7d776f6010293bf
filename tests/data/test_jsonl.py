# SPDX-License-Identifier: Apache-2.0
"""Files, folders, weights, and bad rows: all counted, none dropped."""

import json
import logging
import os
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.data.jsonl import SHOWN, load_pairs
from paddle_infcl.data.rows import DataError, Example
from tests.data.tokenizers import write_rows


@pytest.fixture
def said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("paddle_infcl"), "propagate", True)
    caplog.set_level(logging.INFO)
    return caplog


def simple(n: int, name: str = "") -> list[dict]:
    return [{"query": f"{name}q{i}", "pos": f"{name}p{i}"} for i in range(n)]


def test_rows_come_back_in_order_with_their_source(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [*simple(3), "", "  ", {"query": "ü", "pos": ["日本", "b"], "neg": "n"}])
    data = load_pairs(path)
    assert len(data) == 4
    assert data[3] == data[-1] == Example("ü", ["日本", "b"], ["n"], source=f"{path}:6")
    assert [example.query for example in data] == ["q0", "q1", "q2", "ü"]
    assert data.lengths.tolist() == [4, 4, 4, 3]
    for index in (4, -5):
        with pytest.raises(IndexError):
            data[index]


@given(st.lists(st.text(min_size=1).filter(lambda t: t.strip() and not any(0xD800 <= ord(c) < 0xE000 for c in t))))
@settings(max_examples=60, deadline=None)
def test_any_text_survives(tmp_path_factory, texts):
    rows = [{"query": text, "pos": [text, "b"], "neg": [text + "x"]} for text in [*texts, "last"]]
    path = tmp_path_factory.mktemp("any") / "a.jsonl"
    path.write_bytes("\r\n".join(json.dumps(row, ensure_ascii=bool(i % 2)) for i, row in enumerate(rows)).encode())
    data = load_pairs(path)
    assert [(e.query, e.positives, e.negatives) for e in data] == [(r["query"], r["pos"], r["neg"]) for r in rows]


def test_no_newline_at_the_end_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"query": "a", "pos": "b"}\r\n{"query": "c", "pos": "d"}')
    assert [e.query for e in load_pairs(path)] == ["a", "c"]


def test_folders_as_upstream(tmp_path):
    write_rows(tmp_path / "one" / "train.json", simple(2))
    write_rows(tmp_path / "many [x]" / "train" / "b.json", simple(1, "b"))
    write_rows(tmp_path / "many [x]" / "train" / "a.jsonl", simple(1, "a"))
    write_rows(tmp_path / "one" / "dev.jsonl", simple(3, "d"))
    data = load_pairs([tmp_path / "one", tmp_path / "many [x]"])
    assert [e.query for e in data] == ["q0", "q1", "bq0", "aq0"]
    assert len(load_pairs(tmp_path / "one", split="dev")) == 3
    assert data.source(3).endswith("a.jsonl:1")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda d: d / "absent.jsonl", "no such file or folder"),
        (lambda d: d, "a folder must hold train.json"),
        (lambda d: [], "not one path"),
    ],
)
def test_paths_that_are_not_there(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        load_pairs(make(tmp_path))


def test_ambiguous_folder_and_a_file_twice(tmp_path):
    path = write_rows(tmp_path / "train.json", simple(1))
    with pytest.raises(DataError, match=r"given twice.*weight of 2"):
        load_pairs([path, tmp_path])
    write_rows(tmp_path / "train.jsonl", simple(1))
    with pytest.raises(DataError, match=r"holds both .*train.json and .*train.jsonl"):
        load_pairs(tmp_path)


def test_bad_rows_are_all_counted_and_listed(tmp_path):
    good = {"query": "q", "pos": "p"}
    bad = [
        '{"query": "q", "pos": "p"',
        '{"query": "q", "pos": "p", "pos": "r"}',
        '{"query": "\\ud800", "pos": "p"}',
        {"query": "q", "pos": "p", "neg": ""},
        {"query": "q", "pos": "p", "neg": [""]},
        {"query": "q", "positive": "p", "neg": "n"},
    ]
    path = write_rows(tmp_path / "a.jsonl", [good, *bad, good])
    with pytest.raises(DataError) as caught:
        load_pairs(path)
    assert caught.value.counts == {
        "not JSON": 1,
        "field given twice": 1,
        "half a character": 1,
        "blank negative": 2,
        "mixed naming schemes": 1,
    }
    text = str(caught.value)
    assert text.startswith("6 of 8 rows cannot be used")
    assert "2 x blank negative" in text
    # FlagEmbedding 1369: file, line and reason.
    for line in range(2, 8):
        assert f"{path}:{line}: " in text
    assert f"{path}:1:" not in text and f"{path}:8:" not in text


def test_many_bad_rows_stay_readable(tmp_path):
    with pytest.raises(DataError) as caught:
        load_pairs(write_rows(tmp_path / "a.jsonl", [{"query": "q"}] * 1000))
    assert caught.value.counts == {"no positive": 1000}
    assert str(caught.value).count("a.jsonl:") == SHOWN
    assert f"and {1000 - SHOWN} more" in str(caught.value)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "empty file"),
        (b"\n \n", "empty file"),
        ('{"query": "q", "pos": "p"}'.encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b'{"query": "caf\xe9", "pos": "p"}', "byte 0xe9 at 14"),
        (b' [{"query": "q", "pos": "p"}]', "one object per line"),
        (b'{"query": "q", "pos": "p"} {}', "not JSON"),
    ],
)
def test_wrong_files(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError) as caught:
        load_pairs(tmp_path / "a.json")
    assert message in str(caught.value)
    assert "a.json" in str(caught.value)


def test_ids_are_all_or_nothing(tmp_path):
    # A batch with ids on one rank and without on another would not match.
    rows = [{"query": "a", "pos": "b", "neg": "c", "query_id": 1}, {"query": "d", "pos": "e"}]
    data = load_pairs(write_rows(tmp_path / "a.jsonl", rows))
    assert data.has_ids
    assert (data[0].query_id, data[0].positive_ids, data[0].negative_ids) == (1, [-1], [-1])
    assert (data[1].query_id, data[1].positive_ids, data[1].negative_ids) == (-1, [-1], [])
    assert load_pairs(write_rows(tmp_path / "b.jsonl", simple(1)))[0].query_id is None


def test_says_what_it_ignores(tmp_path, said):
    rows = [{"query": "q", "pos": "p", "neg": ["p", "n"], "score": 1}, {"query": "r", "pos": "s", "lang": "en"}]
    load_pairs(write_rows(tmp_path / "a.jsonl", rows))
    assert "fields that are not used: lang, score" in said.text
    assert "1 rows name one of their positives as a negative as well" in said.text
    assert "a.jsonl:1" in said.text


def test_weights(tmp_path):
    a, b = write_rows(tmp_path / "a.jsonl", simple(10, "a")), write_rows(tmp_path / "b.jsonl", simple(4, "b"))
    data = load_pairs([a, b], weights=[0.5, 2.25])
    assert data.rows_per_epoch == 14
    epochs = [data.epoch_rows(seed=1, epoch=e) for e in range(30)]
    for rows in epochs:
        assert len(rows) == 14
        counts = np.bincount(rows, minlength=14)
        assert counts[:10].sum() == 5 and counts[:10].max() == 1
        assert sorted(counts[10:]) == [2, 2, 2, 3]
    assert (data.epoch_rows(1, 3) == epochs[3]).all()
    assert len({tuple(rows) for rows in epochs}) > 20
    assert len(set(np.concatenate(epochs).tolist())) == 14
    assert (data.epoch_rows(2, 3) != epochs[3]).any()


def test_without_weights_every_row_once(tmp_path):
    data = load_pairs(write_rows(tmp_path / "a.jsonl", simple(5)))
    assert data.epoch_rows(0, 0).tolist() == [0, 1, 2, 3, 4]
    assert data.rows_per_epoch == 5


@pytest.mark.parametrize("weights", [[1.0, 2.0], [0], [-1], [float("nan")], ["2"], [0.01]])
def test_wrong_weights(tmp_path, weights):
    with pytest.raises(DataError, match="weight"):
        load_pairs(write_rows(tmp_path / "a.jsonl", simple(5)), weights=weights)


def test_row_keys(tmp_path):
    rows = [*simple(2), {"query": "q0", "pos": ["x", "p1"]}]
    data = load_pairs(write_rows(tmp_path / "a.jsonl", rows))
    keys, starts = data.row_keys()
    assert starts.tolist() == [0, 2, 4, 7]
    sets = [set(keys[starts[i] : starts[i + 1]].tolist()) for i in range(3)]
    assert [len(sets[2] & sets[i]) for i in range(2)] == [1, 1]
    assert data.row_keys()[0] is keys


def test_a_file_that_changes_is_noticed(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", simple(3))
    data = load_pairs(path)
    write_rows(tmp_path / "a.jsonl", simple(4))
    with pytest.raises(DataError, match="changed after it was checked; load it again"):
        data[0]
    data = load_pairs(path)
    assert data[0].query == "q0"
    with open(path, "r+b") as stream:  # behind its back, with the file open
        stream.write(b"xxx")
    with pytest.raises(DataError, match=r"a.jsonl:1: changed after it was checked: not JSON"):
        data[0]


def test_pickles_without_open_files_and_closes_them(tmp_path):
    data = load_pairs(write_rows(tmp_path / "a.jsonl", simple(3)))
    assert data[1].query == "q1"
    copy = pickle.loads(pickle.dumps(data))
    assert copy[2].query == "q2"
    before = len(os.listdir("/proc/self/fd"))
    data.close()
    del copy
    assert len(os.listdir("/proc/self/fd")) == before - 2
    assert data[0].query == "q0"


def test_texts_do_not_stay_in_memory(tmp_path):
    row = json.dumps({"query": "q" * 100, "pos": "p" * 2000})
    path = write_rows(tmp_path / "a.jsonl", [row] * 5000)
    load_pairs(path)  # caches of the first call
    tracemalloc.start()
    data = load_pairs(path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(data) == 5000
    assert held < 5000 * 32 + 20000
