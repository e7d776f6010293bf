# SPDX-License-Identifier: Apache-2.0
"""Starts the processes of a distributed test, and ends them whatever happens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def environment(rank: int, world: int, ports: list[int]) -> dict[str, str]:
    """What paddle.distributed.launch gives a process, for gloo on one machine."""
    endpoints = [f"127.0.0.1:{port}" for port in ports[:world]]
    paths = [str(ROOT), str(ROOT / "ops" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_TRAINERS_NUM": str(world),
        "PADDLE_CURRENT_ENDPOINT": endpoints[rank],
        "PADDLE_TRAINER_ENDPOINTS": ",".join(endpoints),
        "PADDLE_MASTER": f"127.0.0.1:{ports[world]}",
        "PADDLE_DISTRI_BACKEND": "gloo",
        "TEST_STORE_PORTS": ",".join(map(str, ports[world + 1 :])),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def run(world: int, arguments: list[str], timeout: float = 240.0) -> tuple[list[int], list[str]]:
    """Runs `python arguments...` in `world` processes that find each other, and ends them whatever happens.

    Returns:
        Exit codes, and what each printed, stdout and stderr together. A process that did not finish in time was
        killed, and its output begins with TIMED OUT.
    """
    ports = free_ports(world + 1 + 32)
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment(rank, world, ports),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]
    return collect(processes, timeout)


def collect(processes: list[subprocess.Popen], timeout: float) -> tuple[list[int], list[str]]:
    """Waits for processes, and ends them whatever happens; see `run`."""
    deadline = time.monotonic() + timeout
    outputs: list[str] = []
    try:
        for process in processes:
            try:
                outputs.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                process.kill()
                outputs.append("TIMED OUT\n" + process.communicate()[0])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [process.returncode for process in processes], outputs


def launch(world: int, arguments: list[str], timeout: float = 240.0) -> list[str]:
    """`run` for processes that must succeed.

    Returns:
        What each printed.

    Raises:
        AssertionError: a process failed or none finished in time; shows the output of all.
    """
    codes, outputs = run(world, arguments, timeout)
    shown = "\n".join(f"--- rank {rank}\n{text[-4000:]}" for rank, text in enumerate(outputs))
    assert codes == [0] * world, f"exit codes {codes}\n{shown}"
    return outputs
