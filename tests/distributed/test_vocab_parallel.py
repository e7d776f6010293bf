# SPDX-License-Identifier: Apache-2.0
"""A vocabulary over two processes, in parts of different size: values and gradients of the whole one,
and messages whose size does not depend on it."""

from __future__ import annotations

from tests.distributed.launcher import launch


def test_two_processes_are_equal_to_one():
    outputs = launch(2, ["-m", "tests.distributed.check_vocab_parallel"])
    assert all("equal to one process, and no message grows" in output for output in outputs)
