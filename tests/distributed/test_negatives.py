# SPDX-License-Identifier: Apache-2.0
"""The choice of a strategy, and what processes tell each other, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest

from paddle_infcl.distributed import negatives, ranks
from paddle_infcl.distributed.columns import header_of, layout_from, numbered_owners
from paddle_infcl.distributed.negatives import check_strategy, choose_strategy, gathered_bytes, global_info_nce
from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.functional.blocks import Block, Guide
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.qwen3 import qwen3_groups


def block(B=2, N=3, D=4, dtype="float32", **fields):
    return Block(paddle.ones([B, D], dtype), paddle.ones([N, D], dtype), own=paddle.arange(B), **fields)


def layout(*groups):
    """Of processes with these blocks; the first one's."""
    scale = paddle.ones([])
    return layout_from(groups[0], [header_of(g, scale) for g in groups])


def test_sizes_of_all_processes():
    mine, others = [[block(2, 3)]], [[block(1, 5)]]
    found = layout(mine, others, [[block(0, 0)]])
    assert (found.rows, found.counts, found.rights) == ([2, 1, 0], [[3], [5], [0]], 1)
    assert not found.differentiates
    wants = block()
    wants.left.stop_gradient = False
    assert layout(mine, [[wants]]).differentiates


def test_a_tensor_in_two_fields_is_shared_once_if_so_everywhere():
    """Without hard negatives passages and positives may be one tensor here and two elsewhere."""

    def blocks(same):
        q, p = paddle.ones([2, 4]), paddle.ones([2, 4])
        return [[Block(q, p, own=paddle.arange(2)), Block(p, p if same else paddle.ones([2, 4]))]]

    assert len(layout(blocks(True), blocks(True)).entries) == 1
    found = layout(blocks(True), blocks(False))
    assert len(found.entries) == 2 and found.places == {(0, 0, "right"): 0, (0, 1, "right"): 1}


def test_local_blocks_are_not_shared():
    found = layout([[block(), block(local=True)]], [[block(), block(local=True)]])
    assert list(found.places) == [(0, 0, "right")]


def test_a_rows_own_negatives_stay_where_the_row_is():
    """Of Qwen3-Embedding's passages the positives alone are shared; who has no hard negatives has a block less."""

    def blocks(rows, negatives):
        q, p = paddle.ones([rows, 4]), paddle.ones([rows * (1 + negatives), 4])
        return qwen3_groups(Candidates.from_passages(q, p, paddle.arange(rows) * (1 + negatives)))

    mine, others = blocks(3, 2), blocks(2, 0)
    assert [block.local for block in mine[0]] == [False, False, False, True] and len(others[0]) == 3
    found = layout(mine, others)
    assert found.counts == [[3, 3], [2, 2]] and found.rights == 2
    assert mine[0][-1].right.shape == [6, 4] and mine[0][-1].owner.tolist() == [0, 0, 1, 1, 2, 2]


def test_owners_are_numbered_over_all_processes():
    owner = paddle.to_tensor([0, 1, -1])
    groups = [[block(owner=owner, owner_rule="only"), block(owner=owner, owner_rule="only", local=True)]]
    found = layout(groups, groups)
    numbered = numbered_owners(groups, found, 1)
    for one in numbered[0]:
        assert (one.owner.tolist(), one.row_offset) == ([2, 3, -1], 2)
    assert found.entries[found.places[0, 0, "owner"]] is numbered[0][0].owner
    assert groups[0][0].owner is owner and groups[0][0].row_offset == 0


def test_ids_that_are_the_owners_tensor_are_not_numbered():
    rows = paddle.to_tensor([0, 1, -1])
    groups = [[block(owner=rows, owner_rule="only", row_ids=paddle.arange(2), column_ids=rows)]]
    found = layout(groups, groups)
    numbered_owners(groups, found, 1)
    assert found.entries[found.places[0, 0, "column_ids"]].tolist() == [0, 1, -1]
    assert found.entries[found.places[0, 0, "owner"]].tolist() == [2, 3, -1]


