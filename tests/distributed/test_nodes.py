# SPDX-License-Identifier: Apache-2.0
"""Two "nodes" on the loopback interface, each started by its own `paddle.distributed.launch`."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.distributed.launcher import ROOT, collect, free_ports


def launch_nodes(tmp_path, nodes: int, per_node: int, script: list[str], timeout: float = 120.0):
    """Exit codes of the launchers, and what the first process of each node printed."""
    port = free_ports(1)[0]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("PADDLE_")}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "ops" / "src")])}
    launchers = [
        subprocess.Popen(
            [
                sys.executable, "-m", "paddle.distributed.launch", "--master", f"127.0.0.1:{port}",
                "--nnodes", str(nodes), "--rank", str(node), "--nproc_per_node", str(per_node),
                "--log_dir", str(tmp_path / f"node{node}"), *script,
            ],
            env=variables, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(nodes)
    ]  # fmt: skip
    codes, _ = collect(launchers, timeout)
    return codes, [(tmp_path / f"node{node}" / "workerlog.0").read_text() for node in range(nodes)]


def test_two_nodes_equal_one_process(tmp_path):
    codes, logs = launch_nodes(tmp_path, 2, 1, ["tests/distributed/check_node.py"])
    assert codes == [0, 0], logs
    for node, log in enumerate(logs):
        assert f"equal: process {node} of 2, 1 on this node" in log


def test_a_process_that_dies_ends_the_launchers_of_both_nodes(tmp_path):
    """The launcher of another node notices nothing by itself; the processes watch each other."""
    begin = time.monotonic()
    codes, logs = launch_nodes(tmp_path, 2, 1, ["tests/distributed/check_node_death.py"])
    assert 0 not in codes and time.monotonic() - begin < 50, logs
    assert "process 1 of 2 has ended before its work was done" in logs[0]
