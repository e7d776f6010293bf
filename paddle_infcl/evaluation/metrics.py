# SPDX-License-Identifier: Apache-2.0
"""Ranking metrics, by the field's own implementations (trec_eval and MS MARCO's, through ir_measures)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

METRICS = ("mrr@10", "ndcg@10", "recall@1", "recall@10", "recall@100", "map")

DEPTH = 1000
"""How deep a ranking is looked at: trec_eval's convention. Only `map` sees beyond rank 100."""

HIGHEST = 10_000_000
"""The highest relevance. trec_eval keeps a table with an entry for each relevance up to the highest; where the table
does not fit into memory, every metric comes out as 0 without a word, or the process crashes."""

_BLOCK = 1024  # queries that are handed over at once, as dictionaries


def ranking_metrics(rankings: np.ndarray, relevant: Sequence[Mapping[int, int]]) -> dict[str, np.ndarray]:
    """The metrics of every query.

    - mrr@10: 1 / rank of the first relevant document, 0 if it is not among the first 10.
    - ndcg@10: trec_eval's ndcg_cut: gain = relevance, discount log2(rank + 1).
    - recall@k: share of the relevant documents that are among the first k.
    - map: average precision over the whole ranking; documents that are not in it count as not found.

    Args:
        rankings: [Q, k] int64, documents by number, the best first; -1 fills rows that have fewer.
        relevant: for every query the relevance (> 0) by document, at most HIGHEST; at least one each.

    Returns:
        For each of METRICS an array [Q] float64.
    """
    from ir_measures import AP, RR, R, iter_calc, nDCG

    names = {RR @ 10: "mrr@10", nDCG @ 10: "ndcg@10", R @ 1: "recall@1", R @ 10: "recall@10", R @ 100: "recall@100"}
    names[AP] = "map"
    values = {name: np.zeros(len(rankings)) for name in METRICS}
    for first in range(0, len(rankings), _BLOCK):
        block = range(first, min(first + _BLOCK, len(rankings)))
        qrels = {str(i): {str(document): int(grade) for document, grade in relevant[i].items()} for i in block}
        run = {str(i): _until_last_hit(rankings[i], relevant[i]) for i in block}
        for found in iter_calc(list(names), qrels, run):
            values[names[found.measure]][int(found.query_id)] = found.value
    return values


def _until_last_hit(ranking: np.ndarray, relevant: Mapping[int, int]) -> dict[str, float]:
    """A ranking as ir_measures takes it, cut after its last relevant document: nothing below it counts in any metric.

    Scores are minus the rank. The order is then the ranking's in every implementation, also where similarities are
    equal (trec_eval would put the higher name first).
    """
    hits = np.flatnonzero(np.isin(ranking, np.fromiter(relevant, np.int64, len(relevant))))
    length = int(hits[-1]) + 1 if len(hits) else 1
    return {str(document): -float(rank) for rank, document in enumerate(ranking[:length].tolist())}
