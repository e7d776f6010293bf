# SPDX-License-Identifier: Apache-2.0
"""Options from files and command lines: values, and every error at once."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from paddle_infcl import checks, device
from paddle_infcl.arguments import ConfigError, EmbeddingArgument, parse_config

# PaddleNLP's llm/config/qwen/emb_argument.json, as a set of facts: the options and values that its users have.
UPSTREAM = {
    "model_name_or_path": "Qwen/Qwen2-0.5B",
    "dataset_name_or_path": "./dureader_data",
    "output_dir": "./checkpoints/sft_ckpts",
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 4,
    "per_device_eval_batch_size": 1,
    "eval_accumulation_steps": 1,
    "max_steps": 2000,
    "learning_rate": 3e-5,
    "warmup_steps": 30,
    "logging_steps": 1,
    "evaluation_strategy": "no",
    "save_strategy": "epoch",
    "max_query_len": 512,
    "max_passage_len": 512,
    "group_size": 4,
    "bf16": True,
    "fp16_opt_level": "O2",
    "do_train": True,
    "do_eval": False,
    "disable_tqdm": True,
    "load_best_model_at_end": False,
    "eval_with_do_generation": False,
    "metric_for_best_model": "accuracy",
    "recompute": True,
    "save_total_limit": 1,
    "tensor_parallel_degree": 1,
    "pipeline_parallel_degree": 1,
    "sharding": "stage1",
    "zero_padding": False,
    "unified_checkpoint": True,
    "use_flash_attention": True,
    "amp_custom_black_list": "elementwise_div",
    "release_grads": True,
}


@pytest.fixture
def folder(tmp_path):
    """A model's config, training pairs and held-out pairs."""
    (tmp_path / "model").mkdir()
    config = {"model_type": "bert", "hidden_size": 32, "max_position_embeddings": 128}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    for name in ("train.jsonl", "dev.jsonl"):
        (tmp_path / name).write_text('{"query": "a", "pos_passage": ["b"]}\n')
    return tmp_path


@pytest.fixture
def minimal(folder):
    return {
        "model_name_or_path": str(folder / "model"),
        "train_files": [str(folder / "train.jsonl")],
        "output_dir": str(folder / "out"),
        "max_passage_len": 64,
        "report_to": "none",
    }


def wrong(config):
    with pytest.raises(ConfigError) as caught:
        parse_config(config)
    found = {}
    for problem in caught.value.problems:
        found[problem.option] = "; ".join(filter(None, [found.get(problem.option), problem.message]))
        assert f"\n  {problem.option}" in str(caught.value)
    return found


def test_upstreams_file_parses_unchanged(tmp_path):
    file = tmp_path / "emb_argument.json"
    file.write_text(json.dumps(UPSTREAM))
    config = parse_config([str(file), "--inf_cl_loss", "true"], check_files=False)
    model, data, training, embedding = config
    assert model.model_name_or_path == "Qwen/Qwen2-0.5B" and data.dataset_name_or_path == "./dureader_data"
    assert training.learning_rate == 3e-5 and training.gradient_accumulation_steps == 4
    assert training.amp_custom_black_list == ["elementwise_div"]
    assert embedding.inf_cl_loss and embedding.group_size == 4 and embedding.max_passage_len == 512
    assert [p.option for p in config.missing] == ["dataset_name_or_path"]
    # No GPU in the tests: fp32 on the CPU.
    assert (training.device, training.bf16, training.fp16_opt_level, training.recompute) == ("cpu", False, "O1", True)


def test_a_gpu_configuration_on_a_cpu_warns_once(minimal, caplog):
    config = {**minimal, "device": "gpu", "bf16": True, "fp16_opt_level": "O2", "sharding": "stage1"}
    with caplog.at_level("WARNING", "paddle_infcl"):
        notes = parse_config(config).notes
        parse_config(config)
    assert len(notes) == 1 and "bf16=True" in notes[0] and "sharding=stage1" in notes[0] and "fp32" in notes[0]
    assert caplog.text.count("runs on the CPU in fp32") == 1


