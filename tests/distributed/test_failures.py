# SPDX-License-Identifier: Apache-2.0
"""A process that dies ends the others, with a message; the messages of the exchange."""

from __future__ import annotations

import re
import time

import paddle
import pytest

from paddle_infcl.distributed import exchange, watch
from paddle_infcl.distributed.exchange import Exchange
from tests.distributed.launcher import run

# From the death to the end of the last process. Gloo notices at once; the rest is the interpreter's end.
LIMIT = 30


@pytest.mark.parametrize(
    "world, strategy, where", [(2, "gather", "backward"), (3, "ring", "forward"), (2, "ring", "backward")]
)
def test_a_dead_process_ends_the_others(world, strategy, where):
    begin = time.monotonic()
    codes, outputs = run(world, ["tests/distributed/check_failures.py", strategy, where], timeout=90)
    assert time.monotonic() - begin < 60 + LIMIT
    assert codes[1] == 3
    for rank in set(range(world)) - {1}:
        assert codes[rank] not in (0, None), outputs[rank]
        assert float(re.search(r"noticed after ([\d.]+) s", outputs[rank])[1]) < LIMIT
        assert re.search(r"Connection reset|Connection closed|TIMEOUT|Broken pipe", outputs[rank])
    if where == "forward":
        others = [text for rank, text in enumerate(outputs) if rank != 1]
        assert all("Most often another process has ended" in text for text in others)


class FakeRanks:
    """A ring of `world` places whose groups speak another transport than gloo."""

    groups = (object(),)

    def __init__(self, rank, world):
        self.rank, self.world, self.peers = rank, world, tuple(range(10, 10 + world))


class Task:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait(self):
        self.log.append(f"wait {self.name}")


@pytest.mark.parametrize("rank, order", [(0, "send recv"), (1, "recv send"), (2, "recv send")])
def test_ordered_pairs_on_device_transports(monkeypatch, rank, order):
    """Even places send first, odd ones and the last of an odd ring receive first; waiting is left to the end."""
    log = []

    def task(kind):
        def start(tensor, peer):
            log.append(f"{kind} {peer} {list(tensor.shape)}")
            return Task(log, kind)

        return start

    monkeypatch.setattr(exchange, "backend_of", lambda group: "NCCL")
    monkeypatch.setattr(exchange.dist, "isend", task("send"))
    monkeypatch.setattr(exchange.dist, "irecv", task("recv"))
    ring = Exchange(FakeRanks(rank, 3))
    wait = ring.start([paddle.ones([2, 3])], [paddle.ones([0, 3])])
    following, before = 10 + (rank + 1) % 3, 10 + (rank - 1) % 3
    messages = {"send": f"send {following} [2, 3]", "recv": f"recv {before} [1, 3]"}
    assert log == [messages[kind] for kind in order.split()]
    wait()
    assert log[2:] == [f"wait {kind}" for kind in order.split()]


@pytest.mark.parametrize(
    "rank, order", [(0, "send count recv"), (1, "recv send count"), (2, "count recv send")], ids=str
)
def test_gloo_counts_the_turns_without_a_message(monkeypatch, rank, order):
    """In a ring of odd length, where both ends of a message need the same count: one per tensor and turn."""
    log = []
    monkeypatch.setattr(exchange, "backend_of", lambda group: "GLOO")
    monkeypatch.setattr(exchange.dist, "send", lambda tensor, peer: log.append("send"))
    monkeypatch.setattr(exchange.dist, "recv", lambda tensor, peer: log.append("recv"))

    def refuse(tensor):
        assert tensor.size == 0
        log.append("count")
        raise RuntimeError("opts.elements > 0")

    monkeypatch.setattr(exchange.dist, "all_reduce", refuse)
    wait = Exchange(FakeRanks(rank, 3)).start([paddle.ones([2, 3]), paddle.ones([1])], [paddle.ones([2, 3])] * 2)
    wait()
    assert log == [what for what in order.split() for _ in range(2)]


def test_errors_in_the_background_arrive_at_the_wait(monkeypatch):
    def fail(tensor, peer):
        raise RuntimeError("gone")

    monkeypatch.setattr(exchange, "backend_of", lambda group: "GLOO")
    monkeypatch.setattr(exchange.dist, "send", fail)
    wait = Exchange(FakeRanks(0, 2)).start([paddle.ones([1])], [paddle.ones([1])])
    with pytest.raises(RuntimeError, match=r"passing tensors to the next process failed: gone.*first error") as caught:
        wait()
    assert str(caught.value.__cause__) == "gone"


@pytest.mark.parametrize("what, codes", [("dies", [1, 3, 1]), ("ends", [0, 0, 0]), ("catches", [0, 0, 0])])
def test_processes_that_watch_each_other(what, codes):
    """A death ends processes that wait for nothing that would fail; a normal end, or an error on all, ends nobody."""
    found, outputs = run(3, ["tests/distributed/check_watch.py", what], timeout=50)
    assert found == codes, outputs
    if what == "dies":
        assert "process 1 of 3 has ended before its work was done: this process ends too, within 2 s" in outputs[0]
        assert "process 0 of 3 has ended before its work was done" in outputs[2]
    else:
        assert all("done" in text for text in outputs)


def test_one_process_watches_nobody():
    with watch.ending_together():
        pass


def test_processes_that_cannot_reach_each_other_say_so(monkeypatch):
    def fail():
        raise OSError("no route")

    messages = []
    monkeypatch.setattr(watch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(watch.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watch, "_connect", fail)
    monkeypatch.setattr(watch, "warn_once", lambda key, message: messages.append(message))
    with watch.ending_together():
        pass
    assert len(messages) == 1 and "do not watch each other" in messages[0] and "no route" in messages[0]


def test_the_end_of_one_process_is_the_interpreters():
    with pytest.raises(SystemExit) as caught:
        watch.end_process(3)
    assert caught.value.code == 3


def test_the_end_of_one_of_several_is_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(watch.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(watch.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watch.os, "_exit", ended.append)
    monkeypatch.setattr(watch.logging, "shutdown", lambda: ended.append("written"))
    watch.end_process(0)
    assert ended == ["written", 0]
