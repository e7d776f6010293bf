# SPDX-License-Identifier: Apache-2.0
"""PaddleNLP's DPO trainer with our log-probabilities: the losses of its own, for sums and for means."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from paddle_infcl import kernels

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "example_dpo_logprobs.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("example_dpo_logprobs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("loss_type", ["sigmoid", "simpo"])
def test_the_losses_are_upstreams(example, loss_type, monkeypatch):
    # The plain backend: the interpreter is slow, and tested elsewhere.
    monkeypatch.setattr(kernels, "triton_status", lambda tensor=None: (False, "not here", None))
    ways = {way: example.train(way, 3, loss_type) for way in ("upstream", "logits", "hidden")}
    assert [len(rows) for rows in ways.values()] == [3, 3, 3]
    for way in ("logits", "hidden"):
        for key in ("loss", "logps/chosen", "logps/rejected"):
            got, want = ([row[key] for row in ways[w]] for w in (way, "upstream"))
            np.testing.assert_allclose(got, want, rtol=2e-6)
    assert len({row["loss"] for row in ways["upstream"]}) == 3
