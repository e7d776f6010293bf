# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a checkpoint are whole and hold what belongs there.

Small files are read. Of large ones the last byte is: Paddle pickles them, and a pickle ends with a full stop.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddlenlp.trainer.trainer_callback import TrainerState

from paddle_infcl.trainer.windows import Position

POSITION, NAMES, LOSS = "position.json", "parameter_names.json", "loss.pdparams"
STATE, SCHEDULER = "trainer_state.json", "scheduler.pdparams"


def damage(folder: Path) -> str:
    """What is wrong with the files that a checkpoint has, in words; "" if nothing is."""
    wrong, contents = [], {}
    for file in sorted(f for f in folder.iterdir() if f.suffix in (".json", ".pdparams", ".pdopt", ".pth")):
        try:
            contents[file.name] = content(file)
        except ValueError as error:
            wrong.append(str(error))
    if LOSS in contents and NAMES in contents:
        here, there = set(contents[LOSS]), names_in_loss(contents[NAMES])
        if there and here != there:  # without any it is left over from another run, and not loaded
            wrong.append(f"{LOSS} holds {', '.join(sorted(here))}, the run trained {', '.join(sorted(there))}")
    return "; ".join(wrong)


def content(file: Path) -> Any:
    """What a small file holds; None of a large one, and of one that is not a checkpoint's.

    Raises:
        ValueError: the file was cut off, or holds something else than it should.
    """
    random_state = file.name.startswith("rng_state") and file.suffix == ".pth"
    try:
        found = _read(file, whole=random_state or file.name in (SCHEDULER, LOSS))
    except OSError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise ValueError(f"{file.name} was not written to the end") from error
    check = _CHECKS.get("rng_state" if random_state else file.name)
    if check is not None and (problem := check(found)):
        raise ValueError(f"{file.name} {problem}")
    return found if check is not None else None


def _read(file: Path, *, whole: bool) -> Any:
    if file.stat().st_size == 0:
        raise EOFError
    if file.suffix == ".json":
        return json.loads(file.read_text(encoding="utf-8"))
    if whole:
        return paddle.load(str(file), return_numpy=True)
    with open(file, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read() != pickle.STOP:
            raise EOFError
    return None


def _state_problem(found: Any) -> str:
    steps = found.get("global_step") if isinstance(found, dict) else None
    if not isinstance(steps, int) or steps < 0:
        return "has no global_step, the number of steps that were taken"
    try:
        TrainerState(**found)
    except TypeError as error:
        return f"is not PaddleNLP's: {error}"
    return ""


def _position_problem(found: Any) -> str:
    try:
        position_of(found)
    except ValueError as error:
        return str(error)
    return ""


def position_of(found: Any) -> Position:
    """A position from what its file holds. ValueError: it is none."""
    wanted = {"epoch": 0, "windows": 0, "rows": 0, "global_batch": 1, "seed": 0, "rows_per_epoch": 1}
    can_be_none = ("windows", "rows_per_epoch")
    if not isinstance(found, dict) or set(found) - {"no_duplicates"} != set(wanted):
        raise ValueError("holds no position in the data")
    for name, least in wanted.items():
        value = found[name]
        if not (value is None and name in can_be_none) and (not isinstance(value, int) or value < least):
            raise ValueError(f"holds no position in the data: {name} is {value!r}")
    if found.get("no_duplicates") not in (None, False, True):
        raise ValueError(f"holds no position in the data: no_duplicates is {found['no_duplicates']!r}")
    return Position(**found)


def _names_problem(found: Any) -> str:
    good = isinstance(found, dict) and found and all(isinstance(name, str) for name in found.values())
    return "" if good else "does not name the parameters"


def names_in_loss(names: Mapping[str, str]) -> set[str]:
    """The parameters of the loss among those of `parameter_names.json`."""
    return {name.removeprefix("loss.") for name in names if name.startswith("loss.")}


def _loss_problem(found: Any) -> str:
    if not isinstance(found, dict) or not all(isinstance(value, np.ndarray) for value in found.values()):
        return "holds no parameters of a loss"
    for name, value in found.items():
        if not np.isfinite(value).all():
            return f"holds a {name} that is not finite"
    shape = found["log_temperature"].shape if "log_temperature" in found else (1,)
    return "" if math.prod(shape) == 1 else f"holds a log_temperature of shape {list(shape)}, not [1]"


_CHECKS = {
    STATE: _state_problem,
    POSITION: _position_problem,
    NAMES: _names_problem,
    LOSS: _loss_problem,
    SCHEDULER: lambda c: "" if isinstance(c, dict) and "last_epoch" in c else "holds no state of a scheduler",
    "rng_state": lambda c: "" if isinstance(c, dict | list) and c else "holds no state of random generators",
}

# What Paddle and PaddleNLP raise at files that are cut off or hold something else.
_AT_BROKEN_FILES = (AssertionError, AttributeError, EOFError, ImportError, LookupError, TypeError, pickle.PickleError)


@contextlib.contextmanager
def naming_the_way_out(checkpoint: str, way_out: Callable[[str], str]) -> Iterator[None]:
    """Within it, an error at a checkpoint's files becomes a ValueError that says what to do.

    Args:
        checkpoint: the folder that is loaded.
        way_out: gives the words, where they are needed.
    """
    try:
        yield
    except (ValueError, *_AT_BROKEN_FILES) as error:
        if isinstance(error, ValueError) and "can not parse" not in str(error):
            raise
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} can't be resumed: {what}{way_out(checkpoint)}"
        ) from error
