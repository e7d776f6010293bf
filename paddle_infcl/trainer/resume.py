# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint needs beside PaddleNLP's files, and which checkpoint is whole.

A checkpoint of ours also holds `position.json` (where the run is in its data), `parameter_names.json` (Paddle keys an
optimizer's state by names that are counted up in each process) and, when the loss has parameters, `loss.pdparams`.
`position.json` is written last: a folder that has it is complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import paddle
from paddle import nn

from paddle_infcl.log import logger
from paddle_infcl.trainer.damage import (
    LOSS,
    NAMES,
    POSITION,
    SCHEDULER,
    STATE,
    content,
    damage,
    names_in_loss,
    naming_the_way_out,
    position_of,
)
from paddle_infcl.trainer.windows import Position


def _whats_wrong(folder: Path) -> str:
    """Why a run cannot go on from here: files that are missing, cut off or hold something else; or ""."""
    # PaddleNLP writes the scheduler's state last; its own checkpoints have no position.json.
    missing = [name for name in (STATE, SCHEDULER) if not (folder / name).is_file()]
    return f"it lacks {', '.join(missing)}" if missing else damage(folder)


def way_out(folder: str | Path) -> str:
    """What to do where a checkpoint can't be resumed: a half sentence, for the end of a message."""
    folder = Path(folder)
    others = (other for other in _checkpoints(folder.parent) if other != folder)
    if whole := next((other for other in others if not _whats_wrong(other)), None):
        return f". Resume from {whole}, the last whole one beside it, or delete {folder}"
    return f". There is no other whole checkpoint in {folder.parent}: delete {folder} and start again"


def _checkpoints(output_dir: Path) -> list[Path]:
    """The folders checkpoint-<step>, last steps first."""
    found = [(int(m[1]), f) for f in output_dir.iterdir() if (m := re.fullmatch(r"checkpoint-(\d+)", f.name))]
    return [folder for _, folder in sorted(found, reverse=True)]


def find_checkpoint(wanted: Any, output_dir: str, *, weights_only: bool = False) -> str | None:
    """The checkpoint to go on from.

    Args:
        wanted: a folder; True for the last complete one in `output_dir`; None, False or "" for none.
        output_dir: where the run keeps its checkpoints.
        weights_only: the optimizer's state won't be loaded and need not be there.

    Raises:
        ValueError: a folder that is not there or not complete, or none to be found.
    """
    wanted = {"true": True, "false": None, "": None}.get(str(wanted).lower(), wanted)
    if not wanted:
        return None
    if wanted is not True:
        folder = Path(os.path.expanduser(str(wanted)))
        if not folder.is_dir():
            raise ValueError(f"resume_from_checkpoint: {folder} can't be resumed: there is no such folder")
        if not weights_only and (wrong := _whats_wrong(folder)):
            raise ValueError(f"resume_from_checkpoint: {folder} can't be resumed: {wrong}{way_out(folder)}")
        return str(folder)
    checkpoint = last_checkpoint(output_dir)
    if checkpoint is None:
        raise ValueError(f"resume_from_checkpoint: there is no complete checkpoint in {output_dir}")
    return checkpoint


def last_checkpoint(output_dir: str) -> str | None:
    """The last complete checkpoint-<step> of a folder; one that was cut off while it was written is passed over."""
    if not os.path.isdir(output_dir):
        return None
    for folder in _checkpoints(Path(output_dir)):
        if wrong := _whats_wrong(folder):
            logger.warning("%s is incomplete (%s) and passed over", folder, wrong)
        else:
            return str(folder)
    return None


def loading(checkpoint: str) -> contextlib.AbstractContextManager[None]:
    """Within it, an error at a checkpoint's files says what to do: not all damage is seen before they are loaded."""
    return naming_the_way_out(checkpoint, way_out)


def find_best(state: Any, output_dir: str) -> None:
    """Corrects where a run's best checkpoint is after its folder was moved; PaddleNLP fails on one that is not there.

    Args:
        state: PaddleNLP's TrainerState; its `best_model_checkpoint` may change.
        output_dir: where the run keeps its checkpoints now.
    """
    if state.best_model_checkpoint is None:
        return
    here = Path(output_dir) / Path(state.best_model_checkpoint).name
    if not here.is_dir():
        logger.warning("the best checkpoint so far, %s, is gone: the next one takes its place", here)
    if here != Path(state.best_model_checkpoint) or not here.is_dir():
        state.best_model_checkpoint = str(here) if here.is_dir() else None


def global_step(checkpoint: str) -> int:
    """Optimizer steps that a checkpoint holds."""
    return int(json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))["global_step"])


def parameter_names(model: nn.Layer, loss: nn.Layer) -> dict[str, str]:
    """Paddle's name of every parameter, by its place in the model or the loss."""
    names = {name: parameter.name for name, parameter in model.named_parameters()}
    return {**names, **{f"loss.{name}": parameter.name for name, parameter in loss.named_parameters()}}