def test_a_plain_configuration_on_a_cpu_says_nothing(minimal, caplog):
    with caplog.at_level("WARNING", "paddle_infcl"):
        assert parse_config({**minimal, "device": "auto"}).training.device == "cpu"
        assert parse_config(minimal).training.device == "cpu"
    assert not caplog.text


def test_a_gpu_keeps_its_options(minimal, monkeypatch):
    monkeypatch.setattr(device, "available_device", lambda: ("gpu", ""))
    values = checks._Values({**vars(device), "device": "auto", "no_cuda": False, "fp16": True}, {"device"})
    assert device.resolve_device(values) == ({"device": "gpu"}, [], None)


def test_fp16_with_device_cpu_is_an_error(minimal):
    assert wrong({**minimal, "device": "cpu", "fp16": True}) == {"fp16": "needs a GPU; leave it out, or device: cpu"}
    assert not parse_config({**minimal, "device": "gpu", "fp16": True}).training.fp16


@pytest.mark.parametrize("kind", ["json", "yaml", "dict", "command"])
def test_all_sources_give_the_same_values(kind, minimal, tmp_path):
    """YAML reads 1e-4 as a text and `no` as false; PaddleNLP's parser turns null into "None"."""
    wanted = {
        **minimal,
        "learning_rate": 1e-4,
        "evaluation_strategy": "no",
        "embedding_matryoshka_dims": [8, 16],
        "embedding_matryoshka_weights": [1.0, 0.5],
        "inf_cl_loss": True,
        "false_negative_margin": 0.1,
        "max_steps": 20,
        "pad_negatives": "none",
        "sort_by_length": False,
    }
    if kind == "json":
        source = tmp_path / "c.json"
        source.write_text(json.dumps({**wanted, "no_duplicates": None, "save_total_limit": "None"}))
    elif kind == "yaml":
        source = tmp_path / "c.yaml"
        text = yaml.safe_dump({k: v for k, v in wanted.items() if k not in ("learning_rate", "evaluation_strategy")})
        source.write_text(text + "learning_rate: 1e-4\nevaluation_strategy: no\nsave_total_limit: null\n")
    elif kind == "dict":
        source = wanted
    else:
        source = []
        for name, value in wanted.items():
            source += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
    _, _, training, embedding = parse_config(source)
    assert training.learning_rate == 1e-4 and training.max_steps == 20 and training.save_total_limit is None
    assert training.evaluation_strategy.value == "no"
    assert embedding.embedding_matryoshka_dims == [8, 16] and embedding.embedding_matryoshka_weights == [1.0, 0.5]
    assert embedding.inf_cl_loss is True and embedding.sort_by_length is False
    assert embedding.pad_negatives == "none" and embedding.train_files == minimal["train_files"]
    assert training.report_to == []


def test_the_command_line_wins_over_the_file(minimal, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({**minimal, "embedding_negatives_cross_device": True, "group_size": 2}))
    config = parse_config([str(file), "--group-size", "5", "--no_embedding_negatives_cross_device", "--inf_cl_loss"])
    assert config.embedding.group_size == 5 and config.embedding.inf_cl_loss
    assert config.embedding.embedding_negatives_cross_device is False
    assert "group_size" in config.given and "seed" not in config.given


def test_everything_wrong_at_once(folder):
    found = wrong(
        {
            "output_dir": "out",
            "model_name_or_path": str(folder / "nowhere"),
            "train_files": str(folder / "nothing.jsonl"),
            "temperature": 0.02,
            "lerning_rate": 1e-4,
            "embedding_temperature": 0,
            "group_size": 0,
            "max_query_len": "many",
            "per_device_train_batch_size": 2.5,
            "query_template": "query:",
            "embedding_matryoshka_dims": [16, 16],
            "embedding_matryoshka_weights": [1],
            "pipeline_parallel_degree": 2,
            "sharding": "stage2",
            "gradient_accumulation_steps": 8,
            "zero_padding": True,
            "lora": True,
            "inf_cl_backend": "cuda",
            "bf16": "perhaps",
            "evaluation_strategy": "sometimes",
        }
    )
    assert found["temperature"] == (
        "there is no such option; did you mean embedding_temperature or learnable_temperature?"
    )
    assert found["lerning_rate"] == "there is no such option; did you mean learning_rate?"
    assert found["model_name_or_path"] == "there is no such folder"
    assert found["train_files"] == "there is no such file"
    assert found["max_query_len"] == found["per_device_train_batch_size"] == "must be a whole number"
    assert found["evaluation_strategy"] == "must be one of no, steps, epoch"
    assert found["bf16"] == "must be true or false"
    assert "must be one of auto, triton, paddle, dense" in found["inf_cl_backend"]
    assert "stage1" in found["sharding"] and "names a width twice" in found["embedding_matryoshka_dims"]
    for option in ("embedding_temperature", "group_size", "query_template", "pipeline_parallel_degree"):
        assert option in found
    for option in ("embedding_matryoshka_weights", "zero_padding", "lora"):
        assert option in found
    assert len(found) == 18


