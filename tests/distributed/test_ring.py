# SPDX-License-Identifier: Apache-2.0
"""The ring's schedule for any number of processes, and its sweeps with processes that are threads."""

from __future__ import annotations

import queue
import threading

import numpy as np
import paddle
import pytest

from paddle_infcl.distributed.columns import header_of, layout_from, numbered_owners
from paddle_infcl.distributed.ring import RingPlan, bytes_sent, half, ring_gradients, ring_lse, schedule
from paddle_infcl.functional.contrastive import info_nce
from paddle_infcl.functional.hops import BlockFunctions, block_grads, block_lse
from paddle_infcl.functional.row_losses import InfoNCE
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


@pytest.mark.parametrize("world", [3, 4, 7, 32, 1024])
def test_bytes_are_those_of_the_formula(world):
    column_bytes, gradient_bytes = 10, 7
    for place in {0, 1, world - 1}:
        hops = schedule(place, world)
        moves = sum(hop.arriving is not None for hop in hops)
        gradients = sum(hop.gradient_arriving is not None for hop in hops)
        sent = 2 * moves * column_bytes + gradients * gradient_bytes
        assert sent == bytes_sent(world, column_bytes, gradient_bytes)


def test_halves_cover_all_columns():
    for columns in (0, 1, 511, 512, 513, 1000, 4096):
        first, second = half(columns, 0), half(columns, 1)
        assert (first.start, first.stop, second.stop) == (0, second.start, columns)
    assert half(4096, 0) == slice(0, 2048)


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


def run_ring(objective, pieces, functions):
    """Per process (loss, gradient of the scale), vectors with their gradients, bytes sent; processes are threads."""
    world, rows = len(pieces), [len(part.q) for part in pieces]
    vectors = [[paddle.to_tensor(x, stop_gradient=False) for x in (part.q, part.p)] for part in pieces]
    all_groups = [OBJECTIVES[objective](part, *v) for part, v in zip(pieces, vectors, strict=True)]
    headers = [header_of(groups, paddle.ones([])) for groups in all_groups]
    boxes, sent = [queue.SimpleQueue() for _ in range(world)], [0] * world
    results, errors = [None] * world, []

    def process(rank):
        try:
            layout = layout_from(all_groups[rank], headers)
            groups = numbered_owners(all_groups[rank], layout, rank)
            weights = paddle.full([rows[rank]], 1.0 / sum(rows) / len(groups), "float64")
            exchange = ThreadExchange(rank, world, boxes, sent)
            plan = RingPlan(groups, layout, exchange, functions, [InfoNCE()] * len(groups), weights, 4096)
            scale = paddle.full([], 1 / T, "float64")
            lse, own = ring_lse(plan, scale)
            terms = [
                InfoNCE()(x, o, slice(0, rows[rank])) if rows[rank] else None for x, o in zip(lse, own, strict=True)
            ]
            loss = sum(float((weights * t.losses).sum()) for t in terms if t is not None)
            dothers = [weights if t is None else weights * t.dothers for t in terms]
            down = [weights if t is None else weights * t.down for t in terms]
            gradients, dscale = ring_gradients(plan, scale, lse, dothers, down)
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
    pieces = parts(rows, negatives, seed=len(rows))
    results, vectors, _ = run_ring(objective, pieces, FUNCTIONS)
    joined = whole(pieces)
    q, p = (paddle.to_tensor(x, stop_gradient=False) for x in (joined.q, joined.p))
    temperature = paddle.to_tensor(T, dtype="float64", stop_gradient=False)
    want = info_nce(OBJECTIVES[objective](joined, q, p), temperature=temperature, backend="dense")
    want.backward()
    assert sum(r[0] for r in results) == pytest.approx(float(want), rel=1e-12)
    assert sum(r[1] for r in results) == pytest.approx(-float(temperature.grad) * T**2, rel=1e-9)
    for k, everything in enumerate((q, p)):
        mine = [v[k].grad.numpy() for v in vectors if v[k].shape[0]]
        np.testing.assert_allclose(np.concatenate(mine), everything.grad.numpy(), rtol=1e-9, atol=1e-12)
