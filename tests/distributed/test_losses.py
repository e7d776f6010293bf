# SPDX-License-Identifier: Apache-2.0
"""Several processes on gloo equal one process with the whole batch."""

from __future__ import annotations

import pytest

from tests.distributed.launcher import launch


@pytest.mark.parametrize("world", [2, 3])
def test_processes_equal_one_with_the_whole_batch(world):
    outputs = launch(world, ["tests/distributed/check_losses.py"])
    assert all(f"checked 48 combinations on {world} processes" in text for text in outputs)
