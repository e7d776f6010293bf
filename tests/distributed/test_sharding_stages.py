# SPDX-License-Identifier: Apache-2.0
"""Sharding stages 2 and 3 without accumulation train what one process trains, clipping of gradients included."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paddle_infcl.checks import unsupported_problems
from tests.distributed.check_sharding_stages import train
from tests.distributed.launcher import launch
from tests.training import make_arguments, write_pairs

SCRIPT = "tests/distributed/check_sharding_stages.py"
# 33 rows in global batches of 16: in the last window of an epoch the second process has no row.
BASE = {
    "group_size": 2, "embedding_temperature": 0.1, "num_train_epochs": 2, "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 16, "max_grad_norm": 0.1,
}  # fmt: skip
RUNS = {
    "stage2": {"evaluates": True},
    "stage2 temperature": {"evaluates": True, "learnable_temperature": True},
    "stage3": {"dataloader_drop_last": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    write_pairs(folder / "pairs.jsonl", 33, negatives=1)
    write_pairs(folder / "dev.jsonl", 21, seed=3)
    train(folder, {f"one {name}": BASE | options for name, options in RUNS.items()})
    two = BASE | {"per_device_train_batch_size": 8}
    launch(2, [SCRIPT, str(folder), json.dumps({n: two | o | {"sharding": n.split()[0]} for n, o in RUNS.items()})])
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_stage_equals_one_process(folder, name):
    got, want = (np.load(folder / f"{prefix}{name}.npz") for prefix in ("", "one "))
    assert len(want["losses"]) == (4 if name == "stage3" else 6)
    np.testing.assert_allclose(got["losses"], want["losses"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got["temperature"], want["temperature"], rtol=1e-6)
    assert got["metric"] == pytest.approx(float(want["metric"]), abs=1e-6)
    assert set(got.files) == set(want.files)
    for key in want.files:
        # Adam makes noise of a gradient whose true value is 0: softmax does not see the keys' bias.
        if key.startswith("parameter/") and not key.endswith("k_proj.bias"):
            np.testing.assert_allclose(got[key], want[key], atol=3e-5, err_msg=key)


@pytest.mark.parametrize(
    "options, why",
    [
        ({}, "stands no dataloader_drop_last: false, whose last batch may be uneven: take stage2"),
        ({"dataloader_drop_last": True, "do_eval": True}, "stands no evaluation, whose texts may be: take stage2"),
        ({"evaluation_strategy": "steps"}, "be uneven and no evaluation, whose texts may be: take stage2"),
        ({"dataloader_drop_last": True, "learnable_temperature": True}, "counts the temperature's once per process"),
        ({"dataloader_drop_last": True}, None),
    ],
)
def test_what_stage_3_cannot_do_is_refused(tmp_path, options, why):
    options = dict(options)
    learnable = options.pop("learnable_temperature", False)
    arguments = make_arguments(tmp_path, gradient_accumulation_steps=1, **options)
    arguments.sharding, arguments.learnable_temperature = "stage3", learnable
    found = [str(problem) for problem in unsupported_problems(arguments)]
    assert len(found) == (why is not None)
    assert all(text.startswith("sharding = 'stage3': ") and why in text for text in found)
    arguments.sharding = "stage2"
    assert not unsupported_problems(arguments)
