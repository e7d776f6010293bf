# SPDX-License-Identifier: Apache-2.0
"""Exact search by inner product, a chunk of the corpus at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import numpy as np

_BLOCK = 1024  # queries whose candidates are merged at once


def search(queries: np.ndarray, chunks: Iterable[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k documents with the largest inner products, for every query.

    Documents with equal scores are ranked in corpus order. (Which of several equal documents takes the last place,
    rank k, is faiss's choice: the same in every run.)

    Args:
        queries: [Q, D] float32.
        chunks: parts of the corpus [n_c, D] float32, in order; each is dropped before the next one is asked for.
        k: how many.

    Returns:
        (scores [Q, k] float32, documents [Q, k] int64, numbered over all chunks); -inf and -1 where the corpus has
        fewer than k.
    """
    # Its loader logs which CPU features it looks for.
    logging.getLogger("faiss.loader").setLevel(logging.WARNING)
    import faiss

    scores = np.full((len(queries), k), -np.inf, np.float32)
    documents = np.full((len(queries), k), -1, np.int64)
    first = 0
    for chunk in chunks:
        for start in range(0, len(queries), _BLOCK):
            rows = slice(start, start + _BLOCK)
            found, number = faiss.knn(queries[rows], chunk, min(k, len(chunk)), metric=faiss.METRIC_INNER_PRODUCT)
            _order_ties(found, number)
            # Both halves are sorted, and the first one's numbers are smaller: a stable sort merges them.
            best = np.concatenate([scores[rows], found], 1)
            number = np.concatenate([documents[rows], number + first], 1)
            order = np.argsort(-best, axis=1, kind="stable")[:, :k]
            scores[rows] = np.take_along_axis(best, order, 1)
            documents[rows] = np.take_along_axis(number, order, 1)
        first += len(chunk)
        del chunk
    return scores, documents


def _order_ties(scores: np.ndarray, number: np.ndarray) -> None:
    """Sorts documents of equal score by number, in place; rows are sorted by score already."""
    tied = np.flatnonzero((scores[:, 1:] == scores[:, :-1]).any(axis=1))
    order = np.lexsort((number[tied], -scores[tied]), axis=1)
    number[tied] = np.take_along_axis(number[tied], order, 1)
