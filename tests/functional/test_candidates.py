# SPDX-License-Identifier: Apache-2.0
"""A flat batch of passages and the same batch in columns are the same loss, for every list of blocks."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import Candidates, info_nce
from paddle_infcl.functional.guided import guided_groups
from paddle_infcl.functional.qwen3 import qwen3_groups
from paddle_infcl.functional.ranking import ranking_groups
from paddle_infcl.functional.vectors import l2_normalize

FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def columns_and_passages(negatives, seed=0, rows=5, width=6):
    rng = np.random.default_rng(seed)
    columns = [l2_normalize(paddle.to_tensor(rng.standard_normal((rows, width)))) for _ in range(2 + negatives)]
    p = paddle.stack(columns[1:], axis=1).reshape([-1, width])
    return columns, (columns[0], p)


@pytest.mark.parametrize("negatives", [0, 2])
@pytest.mark.parametrize("objective", ["guided", "keep", "ranking", "hard", "qwen3"])
def test_flat_and_column_layout_agree(objective, negatives):
    columns, (q, p) = columns_and_passages(negatives)
    guides, (gq, gp) = columns_and_passages(negatives, seed=1, width=3)
    layouts = [
        (Candidates.from_columns(columns), Candidates.from_columns(guides)),
        (Candidates.from_passages(q, p), Candidates.from_passages(gq, gp)),
    ]
    build = {
        "guided": lambda batch, guide: guided_groups(batch, guide, margin=0.2),
        "keep": lambda batch, guide: guided_groups(batch, guide, margin=0.5, keep_own_negatives=True),
        "ranking": lambda batch, guide: ranking_groups(batch, directions=FOUR),
        "hard": lambda batch, guide: ranking_groups(batch, hardness_mode="hard_negatives", hardness_strength=3.0),
        "qwen3": lambda batch, guide: qwen3_groups(batch, margin=0.1),
    }[objective]
    a, b = (float(info_nce(build(*layout), temperature=0.1, backend="paddle")) for layout in layouts)
    assert a == pytest.approx(b, rel=1e-12)


def test_rows_with_different_numbers_of_negatives():
    _, (q, p) = columns_and_passages(2)
    own = paddle.to_tensor([0, 1, 4, 6, 7])
    batch = Candidates.from_passages(q, p[:8], own)
    np.testing.assert_array_equal(batch.owners[0].numpy(), [0, 1, 1, 1, 2, 2, 3, 4])
    np.testing.assert_array_equal(batch.positives.numpy(), p.numpy()[[0, 1, 4, 6, 7]])


def test_passages_without_negatives_are_not_copied():
    columns, _ = columns_and_passages(0)
    batch = Candidates.from_passages(columns[0], columns[1])
    assert batch.positives is columns[1]


def test_ids_drop_in_all_blocks():
    """Rows 0 and 2 share a document: neither its query, nor its positive, nor its passages are negatives."""
    _, (q, p) = columns_and_passages(0)
    ids = paddle.to_tensor([4, 1, 4, 2, 3])
    for tensor in (q, p):
        tensor.stop_gradient = False
    batch = Candidates.from_passages(q, p, None, ids, ids)
    groups = ranking_groups(batch, directions=("query_to_doc", "query_to_query", "doc_to_doc"))
    weights = paddle.to_tensor([1.0, 0, 0, 0, 0], dtype="float64")
    info_nce(groups, temperature=0.1, row_weights=weights, backend="paddle").backward()
    assert not q.grad.numpy()[2].any() and not p.grad.numpy()[2].any()
    assert q.grad.numpy()[1].any() and p.grad.numpy()[1].any()


def test_own_must_say_whose_negatives_are_whose():
    _, (q, p) = columns_and_passages(1)
    for own in ([1, 2, 4, 6, 8], [0, 2, 2, 6, 8]):
        with pytest.raises(ValueError, match="must increase from 0"):
            Candidates.from_passages(q, p, paddle.to_tensor(own))
