# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, or of a run with other options: they are named, or passed over."""

import json
import shutil

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
