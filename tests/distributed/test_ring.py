# SPDX-License-Identifier: Apache-2.0
"""The ring's schedule for any number of processes, and its sweeps with processes that are threads."""

from __future__ import annotations

import queue
import threading

import numpy as np
import paddle
import pytest

from paddle_infcl.distributed.columns import header_of, layout_from, numbered_owners
from paddle_infcl.distributed.exchange import turns
from paddle_infcl.distributed.ring import RingPlan, bytes_sent, part_of, ring_gradients, ring_lse, schedule
from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.contrastive import info_nce
from paddle_infcl.functional.hops import BlockFunctions, block_grads, block_lse
from paddle_infcl.functional.row_losses import InfoNCE, logaddexp
from tests.distributed.batches import OBJECTIVES, parts, whole

T = 0.1


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 17, 64, 129, 512, 1024])
def test_the_schedule_shows_every_shard_to_every_process_once(world):
    hops = [schedule(place, world) for place in range(world)]
    seen = np.array([[hop.shard for hop in line] for line in hops])
    arriving = np.array([[-1 if hop.arriving is None else hop.arriving for hop in line] for line in hops])
    assert (np.sort(seen, axis=1) == np.arange(world)).all()
    assert (np.sort(seen, axis=0) == np.arange(world)[:, None]).all()  # and no two processes hold the same one
    following = np.roll(seen, -1, axis=0)  # what the next process holds
    arriving_there = np.roll(arriving, -1, axis=0)
    assert (arriving_there[:, :-1] == seen[:, :-1]).all()
    assert (following[:, 1:] == seen[:, :-1]).all()
    if world > 1:
        gradients = np.array([[hop.gradient_arriving for hop in line[1:]] for line in hops])
        assert (np.roll(gradients, -1, axis=0) == seen[:, 1:]).all()  # what leaves is what the next one expects
        assert (gradients[:, -1] == np.arange(world)).all()  # at the end everybody has his own


def test_messages_meet_in_their_turns():
    """For every number of processes: one message to the next and one from the previous, with a partner in every turn.

    Nobody waits for himself then: who is at the earliest turn has a partner that waits for nothing earlier. And as
    everybody goes through the same number of turns, both ends of a message have counted the same number.
    """
    for world in range(2, 1025):
        everybody = [turns(place, world) for place in range(world)]
        assert {len(line) for line in everybody} == {2 + world % 2}
        for place, line in enumerate(everybody):
            following = everybody[(place + 1) % world]
            assert sorted(filter(None, line)) == ["receive", "send"]
            assert line.index("send") == following.index("receive")
            assert world % 2 or None not in line


@pytest.mark.parametrize("world", [3, 4, 7, 32, 1024])
def test_bytes_are_those_of_the_formula(world):
    column_bytes, gradient_bytes = 10, 7
    for place in {0, 1, world - 1}:
        hops = schedule(place, world)
        moves = sum(hop.arriving is not None for hop in hops)
        gradients = sum(hop.gradient_arriving is not None for hop in hops)
        sent = 2 * moves * column_bytes + gradients * gradient_bytes
        assert sent == bytes_sent(world, column_bytes, gradient_bytes)


def test_parts_cover_all_columns():
    for columns in (0, 1, 511, 512, 513, 1000, 4096):
        first, second = part_of(columns, 0, 2), part_of(columns, 1, 2)
        assert (first.start, first.stop, second.stop) == (0, second.start, columns)
        assert part_of(columns, 0, 1) == slice(0, columns)
    assert part_of(4096, 0, 2) == slice(0, 2048)


class ThreadExchange:
    """Copies tensors between threads; counts what each sends."""

    def __init__(self, place, world, boxes, sent):
        self.place, self.world, self._boxes, self._sent = place, world, boxes, sent

    def start(self, outgoing, incoming):
        self._boxes[(self.place + 1) % self.world].put([t.numpy().copy() for t in outgoing])
        self._sent[self.place] += sum(t.size * t.element_size() for t in outgoing)

        def wait():
            values = self._boxes[self.place].get(timeout=60)
            assert [list(v.shape) for v in values] == [list(t.shape) for t in incoming]
            for tensor, value in zip(incoming, values, strict=True):
                if value.size:
                    tensor.set_value(paddle.to_tensor(value))

        return wait


def run_ring(objective, pieces, functions, e=0.0):
    """Per process (loss, gradient of the scale), vectors with their gradients, bytes sent; processes are threads.

    e: label smoothing.
    """
    world, rows, dtype = len(pieces), [len(part.q) for part in pieces], str(pieces[0].q.dtype)
    vectors = [[paddle.to_tensor(x, stop_gradient=False) for x in (part.q, part.p)] for part in pieces]
    all_groups = [OBJECTIVES[objective](part, *v) for part, v in zip(pieces, vectors, strict=True)]
    headers = [header_of(groups, paddle.ones([])) for groups in all_groups]
    boxes, sent = [queue.SimpleQueue() for _ in range(world)], [0] * world
    results, errors = [None] * world, []

    def process(rank):
        try:
            layout = layout_from(all_groups[rank], headers)
            groups = numbered_owners(all_groups[rank], layout, rank)
            weights = paddle.full([rows[rank]], 1.0 / sum(rows) / len(groups), dtype)
            exchange = ThreadExchange(rank, world, boxes, sent)
            plan = RingPlan(groups, layout, exchange, functions, [InfoNCE()] * len(groups), weights, 4096, e)
            scale = paddle.full([], 1 / T, dtype)
            lse, own = ring_lse(plan, scale)
            terms = [
                InfoNCE()(x, o, slice(0, rows[rank])) if rows[rank] else None for x, o in zip(lse, own, strict=True)
            ]
            loss = sum(float((weights * t.losses).sum()) for t in terms if t is not None)
            if e and rows[rank]:
                above = [o - even.means(scale) for o, even in zip(own, plan.even, strict=True)]
                loss += e * sum(float((weights * a).sum()) for a in above)
            dothers = [weights if t is None else weights * t.dothers for t in terms]
            down = [weights if t is None else weights * (t.down + e) for t in terms]
            gradients, dscale = ring_gradients(plan, scale, lse, dothers, down, -e * weights)
            results[rank] = (loss, float(dscale), list(zip(plan.tensors, gradients, strict=True)))
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for _, _, pairs in results:  # through what made the blocks' tensors from the vectors
        terms = [(t * g).sum() for t, g in pairs if g is not None and g.shape[0]]
        if terms:
            sum(terms).backward()
    return results, vectors, sent