@pytest.mark.parametrize(
    "change, option, message",
    [
        ({"embedding_matryoshka_dims": [16, 64]}, "embedding_matryoshka_dims", "64 is above the model's width, 32"),
        ({"embedding_matryoshka_dims": [16, 0]}, "embedding_matryoshka_dims", "positive widths"),
        ({"embedding_matryoshka_weights": [1]}, "embedding_matryoshka_weights", "which has 0"),
        (
            {"embedding_matryoshka_dims": [8], "embedding_matryoshka_weights": [0]},
            "embedding_matryoshka_weights",
            "not all 0",
        ),
        ({"max_passage_len": 512}, "max_passage_len", "128 positions"),
        ({"embedding_temperature": -0.1}, "embedding_temperature", "positive"),
        ({"embedding_temperature": ".nan"}, "embedding_temperature", "a number"),
        ({"embedding_temperature": "nan"}, "embedding_temperature", "positive"),
        ({"false_negative_margin": -1}, "false_negative_margin", "0 or more"),
        ({"inf_cl_memory_budget": 0}, "inf_cl_memory_budget", "bytes"),
        ({"loss_type": "inf_cl", "inf_cl_loss": False}, "loss_type", "leave one of the two out"),
        ({"loss_type": "softmax"}, "loss_type", "contrastive, inf_cl"),
        ({"inf_cl_backend": "paddle"}, "inf_cl_backend", "without inf_cl_loss"),
        ({"pooling": "max"}, "pooling", "cls, mean, last"),
        ({"pad_negatives": "always"}, "pad_negatives", "none, repeat"),
        ({"passage_template": "{text} {text}"}, "passage_template", "exactly once"),
        ({"per_device_train_batch_size": 1, "group_size": 1}, "per_device_train_batch_size", "nothing to contrast"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps", "1 or more"),
        ({"bf16": True, "fp16": True, "device": "gpu"}, "fp16", "bf16 is on as well"),
        ({"fp16_opt_level": "O2"}, "fp16_opt_level", "needs fp16"),
        ({"learning_rate": 0}, "learning_rate", "positive"),
        ({"num_train_epochs": 0}, "num_train_epochs", "positive"),
        ({"sharding": "stage4"}, "sharding", "stage1, stage2 or stage3"),
        ({"context_parallel_degree": 2}, "context_parallel_degree", "pooling"),
        ({"flash_mask": True}, "flash_mask", "zero_padding"),
        ({"count_trained_tokens": True}, "count_trained_tokens", "pairs_per_second"),
        ({"train_weights": [1, 2]}, "train_weights", "which has 1"),
        ({"train_weights": [0]}, "train_weights", "positive"),
        ({"dataset_name_or_path": "data"}, "dataset_name_or_path", "name the data once"),
        ({"eval_queries": "q.jsonl"}, "eval_queries", "together"),
        ({"evaluation_strategy": "steps"}, "evaluation_strategy", "eval_pairs"),
        ({"do_eval": True}, "do_eval", "eval_pairs"),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", "needs evaluation_strategy"),
        ({"early_stopping_patience": 2}, "early_stopping_patience", "needs load_best_model_at_end"),
        ({"resume_from_checkpoint": "nowhere/checkpoint-3"}, "resume_from_checkpoint", "no such folder"),
        ({"lr_scheduler_type": "spiral"}, "SFTConfig", "spiral"),
        ({"model_init_kwargs": "[1]"}, "model_init_kwargs", "a mapping"),
        ({"no_recompute_layers": "one"}, "no_recompute_layers", "a whole number"),
    ],
)
def test_one_thing_wrong(minimal, change, option, message):
    found = wrong({**minimal, **change})
    assert message in found[option], found


def test_evaluation_options(minimal, folder):
    base = {**minimal, "eval_pairs": str(folder / "dev.jsonl"), "evaluation_strategy": "steps", "eval_steps": 5}
    assert parse_config(base).training.do_eval
    best = {**base, "load_best_model_at_end": True, "save_steps": 10, "metric_for_best_model": "ndcg@10"}
    assert parse_config(best).training.greater_is_better is True
    parse_config({**best, "metric_for_best_model": "eval_mrr@10", "early_stopping_patience": 2})
    assert "there are mrr@10" in wrong({**best, "metric_for_best_model": "ndcg"})["metric_for_best_model"]
    assert "is needed" in wrong({**best, "metric_for_best_model": None})["metric_for_best_model"]
    assert "a multiple of eval_steps, 5" in wrong({**best, "save_steps": 7})["save_steps"]
    assert "the same as evaluation_strategy" in wrong({**best, "save_strategy": "epoch"})["save_strategy"]
    # What never runs need not be right: upstream's file names a metric that it has not got.
    parse_config({**minimal, "metric_for_best_model": "accuracy"})


def test_paddlenlps_data_folders(minimal, folder):
    del minimal["train_files"]
    base = {**minimal, "dataset_name_or_path": str(folder), "do_eval": True, "eval_steps": 3}
    config = parse_config(base)
    assert config.train_files == [str(folder / "train.jsonl")]
    assert config.embedding.eval_pairs == str(folder / "dev.jsonl")
    many = folder / "many"
    (many / "train").mkdir(parents=True)
    for name in ("b.json", "a.json", "readme.txt"):
        (many / "train" / name).write_text("{}")
    config = parse_config({**minimal, "dataset_name_or_path": str(many)})
    assert config.train_files == [str(many / "train" / "a.json"), str(many / "train" / "b.json")]
    single = parse_config({**minimal, "dataset_name_or_path": str(folder / "train.jsonl")})
    assert single.train_files == [str(folder / "train.jsonl")]


def test_loss_type_and_head_dim(minimal):
    config = parse_config({**minimal, "loss_type": "inf_cl", "inf_cl_head_dim": 64})
    assert config.embedding.inf_cl_loss
    assert any("inf_cl_head_dim is not needed" in note for note in config.notes)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("c.yaml", "a: [1", "is not YAML"),
        ("c.json", "{", "is not JSON"),
        ("c.yaml", "- a\n", "holds a list"),
        ("c.toml", "", "ends in .json, .yaml or .yml"),
        (None, None, "can't be read"),
    ],
)
def test_files_that_are_no_configuration(tmp_path, name, text, message):
    file = tmp_path / (name or "gone.yaml")
    if name:
        file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_config(file)