IDS = {"row_ids": paddle.ones([2], "int64"), "column_ids": paddle.ones([3], "int64")}
GUIDE = Guide(paddle.ones([2, 5]), paddle.ones([3, 5]), paddle.ones([2]))


@pytest.mark.parametrize(
    "other, what",
    [
        ([[block(), block()]], "number of blocks"),
        ([[block(**IDS)]], r"number of tensors \(ids, guide vectors\)"),
        ([[block(D=5)]], "width"),
        ([[block(dtype="float64")]], "dtype"),
    ],
)
def test_processes_that_disagree(other, what):
    with pytest.raises(ValueError, match="differ in the " + what):
        layout([[block()]], other)
    with pytest.raises(ValueError, match="ids or guide vectors on all of them or on none"):
        layout(other, [[block()]])


def test_too_many_tensors():
    with pytest.raises(ValueError, match="61 tensors to share between processes; at most 60"):
        header_of([[block() for _ in range(61)]], paddle.ones([]))


def test_auto_goes_by_size_and_says_so_once(monkeypatch):
    messages = []
    monkeypatch.setattr(negatives, "_told", set())
    monkeypatch.setattr(negatives.logger, "info", messages.append)
    groups = [[block(2, 1000, 8, guide=Guide(paddle.ones([2, 5]), paddle.ones([1000, 5]), paddle.ones([2])))]]
    found = layout(groups, groups)
    # Vectors, their gradients and the sums of these in float32; the guide's vectors.
    assert gathered_bytes(found) == 2000 * (8 * (4 + 4 + 4) + 5 * 4)
    assert choose_strategy("auto", found) == choose_strategy("auto", found) == "gather"
    monkeypatch.setitem(negatives.GATHER_LIMIT, "cpu", gathered_bytes(found) - 1)
    assert choose_strategy("auto", found, rank=1) == "ring"
    assert choose_strategy("auto", found) == "ring"
    assert len(messages) == 2 and "auto takes gather" in messages[0] and "auto takes ring" in messages[1]
    assert [choose_strategy(s, found) for s in ("gather", "ring")] == ["gather", "ring"]


def test_wrong_options():
    with pytest.raises(ValueError, match="negatives_strategy: 'rnig' is none of auto, gather, ring, local"):
        check_strategy("rnig")
    with pytest.raises(ValueError, match="label_smoothing: must be between 0 and 1"):
        global_info_nce([], temperature=1.0, ranks=Ranks(), label_smoothing=1.5)


def test_one_process_needs_no_messages():
    value = global_info_nce(
        [[block(dtype="float64")]], temperature=1.0, ranks=Ranks(), strategy="ring", backend="paddle"
    )
    assert float(value) == pytest.approx(1.0986122886681098)  # three equal candidates: log 3


@pytest.mark.parametrize("counts", [[2, 2], [2, 1], [0, 0]])
def test_sums_by_reduce_scatter(monkeypatch, counts):
    """Device transports scatter sums: shares of unequal size are padded, equal ones go as they are."""
    seen = []

    def reduce_scatter(out, parts, group):
        seen.append(parts)
        assert parts.is_contiguous() and parts.shape[0] == 2 * out.shape[0]
        out.set_value(2 * parts[out.shape[0] :])  # this is process 1, and both have the same

    monkeypatch.setattr(ranks, "backend_of", lambda group: "NCCL")
    monkeypatch.setattr(ranks.dist.stream, "reduce_scatter", reduce_scatter)
    gathered = paddle.arange(2.0 * sum(counts)).reshape([-1, 2])
    total = ranks.sum_slices(gathered, counts, SimpleNamespace(rank=1))
    assert total.tolist() == (2 * gathered[counts[0] :]).tolist()
    if counts == [2, 2]:
        assert seen[0] is gathered
    assert len(seen) == (sum(counts) > 0)


def test_messages_that_fail_are_explained():
    with pytest.raises(RuntimeError, match=r"^sums failed: gone\. Most often another process has ended"):
        with ranks.explained("sums"):
            raise OSError("gone")
