# SPDX-License-Identifier: Apache-2.0
"""Several processes train what one process with the whole batch trains."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launcher import launch
from tests.trainer_process import main
from tests.training import write_pairs

SCRIPT = str(Path(__file__).with_name("trainer_process.py"))
# 33 rows in global batches of 16: windows of 16, 16 and 1; in the last one the second process has no row.
BASE = {
    "pairs": "pairs.jsonl",
    "dropout": 0.0,
    "per_device_train_batch_size": 4,
    "group_size": 2,
    "learnable_temperature": True,
    "embedding_temperature": 0.1,
    "num_train_epochs": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_pairs(folder / "pairs.jsonl", 33, negatives=1)
    write_pairs(folder / "dev.jsonl", 21, seed=3)
    return folder


@pytest.fixture(scope="module")
def one(folder):
    runs = {"one": {**BASE, "gradient_accumulation_steps": 4}}
    main(folder, runs)
    return np.load(folder / "one.npz")


@pytest.fixture(scope="module")
def two(folder):
    half = {**BASE, "gradient_accumulation_steps": 2}
    runs = {
        "two": half,
        "recompute": {**half, "recompute": True},
        "saved": {**half, "save_strategy": "steps", "save_steps": 3, "max_steps": 6},
        "resumed": {**half, "resume": "saved/checkpoint-3"},
        "ring": {**half, "negatives_strategy": "ring", "offload_features": True},
    }
    launch(2, [SCRIPT, str(folder), json.dumps(runs)])
    return {name: np.load(folder / f"{name}.npz") for name in runs}


def assert_same(got, want):
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got["temperature"], want["temperature"], rtol=1e-6)
    for name in want.files:
        # Adam makes noise of a gradient whose true value is 0: softmax does not see the keys' bias.
        if name.startswith("parameter/") and not name.endswith("k_proj.bias"):
            np.testing.assert_allclose(got[name], want[name], atol=3e-5, err_msg=name)
    assert got["metric"] == pytest.approx(float(want["metric"]), abs=1e-6)


@pytest.mark.parametrize("name", ["two", "recompute", "resumed", "ring"])
def test_two_processes_equal_one(one, two, name):
    """Plain data parallel without fleet: losses, temperature, parameters after 6 steps, evaluation."""
    assert len(one["losses"]) == 6
    assert_same(two[name], one)
    assert two[name]["negatives"][-3] == one["negatives"][-3] == 31


def test_a_run_of_two_processes_goes_on_in_one(one, two, folder):
    """The same global batch, made up otherwise: the same windows."""
    main(folder, {"onward": {**BASE, "gradient_accumulation_steps": 4, "resume": "saved/checkpoint-3"}})
    assert_same(np.load(folder / "onward.npz"), one)


def test_one_synchronisation_per_step(two):
    # Two micro-batches per window, 6 steps, and one backward pass in each that reduces gradients.
    assert two["two"]["reductions"] == 6


def test_sharding_stage_1(one, folder):
    half = {**BASE, "gradient_accumulation_steps": 2, "sharding": "stage1"}
    runs = {
        "sharded": {**half, "save_strategy": "steps", "save_steps": 3, "max_steps": 6},
        "sharded-on": {**half, "resume": "sharded/checkpoint-3"},
    }
    launch(2, [SCRIPT, str(folder), json.dumps(runs)])
    for name in runs:
        assert_same(np.load(folder / f"{name}.npz"), one)