FUNCTIONS = BlockFunctions(block_lse, block_grads)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(
    "rows, negatives", [([3, 2], [1, 1]), ([3, 2, 4], [0, 2, 1]), ([2, 0, 3, 1, 2], [1, 1, 0, 2, 1])]
)
def test_the_sweeps_equal_one_process(objective, rows, negatives):
    check_against_one_process(objective, parts(rows, negatives, seed=len(rows)), FUNCTIONS)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_smoothed_labels_in_the_ring(objective):
    """Candidates are counted and added up hop by hop, an empty process among them, without a message more."""
    pieces = parts([3, 0, 2], [1, 1, 2], seed=9)
    smoothed = check_against_one_process(objective, pieces, FUNCTIONS, e=0.3)
    assert smoothed == run_ring(objective, pieces, FUNCTIONS)[2]


def check_against_one_process(objective, pieces, functions, tolerance=1e-9, e=0.0):
    results, vectors, sent = run_ring(objective, pieces, functions, e)
    joined = whole(pieces)
    q, p = (paddle.to_tensor(x, stop_gradient=False) for x in (joined.q, joined.p))
    temperature = paddle.to_tensor(T, dtype=q.dtype, stop_gradient=False)
    want = info_nce(OBJECTIVES[objective](joined, q, p), temperature=temperature, backend="dense", label_smoothing=e)
    want.backward()
    assert sum(r[0] for r in results) == pytest.approx(float(want), rel=tolerance)
    assert sum(r[1] for r in results) == pytest.approx(-float(temperature.grad) * T**2, rel=10 * tolerance)
    for k, everything in enumerate((q, p)):
        mine = np.concatenate([v[k].grad.numpy() for v in vectors if v[k].shape[0]])
        largest = np.abs(everything.grad.numpy()).max()
        np.testing.assert_allclose(mine, everything.grad.numpy(), rtol=tolerance, atol=tolerance * largest)
    return sent


def test_large_shards_travel_in_two_parts_and_bytes_are_as_said():
    """Some shards are halved and some are not; all processes agree which."""
    pieces = parts([300, 700, 260], [1, 0, 2], width=4, seed=5)
    sent = check_against_one_process("plain", pieces, FUNCTIONS, e=0.2)
    columns = [len(part.p) * 4 * 8 for part in pieces]
    for place in range(3):
        # Twice all shards but the one that the next process has already; gradients of those visited.
        shards = 2 * (columns[place] + columns[place - 1])
        assert sent[place] == shards + columns[place - 1] + columns[place - 2]
    even = parts([600] * 4, [0] * 4, width=4, seed=6)
    sent = check_against_one_process("plain", even, FUNCTIONS)
    assert sent == [bytes_sent(4, 600 * 4 * 8, 600 * 4 * 8)] * 4


@pytest.mark.parametrize(
    "objective, e",
    [("plain", 0.0), ("ids", 0.0), ("guided", 0.0), ("four ways", 0.0), ("plain", 0.2), ("guided", 0.2)],
)
def test_the_triton_functions_in_the_ring(objective, e):
    ops = pytest.importorskip("paddle_infcl_ops")
    if not ops.availability()[0]:
        pytest.skip(ops.availability()[1])
    pieces = parts([3, 2], [1, 1], width=16, seed=2)
    for part in pieces:
        for name in ("q", "p", "guide_q", "guide_p"):
            setattr(part, name, getattr(part, name).astype("float32"))
    lock = threading.Lock()  # Triton's interpreter runs in one thread at a time

    def alone(function):
        def call(*args, **kwargs):
            with lock:
                return function(*args, **kwargs)

        return call

    check_against_one_process(objective, pieces, BlockFunctions(alone(ops.block_lse), alone(ops.block_grads)), 2e-5, e)


@pytest.mark.parametrize("size", [1.0, 1e3, -1e3])
def test_merging_is_exact_for_logits_of_a_thousand(size):
    """Upstream's merge gives inf for log-sum-exps of -60 and 60; right is 60."""
    q = paddle.to_tensor([[1.0, 0.0]], dtype="float64")
    one, scale = paddle.ones([], dtype="float64"), paddle.to_tensor(size, dtype="float64")
    lse = block_lse(Block(q, paddle.to_tensor([[1.0, 0.0]], dtype="float64")), scale)
    both = block_lse(Block(q, paddle.to_tensor([[-1.0, 0.0], [0.5, 0.0]], dtype="float64")), scale, out=lse)
    want = np.logaddexp.reduce(size * np.array([1.0, -1.0, 0.5]))
    assert float(both) == pytest.approx(want, rel=1e-15)
    for a, b in ((-1000.0, 1000.0), (1000.0, 1000.0), (-60.0, 60.0), (float("-inf"), -1000.0)):
        merged = logaddexp(one * a, one * b)
        assert float(merged) == pytest.approx(np.logaddexp(a, b), rel=1e-15)
    assert float(logaddexp(one * float("-inf"), one * float("-inf"))) == float("-inf")