def test_words_that_are_no_options(minimal):
    file_less = ["--output_dir", "x", "--seed=1"]
    assert "there is no such option" in wrong([*file_less, "--frobnicate"])["frobnicate"]
    with pytest.raises(ConfigError, match=r"ends in \.json"):
        parse_config(["train", "--seed", "1"])


def test_options_from_paddlenlps_own_arguments():
    """PaddleNLP's EmbeddingArgument: our fields are missing, its lengths default to 1."""

    @dataclasses.dataclass
    class Upstream:
        max_query_len: int = 1
        max_passage_len: int = 1.0
        group_size: int = 8
        embedding_temperature: float = 0.05
        embedding_negatives_cross_device: bool = True
        embedding_matryoshka_dims: list | None = None
        loss_type: str = "inf_cl"
        inf_cl_head_dim: int = 64

    arguments = EmbeddingArgument.of(Upstream())
    assert arguments.inf_cl_loss and arguments.embedding_temperature == 0.05 and arguments.inf_cl_backend == "auto"
    with pytest.raises(ConfigError, match="loss_type = 'other'"):
        EmbeddingArgument.of(Upstream(loss_type="other"))


def test_paddlenlps_parser_takes_our_options():
    from paddlenlp.trainer import PdArgumentParser

    (arguments,) = PdArgumentParser(EmbeddingArgument).parse_args_into_dataclasses(
        ["--inf_cl_loss", "true", "--embedding_matryoshka_dims", "8", "16", "--inf_cl_backend", "paddle"]
    )
    assert arguments.inf_cl_loss and arguments.embedding_matryoshka_dims == [8, 16]
    assert arguments.inf_cl_backend == "paddle" and arguments.false_negative_margin is None


