# SPDX-License-Identifier: Apache-2.0
"""The metrics against the definitions, written out in NumPy here, and the search against a full sort."""

import math
import subprocess
import sys

import numpy as np
import pytest

from paddle_infcl.evaluation.metrics import METRICS, ranking_metrics
from paddle_infcl.evaluation.search import search


def by_definition(ranking, relevant):
    """The metrics of one query, from the ranking's numbers and {document: grade}."""
    hits = [document in relevant for document in ranking]
    ranks = [rank for rank, hit in enumerate(hits, 1) if hit]
    gains = [relevant.get(document, 0) for document in ranking[:10]]
    ideal = sorted(relevant.values(), reverse=True)[:10]
    found = {k: sum(rank <= k for rank in ranks) for k in (1, 10, 100)}
    return {
        "mrr@10": 1 / ranks[0] if ranks and ranks[0] <= 10 else 0.0,
        "ndcg@10": sum(g / math.log2(i + 2) for i, g in enumerate(gains))
        / sum(g / math.log2(i + 2) for i, g in enumerate(ideal)),
        **{f"recall@{k}": found[k] / len(relevant) for k in (1, 10, 100)},
        "map": sum((i + 1) / rank for i, rank in enumerate(ranks)) / len(relevant),
    }


@pytest.mark.parametrize("most", [1, 5, 30])
def test_metrics_against_their_definitions(most):
    generator = np.random.default_rng(most)
    rankings = np.stack([generator.permutation(400)[:300] for _ in range(1500)])  # more than one block of queries
    relevant = [
        {int(d): int(generator.integers(1, 4)) for d in generator.choice(400, generator.integers(1, most + 1), False)}
        for _ in range(1500)
    ]
    for row in range(0, 1500, 3):  # some good rankings among the random ones
        found = list(relevant[row])
        rankings[row] = np.concatenate([found, np.setdiff1d(rankings[row], found)])[:300]
    values = ranking_metrics(rankings, relevant)
    assert set(values) == set(METRICS)
    for row in range(1500):
        expected = by_definition(rankings[row].tolist(), relevant[row])
        for name in METRICS:
            assert values[name][row] == pytest.approx(expected[name], abs=1e-6), (name, row)


def test_nothing_found_and_short_rankings():
    values = ranking_metrics(np.array([[5, 6, -1, -1], [5, 3, -1, -1], [-1, -1, -1, -1]]), [{3: 1}, {3: 1}, {0: 2}])
    for name in METRICS:
        assert values[name][0] == values[name][2] == 0
    assert (values["mrr@10"][1], values["map"][1], values["recall@1"][1]) == (0.5, 0.5, 0)
    assert values["ndcg@10"][1] == pytest.approx(1 / math.log2(3))


def brute_force(queries, corpus, k):
    scores = queries.astype(np.float64) @ corpus.T.astype(np.float64)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, order, 1), order


@pytest.mark.parametrize("chunk", [7, 50, 300, 1000])
@pytest.mark.parametrize("k", [1, 20, 120, 300])
def test_search_is_a_full_sort(chunk, k):
    generator = np.random.default_rng(0)
    # Whole numbers that fp32 multiplies and adds exactly.
    queries, corpus = (generator.integers(-500, 500, (n, 16)).astype("float32") for n in (1100, 300))
    expected, order = brute_force(queries, corpus, k)
    scores, documents = search(queries, (corpus[i : i + chunk] for i in range(0, 300, chunk)), k)
    np.testing.assert_array_equal(documents, order)
    np.testing.assert_array_equal(scores, expected)


@pytest.mark.parametrize("chunk", [9, 64, 200])
def test_equal_scores_keep_the_order_of_the_corpus(chunk):
    generator = np.random.default_rng(1)
    # Small whole numbers: scores are exact, and most are shared by many documents.
    queries, corpus = (generator.integers(-1, 2, (n, 4)).astype("float32") for n in (40, 200))
    _, order = brute_force(queries, corpus, 200)
    _, documents = search(queries, (corpus[i : i + chunk] for i in range(0, 200, chunk)), 200)
    np.testing.assert_array_equal(documents, order)


def test_a_corpus_smaller_than_k_leaves_places_empty():
    scores, documents = search(np.ones((2, 3), "float32"), [np.ones((1, 3), "float32"), np.eye(3, dtype="float32")], 6)
    assert documents.tolist() == [[0, 1, 2, 3, -1, -1]] * 2
    assert scores[0].tolist() == [3, 1, 1, 1, -np.inf, -np.inf]


@pytest.mark.parametrize("first", ["faiss", "paddle"])
def test_faiss_and_paddle_share_a_process(first):
    # Both bring an OpenMP runtime. Each must still work after the other has used its threads.
    script = f"""
import {first}, numpy as np, paddle
from paddle_infcl.evaluation.search import search
x = np.random.default_rng(0).standard_normal((3000, 64)).astype("float32")
for _ in range(2):
    product = (paddle.to_tensor(x) @ paddle.to_tensor(x[:50]).T).numpy()
    _, found = search(x[:50], [x], 5)
    assert (found[:, 0] == product.argmax(0)).all()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "fine\n", done.stderr
