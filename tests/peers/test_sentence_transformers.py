# SPDX-License-Identifier: Apache-2.0
"""The guided and the ranking loss against the real sentence-transformers, over random settings.

It needs torch and newer packages than PaddleNLP allows beside itself, so it may have an interpreter of its own: name
it in the environment variable PEERS_PYTHON. Skipped where sentence-transformers is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import guided_inf_cl_loss, multiple_negatives_ranking_loss

pytestmark = pytest.mark.peers
PYTHON = os.environ.get("PEERS_PYTHON", sys.executable)
SCRIPT = Path(__file__).with_name("sentence_transformers_losses.py")
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def random_case(rng) -> dict:
    rows, negatives, width = int(rng.integers(2, 9)), int(rng.integers(0, 3)), int(rng.integers(2, 7))
    anchor = rng.standard_normal((rows, width))
    columns = [anchor, 0.6 * anchor + rng.standard_normal((rows, width))]
    columns += [0.3 * anchor + rng.standard_normal((rows, width)) for _ in range(negatives)]
    case = {"columns": columns, "guides": None}
    chunk = {"mini_batch_size": int(rng.integers(1, rows + 1))}
    if rng.random() < 0.5:
        guide = rng.standard_normal((rows, 3))
        case["guides"] = [guide] + [0.7 * guide + rng.standard_normal((rows, 3)) for _ in range(1 + negatives)]
        case["kind"] = "guided"
        case["options"] = {
            "temperature": float(rng.choice([0.05, 0.2])),
            "margin_strategy": str(rng.choice(["absolute", "relative"])),
            "margin": float(rng.choice([0.0, 0.1, 0.3])),
            "contrast_anchors": bool(rng.random() < 0.5),
            "contrast_positives": bool(rng.random() < 0.5),
            **chunk,
        }
        return case
    directions = ["query_to_doc"] + [d for d in DIRECTIONS[1:] if rng.random() < 0.5]
    per_direction = set(directions) <= {"query_to_doc", "doc_to_query"} and rng.random() < 0.5
    hard = ["hard_negatives"] if negatives else []
    mode = rng.choice([None, "in_batch_negatives", "all_negatives", *hard])
    case["kind"] = "ranking"
    case["options"] = {
        "scale": float(rng.choice([5.0, 20.0])),
        "directions": directions,
        "partition_mode": "per_direction" if per_direction else "joint",
        "hardness_mode": mode,
        "hardness_strength": 4.0 if mode else 0.0,
        **chunk,
    }
    return case


def ours(case, backend):
    columns = [paddle.to_tensor(c, stop_gradient=False) for c in case["columns"]]
    options = {k: v for k, v in case["options"].items() if k != "mini_batch_size"}
    if case["kind"] == "guided":
        guides = [paddle.to_tensor(g) for g in case["guides"]]
        loss = guided_inf_cl_loss(columns, guides, published_diagonals=True, backend=backend, **options)
    else:
        temperature, partition = 1 / options.pop("scale"), options.pop("partition_mode")
        loss = multiple_negatives_ranking_loss(
            columns, temperature=temperature, partition=partition, backend=backend, **options
        )
    loss.backward()
    return float(loss), [np.zeros(c.shape) if c.grad is None else c.grad.numpy() for c in columns]


def test_losses_and_gradients_are_those_of_sentence_transformers(tmp_path):
    if subprocess.run([PYTHON, "-c", "import sentence_transformers"], capture_output=True, check=False).returncode:
        pytest.skip("sentence-transformers is not installed (PEERS_PYTHON may name an interpreter that has it)")
    rng = np.random.default_rng(0)
    cases = [random_case(rng) for _ in range(60)]
    arrays = {}
    for k, case in enumerate(cases):
        arrays |= {f"{k}_{c}": x for c, x in enumerate(case["columns"])}
        arrays |= {f"{k}_guide_{c}": x for c, x in enumerate(case["guides"] or [])}
    options = [{"kind": c["kind"], "options": c["options"], "columns": len(c["columns"])} for c in cases]
    np.savez(tmp_path / "cases.npz", options=json.dumps(options), **arrays)
    subprocess.run([PYTHON, str(SCRIPT), str(tmp_path / "cases.npz"), str(tmp_path / "results.npz")], check=True)
    results = np.load(tmp_path / "results.npz")
    for k, case in enumerate(cases):
        for backend in ("paddle", "dense"):
            loss, gradients = ours(case, backend)
            assert loss == pytest.approx(float(results[f"{k}_loss"]), rel=1e-12, abs=1e-13), case["options"]
            for c, gradient in enumerate(gradients):
                want = results[f"{k}_grad_{c}"]
                np.testing.assert_allclose(gradient, want, rtol=1e-9, atol=1e-12, err_msg=str(case["options"]))