def save(folder: str, names: Mapping[str, str], position: Position) -> None:
    """Writes our files into a checkpoint that PaddleNLP has finished."""
    (Path(folder) / NAMES).write_text(json.dumps(names, indent=1), encoding="utf-8")
    partial = Path(folder) / (POSITION + ".tmp")
    partial.write_text(json.dumps(position.as_dict()), encoding="utf-8")
    os.replace(partial, Path(folder) / POSITION)


def load_position(checkpoint: str) -> Position | None:
    """The position in the data; None where PaddleNLP's own trainer wrote the checkpoint."""
    file = Path(checkpoint) / POSITION
    return position_of(content(file)) if file.is_file() else None


def save_loss(folder: str, loss: nn.Layer) -> None:
    """Keeps the loss's parameters (a learnable temperature), if it has any."""
    file = os.path.join(folder, LOSS)
    if loss.parameters():
        paddle.save(loss.state_dict(), file)
    elif os.path.isfile(file):  # an earlier run's
        os.remove(file)


def _trained_in_loss(checkpoint: str) -> bool:
    """Whether a checkpoint's run trained parameters of its loss."""
    file = Path(checkpoint) / NAMES
    return bool(names_in_loss(content(file))) if file.is_file() else (Path(checkpoint) / LOSS).is_file()


def check_loss(checkpoint: str, loss: nn.Layer, *, weights_only: bool = False) -> None:
    """Says so when the temperature was trained and is not here, or the reverse.

    Args:
        checkpoint: the one to go on from.
        loss: this run's.
        weights_only: a warning is enough, since nothing else of the run goes on.

    Raises:
        ValueError: the run can't go on with another temperature than the trained one.
    """
    was, trains = _trained_in_loss(checkpoint), bool(loss.parameters())
    if trains and not was:
        logger.warning(
            "learnable_temperature was false in the run of %s: T is trained from embedding_temperature, %g, on",
            checkpoint,
            loss.temperature,
        )
    if trains or not was:
        return
    message = (
        f"it was trained with learnable_temperature: true, which is false here, so T would be embedding_temperature, "
        f"{loss.temperature:g}, and no longer the trained one"
    )
    if not weights_only:
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} can't be continued: {message}. Use learnable_temperature: true, or "
            "ignore_load_lr_and_optim: true to begin again from its weights"
        )
    logger.warning("%s: %s", checkpoint, message)


def load_loss(checkpoint: str, loss: nn.Layer) -> None:
    """The reverse of `save_loss`.

    Raises:
        ValueError: the file holds something else than this loss's parameters; Paddle would pass over them.
    """
    file = Path(checkpoint) / LOSS
    if not loss.parameters() or not _trained_in_loss(checkpoint):
        return
    if file.is_file():
        state, own = content(file), loss.state_dict()
        here, wanted = ({name: list(v.shape) for name, v in values.items()} for values in (state, own))
        if here != wanted:
            raise ValueError(f"{file} holds {here}, the loss has {wanted}{way_out(checkpoint)}")
        loss.set_state_dict(state)
    else:
        logger.warning("%s has no %s: the loss's parameters (the temperature) start anew", checkpoint, LOSS)


def warn_without_random_state(checkpoint: str, world: int) -> None:
    """Says so when dropout masks can't be those of the run that goes on."""
    name = f"rng_state_{world}.pth" if world > 1 else "rng_state.pth"
    if not os.path.isfile(os.path.join(checkpoint, name)):
        logger.warning(
            "%s has no %s, so %s did not write it: dropout masks will differ from the uninterrupted run's",
            checkpoint,
            name,
            f"{world} processes" if world > 1 else "one process",
        )


@contextlib.contextmanager
def optimizer_names(optimizer: Any, checkpoint: str, now: Mapping[str, str]) -> Iterator[None]:
    """Within it, `optimizer.set_state_dict` takes the state of a checkpoint under this process's parameter names.

    Args:
        optimizer: any of Paddle's.
        checkpoint: the state's checkpoint; one without `parameter_names.json` is taken as it is.
        now: `parameter_names` of this process.
    """
    file = Path(checkpoint) / NAMES
    then = content(file) if file.is_file() else {}
    renamed = {old: now[place] for place, old in then.items() if place in now}
    set_state_dict = optimizer.set_state_dict
    optimizer.set_state_dict = lambda state: set_state_dict(_rename(state, renamed))
    try:
        with loading(checkpoint):
            yield
    finally:
        del optimizer.set_state_dict


def _rename(state: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """Keys are a parameter's name, or it and an underscore and what is kept of the parameter."""

    def new(key: str) -> str:
        end = len(key)
        while end > 0:
            if key[:end] in renamed:
                return renamed[key[:end]] + key[end:]
            end = key.rfind("_", 0, end)
        return key

    return {
        new(key): {new(k): v for k, v in value.items()} if key == "master_weights" else value
        for key, value in state.items()
    }
