# SPDX-License-Identifier: Apache-2.0
"""The Gene Ontology set: from a synonym of a term to the term's definition. Many queries share a passage.

Three synonyms per definition on average, and up to dozens: a batch is full of false negatives, and every one is known
by the term's number, which the rows carry as `pos_id`. Reads the SQLite file of Bioconductor's GO.db.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sqlite3
from collections.abc import Sequence

from paddle_infcl.data.retrieval_set import write_counts, write_jsonl, write_retrieval_set
from paddle_infcl.data.rows import DataError

FILE = "/usr/lib/R/site-library/GO.db/extdata/GO.sqlite"
_QUERY = """
    SELECT t.go_id, s.synonym, t.definition FROM go_term t JOIN go_synonym s ON s._id = t._id
    WHERE t.definition IS NOT NULL AND s.like_go_id = 0 ORDER BY t.go_id, s.synonym
"""


def synonyms(database: str) -> list[tuple[int, str, list[str]]]:
    """Terms with their synonyms.

    Args:
        database: the SQLite file.

    Returns:
        (number of the term, definition, synonyms); no synonym twice.

    Raises:
        DataError: no such file, or another format.
    """
    if not os.path.isfile(database):
        raise DataError(
            f"{database}: not there. On Debian and Ubuntu: apt install r-bioc-go.db; elsewhere take GO.db from "
            "Bioconductor and name its extdata/GO.sqlite with --database"
        )
    terms: dict[str, tuple[int, str, list[str]]] = {}
    try:
        with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
            for go_id, synonym, definition in connection.execute(_QUERY):
                name, text = synonym.strip(), " ".join(definition.split())
                term = terms.setdefault(go_id, (int(go_id.removeprefix("GO:")), text, []))
                if name and text and name not in term[2]:
                    term[2].append(name)
    except (sqlite3.Error, ValueError) as error:
        raise DataError(f"{database}: not GO.db's SQLite file: {error}") from None
    return [term for term in terms.values() if term[2]]


def make(
    output_dir: str,
    *,
    database: str = FILE,
    fewest_synonyms: int = 1,
    terms: int | None = None,
    held_out: float = 0.2,
    eval_queries: int = 2000,
    eval_corpus: int | None = None,
    seed: int = 0,
) -> dict:
    """Makes the set: `train.jsonl`, the folder `eval` and `counts.json`, as the code-search set has them.

    Split by a hash of the term: none is on both sides.

    Args:
        output_dir: made if need be.
        database: GO.db's SQLite file.
        fewest_synonyms: terms with fewer are left out.
        terms: train on so many terms at most, the first by their hash; None: all. Fewer terms, more duplicates in a
            batch.
        held_out: share of the terms that is not trained on.
        eval_queries: number of held-out synonyms to ask.
        eval_corpus: number of definitions to search; None: all that are held out.
        seed: of the choice of queries.

    Returns:
        The counts that were written.

    Raises:
        DataError: no such file, another format, or nothing left on one side.
    """
    train, test = [], []
    for number, definition, names in synonyms(database):
        if len(names) < fewest_synonyms:
            continue
        rows = [{"query": name, "positive": definition, "positive_id": number} for name in names]
        place = int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:8], "big") / 2**64
        (test if place < held_out else train).append((place, rows))
    train = sorted(train, key=lambda term: term[0])[:terms]
    if not train or not test:
        raise DataError(f"{database}: {len(train)} terms to train on and {len(test)} held out; both must be there")
    os.makedirs(output_dir, exist_ok=True)
    pairs = [row for _, rows in train for row in rows]
    write_jsonl(os.path.join(output_dir, "train.jsonl"), pairs)
    asked = [{k: row[k] for k in ("query", "positive")} for _, rows in test for row in rows]
    size = len(test) if eval_corpus is None else eval_corpus
    counts: dict = {"eval": write_retrieval_set(os.path.join(output_dir, "eval"), asked, eval_queries, size, seed)}
    counts |= {"train": len(pairs), "terms": len(train), "held_out": len(asked), "held_out_terms": len(test)}
    write_counts(output_dir, counts)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of scripts/make_gene_ontology.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="data/gene_ontology")
    parser.add_argument("--database", default=FILE, help="GO.db's GO.sqlite")
    parser.add_argument("--fewest_synonyms", type=int, default=1, help="leave terms with fewer out")
    parser.add_argument("--terms", type=int, default=None, help="train on so many terms at most; default: all")
    parser.add_argument("--held_out", type=float, default=0.2, help="share of the terms that is not trained on")
    parser.add_argument("--eval_queries", type=int, default=2000)
    parser.add_argument("--eval_corpus", type=int, default=None, help="default: every held-out definition")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(argv))
    try:
        counts = make(args.pop("output_dir"), **args)
    except DataError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(counts, indent=2))
