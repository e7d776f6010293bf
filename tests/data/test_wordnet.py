# SPDX-License-Identifier: Apache-2.0
"""The WordNet set from a made-up dictionary in WordNet's file format."""

import json
from pathlib import Path

import pytest

from paddle_infcl.data.rows import DataError
from paddle_infcl.data.wordnet import main, make, synsets

LICENCE = "  1 This software and database is being provided to you\n  2 free of charge\n"


def line(offset: int, lemmas: list[str], gloss: str) -> str:
    words = " ".join(f"{lemma} 0" for lemma in lemmas)
    return f"{offset:08d} 03 n {len(lemmas):02x} {words} 001 @ 00001740 n 0000 | {gloss}  \n"


def dictionary(folder: Path, nouns: int = 60) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = dict.fromkeys(("noun", "verb", "adj", "adv"), LICENCE)
    for i in range(nouns):
        text["noun"] += line(i, [f"noun{i}", f"other_noun_{i}"], f'the meaning number {i}; "an example of noun{i}"')
    text["verb"] += line(900, ["hit", "strike"], 'deal a blow to: "he hit it"; "she struck it"')
    text["adj"] += line(901, ["asleep(p)", "main(a)", "galore(ip)"], "in a state; of sleep")
    text["adj"] += line(902, ["big"], "large")
    text["adv"] += line(903, [f"word{i}" for i in range(17)], "(of many) with more than fifteen words")
    for part, content in text.items():
        (folder / f"data.{part}").write_text(content)
    return folder


def lines(path: Path) -> list[dict]:
    return [json.loads(row) for row in path.read_text().splitlines()]


def test_definitions_and_lemmas(tmp_path):
    folder = str(dictionary(tmp_path))
    assert list(synsets(folder, "noun"))[3] == ("the meaning number 3", ["noun3", "other noun 3"])
    assert list(synsets(folder, "verb")) == [("deal a blow to", ["hit", "strike"])]
    assert next(iter(synsets(folder, "adj"))) == ("in a state; of sleep", ["asleep", "main", "galore"])
    assert len(next(iter(synsets(folder, "adv")))[1]) == 17  # the count is hexadecimal


def test_the_set(tmp_path):
    counts = make(str(tmp_path / "out"), wordnet=str(dictionary(tmp_path / "dict")), eval_queries=4, held_out=0.3)
    train = lines(tmp_path / "out" / "train.jsonl")
    corpus = lines(tmp_path / "out" / "eval" / "corpus.jsonl")
    assert counts["one_word_definitions"] == 1
    assert counts["parts"] == {"noun": 60, "verb": 1, "adj": 1, "adv": 1}
    assert counts["train"] + counts["held_out"] == 63 and counts["train"] == len(train)
    assert 5 < counts["held_out"] < 35
    assert counts["eval"] == {"queries": 4, "corpus": counts["held_out"]}
    assert not {row["positive"] for row in train} & {row["text"] for row in corpus}
    assert json.loads((tmp_path / "out" / "counts.json").read_text()) == counts


def test_a_passage_is_on_one_side_only(tmp_path):
    folder = dictionary(tmp_path / "dict")
    with open(folder / "data.noun", "a") as stream:
        stream.writelines(line(1000 + i, [f"noun{i}", f"other_noun_{i}"], f"second meaning {i}") for i in range(60))
    counts = make(str(tmp_path / "out"), wordnet=str(folder), eval_queries=4, held_out=0.3, eval_corpus=6)
    train = {row["positive"] for row in lines(tmp_path / "out" / "train.jsonl")}
    corpus = [row["text"] for row in lines(tmp_path / "out" / "eval" / "corpus.jsonl")]
    assert counts["held_out"] % 2 == 0
    assert len(corpus) == len(set(corpus)) == 6 and not set(corpus) & train


def test_errors(tmp_path):
    with pytest.raises(DataError, match=r"no data.noun, data.verb, data.adj, data.adv.*apt install wordnet-base"):
        make(str(tmp_path / "out"), wordnet=str(tmp_path))
    folder = dictionary(tmp_path / "dict")
    with pytest.raises(DataError, match="63 pairs to train on and 0 held out"):
        make(str(tmp_path / "out"), wordnet=str(folder), held_out=0)
    for wrong in ("00001740 03 n zz entity\n", "no bar at all\n", "00001740 03 n 04 entity 0 | a thing\n"):
        (folder / "data.adv").write_text(LICENCE + wrong)
        with pytest.raises(DataError, match=r"data.adv:3: not a line of a WordNet"):
            make(str(tmp_path / "out"), wordnet=str(folder))


def test_command_line(tmp_path, capsys):
    out = str(tmp_path / "out")
    main(["--output_dir", out, "--wordnet", str(dictionary(tmp_path / "dict")), "--eval_queries", "3"])
    assert json.loads(capsys.readouterr().out)["eval"]["queries"] == 3
    with pytest.raises(SystemExit):
        main(["--output_dir", out, "--wordnet", str(tmp_path)])
    assert "apt install wordnet-base" in capsys.readouterr().err
