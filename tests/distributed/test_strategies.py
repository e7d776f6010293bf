# SPDX-License-Identifier: Apache-2.0
"""Several processes on gloo equal one process with the whole batch, whichever way negatives travel."""

from __future__ import annotations

import pytest

from tests.distributed.launcher import launch

CHECK = "tests/distributed/check_strategies.py"


@pytest.mark.parametrize("world, combinations", [(2, 240), (3, 90), (4, 90)])
def test_data_parallel_without_fleet(world, combinations):
    outputs = launch(world, [CHECK, "0", "0", "0"])
    assert all(f"checked {combinations} combinations on {world} processes" in text for text in outputs)
    # What auto takes is said once, by one process.
    assert sum(text.count("[paddle_infcl] INFO negatives_strategy: auto takes gather") for text in outputs) == (
        world == 2
    )


@pytest.mark.parametrize(
    "dp, sharding, mp",
    [(2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 1, 2)],
    ids=["dp", "sharding", "dp x sharding", "tp copies"],
)
def test_topologies_of_fleet(dp, sharding, mp):
    """Data parallel x sharding is one batch; tensor-parallel processes hold copies and count once."""
    outputs = launch(dp * sharding * mp, [CHECK, str(dp), str(sharding), str(mp)])
    assert all(f"checked 30 combinations on {dp * sharding} processes" in text for text in outputs)
