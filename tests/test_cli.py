# SPDX-License-Identifier: Apache-2.0
"""The command line, end to end on a tiny model."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from paddle_infcl import kernels
from paddle_infcl.checks import ConfigError, Problem
from paddle_infcl.cli import main, program
from paddle_infcl.commands import estimate, train
from tests.training import make_model, make_tokenizer, write_pairs

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, training pairs, and the same held-out pairs in both forms."""
    folder = tmp_path_factory.mktemp("cli")
    make_model().save_pretrained(folder / "model")
    make_tokenizer(folder / "tokenizer").save_pretrained(str(folder / "model"))
    write_pairs(folder / "train.jsonl", 48)
    rows = [json.loads(line) for line in write_pairs(folder / "dev.jsonl", 20, seed=9).read_text().splitlines()]
    with (
        open(folder / "queries.jsonl", "w") as queries,
        open(folder / "corpus.jsonl", "w") as corpus,
        open(folder / "qrels.tsv", "w") as qrels,
    ):
        qrels.write("query-id\tcorpus-id\tscore\n")
        for i, row in enumerate(rows):
            package = "even" if i % 2 == 0 else "odd"
            queries.write(json.dumps({"_id": f"q{i}", "text": row["query"], "package": package}) + "\n")
            corpus.write(json.dumps({"_id": f"p{i}", "text": row["pos_passage"][0]}) + "\n")
            qrels.write(f"q{i}\tp{i}\t1\n")
    return folder


def options(folder, output, **changes):
    values = {
        "model_name_or_path": str(folder / "model"),
        "train_files": [str(folder / "train.jsonl")],
        "output_dir": str(output),
        "max_query_len": 16,
        "max_passage_len": 16,
        "inf_cl_loss": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 2,
        "learning_rate": "2e-3",
        "eval_pairs": str(folder / "dev.jsonl"),
        "evaluation_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 1,
        "query_template": "bal {text}",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
    }
    return {**values, **changes}


def write_config(path, values):
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.fixture(scope="module")
def trained(folder):
    """One run of `train`, from a YAML file and an option that wins over it."""
    config = write_config(folder / "run.yaml", options(folder, folder / "out", embedding_temperature=1.0))
    assert main(["train", config, "--embedding_temperature", "0.05"]) == 0
    return folder / "out"


def test_train_evaluate_encode_agree(folder, trained, tmp_path, capsys):
    """What training reported is what the saved model scores: by `evaluate`, and from vectors by `encode`."""
    state = json.loads((trained / "trainer_state.json").read_text())
    history = state["log_history"]
    assert state["global_step"] == 6 and {e["temperature"] for e in history if "loss" in e} == {0.05}
    reported = [e for e in history if "eval_mrr@10" in e]
    assert [e["step"] for e in reported] == [3, 6]
    results = json.loads((trained / "all_results.json").read_text())
    assert results["eval_mrr@10"] == reported[-1]["eval_mrr@10"] and results["train_loss"] > 0

    capsys.readouterr()
    scores = tmp_path / "scores" / "after.json"
    assert (
        main(["evaluate", "--model", str(trained), "--pairs", str(folder / "dev.jsonl"), "--output", str(scores)]) == 0
    )
    shown = capsys.readouterr().out
    metrics = json.loads(scores.read_text())["metrics"]
    for name, value in metrics.items():
        assert value == pytest.approx(reported[-1][f"eval_{name}"], abs=1e-9)
        assert name in shown and f"{value:.4f}" in shown

    vectors = {}
    for kind, name in (("query", "queries"), ("passage", "corpus")):
        target = tmp_path / f"{name}.npy"
        words = ["encode", "--model", str(trained), "--input", str(folder / f"{name}.jsonl")]
        assert main([*words, "--output", str(target), "--kind", kind]) == 0
        vectors[kind] = np.load(target)
    assert "20 x 32 float32" in capsys.readouterr().out
    similar = vectors["query"] @ vectors["passage"].T
    ranks = (similar > np.diag(similar)[:, None]).sum(axis=1) + 1
    assert np.where(ranks <= 10, 1 / ranks, 0).mean() == pytest.approx(metrics["mrr@10"], abs=1e-9)


