# SPDX-License-Identifier: Apache-2.0
"""Batches that are spread over processes, the same batch in one piece, and objectives over them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import paddle

from paddle_infcl.functional.blocks import Block, Hardness
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.guided import guided_groups
from paddle_infcl.functional.ranking import ranking_groups


@dataclass
class Part:
    """What one process has, as arrays."""

    q: np.ndarray
    p: np.ndarray
    own: np.ndarray
    q_ids: np.ndarray
    p_ids: np.ndarray
    guide_q: np.ndarray
    guide_p: np.ndarray


def parts(rows: list[int], negatives: list[int], *, width: int = 8, seed: int = 0, unit: bool = True) -> list[Part]:
    """The processes' parts of a batch.

    Args:
        rows: queries of each process.
        negatives: hard negatives that each query of each process has.
        width: of the vectors.
        seed: of the random numbers.
        unit: vectors of length 1, else inputs of an encoder.
    """
    rng = np.random.default_rng(seed)

    def vectors(n, width):
        x = rng.standard_normal((n, width))
        return x / np.linalg.norm(x, axis=1, keepdims=True) if unit or width == 3 else x

    out, document = [], 0
    for count, extra in zip(rows, negatives, strict=True):
        N = count * (1 + extra)
        own = np.arange(count) * (1 + extra)
        q_ids = np.stack([rng.integers(0, 5, count), document + np.arange(count)], 1)
        p_ids = np.full((N, 2), -1)
        p_ids[:, 0] = rng.integers(0, 5, N)
        p_ids[own] = q_ids
        document += count
        out.append(Part(vectors(count, width), vectors(N, width), own, q_ids, p_ids, vectors(count, 3), vectors(N, 3)))
    return out


def whole(pieces: list[Part]) -> Part:
    """The batch of all processes as one process's."""
    offsets = np.cumsum([0] + [len(part.p) for part in pieces[:-1]])
    joined = {f.name: np.concatenate([getattr(part, f.name) for part in pieces]) for f in fields(Part)}
    joined["own"] = np.concatenate([part.own + o for part, o in zip(pieces, offsets, strict=True)])
    return Part(**joined)


def _candidates(part: Part, q, p, ids: bool) -> Candidates:
    q_ids, p_ids = (paddle.to_tensor(part.q_ids), paddle.to_tensor(part.p_ids)) if ids else (None, None)
    return Candidates.from_passages(q, p, paddle.to_tensor(part.own), q_ids, p_ids)


def _plain(part, q, p):
    return info_nce_groups(q, p, own=paddle.to_tensor(part.own))


def _ids(part, q, p):
    return info_nce_groups(
        q, p, own=paddle.to_tensor(part.own), q_ids=paddle.to_tensor(part.q_ids), p_ids=paddle.to_tensor(part.p_ids)
    )


def _margin(part, q, p):
    return info_nce_groups(q, p, own=paddle.to_tensor(part.own), margin=0.2)


def _margin_keeps(part, q, p):
    return info_nce_groups(q, p, own=paddle.to_tensor(part.own), margin=0.2, keep_own_negatives=True)


def _guided(part, q, p):
    guide = _candidates(part, paddle.to_tensor(part.guide_q), paddle.to_tensor(part.guide_p), ids=False)
    return guided_groups(
        _candidates(part, q, p, ids=True), guide, margin=0.1, contrast_anchors=False, keep_own_negatives=True
    )


def _symmetric(part, q, p):
    return ranking_groups(
        _candidates(part, q, p, ids=False), directions=("query_to_doc", "doc_to_query"), partition="per_direction"
    )


def _four_ways(part, q, p):
    directions = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    return ranking_groups(
        _candidates(part, q, p, ids=True), directions=directions, hardness_mode="hard_negatives", hardness_strength=3.0
    )


def _own_negatives(part, q, p):
    """Own hard negatives only, and everybody's positives, which are harder for others."""
    batch = _candidates(part, q, p, ids=False)
    first = Block(q, p, own=batch.own, owner=batch.owners[0], owner_rule="only")
    others = Block(
        batch.positives, batch.positives, self_column=batch.row_numbers, owner=batch.row_numbers,
        hardness=Hardness(2.0, "others"),
    )  # fmt: skip
    return [[first, others]]


# From arrays and the vectors of one process to its groups of blocks.
OBJECTIVES = {
    "plain": _plain,
    "ids": _ids,
    "margin": _margin,
    "margin, own negatives kept": _margin_keeps,
    "guided": _guided,
    "symmetric": _symmetric,
    "four ways": _four_ways,
    "own negatives": _own_negatives,
}
