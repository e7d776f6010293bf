# SPDX-License-Identifier: Apache-2.0
"""The Gene Ontology set from a made-up database in GO.db's format."""

import json
import sqlite3

import pytest

from paddle_infcl.data.gene_ontology import main, make, synonyms
from paddle_infcl.data.jsonl import load_pairs
from paddle_infcl.data.rows import DataError


@pytest.fixture
def database(tmp_path):
    """40 terms, term k with k % 4 synonyms and an alternative number, which is none."""
    path = tmp_path / "GO.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE go_term (_id INTEGER, go_id TEXT, term TEXT, ontology TEXT, definition TEXT)")
        connection.execute("CREATE TABLE go_synonym (_id INTEGER, synonym TEXT, secondary TEXT, like_go_id INTEGER)")
        for k in range(40):
            text = None if k == 3 else f"The\nmeaning of term {k}."
            connection.execute("INSERT INTO go_term VALUES (?, ?, ?, 'BP', ?)", (k, f"GO:{k:07d}", f"term {k}", text))
            rows = [(k, f"name {n} of {k}", None, 0) for n in range(k % 4)] + [(k, "GO:0099999", "GO:0099999", 1)]
            connection.executemany("INSERT INTO go_synonym VALUES (?, ?, ?, ?)", [*rows, *rows[:1]])
    return str(path)


def test_terms_and_their_synonyms(database):
    found = synonyms(database)
    assert len(found) == 29  # a fourth has no synonym, one no definition
    assert found[0] == (1, "The meaning of term 1.", ["name 0 of 1"])
    assert found[1] == (2, "The meaning of term 2.", ["name 0 of 2", "name 1 of 2"])


def test_the_set_is_split_by_term_and_carries_ids(database, tmp_path):
    counts = make(str(tmp_path / "out"), database=database, fewest_synonyms=2, terms=8, held_out=0.4, eval_queries=5)
    pairs = load_pairs(tmp_path / "out" / "train.jsonl")
    assert counts["terms"] == 8 and len(pairs) == counts["train"] and counts["eval"]["queries"] == 5
    ids = {pairs[k].positive_ids[0] for k in range(len(pairs))}
    assert len(ids) == 8 and all(k % 4 >= 2 for k in ids)
    corpus = (tmp_path / "out" / "eval" / "corpus.jsonl").read_text()
    assert corpus.count("\n") == counts["held_out_terms"]
    assert not any(pairs[k].positives[0] in corpus for k in range(len(pairs)))
    assert json.loads((tmp_path / "out" / "counts.json").read_text()) == counts
    assert counts == make(str(tmp_path / "again"), database=database, fewest_synonyms=2, terms=8, held_out=0.4,
                          eval_queries=5)  # fmt: skip


def test_what_is_wrong_is_said(database, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--output_dir", str(tmp_path / "out"), "--database", str(tmp_path / "none")])
    assert "apt install r-bioc-go.db" in capsys.readouterr().err
    (tmp_path / "text").write_text("no database, but long enough to be read as one" * 40)
    with pytest.raises(DataError, match=r"not GO\.db's SQLite file"):
        synonyms(str(tmp_path / "text"))
    with pytest.raises(DataError, match="both must be there"):
        make(str(tmp_path / "out"), database=database, fewest_synonyms=9)
    main(["--output_dir", str(tmp_path / "out"), "--database", database, "--held_out", "0.5"])
    assert '"terms"' in capsys.readouterr().out
