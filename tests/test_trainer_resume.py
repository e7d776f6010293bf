# SPDX-License-Identifier: Apache-2.0
"""Kill and resume: the steps after it are the ones that the uninterrupted run takes."""

import json
import shutil

import numpy as np
import pytest
from paddlenlp.trainer import TrainerCallback

from paddle_infcl.modeling import SentenceEncoder
from paddle_infcl.trainer import resume
from paddle_infcl.trainer.windows import Position, TrainingWindows
from tests.training import losses, make_model, make_trainer


class Killed(Exception):
    pass


class KillAfter(TrainerCallback):
    """Dies after a step, when its checkpoint is written; the process learns nothing more."""

    def __init__(self, step):
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise Killed


def parameters(trainer):
    return {name: p.numpy() for name, p in trainer.model.named_parameters()}


# 4 windows per epoch, 3 epochs; dropout is on, and so are warm-up and decay.
RUN = {
    "num_train_epochs": 3,
    "save_strategy": "steps",
    "save_steps": 1,
    "warmup_steps": 3,
    "weight_decay": 0.1,
    "learnable_temperature": True,
    "sort_by_length": True,
}


SMALL = ("scheduler.pdparams", "trainer_state.json", "position.json")


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    trainer = make_trainer(folder, folder / "out", **{**RUN, "save_strategy": "no"})
    trainer.train()
    return folder, trainer


@pytest.mark.parametrize("step", [1, 4, 6, 8], ids=["mid-epoch", "epoch-end", "second-epoch", "its-end"])
def test_resumed_steps_equal_uninterrupted_ones(whole_run, tmp_path, step):
    folder, whole = whole_run
    killed = make_trainer(folder, tmp_path, callbacks=[KillAfter(step)], **RUN)
    with pytest.raises(Killed):
        killed.train()
    resumed = make_trainer(folder, tmp_path, **RUN)
    resumed.train(resume_from_checkpoint=True)
    want = losses(whole)
    assert losses(killed) == {s: want[s] for s in range(1, step + 1)}
    assert losses(resumed) == want and len(want) == 12
    for field in ("learning_rate", "temperature", "progress_or_epoch"):
        got, expected = ([e[field] for e in t.state.log_history if "loss" in e] for t in (resumed, whole))
        assert got == expected, field
    for name, value in parameters(whole).items():
        np.testing.assert_array_equal(parameters(resumed)[name], value, err_msg=name)
    assert resumed.loss_fn.temperature == whole.loss_fn.temperature


def test_without_the_random_state_losses_differ(whole_run, tmp_path, monkeypatch):
    """The test above guards something: dropout masks come from the restored generators, at an epoch's end too."""
    folder, whole = whole_run
    with pytest.raises(Killed):
        make_trainer(folder, tmp_path, callbacks=[KillAfter(4)], **RUN).train()
    resumed = make_trainer(folder, tmp_path, **RUN)
    monkeypatch.setattr(resumed, "_load_rng_state", lambda checkpoint: None)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed)[5] != losses(whole)[5]


@pytest.fixture
def stopped(whole_run, tmp_path):
    """A run that was killed after step 2 of 12."""
    with pytest.raises(Killed):
        make_trainer(whole_run[0], tmp_path, callbacks=[KillAfter(2)], **RUN).train()
    return whole_run[0], tmp_path


def test_nothing_is_left_to_train(whole_run, tmp_path, caplog):
    folder, _ = whole_run
    options = {**RUN, "max_steps": 2}
    make_trainer(folder, tmp_path, **options).train()
    again = make_trainer(folder, tmp_path, **options)
    result = again.train(resume_from_checkpoint=True)
    assert result.global_step == 2 and "nothing is left to train" in caplog.text
    assert max(losses(again)) == 2
    # More epochs go on from there.
    longer = make_trainer(folder, tmp_path, **{**options, "max_steps": 3})
    assert longer.train(resume_from_checkpoint=True).global_step == 3


def test_incomplete_checkpoints_are_passed_over(stopped, caplog):
    folder, out = stopped
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-3")
    (out / "checkpoint-3" / "scheduler.pdparams").unlink()
    resumed = make_trainer(folder, out, **{**RUN, "max_steps": 3})
    with pytest.raises(ValueError, match=r"checkpoint-3 can't be resumed: it lacks scheduler\.pdparams"):
        resumed.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-3 is incomplete" in caplog.text and max(losses(resumed)) == 3


@pytest.mark.parametrize("name, size", [(n, s) for n in SMALL for s in (0, 40)] + [("optimizer.pdopt", 0)])
def test_files_that_were_cut_off(stopped, caplog, name, size):
    out = stopped[1]
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-3")
    with open(out / "checkpoint-3" / name, "r+b") as file:
        file.truncate(size)
    with pytest.raises(ValueError, match=f"checkpoint-3 can't be resumed: {name} was not written to the end"):
        resume.find_checkpoint(out / "checkpoint-3", str(out))
    assert resume.find_checkpoint(True, str(out)) == str(out / "checkpoint-2")
    assert f"checkpoint-3 is incomplete ({name} was not written to the end) and passed over" in caplog.text


