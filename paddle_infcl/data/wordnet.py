# SPDX-License-Identifier: Apache-2.0
"""The WordNet set: from the meaning of a word to the word, a dictionary read backwards.

The query is the definition of a synset, the passage its lemmas, such as "hit, strike". Reads the database files of
WordNet 3.0 (data.noun, data.verb, data.adj, data.adv), whose format wndb(5WN) describes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence

from paddle_infcl.data.retrieval_set import write_counts, write_jsonl, write_retrieval_set
from paddle_infcl.data.rows import DataError

FOLDER = "/usr/share/wordnet"
PARTS = ("noun", "verb", "adj", "adv")


def synsets(folder: str, part: str) -> Iterator[tuple[str, list[str]]]:
    """Reads one database file.

    Args:
        folder: where the files are.
        part: noun, verb, adj or adv.

    Yields:
        (definition, lemmas): the gloss up to its first example, since examples hold the word itself; the lemmas with
        blanks for underscores, without the position marks of adjectives.

    Raises:
        DataError: a line does not have the format.
    """
    path = os.path.join(folder, f"data.{part}")
    with open(path, encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            if line.startswith("  "):
                continue  # the licence on top
            try:
                head, gloss = line.split(" | ", 1)
                fields = head.split()
                words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
                if not words or len(words) != int(fields[3], 16):
                    raise ValueError
            except (ValueError, IndexError):
                raise DataError(f"{path}:{number}: not a line of a WordNet 3.0 database file") from None
            definition = re.split(r'[;:]\s*"|^\s*"', gloss.strip(), maxsplit=1)[0].strip(" ;")
            yield definition, [re.sub(r"\((a|p|ip)\)$", "", word).replace("_", " ") for word in words]


def make(
    output_dir: str,
    *,
    wordnet: str = FOLDER,
    held_out: float = 0.2,
    eval_queries: int = 2000,
    eval_corpus: int | None = None,
    seed: int = 0,
) -> dict:
    """Makes the set: `train.jsonl`, the folder `eval` and `counts.json`, as the code-search set has them.

    One-word definitions are dropped: they are synonyms, not meanings. What is held out is decided by a hash of the
    lemmas, so a passage is on one side only, whatever its number of meanings.

    Args:
        output_dir: made if need be.
        wordnet: folder with the database files.
        held_out: share of the passages that is not trained on.
        eval_queries: number of held-out definitions to ask.
        eval_corpus: number of passages to search; None: all that are held out.
        seed: of the choice of queries.

    Returns:
        The counts that were written.

    Raises:
        DataError: the files are not there, or have another format.
    """
    missing = [part for part in PARTS if not os.path.isfile(os.path.join(wordnet, f"data.{part}"))]
    if missing:
        raise DataError(
            f"{wordnet}: no {', '.join(f'data.{part}' for part in missing)}. On Debian and Ubuntu: apt install "
            "wordnet-base; elsewhere unpack WordNet 3.0 and name its dict folder with --wordnet"
        )
    train, test = [], []
    counts: dict = {"train": 0, "held_out": 0, "one_word_definitions": 0, "parts": {}}
    for part in PARTS:
        kept = 0
        for definition, lemmas in synsets(wordnet, part):
            if len(definition.split()) < 2:
                counts["one_word_definitions"] += 1
                continue
            kept += 1
            row = {"query": definition, "positive": ", ".join(lemmas), "part": part}
            digest = hashlib.sha256(row["positive"].encode()).digest()
            (test if int.from_bytes(digest[:8], "big") < held_out * 2**64 else train).append(row)
        counts["parts"][part] = kept
    if not train or not test:
        raise DataError(f"{wordnet}: {len(train)} pairs to train on and {len(test)} held out; both must be there")
    os.makedirs(output_dir, exist_ok=True)
    write_jsonl(os.path.join(output_dir, "train.jsonl"), train)
    size = len(test) if eval_corpus is None else eval_corpus
    counts["eval"] = write_retrieval_set(os.path.join(output_dir, "eval"), test, eval_queries, size, seed)
    counts |= {"train": len(train), "held_out": len(test), "seed": seed}
    write_counts(output_dir, counts)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of scripts/make_wordnet.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="data/wordnet")
    parser.add_argument("--wordnet", default=FOLDER, help="folder with data.noun, data.verb, data.adj and data.adv")
    parser.add_argument("--held_out", type=float, default=0.2, help="share of the passages that is not trained on")
    parser.add_argument("--eval_queries", type=int, default=2000)
    parser.add_argument("--eval_corpus", type=int, default=None, help="default: every held-out passage")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(argv))
    try:
        counts = make(args.pop("output_dir"), **args)
    except DataError as error:
        parser.exit(2, f"{error}\n")
    print(json.dumps(counts, indent=2))
