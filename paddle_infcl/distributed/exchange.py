# SPDX-License-Identifier: Apache-2.0
"""Passing tensors around a ring of processes: to the next one, from the previous one, while something else is done.

Messages go in ordered pairs: processes at even places send before they receive, those at odd places receive before
they send. No cycle of processes then waits for itself, whatever their number.

- NCCL and other device transports: `isend` and `irecv`, in that order; they run on their own streams.
- Gloo: blocking `send` and `recv`, in a thread of their own. Gloo matches messages by counting those of each process,
  so both ends of every pair must have the same count. In a ring of even length they do. In one of odd length they
  can't (the pairs of an odd cycle need three turns, and a process that sits one out falls behind), so there every
  process in turn broadcasts to all: W times the bytes, right all the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import paddle
import paddle.distributed as dist
from paddle import Tensor

from paddle_infcl.distributed.ranks import Ranks, backend_of, explained

Wait = Callable[[], None]


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
        if self.world % 2 and self.world > 1:
            return _in_background(lambda: self._broadcasts(outgoing, incoming))
        return _in_background(lambda: self._pairs(dist.send, dist.recv, outgoing, incoming))

    def _pairs(self, send: Callable, receive: Callable, outgoing: list[Tensor], incoming: list[Tensor]) -> list:
        """One message after the other; returns what `send` and `receive` return."""
        sends = [(send, t, self._next) for t in outgoing]
        receives = [(receive, t, self._previous) for t in incoming]
        order = sends + receives if self.place % 2 == 0 else receives + sends
        return [call(tensor, peer) for call, tensor, peer in order]

    def _start_tasks(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Wait:
        tasks = self._pairs(dist.isend, dist.irecv, outgoing, incoming)

        def wait() -> None:
            for task in tasks:
                task.wait()
            outgoing.clear()  # kept until here: the transport reads them

        return wait

    def _broadcasts(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        # All processes there are, since all are in the group that messages go through: also other rings of copies.
        for peer in range(dist.get_world_size()):
            mine, wanted = peer == dist.get_rank(), peer == self._previous
            # What comes by for others has sizes that only they know: a header each.
            sizes = paddle.to_tensor([t.size for t in outgoing], dtype="int64")
            dist.broadcast(sizes, peer)
            for k, size in enumerate(sizes.numpy().tolist()):
                buffer = outgoing[k] if mine else incoming[k] if wanted else paddle.empty([size], outgoing[k].dtype)
                dist.broadcast(buffer, peer)


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
