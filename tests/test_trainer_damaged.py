# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, or of a run with other options: they are named, or passed over."""

import json
import shutil

import numpy as np
import paddle
import pytest

from paddle_infcl.trainer import resume
from paddle_infcl.trainer.windows import Position
from tests.training import losses, make_trainer

RUN = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 1, "learnable_temperature": True}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    make_trainer(folder, folder / "out", **RUN, max_steps=2).train()
    return folder


@pytest.fixture
def out(finished, tmp_path):
    """Its folder, to be damaged."""
    shutil.copytree(finished / "out", tmp_path / "out")
    return tmp_path / "out"


def go_on(finished, out, **changes):
    trainer = make_trainer(finished, out, **{**RUN, "max_steps": 3, **changes})
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    return trainer


def test_a_trained_temperature_is_not_lost(finished, out, caplog):
    frozen = {"learnable_temperature": False, "embedding_temperature": 0.5}
    with pytest.raises(
        ValueError, match=r"with learnable_temperature: true, which is false here, so T would be .*0\.5"
    ):
        go_on(finished, out, **frozen)
    trainer = go_on(finished, out, ignore_load_lr_and_optim=True, **frozen)
    assert "embedding_temperature, 0.5, and no longer the trained one" in caplog.text and max(losses(trainer)) == 3
    # Its checkpoint has no temperature of the run that was there before; without our files neither.
    assert not (out / "checkpoint-2" / "loss.pdparams").exists()
    go_on(finished, out, **frozen)
    (out / "checkpoint-2" / "parameter_names.json").unlink()
    resume.check_loss(str(out / "checkpoint-2"), trainer.loss_fn)


def test_a_temperature_that_is_trained_from_here_on(finished, tmp_path, caplog):
    make_trainer(finished, tmp_path, **{**RUN, "learnable_temperature": False}, max_steps=2).train()
    trainer = go_on(finished, tmp_path, embedding_temperature=0.25)
    assert (
        "learnable_temperature was false in the run of" in caplog.text and "embedding_temperature, 0.25" in caplog.text
    )
    assert max(losses(trainer)) == 3 and trainer.loss_fn.temperature == pytest.approx(0.25, rel=0.01)


def test_no_duplicates_of_checkpoints_that_do_not_say(finished, out):
    """Older checkpoints have no note of it: as before, nothing is refused."""
    file = out / "checkpoint-2" / "position.json"
    position = json.loads(file.read_text())
    assert position["no_duplicates"] is False
    with pytest.raises(ValueError, match="its no_duplicates was false, here it is true"):
        go_on(finished, out, no_duplicates=True)
    del position["no_duplicates"]
    file.write_text(json.dumps(position))
    assert resume.load_position(str(out / "checkpoint-2")) == Position(**position)
    assert max(losses(go_on(finished, out, no_duplicates=True))) == 3


