# SPDX-License-Identifier: Apache-2.0
"""Writes held-out pairs as a retrieval task: queries, a corpus, and which passage answers which query."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Sequence


def write_jsonl(path: str, rows: Sequence[dict]) -> None:
    """Writes one JSON object per line."""
    with open(path, "w", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def write_counts(folder: str, counts: dict) -> None:
    """Writes what a set holds to `counts.json`."""
    with open(os.path.join(folder, "counts.json"), "w", encoding="utf-8") as stream:
        json.dump(counts, stream, indent=2)
        stream.write("\n")


def write_retrieval_set(folder: str, pairs: Sequence[dict], queries: int, corpus: int, seed: int) -> dict[str, int]:
    """Writes held-out pairs as a retrieval task.

    Files: `pairs.jsonl` (query, positive and what else the pairs have), and the same as `queries.jsonl`,
    `corpus.jsonl` (_id, text) and `qrels.tsv` (query-id, corpus-id, score, with a header). The corpus holds the
    passages of the queries and, up to its size, passages of other held-out pairs. Passages with equal texts are one.

    Args:
        folder: made if need be.
        pairs: dicts with query, positive, package.
        queries: number of queries, at most.
        corpus: number of passages, at least those of the queries.
        seed: of the choice.

    Returns:
        The counts: queries, corpus.
    """
    os.makedirs(folder, exist_ok=True)
    chosen = list(pairs)
    random.Random(seed).shuffle(chosen)
    asked = chosen[:queries]
    ids: dict[str, str] = {}
    for number, pair in enumerate(chosen):
        if number >= len(asked) and len(ids) >= corpus:
            break
        ids.setdefault(pair["positive"], f"p{len(ids)}")
    write_jsonl(os.path.join(folder, "pairs.jsonl"), asked)
    extra = [{key: value for key, value in pair.items() if key not in ("query", "positive")} for pair in asked]
    numbered = list(enumerate(zip(asked, extra, strict=True)))
    write_jsonl(
        os.path.join(folder, "queries.jsonl"),
        [{"_id": f"q{n}", "text": p["query"], **more} for n, (p, more) in numbered],
    )
    write_jsonl(os.path.join(folder, "corpus.jsonl"), [{"_id": name, "text": text} for text, name in ids.items()])
    with open(os.path.join(folder, "qrels.tsv"), "w", encoding="utf-8") as stream:
        stream.write("query-id\tcorpus-id\tscore\n")
        stream.writelines(f"q{n}\t{ids[p['positive']]}\t1\n" for n, (p, _) in numbered)
    return {"queries": len(asked), "corpus": len(ids)}