def test_evaluate_by_group(folder, trained, tmp_path, capsys):
    words = ["evaluate", "--model", str(trained), "--queries", str(folder / "queries.jsonl")]
    words += ["--corpus", str(folder / "corpus.jsonl"), "--qrels", str(folder / "qrels.tsv")]
    assert main([*words, "--output", str(tmp_path / "m.json")]) == 0
    found = json.loads((tmp_path / "m.json").read_text())
    groups = found["groups"]
    assert {name: group["queries"] for name, group in groups.items()} == {"even": 10, "odd": 10}
    mean = (groups["even"]["mrr@10"] + groups["odd"]["mrr@10"]) / 2
    assert mean == pytest.approx(found["metrics"]["mrr@10"])
    assert re.search(r"^even .*\n^odd ", capsys.readouterr().out, re.M)
    assert main([*words, "--group_field", "colour"]) == 1


def test_evaluate_writes_its_output_alone(folder, tmp_path):
    """No file beside it is replaced on the way, whatever its name."""
    pairs = tmp_path / "m.json.tmp"
    pairs.write_bytes((folder / "dev.jsonl").read_bytes())
    words = ["evaluate", "--model", str(folder / "model"), "--pairs", str(pairs)]
    assert main([*words, "--output", str(tmp_path / "m.json"), "--query_template", "{text}"]) == 0
    assert pairs.read_bytes() == (folder / "dev.jsonl").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.json", "m.json.tmp"]


def test_a_finished_run_is_not_trained_again(folder, trained, caplog):
    config = str(folder / "run.yaml")
    assert main(["train", config, "--embedding_temperature", "0.05"]) == 0
    assert "nothing is left to train" in caplog.text


def test_killed_and_started_again(folder, tmp_path, trained):
    """The same command goes on from the last checkpoint, and ends where the uninterrupted run does."""
    import shutil

    config = write_config(tmp_path / "c.yaml", options(folder, tmp_path / "out", embedding_temperature=0.05))
    (tmp_path / "out").mkdir()
    shutil.copytree(trained / "checkpoint-3", tmp_path / "out" / "checkpoint-3")
    assert main(["train", config]) == 0

    def losses(out):
        history = json.loads((out / "trainer_state.json").read_text())["log_history"]
        return [e["loss"] for e in history if "loss" in e]

    assert losses(tmp_path / "out") == losses(trained)


def test_errors_are_one_message(folder, tmp_path, caplog):
    config = write_config(tmp_path / "c.yaml", options(folder, tmp_path / "out", temperature=0.02, group_size=0))
    assert main(["train", config]) == 1
    shown = caplog.text
    assert "2 options can't work" in shown and "embedding_temperature" in shown and "Traceback" not in shown


def test_data_errors_come_before_the_model_loads(folder, tmp_path, caplog, monkeypatch):
    from paddle_infcl import modeling

    monkeypatch.setattr(modeling.SentenceEncoder, "from_pretrained", lambda *a, **k: pytest.fail("the model loads"))
    (tmp_path / "bad.jsonl").write_text('{"query": "a", "pos_passage": [""]}\n')
    values = options(folder, tmp_path / "out", train_files=[str(tmp_path / "bad.jsonl")])
    assert main(["train", write_config(tmp_path / "c.yaml", values)]) == 1
    assert "bad.jsonl:1" in caplog.text
    values = options(folder, tmp_path / "out", gradient_accumulation_steps=100)
    assert main(["train", write_config(tmp_path / "c.yaml", values)]) == 1
    assert "48 rows per epoch and one global batch takes 400" in caplog.text


def test_a_backend_that_cannot_run_stops_the_start(folder, tmp_path, caplog, monkeypatch):
    def broken(backend, tensor):
        raise kernels.BackendError("backend 'triton' can't run: no such thing")

    monkeypatch.setattr(kernels, "choose_backend", broken)
    values = options(folder, tmp_path / "out", inf_cl_backend="triton")
    assert main(["train", write_config(tmp_path / "c.yaml", values)]) == 1
    assert "no such thing" in caplog.text


def test_the_fallback_is_said_before_the_model_loads(folder, tmp_path, caplog, monkeypatch):
    kernels.load_ops.cache_clear()
    monkeypatch.setitem(sys.modules, "paddle_infcl_ops", None)

    def load_model(config):
        assert caplog.text.count("the Triton kernels are not used: the package paddle_infcl_ops") == 1
        raise ConfigError([Problem("model", "here", "far enough")])

    monkeypatch.setattr(train, "load_model", load_model)
    try:
        assert main(["train", write_config(tmp_path / "c.yaml", options(folder, tmp_path / "out"))]) == 1
    finally:
        kernels.load_ops.cache_clear()
    assert "far enough" in caplog.text


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_dry_run_of_every_recipe(config, capfd):
    assert main(["train", str(config), "--dry_run", "--processes", "8"]) == 0
    shown = capfd.readouterr().out
    values = yaml.safe_load(config.read_text())
    assert re.search(r"^backend: (paddle|triton|dense) \(.+\)$", shown, re.M)
    assert "memory of one process, an estimate for 8 processes" in shown
    pairs = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * 8
    assert f"= {pairs:,}" in shown
    resolved = yaml.safe_load(shown.split("\nbackend:")[0])
    assert resolved["inf_cl_loss"] is True and resolved["model_name_or_path"] == values["model_name_or_path"]
    assert resolved["group_size"] == values["group_size"]
    # The launch command stands on top, and names the file.
    head = config.read_text().split("\nmodel_name_or_path")[0]
    assert f"configs/{config.name}" in head


