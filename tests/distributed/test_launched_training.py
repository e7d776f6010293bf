# SPDX-License-Identifier: Apache-2.0
"""`paddle.distributed.launch scripts/run_embedding.py CONFIG.yaml` on two processes, and the same on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import yaml

from tests.distributed.launcher import ROOT
from tests.distributed.test_nodes import launch_nodes
from tests.training import make_model, make_tokenizer, write_pairs


def config(folder, output, accumulation):
    values = {
        "model_name_or_path": str(folder / "model"), "train_files": [str(folder / "train.jsonl")],
        "output_dir": str(folder / output), "max_query_len": 16, "max_passage_len": 16, "inf_cl_loss": True,
        "inf_cl_backend": "paddle", "per_device_train_batch_size": 4, "gradient_accumulation_steps": accumulation,
        "num_train_epochs": 2, "learning_rate": 2e-3, "embedding_temperature": 0.1, "logging_steps": 1,
        "eval_pairs": str(folder / "dev.jsonl"), "evaluation_strategy": "steps", "eval_steps": 3, "device": "cpu",
        "save_strategy": "no", "disable_tqdm": True, "report_to": "none", "do_train": True, "do_eval": True, "seed": 5,
    }  # fmt: skip
    path = folder / f"{output}.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def history(folder):
    entries = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    losses = [e["loss"] for e in entries if "loss" in e]
    metrics = [(e["eval_mrr@10"], e["eval_recall@10"]) for e in entries if "eval_mrr@10" in e]
    return losses, metrics


def run_alone(arguments, timeout):
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "ops" / "src")]),
    }
    subprocess.run(
        [sys.executable, *arguments], check=True, cwd=ROOT, env=environment, capture_output=True, timeout=timeout
    )


def test_two_launched_processes_reach_what_one_reaches(tmp_path):
    make_model(dropout=0.0).save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "tokenizer").save_pretrained(str(tmp_path / "model"))
    write_pairs(tmp_path / "train.jsonl", 50)  # windows of 16, 16, 16 and 2
    write_pairs(tmp_path / "dev.jsonl", 21, seed=9)
    script = "scripts/run_embedding.py"
    codes, logs = launch_nodes(tmp_path, 1, 2, [script, config(tmp_path, "two", 2)])
    assert codes == [0], logs[0][-4000:]
    run_alone([script, config(tmp_path, "one", 4)], timeout=120)
    (losses, metrics), (want_losses, want_metrics) = history(tmp_path / "two"), history(tmp_path / "one")
    assert len(losses) == 8 and len(metrics) >= 2
    np.testing.assert_allclose(losses, want_losses, rtol=1e-4)
    np.testing.assert_allclose(metrics, want_metrics, atol=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_launched_processes_train_the_quickstart(tmp_path):
    """The quickstart's configuration, model and data, with small batches, two steps and no dropout."""
    data = ROOT / "data" / "code_search" / "eval" / "pairs.jsonl"
    if not data.exists() or not (ROOT / "data" / "all-MiniLM-L6-v2").exists():
        pytest.skip("scripts/quickstart.sh makes the model and the data")
    lines = data.read_text(encoding="utf-8").splitlines()
    (tmp_path / "dev.jsonl").write_text("\n".join(lines[:: len(lines) // 40]) + "\n", encoding="utf-8")
    values = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    values = {name: value for name, value in values.items() if not name.startswith("eval_")}
    values |= {
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "per_device_train_batch_size": 4,
        "max_steps": 2, "warmup_steps": 0, "eval_pairs": str(tmp_path / "dev.jsonl"), "eval_steps": 2,
        "disable_tqdm": True,
    }  # fmt: skip
    for name, accumulation in (("one", 4), ("two", 2)):
        own = values | {"output_dir": str(tmp_path / name), "gradient_accumulation_steps": accumulation}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(own))
    script = "scripts/run_embedding.py"
    codes, logs = launch_nodes(tmp_path, 1, 2, [script, str(tmp_path / "two.yaml")], timeout=280)
    assert codes == [0], logs[0][-4000:]
    run_alone([script, str(tmp_path / "one.yaml")], timeout=280)
    (losses, metrics), (want_losses, want_metrics) = history(tmp_path / "two"), history(tmp_path / "one")
    assert len(losses) == 2 and len(metrics) == 1
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    np.testing.assert_allclose(metrics, want_metrics, atol=0.025)  # a near tie of one query among forty
