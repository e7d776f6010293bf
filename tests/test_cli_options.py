# SPDX-License-Identifier: Apache-2.0
"""Words of `encode` and `evaluate` that can't work: named, with what would be right, before anything is done."""

import json

import pytest

from paddle_infcl.cli import main

LIMIT = "must be 1 token or more, special tokens included; leave it out for the model's limit"
TEMPLATE = "must contain {text} exactly once"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """The words of both commands that work but for the model, which must not load."""
    monkeypatch.setattr("paddle_infcl.commands.common.load_for_inference", lambda options: pytest.fail("it loads"))
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "pairs").write_text(json.dumps({"query": "a", "pos_passage": ["b"]}) + "\n")
    (tmp_path / "queries").write_text(json.dumps({"_id": "q", "text": "a"}) + "\n")
    (tmp_path / "corpus").write_text(json.dumps({"_id": "d", "text": "b"}) + "\n")
    (tmp_path / "qrels").write_text("q\td\t1\n")
    return {
        "encode": ["encode", "--model", "m", "--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "a.npy")],
        "evaluate": ["evaluate", "--model", "m", "--pairs", str(tmp_path / "pairs")],
    }


@pytest.mark.parametrize(
    ("command", "option", "value", "right"),
    [
        ("encode", "max_length", 0, LIMIT),
        ("encode", "max_length", -1, LIMIT),
        ("encode", "batch_size", 0, "must be 1 or more"),
        ("encode", "template", "", TEMPLATE),
        ("encode", "template", "query: ", TEMPLATE),
        ("encode", "template", "{text} {text}", TEMPLATE),
        ("encode", "field", "", "must not be empty; leave it out for the default"),
        ("encode", "input", "", "must name a file"),
        ("encode", "output", "", "must name a file"),
        ("evaluate", "max_query_len", 0, LIMIT),
        ("evaluate", "max_passage_len", -8, LIMIT),
        ("evaluate", "batch_size", -1, "must be 1 or more"),
        ("evaluate", "query_template", "", TEMPLATE),
        ("evaluate", "passage_template", "", TEMPLATE),
        ("evaluate", "passage_template", "passage", TEMPLATE),
        ("evaluate", "group_field", "", "must not be empty; leave it out for the default"),
        ("evaluate", "corpus", "", "must name a file"),
        ("evaluate", "output", "", "must name a file"),
    ],
)
def test_what_was_given_counts(words, command, option, value, right, caplog):
    """0 and the empty text are not "not given"."""
    assert main([*words[command], f"--{option}", str(value)]) == 1
    assert f"1 option can't work:\n  --{option} = {value!r}: {right}" in caplog.text


def test_all_that_is_wrong_comes_at_once(words, caplog):
    assert main([*words["encode"], "--max_length", "0", "--batch_size", "0", "--template", ""]) == 1
    assert "3 options can't work" in caplog.text


@pytest.mark.parametrize("way", ["same", "relative", "link"])
@pytest.mark.parametrize("option", ["input", "pairs", "queries", "corpus", "qrels"])
def test_an_input_is_not_overwritten(words, tmp_path, monkeypatch, option, way, caplog):
    monkeypatch.chdir(tmp_path)
    given = {name: str(tmp_path / name) for name in ("queries", "corpus", "qrels")}
    if option == "input":
        given = {"input": str(tmp_path / "a.txt")}
    elif option == "pairs":
        given = {"pairs": str(tmp_path / "pairs")}
    source = tmp_path / given[option]
    before = source.read_bytes()
    (tmp_path / "link").symlink_to(source)
    output = {"same": str(source), "relative": f"./{source.name}", "link": "link"}[way]
    command = ["encode" if option == "input" else "evaluate", "--model", "m", "--output", output]
    assert main(command + [word for name, file in given.items() for word in (f"--{name}", file)]) == 1
    assert f"--output = {output!r}: is the same file as --{option} {source}, which it would overwrite" in caplog.text
    assert source.read_bytes() == before


def test_an_empty_corpus_is_an_error(words, tmp_path, caplog):
    (tmp_path / "corpus").write_text("\n")
    assert main([*words["evaluate"], "--corpus", str(tmp_path / "corpus")]) == 1
    assert (
        f"corpus {tmp_path / 'corpus'}: no documents in it; an object with `text` on every line is right"
        in caplog.text
    )