def test_recipes_of_the_pull_request():
    for name, group, accumulation in (("pr9673_group4", 4, 4096), ("pr9673_group1", 1, 16384)):
        values = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
        assert values["group_size"] == group and values["gradient_accumulation_steps"] == accumulation
        assert values["bf16"] is True and "--gpus 0,1,2,3,4,5,6,7" in (ROOT / "configs" / f"{name}.yaml").read_text()


def test_dry_run_estimates(folder, tmp_path, capfd):
    config = write_config(tmp_path / "c.yaml", options(folder, tmp_path / "out", group_size=2))
    assert main(["train", config, "--dry-run"]) == 0
    shown = capfd.readouterr().out
    # 16 queries and 32 passages of width 32 in fp32.
    assert re.search(r"representations: +6\.0 KiB +\(width 32\)", shown)
    assert re.search(r"logits at once: +8\.0 MiB", shown)
    guided = ["--objective", "guided", "--guide_model_name_or_path", str(folder / "model")]
    assert main(["train", config, "--dry-run", *guided]) == 0
    assert re.search(r"its vectors: +6\.0 KiB +\(width 32", capfd.readouterr().out)
    parameters = sum(int(np.prod(p.shape)) for p in make_model().parameters())
    assert re.search(rf"model and optimizer: +[\d.]+ [KM]iB +\({parameters / 1e6:.1f}M parameters", shown)
    assert main(["train", config, "--dry_run", "--inf_cl_loss", "false"]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"similarities: +2\.0 KiB +\(B x N", shown) and "backend: dense" in shown
    assert not (tmp_path / "out").exists()
    assert main(["train", config, "--processes", "4"]) == 1
    assert main(["train", config, "--dry_run", "--processes", "many"]) == 1


