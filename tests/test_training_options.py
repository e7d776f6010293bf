# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401, F811 - fixtures
"""Options of a run that PaddleNLP takes without a word."""

import os

import pytest

from paddle_infcl import arguments, checks, device
from paddle_infcl.arguments import parse_config
from tests.test_arguments import folder, minimal, wrong


def defaults():
    return {name: option.default for name, option in arguments._option_table()[0].items()}


@pytest.mark.parametrize("kind", ["absolute", "dots", "relative", "link", "home"])
def test_the_model_is_not_overwritten(minimal, folder, monkeypatch, kind):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    (folder / "link").symlink_to(folder / "model")
    names = {
        "absolute": folder / "model",
        "dots": f"{folder}/out/../model/",
        "relative": "model",
        "link": "link",
        "home": "~/model",
    }
    want = {
        "output_dir": "is the folder of model_name_or_path as well, whose weights the trained model would replace: "
        "name another one"
    }
    assert wrong({**minimal, "output_dir": str(names[kind])}) == want
    # Evaluation alone writes nothing there.
    evaluation = {"do_train": False, "eval_pairs": minimal["train_files"][0]}
    parse_config({**minimal, "output_dir": str(names[kind]), **evaluation})


def test_a_folder_that_is_not_there_yet_is_not_the_models(minimal, folder):
    found = wrong({**minimal, "model_name_or_path": f"{folder}/new", "output_dir": f"{folder}/out/../new"})
    assert "model_name_or_path as well" in found["output_dir"]


def test_the_guide_is_not_overwritten(minimal, folder):
    (folder / "guide").mkdir()
    config = {**minimal, "objective": "guided", "guide_model_name_or_path": str(folder / "guide")}
    assert "guide_model_name_or_path as well" in wrong({**config, "output_dir": f"{folder}/guide"})["output_dir"]
    parse_config(config)


def test_a_checkpoint_inside_the_output_folder_goes_on(minimal, folder):
    checkpoint = folder / "out" / "checkpoint-2"
    os.makedirs(folder / "out")
    (folder / "model").rename(checkpoint)
    parse_config({**minimal, "model_name_or_path": str(checkpoint), "resume_from_checkpoint": str(checkpoint)})


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("max_steps", 0, "must be 1 or more; -1, or leave it out, for num_train_epochs"),
        ("max_steps", -2, "must be 1 or more; -1, or leave it out, for num_train_epochs"),
        ("eval_steps", 0, "must be 1 or more; evaluation_strategy: no turns evaluation off"),
        ("eval_steps", -1, "must be 1 or more; evaluation_strategy: no turns evaluation off"),
        ("save_steps", 0, "must be 1 or more; save_strategy: no turns it off"),
        ("logging_steps", 0, "must be 1 or more; logging_strategy: no turns it off"),
    ],
)
def test_steps_that_are_none(minimal, option, value, message):
    assert wrong({**minimal, option: value}) == {option: message}


def test_steps_that_are_some(minimal):
    for steps in ({"max_steps": -1}, {"max_steps": 1}, {"max_steps": None}, {"eval_steps": 1}, {"save_steps": 1}):
        parse_config({**minimal, **steps})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_guide_is_float32_on_a_cpu(minimal, folder, monkeypatch, dtype):
    (folder / "guide").mkdir()
    guided = {"objective": "guided", "guide_model_name_or_path": str(folder / "guide"), "guide_dtype": dtype}
    config = parse_config({**minimal, **guided})
    assert config.embedding.guide_dtype == "float32"
    assert len(config.notes) == 1 and "runs on the CPU in fp32; without effect here" in config.notes[0]
    assert f"guide_dtype={dtype}" in config.notes[0]
    assert not parse_config({**minimal, **guided, "guide_dtype": "float32"}).notes
    assert "guide_dtype" in wrong({**minimal, **guided, "guide_dtype": "float8"})
    monkeypatch.setattr(device, "available_device", lambda: ("gpu", ""))
    on_gpu = checks.check_everything({**defaults(), **minimal, **guided}, set(guided), set())
    assert "guide_dtype" not in on_gpu.changes and not on_gpu.notes


@pytest.mark.parametrize(
    "option, value",
    [
        ("embedding_matryoshka_dims", [8, None]),
        ("embedding_matryoshka_dims", "[8, null]"),
        ("embedding_matryoshka_dims", [8, "none"]),
        ("train_weights", [None]),
        ("train_files", [None]),
        ("ranking_directions", ["query_to_doc", None]),
    ],
)
def test_lists_with_nothing_in_them(minimal, option, value):
    assert wrong({**minimal, option: value})[option] == "must be a list without null"


@pytest.mark.parametrize("name, text", [("a.json", '{"seed": 5}'), ("a.yaml", "seed: 5")])
def test_files_with_a_byte_order_mark(minimal, tmp_path, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    words = [f"--{option}={value[0] if isinstance(value, list) else value}" for option, value in minimal.items()]
    assert parse_config([str(tmp_path / name), *words]).training.seed == 5


@pytest.mark.parametrize(
    "option, value, message",
    [
        ("warmup_ratio", 1.5, "must be between 0 and 1"),
        ("warmup_ratio", -0.1, "must be between 0 and 1"),
        ("hidden_dropout_prob", 2, "must be 0 or more and less than 1"),
        ("attention_probs_dropout_prob", 1, "must be 0 or more and less than 1"),
        ("adam_beta1", 1, "must be 0 or more and less than 1"),
        ("adam_beta2", -0.5, "must be 0 or more and less than 1"),
        ("adam_epsilon", -1e-8, "must be 0 or more"),
        ("lr_end", -1, "must be 0 or more"),
        ("scale_loss", 0, "must be positive"),
        ("power", 0, "must be positive"),
        ("early_stopping_threshold", float("inf"), "must be a finite number"),
        ("num_cycles", float("nan"), "must be a finite number"),
        ("adam_epsilon", float("inf"), "must be a finite number"),
    ],
)
def test_ranges_of_numbers(minimal, option, value, message):
    assert wrong({**minimal, option: value}) == {option: message}


def test_numbers_at_the_ends_of_their_ranges(minimal):
    zeros = ("warmup_ratio", "hidden_dropout_prob", "attention_probs_dropout_prob", "adam_beta1", "lr_end")
    parse_config({**minimal, **dict.fromkeys(zeros, 0.0)})
    parse_config({**minimal, "warmup_ratio": 1})


def test_no_number_is_nan_or_infinite(minimal):
    """Every option that is a number names itself."""
    table, _ = arguments._option_table()
    floats = [name for name, option in table.items() if "float" in str(option.type).lower()]
    assert len(floats) > 25
    for value in (float("nan"), float("inf")):
        given = {name: [value] if "List" in str(table[name].type) else value for name in floats}
        assert set(floats) <= set(wrong({**minimal, **given}))
    parse_config({**minimal, "num_train_epochs": float("inf"), "max_steps": 3})
    assert "num_train_epochs" in wrong({**minimal, "num_train_epochs": float("nan"), "max_steps": 3})