def test_what_a_checkpoint_lacks_without_stopping(stopped, caplog):
    folder, out = stopped
    for name in ("rng_state.pth", "loss.pdparams"):
        (out / "checkpoint-2" / name).unlink()
    make_trainer(folder, out, **{**RUN, "max_steps": 3}).train(resume_from_checkpoint=True)
    assert "has no rng_state.pth, so one process did not write it: dropout masks will differ" in caplog.text
    assert "has no loss.pdparams: the loss's parameters (the temperature) start anew" in caplog.text


def test_old_checkpoints_are_deleted(whole_run, tmp_path):
    """By a single process too, which PaddleNLP's own rotation passes over."""
    make_trainer(whole_run[0], tmp_path, **{**RUN, "max_steps": 4, "save_total_limit": 2}).train()
    assert sorted(f.name for f in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hidden_layers": 3}, r"not the weights of this BertModel: 16 missing: backbone\.encoder\.layers\.2"),
        ({"num_hidden_layers": 1}, r"16 unknown: backbone\.encoder\.layers\.1"),
        ({"hidden_size": 16}, r"of another shape: backbone\.embeddings"),
    ],
)
def test_a_checkpoint_of_another_model(stopped, change, message):
    folder, out = stopped
    config = make_model().config
    for name, value in change.items():
        setattr(config, name, value)
    trainer = make_trainer(folder, out, model=SentenceEncoder.from_config(config, pooling="mean"), **RUN)
    with pytest.raises(ValueError, match=message):
        trainer.train(resume_from_checkpoint=True)


@pytest.mark.parametrize("there", [True, False])
def test_a_run_whose_folder_was_moved(whole_run, tmp_path, caplog, there):
    """Its best checkpoint moved with it, and is kept; or it is gone."""
    old, new = tmp_path / "old", tmp_path / "new"
    options = {**RUN, "save_total_limit": 2, "metric_for_best_model": "mrr@10", "load_best_model_at_end": True}
    options |= {"evaluation_strategy": "steps", "eval_steps": 1, "evaluator": lambda encode: {"mrr@10": 0.5}}
    make_trainer(whole_run[0], old, max_steps=2, **options).train()
    old.rename(new)
    if not there:
        shutil.rmtree(new / "checkpoint-1")
    resumed = make_trainer(whole_run[0], new, max_steps=4, **options)
    resumed.train(resume_from_checkpoint=True)
    want = ["checkpoint-1", "checkpoint-4"] if there else ["checkpoint-3", "checkpoint-4"]
    assert sorted(f.name for f in new.glob("checkpoint-*")) == want
    assert resumed.state.best_model_checkpoint == str(new / f"checkpoint-{1 if there else 3}")
    assert ("checkpoint-1, is gone" in caplog.text) != there


def test_a_full_disk_is_named(whole_run, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(resume, "save", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*checkpoint-1'"):
        make_trainer(whole_run[0], tmp_path, **RUN).train()


def test_no_checkpoint_to_resume(whole_run, tmp_path):
    trainer = make_trainer(whole_run[0], tmp_path, **RUN)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no such folder"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-9"))
    assert resume.find_checkpoint("false", str(tmp_path)) is None
    assert resume.find_checkpoint("", str(tmp_path)) is None
    assert resume.last_checkpoint(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"seed": 12}, "its seed was 11, here it is 12"),
        ({"rows": 48}, "training rows was 40"),
        ({"no_duplicates": True}, "its no_duplicates was false, here it is true"),
    ],
)
def test_other_data_is_refused(stopped, change, message):
    folder, out = stopped
    with pytest.raises(ValueError, match=message):
        make_trainer(folder, out, **{**RUN, **change}).train(resume_from_checkpoint=True)
    again = make_trainer(folder, out, ignore_data_skip=True, **{**RUN, **change, "max_steps": 4})
    again.train(resume_from_checkpoint=True)
    assert sorted(losses(again)) == [1, 2, 3, 4]


