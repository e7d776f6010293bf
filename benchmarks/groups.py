# SPDX-License-Identifier: Apache-2.0
"""The blocks of a benchmark case: those that `paddle_infcl.functional` lists for the objective.

The public functions scale their columns to length 1 and compute thresholds first, in Paddle operators on [B, D]. The
benchmark times what comes after, the operators of `paddle_infcl_ops` on the same blocks: on a device without a Paddle
of its own the rest would be the CPU's time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import paddle

from benchmarks.cases import Case
from paddle_infcl.functional.blocks import Block, Guide
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.qwen3 import qwen3_groups
from paddle_infcl.functional.ranking import DIRECTIONS, ranking_groups
from paddle_infcl.functional.symmetric import symmetric_groups


def block(left, right, own=None, **fields) -> SimpleNamespace:
    """A block as the operators take it."""
    names = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
    return SimpleNamespace(left=left, right=right, own=own, row_offset=0, **{n: fields.get(n) for n in names})


def rows_of(value: float, B: int) -> paddle.Tensor:
    """[B] fp32 of one number."""
    return paddle.to_tensor(np.full(B, value, "float32"))


def groups_of(case: Case, q, p, guide_vectors: Callable[[int, int], paddle.Tensor]) -> list[list]:
    """The blocks of a case.

    Args:
        case: its kind decides.
        q, p: [B, D], [N, D].
        guide_vectors: (rows, seed) -> [rows, 384] unit vectors.
    """
    B, N = case.B, case.N
    own = paddle.to_tensor(np.arange(B) * (N // B))
    if case.kind in ("four directions", "symmetric", "qwen3", "hardness"):
        if case.kind == "symmetric":
            return symmetric_groups(q, p, None, None)
        batch = Candidates.from_columns([q, p], normalize=False)
        if case.kind == "four directions":
            return ranking_groups(batch, directions=DIRECTIONS)
        if case.kind == "hardness":
            return ranking_groups(batch, hardness_mode="in_batch_negatives", hardness_strength=5.0)
        groups = qwen3_groups(batch, margin=None)
        for each in groups[0]:
            each.limit = rows_of(0.22, B)
        return groups
    if case.kind == "ids":
        generator = np.random.default_rng(7)
        ids = [paddle.to_tensor(generator.integers(0, 2**40, (n, 2))) for n in (B, N)]
        return [[block(q, p, own, row_ids=ids[0], column_ids=ids[1])]]
    if case.kind == "margin":
        return [[block(q, p, own, limit=rows_of(0.22, B))]]
    guides = {"q": None, "p": None}
    if "guide" in case.kind:
        guides = {"q": guide_vectors(B, 3), "p": guide_vectors(N, 4)}

    def guide(left: str, right: str) -> Guide | None:
        return None if guides["q"] is None else Guide(guides[left], guides[right], rows_of(0.3, B))

    first = Block(q, p, own=own, guide=guide("q", "p"))
    if "blocks" not in case.kind:
        return [[first]]
    itself = paddle.to_tensor(np.arange(B))
    return [[first, Block(q, q, self_column=itself, guide=guide("q", "q")),
             Block(p, p, self_column=itself, guide=guide("p", "p"))]]  # fmt: skip