def test_parameter_counts(tmp_path):
    from safetensors.numpy import save_file

    assert estimate.parameter_count(None) is None and estimate.parameter_count(str(tmp_path)) is None
    qwen = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "vocab_size": 151936}
    qwen |= {"num_attention_heads": 14, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(qwen))
    assert estimate.parameter_count(str(tmp_path)) == pytest.approx(494e6, rel=0.01)  # Qwen2-0.5B
    bert = {"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072, "vocab_size": 30522}
    bert |= {"num_attention_heads": 12, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(bert))
    assert estimate.parameter_count(str(tmp_path)) == pytest.approx(109e6, rel=0.01)  # without its pooler
    save_file({"a": np.zeros([3, 5], "float32"), "b": np.zeros([7], "float32")}, tmp_path / "model.safetensors")
    assert estimate.parameter_count(str(tmp_path)) == 22


def test_doctor(capsys, monkeypatch):
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    for name in (
        "python",
        "paddlepaddle",
        "paddlenlp",
        "triton",
        "numpy",
        "torch",
        "inf_cl_backend",
        "auto would take",
    ):
        assert name in shown
    assert "Training can run." in shown and "without CUDA" in shown
    monkeypatch.setitem(sys.modules, "paddlenlp.trl", None)
    assert main(["doctor"]) == 1
    assert "can't run here" in capsys.readouterr().out


def test_doctor_says_why_not_triton(capsys, monkeypatch):
    monkeypatch.setattr(kernels, "triton_status", lambda tensor=None: (False, "it is broken", ImportError("x")))
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "does not run: it is broken [ImportError]" in shown and re.search(r"auto would take +paddle", shown)


def test_help(capsys):
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--inf_cl_loss" in shown and "--dry_run" in shown
    assert main(["train"]) == 2
    with pytest.raises(SystemExit) as exit_code:
        main(["--version"])
    assert exit_code.value.code == 0


def test_wrong_words(folder, tmp_path, caplog):
    assert main(["evaluate", "--model", str(folder / "model")]) == 1
    assert "--pairs" in caplog.text
    assert main(["evaluate", "--model", str(folder / "model"), "--queries", str(folder / "queries.jsonl")]) == 1
    words = ["encode", "--model", str(folder / "model"), "--input", str(folder / "train.jsonl"), "--output", "x.npy"]
    assert main([*words, "--kind", "query", "--template", "{text}"]) == 1
    assert main([*words]) == 1  # no field `text`
    assert "no field `text`" in caplog.text


def test_templates_limits_and_prompts(folder, tmp_path):
    """Templates that were not given are the checkpoint's prompts; the saved model keeps those of training."""
    from paddle_infcl.arguments import ConfigError, parse_config
    from paddle_infcl.commands.train import load_model, set_templates

    values = options(folder, tmp_path / "out")
    config = parse_config(values)
    model, _ = load_model(config)
    model.prompts["document"] = "bem "
    set_templates(model, config)
    assert config.embedding.passage_template == "bem {text}" and config.embedding.query_template == "bal {text}"
    assert model.prompts["query"] == "bal " and model.max_seq_length == 16
    config = parse_config({**values, "query_template": "{text} end", "hidden_dropout_prob": 0.25})
    model, _ = load_model(config)
    assert model.config.hidden_dropout_prob == 0.25
    set_templates(model, config)
    assert "query" not in model.prompts
    config = parse_config({**values, "max_passage_len": 40})
    config.embedding.max_passage_len = 41
    with pytest.raises(ConfigError, match="40 positions"):
        set_templates(model, config)


def test_from_random_weights(folder, tmp_path):
    values = options(folder, tmp_path / "out", continue_training=False, max_steps=1, evaluation_strategy="no")
    values["max_passage_len"] = 12
    assert main(["train", write_config(tmp_path / "c.yaml", values), "--save_strategy", "no"]) == 0
    results = json.loads((tmp_path / "out" / "all_results.json").read_text())
    assert "eval_mrr@10" in results  # held-out pairs are scored at the end, whatever the strategy


def test_evaluation_alone(folder, tmp_path, caplog):
    config = write_config(tmp_path / "c.yaml", options(folder, tmp_path / "out", do_train=False))
    assert main(["train", config]) == 0
    assert "do_train is false: eval_mrr@10" in caplog.text and not (tmp_path / "out" / "all_results.json").exists()
    values = options(folder, tmp_path / "out", do_train=False, eval_pairs=None, evaluation_strategy="no")
    assert main(["train", write_config(tmp_path / "d.yaml", values)]) == 1
    assert "nothing to do" in caplog.text


def test_the_script_and_the_module(folder, tmp_path):
    """`python scripts/run_embedding.py` and `python -m paddle_infcl` are the command."""
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    values = options(folder, tmp_path / "out", max_steps=2, evaluation_strategy="no", save_strategy="no")
    config = tmp_path / "emb_argument.json"
    config.write_text(json.dumps(values))
    script = [sys.executable, str(ROOT / "scripts" / "run_embedding.py"), str(config), "--loss_type", "inf_cl"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "out" / "model_state.pdparams").is_file()
    assert "the Triton kernels are not used" in done.stderr
    module = [sys.executable, "-m", "paddle_infcl", "train", "--group_size", "0"]
    done = subprocess.run(module, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 1 and "output_dir: is needed" in done.stderr


def test_one_process_of_several_ends_at_once(monkeypatch):
    """Whatever starts it: the interpreter's own end now and then aborts in Paddle's process groups."""
    ended = []
    monkeypatch.setattr("paddle_infcl.distributed.watch.dist.is_initialized", lambda: True)
    monkeypatch.setattr("paddle_infcl.distributed.watch.dist.get_world_size", lambda: 2)
    monkeypatch.setattr("paddle_infcl.distributed.watch.os._exit", ended.append)
    with pytest.raises(SystemExit, match="1"):
        program(["train", "no_such.yaml"])
    assert ended == [1]


def test_ctrl_c(folder, tmp_path, monkeypatch, caplog):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("paddle_infcl.commands.train.run", interrupted)
    assert main(["train", write_config(tmp_path / "run.yaml", options(folder, tmp_path / "out"))]) == 130
    assert "stopped by Ctrl-C; without overwrite_output_dir the same command goes on" in caplog.text


def test_words_of_the_help_need_no_paddlenlp():
    code = (
        "import sys; from paddle_infcl.cli import main; main(['train', '--help']); "
        "assert not [m for m in sys.modules if m.startswith('paddlenlp')]"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