def test_another_batch_goes_on_by_rows(stopped, caplog):
    """After 24 of 40 rows in windows of 12: the 16 others in windows of 8, none twice, then two more epochs."""
    folder, out = stopped
    resumed = make_trainer(folder, out, **{**RUN, "gradient_accumulation_steps": 2})
    seen, collator = [], resumed.data_collator.__class__

    class Spy(collator):
        def __call__(self, examples):
            seen.extend(example.source for example, _ in examples)
            return super().__call__(examples)

    resumed.data_collator.__class__ = Spy
    result = resumed.train(resume_from_checkpoint=True)
    assert "the batch was 12 and is 8" in caplog.text
    assert result.global_step == 2 + 2 + 5 + 5
    position = json.loads((out / "checkpoint-2" / "position.json").read_text())
    assert position["rows"] == 24
    first = make_trainer(folder, out / "other", **{**RUN, "max_steps": 2})
    done = []
    first.data_collator.__class__ = type(
        "Spy",
        (collator,),
        {"__call__": lambda self, e: (done.extend(x.source for x, _ in e), collator.__call__(self, e))[1]},
    )
    first.train()
    assert len(set(done)) == 24 and len(set(seen[:16])) == 16 and not set(done) & set(seen[:16])
    assert len(set(seen[16:56])) == 40
    # And a resume within that epoch.
    halfway = make_trainer(folder, out, **{**RUN, "gradient_accumulation_steps": 2})
    halfway.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    assert losses(halfway) == losses(resumed)


def test_paddlenlps_own_checkpoints_resume(stopped, whole_run):
    """Without our files: the position follows from the number of steps; the optimizer's names must then agree."""
    folder, out = stopped
    (out / "checkpoint-2" / "position.json").unlink()
    resumed = make_trainer(folder, out, **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(whole_run[1])


def test_weights_only(stopped):
    folder, out = stopped
    trainer = make_trainer(folder, out, ignore_load_lr_and_optim=True, **{**RUN, "max_steps": 2})
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
    assert sorted(losses(trainer)) == [1, 2]


def test_optimizer_names():
    renamed = {"linear_1.w_0": "linear_7.w_0", "embedding_0.w_0": "embedding_3.w_0"}
    state = {
        "linear_1.w_0_moment1_0": 1,
        "linear_1.w_0_fp32_master_0_beta1_pow_acc_0": 2,
        "linear_11.w_0_moment1_0": 3,
        "LR_Scheduler": 4,
        "master_weights": {"embedding_0.w_0": 5},
    }
    assert resume._rename(state, renamed) == {
        "linear_7.w_0_moment1_0": 1,
        "linear_7.w_0_fp32_master_0_beta1_pow_acc_0": 2,
        "linear_11.w_0_moment1_0": 3,
        "LR_Scheduler": 4,
        "master_weights": {"embedding_3.w_0": 5},
    }


class FakeLoader:
    """Epochs of different lengths, as `no_duplicates` makes them."""

    def __init__(self, lengths):
        self.lengths, self.epoch, self._skip, self.sampler = lengths, 0, 0, self
        self.rows_per_epoch = 100

    def windows_in(self, epoch):
        return self.lengths[epoch]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def skip(self, windows):
        self._skip = windows

    def __iter__(self):
        skipped, self._skip = self._skip, 0
        for window in range(self.lengths[self.epoch]):
            yield None if window < skipped else (self.epoch, window)


def test_epochs_of_different_lengths():
    lengths = [3, 5, 2]
    windows = TrainingWindows(FakeLoader(lengths), global_batch=30, seed=1)
    assert windows.steps_in(3) == 10 and windows.steps_in(1.5) == 5 and windows.steps_in(0.1) == 1
    want, positions = [], []
    for _ in lengths:
        for window in windows:
            want.append(window)
            positions.append((windows.position(0), windows.progress, windows.ends_epoch))
    assert want == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1)]
    assert positions[3][1] == 1 + 1 / 5 and positions[7][1] == 2.0
    assert [end for *_, end in positions] == [i in (2, 7, 9) for i in range(10)]
    for step in range(1, 10):
        for saved in (positions[step - 1][0], None):
            resumed = TrainingWindows(FakeLoader(lengths), global_batch=30, seed=1)
            assert resumed.resume(saved, step) == []
            epoch = list(resumed)
            assert epoch[:step] == [None] * step, "PaddleNLP's loop throws away as many items as steps were taken"
            rest = epoch[step:]
            while len(rest) < 10 - step:
                rest += list(resumed)
            assert rest == want[step:]


def test_an_endless_stream():
    class Stream:
        def set_epoch(self, epoch):
            pass

        def skip(self, windows):
            self.skipped = windows

        def __len__(self):
            raise ValueError("length of IterableDataset not supported")

        def __iter__(self):
            return iter([None] * self.skipped + ["next"])

    windows = TrainingWindows(Stream(), global_batch=8, seed=0)
    assert windows.endless and windows.progress is None and not windows.ends_epoch and windows.rows_until(5) == 40
    with pytest.raises(TypeError):
        len(windows)
    windows.resume(Position(0, 3, 24, 8, 0, None), 3)
    assert list(windows) == [None, None, None, "next"]
    with pytest.raises(ValueError, match="the data is a stream"):
        TrainingWindows(Stream(), global_batch=16, seed=0).resume(Position(0, 3, 24, 8, 0, None), 3)