def test_choices_agree_with_those_who_use_them():
    from paddle_infcl.distributed.negatives import STRATEGIES
    from paddle_infcl.kernels import BACKENDS
    from paddle_infcl.pooling import POOLINGS

    assert checks.BACKENDS == BACKENDS and checks.POOLINGS == POOLINGS and checks.STRATEGIES == STRATEGIES


def test_every_option_is_documented():
    text = (Path(__file__).parents[1] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^|]*)` \|", text, re.M))
    defaults = {f.name: json.dumps(f.default) for f in dataclasses.fields(EmbeddingArgument)}
    assert rows == defaults


@pytest.mark.parametrize(
    "option, value",
    [
        ("seed", -1),
        ("seed", 2**32),
        ("learning_rate", float("inf")),
        ("weight_decay", float("nan")),
        ("max_grad_norm", -1),
        ("warmup_steps", -5),
        ("dataloader_num_workers", -1),
        ("logging_steps", -3),
        ("logging_steps", 0),
        ("save_steps", 0),
        ("eval_steps", -1),
        ("num_train_epochs", float("inf")),
    ],
)
def test_numbers_that_paddlenlp_lets_through(minimal, option, value):
    assert list(wrong({**minimal, option: value})) == [option]
    assert parse_config({**minimal, "logging_strategy": "no", "logging_steps": 0, "save_strategy": "no"})


def test_output_folders_that_cannot_be(minimal, folder, monkeypatch):
    file = folder / "train.jsonl"
    for path in (file, file / "deeper"):
        assert wrong({**minimal, "output_dir": str(path)}) == {"output_dir": f"{file} is a file: name a folder"}
    monkeypatch.setattr(checks.os, "access", lambda path, mode: False)
    assert wrong(minimal) == {"output_dir": f"no permission to write into {folder}"}


def test_a_folder_among_train_files(minimal, folder):
    found = wrong({**minimal, "train_files": [str(folder)]})
    assert found == {"train_files": "is a folder: name its files, or dataset_name_or_path"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.yaml", b"seed: 1\nseed: 2\n", "names seed twice"),
        ("a.json", b'{"seed": 1, "seed": 2}', "names seed twice"),
        ("a.yaml", "output_dir: \u00e9".encode("latin-1"), "is not UTF-8: byte 0xe9 at 12"),
        ("a.json", b"\xff{}", "is not UTF-8: byte 0xff at 0"),
    ],
)
def test_files_that_say_two_things_or_nothing(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / name}: {message}")):
        parse_config([str(tmp_path / name)])


def test_choices_are_shown_as_they_are_written(minimal):
    config = {**minimal, "load_best_model_at_end": True, "save_strategy": "epoch", "evaluation_strategy": "steps"}
    with pytest.raises(ConfigError, match="save_strategy = 'epoch': must be the same as evaluation_strategy"):
        parse_config({**config, "eval_pairs": minimal["train_files"][0], "metric_for_best_model": "map"})


def test_lists_that_end_too_early(minimal):
    found = wrong({**minimal, "embedding_matryoshka_dims": "[8,"})
    assert found == {"embedding_matryoshka_dims": "must be a list, such as [64, 128]"}


def test_a_model_folder_with_a_broken_config(minimal, folder):
    """Loading the model says what is wrong with it."""
    for content in ("[]", '{"hidden_size": "32", "max_position_embeddings": "x"}'):
        (folder / "model" / "config.json").write_text(content)
        assert parse_config({**minimal, "embedding_matryoshka_dims": [8]})
