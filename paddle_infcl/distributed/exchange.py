# SPDX-License-Identifier: Apache-2.0
"""Passing tensors around a ring of processes: to the next one, from the previous one, while something else is done.

Messages go in ordered pairs, in two turns: from even places to odd ones, then from odd ones to even ones. In a ring of
odd length two even places are neighbours, and the message between them has a third turn. In a turn nobody has more
than one partner, and everybody keeps to the order of the turns, so no cycle of processes waits for itself, whatever
their number (`turns`).

- NCCL and other device transports: `isend` and `irecv`, in that order; they run on their own streams.
- Gloo: blocking `send` and `recv`, in a thread of their own. Gloo matches messages by counting those of each process,
  so both ends of every pair must have the same count: who has no partner in a turn counts on without a message.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence

import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_infcl.distributed.ranks import Ranks, backend_of, explained

Wait = Callable[[], None]


def turns(place: int, world: int) -> list[str | None]:
    """What the process at a place of a ring does in each turn: "send", "receive", or None for nothing."""
    count = 2 + world % 2

    def turn_of(sender: int) -> int:
        return 2 if world % 2 and sender == world - 1 else sender % 2

    does = {turn_of(place): "send", turn_of((place - 1) % world): "receive"}
    return [does.get(turn) for turn in range(count)]


class Exchange:
    """The ring of `ranks`.

    Attributes:
        place: this process's place in the ring; `world`: its length.
    """

    def __init__(self, ranks: Ranks):
        self.place, self.world = ranks.rank, ranks.world
        peers = ranks.peers
        self._next, self._previous = peers[(self.place + 1) % self.world], peers[self.place - 1]
        self._gloo = backend_of(ranks.groups[0]) == "GLOO"

    def start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Wait:
        """Begins to send to the next process and to receive from the previous one.

        Exchanges happen in the order in which they are started, which must be the same on all processes.

        Args:
            outgoing: tensors to send; they must stay as they are until the wait is over.
            incoming: tensors to receive into, of the shapes and dtypes that the previous process sends.

        Returns:
            A function to call before the tensors are used again. It raises what went wrong on the way.
        """
        # Gloo counts messages: an empty tensor is one too, of one row.
        outgoing = [t if t.shape[0] else paddle.zeros([1, *t.shape[1:]], t.dtype) for t in outgoing]
        incoming = [t if t.shape[0] else paddle.zeros([1, *t.shape[1:]], t.dtype) for t in incoming]
        if not self._gloo:
            return self._start_tasks(outgoing, incoming)
        return _in_background(lambda: self._pairs(dist.send, dist.recv, outgoing, incoming))

    def _pairs(self, send: Callable, receive: Callable, outgoing: list[Tensor], incoming: list[Tensor]) -> list:
        """One message after the other; returns what `send` and `receive` return."""
        results = []
        for what in turns(self.place, self.world):
            if what == "send":
                results += [send(tensor, self._next) for tensor in outgoing]
            elif what == "receive":
                results += [receive(tensor, self._previous) for tensor in incoming]
            elif self._gloo:
                for _ in outgoing:
                    _count_a_message()
        return results

    def _start_tasks(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Wait:
        tasks = self._pairs(dist.isend, dist.irecv, outgoing, incoming)

        def wait() -> None:
            for task in tasks:
                task.wait()
            outgoing.clear()  # kept until here: the transport reads them

        return wait


def _count_a_message() -> None:
    """Raises gloo's count of this process's messages by one, without a message.

    A sum of nothing is numbered like every message. Then gloo looks at its size and refuses it, before it talks to
    anybody. Were it not counted, the next message would fail with a timeout.
    """
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(paddle.empty([0]))


_work: queue.SimpleQueue = queue.SimpleQueue()
_worker: threading.Thread | None = None


def _run() -> None:
    while True:
        job, done, failure = _work.get()
        try:
            job()
        except BaseException as error:
            failure.append(error)
        done.set()


def _in_background(job: Callable[[], None]) -> Wait:
    """Runs jobs one after the other in a thread that doesn't keep the process alive."""
    global _worker
    if _worker is None:
        _worker = threading.Thread(target=_run, name="paddle_infcl-exchange", daemon=True)
        _worker.start()
    done, failure = threading.Event(), []
    _work.put((job, done, failure))

    def wait() -> None:
        done.wait()
        if failure:
            with explained("passing tensors to the next process"):
                raise failure[0]

    return wait
