# SPDX-License-Identifier: Apache-2.0
"""PaddleNLP's options of a run: what it takes without a word and what can't work."""

from __future__ import annotations

import math
import os
import typing
from collections.abc import Callable
from pathlib import Path

from paddle_infcl.device import world_size
from paddle_infcl.paths import same_path


def check_training(v, need: Callable[[bool, str, str], None]) -> None:
    """Checks the options of the run.

    Args:
        v: options by attribute; `given(name)` tells which somebody set.
        need: (condition, option, message) -> None; notes a problem when the condition is false.
    """
    need(bool(v.output_dir), "output_dir", "is needed: the folder for checkpoints and the trained model")
    if v.output_dir and (why := _cant_be_a_folder(v.output_dir)):
        need(False, "output_dir", why)
    _check_overwriting(v, need)
    for option in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
        need(getattr(v, option) >= 1, option, "must be 1 or more")
    need(
        v.max_steps == -1 or v.max_steps >= 1,
        "max_steps",
        "must be 1 or more; -1, or leave it out, for num_train_epochs",
    )
    need(
        v.max_steps > 0 or v.num_train_epochs > 0, "num_train_epochs", "must be positive where max_steps is not given"
    )
    need(v.max_steps > 0 or v.num_train_epochs != math.inf, "num_train_epochs", "must be finite")
    need(0 < v.learning_rate < math.inf, "learning_rate", "must be positive and finite")
    for option in ("weight_decay", "max_grad_norm", "warmup_steps", "dataloader_num_workers"):
        need(0 <= getattr(v, option) < math.inf, option, "must be 0 or more")
    for option in ("warmup_ratio", "lr_end", "adam_epsilon"):
        most, words = (1, "between 0 and 1") if option == "warmup_ratio" else (math.inf, "0 or more")
        need(0 <= getattr(v, option) <= most, option, f"must be {words}")
    for option in ("hidden_dropout_prob", "attention_probs_dropout_prob", "adam_beta1", "adam_beta2"):
        need(0 <= getattr(v, option) < 1, option, "must be 0 or more and less than 1")
    for option in ("scale_loss", "power"):
        need(getattr(v, option) > 0, option, "must be positive")
    need(0 <= v.seed < 2**32, "seed", "must be 0 or more and below 2^32")
    # PaddleNLP takes 0 and -1 as "never", without a word.
    for what in ("logging", "save"):
        every = getattr(v, f"{what}_steps")
        stepwise = word(getattr(v, f"{what}_strategy")) == "steps"
        need(not stepwise or every > 0, f"{what}_steps", f"must be 1 or more; {what}_strategy: no turns it off")
    need(
        v.eval_steps is None or v.eval_steps >= 1,
        "eval_steps",
        "must be 1 or more; evaluation_strategy: no turns evaluation off",
    )
    need(not (v.fp16 and v.bf16), "fp16", "bf16 is on as well: take one of the two")
    need(v.fp16_opt_level in ("O0", "O1", "O2"), "fp16_opt_level", "must be O0, O1 or O2")
    precise = v.fp16 or v.bf16 or v.fp16_opt_level != "O2"
    need(precise, "fp16_opt_level", "O2 needs fp16: true or bf16: true")
    if v.given("inf_cl_loss") and v.given("loss_type"):
        agree = v.inf_cl_loss or v.loss_type != "inf_cl"
        need(agree, "loss_type", "means inf_cl_loss: true, and inf_cl_loss is false: leave one of the two out")
    if v.given("inf_cl_backend"):
        used = v.inf_cl_loss or v.loss_type == "inf_cl"
        need(used, "inf_cl_backend", "has no effect without inf_cl_loss: true")
    pairs = v.per_device_train_batch_size * v.gradient_accumulation_steps * world_size()
    need(
        pairs > 1 or v.group_size > 1,
        "per_device_train_batch_size",
        "one pair in a batch and group_size 1 leave nothing to contrast with: a larger batch, more "
        "gradient_accumulation_steps, or hard negatives",
    )


def _check_overwriting(v, need) -> None:
    """The trained model must not replace the weights that it starts from, or the guide's."""
    if not v.output_dir or (v.given("do_train") and not v.do_train):  # evaluation alone writes nothing
        return
    for option in ("model_name_or_path", "guide_model_name_or_path"):
        path = getattr(v, option)
        message = f"is the folder of {option} as well, whose weights the trained model would replace: name another one"
        need(not (path and same_path(*map(os.path.expanduser, (v.output_dir, path)))), "output_dir", message)


def word(option: typing.Any) -> typing.Any:
    """An option's text, whether it is one of an enum's members or a text."""
    return getattr(option, "value", option)


def _cant_be_a_folder(path: str) -> str | None:
    """Why files can't be written into a folder, which may not be there yet; None if they can."""
    there = Path(os.path.expanduser(path)).absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return f"{there} is a file: name a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"no permission to write into {there}"