POSITION = {"epoch": 0, "windows": 2, "rows": 24, "global_batch": 12, "seed": 11, "rows_per_epoch": 40}
DAMAGED = [
    ("position.json", [], "holds no position in the data"),
    ("position.json", None, "holds no position in the data"),
    ("position.json", {}, "holds no position in the data"),
    ("position.json", {**POSITION, "epoch": "1"}, "holds no position in the data: epoch is '1'"),
    ("position.json", {**POSITION, "rows": None}, "holds no position in the data: rows is None"),
    ("position.json", {**POSITION, "global_batch": 0}, "holds no position in the data: global_batch is 0"),
    ("position.json", {**POSITION, "no_duplicates": 3}, "holds no position in the data: no_duplicates is 3"),
    ("trainer_state.json", {}, "has no global_step, the number of steps that were taken"),
    ("trainer_state.json", [2], "has no global_step, the number of steps that were taken"),
    ("trainer_state.json", {"global_step": 2, "colour": 1}, "is not PaddleNLP's: .*'colour'"),
    ("parameter_names.json", [], "does not name the parameters"),
    ("parameter_names.json", {}, "does not name the parameters"),
    ("parameter_names.json", {"a": 1}, "does not name the parameters"),
    ("loss.pdparams", b"xxxx", "holds no parameters of a loss"),
    ("loss.pdparams", b"\x80\x04}", "was not written to the end"),
    ("loss.pdparams", {"log_temperature": [0.0] * 3}, r"holds a log_temperature of shape \[3\], not \[1\]"),
    ("loss.pdparams", {"log_temperature": [np.nan]}, "holds a log_temperature that is not finite"),
    ("loss.pdparams", {"colour": [0.0]}, "holds colour, the run trained log_temperature"),
    ("loss.pdparams", {}, "holds , the run trained log_temperature"),
    ("scheduler.pdparams", {}, "holds no state of a scheduler"),
    ("rng_state.pth", {}, "holds no state of random generators"),
    ("rng_state.pth", b"\x80\x04}", "was not written to the end"),
    ("model_state.pdparams", b"\x80\x04}", "was not written to the end"),
    ("optimizer.pdopt", b"\x80\x04}", "was not written to the end"),
]


def write(file, content):
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif file.suffix == ".json":
        file.write_text(json.dumps(content))
    else:
        paddle.save({name: paddle.to_tensor(value) for name, value in content.items()}, str(file))


@pytest.mark.parametrize("name, content, message", DAMAGED, ids=[f"{i}-{d[0]}" for i, d in enumerate(DAMAGED)])
def test_damaged_files_are_found_before_the_start(out, caplog, name, content, message):
    folder = out / "checkpoint-2"
    write(folder / name, content)
    with pytest.raises(ValueError, match=f"checkpoint-2 can't be resumed: {name} {message}") as caught:
        resume.find_checkpoint(folder, str(out))
    assert f". Resume from {out / 'checkpoint-1'}, the last whole one beside it, or delete {folder}" in str(
        caught.value
    )
    assert resume.last_checkpoint(str(out)) == str(out / "checkpoint-1")
    assert "checkpoint-2 is incomplete" in caplog.text and "and passed over" in caplog.text
    shutil.rmtree(out / "checkpoint-1")
    with pytest.raises(ValueError, match=r"There is no other whole checkpoint in .*: delete .*checkpoint-2 and start"):
        resume.find_checkpoint(folder, str(out))


def test_whole_checkpoints_are_whole(finished, out, caplog):
    assert resume.last_checkpoint(str(out)) == str(out / "checkpoint-2") and not caplog.text
    make_trainer(finished, out / "drop", **{**RUN, "no_duplicates": True}, max_steps=1).train()
    assert resume.last_checkpoint(str(out / "drop")).endswith("checkpoint-1") and "incomplete" not in caplog.text


@pytest.mark.parametrize("name", ["model_state.pdparams", "optimizer.pdopt"])
def test_large_files_are_not_read_before_the_start(finished, out, name):
    """What only their content shows is named, with what to do, when they are loaded."""
    (out / "checkpoint-2" / name).write_bytes(b"\x80\x04broken.")
    assert resume.last_checkpoint(str(out)) == str(out / "checkpoint-2")
    with pytest.raises(ValueError, match=f"can't be resumed: .*{name}.* Resume from .*checkpoint-1, the last whole"):
        go_on(finished, out)


def test_parameters_of_another_loss(finished, out):
    """Without the names of a run of ours nothing is known of them before the loss is there."""
    (out / "checkpoint-2" / "parameter_names.json").unlink()
    write(out / "checkpoint-2" / "loss.pdparams", {"colour": [0.0]})
    trainer = make_trainer(finished, out, **RUN)
    with pytest.raises(ValueError, match=r"loss\.pdparams holds \{'colour': \[1\]\}, the loss has \{'log_temp"):
        resume.load_loss(str(out / "checkpoint-2"), trainer.loss_fn)
