# SPDX-License-Identifier: Apache-2.0
"""Processes that watch each other, so that the end of one is the end of all.

A process that dies leaves the others waiting in a collective: for gloo until its connections break, for NCCL until
Paddle's own limit of half an hour. `paddle.distributed.launch` ends the other processes of the same node, not those of
other nodes. Here every process holds a connection to the next one, over which nothing is ever sent but a farewell.
The kernel closes it with the process, however that ends; keepalive finds a node that is gone within a minute. Who
sees a connection close without farewell says so and, if it is still there after a moment, ends its process, which the
one before sees in turn.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import paddle
import paddle.distributed as dist

from paddle_infcl.log import logger, warn_once

#: Seconds in which a process may end by itself, with its own error, after another one has.
GRACE = 10.0
_CONNECT = 20.0
_FAREWELL = b"."


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _everybodys(values: list[int]) -> list[list[int]]:
    """The lists of all processes, by global rank."""
    own = paddle.to_tensor([values], dtype="int64")
    out = paddle.empty([dist.get_world_size(), len(values)], dtype="int64")
    dist.stream.all_gather(out, own)
    return out.numpy().tolist()


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """The connection of the process that knows the token; others are turned away."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_CONNECT)
        with contextlib.suppress(OSError):
            if connection.recv(len(token), socket.MSG_WAITALL) == token:
                return connection
        connection.close()


def _connect() -> tuple[socket.socket, socket.socket]:
    """Connections to the next process, to watch it, and from the previous one, which watches this one."""
    rank, world = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1").rpartition(":")[0] or "127.0.0.1"
    token = secrets.token_bytes(7)
    with socket.socket() as listener:
        listener.settimeout(_CONNECT)
        listener.bind((host, 0))
        listener.listen()
        address, port = struct.unpack("!I", socket.inet_aton(socket.gethostbyname(host)))[0], listener.getsockname()[1]
        table = _everybodys([address, port, int.from_bytes(token, "big")])
        address, port, theirs = table[(rank + 1) % world]
        watched = socket.create_connection((socket.inet_ntoa(struct.pack("!I", address)), port), timeout=_CONNECT)
        watched.sendall(theirs.to_bytes(7, "big"))
        watching = _accept(listener, token)
    for connection in (watched, watching):
        connection.settimeout(None)
        _keep_alive(connection)
    return watched, watching


def _watch(watched: socket.socket, name: str, stop: threading.Event, grace: float) -> None:
    try:
        farewell = watched.recv(1) == _FAREWELL
    except OSError:
        farewell = False
    if farewell or stop.is_set():
        return
    logger.error("%s has ended before its work was done: this process ends too, within %.0f s", name, grace)
    if not stop.wait(grace):
        for handler in logger.handlers:
            handler.flush()
        os._exit(1)


@contextlib.contextmanager
def ending_together(grace: float = GRACE) -> Iterator[None]:
    """Within it, the death of any process of the run ends all of them: a collective to enter, and to leave normally.

    One process, or processes that can't reach each other but through their collectives, go on as they are; the latter
    say so.

    Args:
        grace: seconds that a process gets to end by itself after another one has.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    try:
        watched, watching = _connect()
    except OSError as error:
        warn_once(
            "watch",
            f"the processes do not watch each other: no connection between them ({error}). One that dies leaves the "
            "others waiting until their transport gives up",
        )
        yield
        return
    stop = threading.Event()
    name = f"process {(dist.get_rank() + 1) % dist.get_world_size()} of {dist.get_world_size()}"
    threading.Thread(target=_watch, args=(watched, name, stop, grace), name="paddle_infcl-watch", daemon=True).start()
    try:
        yield
        with contextlib.suppress(OSError):
            watching.sendall(_FAREWELL)
    finally:
        stop.set()
        for connection in (watched, watching):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def end_process(code: int) -> NoReturn:
    """Ends the program; one process of several at once, with everything written out.

    Paddle's process groups now and then abort or hang while the interpreter goes down (gloo, Paddle 3.3), when all
    work is done: the launcher then reports a failure.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        sys.exit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
