# SPDX-License-Identifier: Apache-2.0
"""What may be combined, and what a configuration becomes on this machine.

Everything here looks at plain values, before PaddleNLP's dataclasses (whose constructors start process groups and stop
at their first complaint) and long before a model loads.
"""

from __future__ import annotations

import json
import math
import os
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paddle_infcl.device import resolve_device
from paddle_infcl.objective_options import check_guide, check_objective
from paddle_infcl.training_options import check_training, word

LOSS_TYPES = ("contrastive", "inf_cl")
BACKENDS = ("auto", "triton", "paddle", "dense")
STRATEGIES = ("auto", "gather", "ring", "local")
PAD_NEGATIVES = ("none", "repeat")
POOLINGS = ("cls", "mean", "last")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the option, its value, and what would be right."""

    option: str
    value: typing.Any
    message: str

    def __str__(self):
        value = getattr(self.value, "value", self.value)  # an enum's member
        shown = "" if value is None else f" = {value!r}"
        return f"{self.option}{shown}: {self.message}"


class ConfigError(ValueError):
    """Options that can't work, all of them. `problems` lists them."""

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        count = "1 option can't work" if len(problems) == 1 else f"{len(problems)} options can't work"
        super().__init__("\n  ".join([f"{count}:", *map(str, problems)]))


@dataclass
class Checked:
    """What `check_everything` found.

    Attributes:
        problems: what can't work.
        missing: files that are named and not there.
        changes: values that fit this machine, by option.
        notes: the same in words.
        train_files: files of training pairs.
    """

    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    changes: dict[str, typing.Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    train_files: list[str] = field(default_factory=list)


class _Values:
    """Options by attribute, and which of them somebody set."""

    def __init__(self, values: Mapping, given: set[str]):
        self.__dict__.update(values)
        self._given = given

    def given(self, name: str) -> bool:
        return name in self._given


def check_everything(values: Mapping, given: set[str], broken: set[str]) -> Checked:
    """Checks a whole configuration.

    Args:
        values: every option there is, defaults included.
        given: the options that somebody set.
        broken: options that are known to be wrong; nothing more is said about them.
    """
    v, found = _Values(values, given), Checked()
    found.problems += loss_problems(v)
    check_guide(v, _needs(v, found.problems))
    _check_embedding(v, found.problems)
    check_training(v, _needs(v, found.problems))
    found.problems += unsupported_problems(v)
    _check_device(v, found)
    _check_model(v, found)
    _check_data(v, found)
    _check_evaluation(v, found)
    named = {p.option for p in found.problems}
    found.problems += [p for p in _infinite(values) if p.option not in named]
    found.problems = [p for p in found.problems if p.option not in broken]
    found.missing = [p for p in found.missing if p.option not in broken]
    return found


def _infinite(values: Mapping) -> list[Problem]:
    """Numbers that no option can have; with max_steps there may be endless epochs."""
    return [
        Problem(name, value, "must be a finite number")
        for name, value in values.items()
        if isinstance(value, float) and not math.isfinite(value)
        if (name, value) != ("num_train_epochs", math.inf)
    ]


def _needs(v, problems: list[Problem]) -> Callable[[bool, str, str], None]:
    def need(condition: bool, option: str, message: str) -> None:
        if not condition:
            problems.append(Problem(option, getattr(v, option), message))

    return need


def loss_problems(v) -> list[Problem]:
    """What is wrong with the options of the loss by themselves."""
    problems: list[Problem] = []
    need = _needs(v, problems)
    for option, choices in (
        ("loss_type", LOSS_TYPES),
        ("inf_cl_backend", BACKENDS),
        ("negatives_strategy", STRATEGIES),
    ):
        need(getattr(v, option) in choices, option, f"must be one of {', '.join(choices)}")
    temperature = v.embedding_temperature
    need(0 < temperature < math.inf, "embedding_temperature", "must be positive; 0.02 is usual")
    budget = v.inf_cl_memory_budget
    need(budget is None or budget > 0, "inf_cl_memory_budget", "must be a positive number of bytes")
    margin = v.false_negative_margin
    need(margin is None or 0 <= margin < math.inf, "false_negative_margin", "must be 0 or more; 0.1 is usual")
    dims, weights = v.embedding_matryoshka_dims, v.embedding_matryoshka_weights
    need(not dims or min(dims) > 0, "embedding_matryoshka_dims", "must be positive widths")
    need(not dims or len(set(dims)) == len(dims), "embedding_matryoshka_dims", "names a width twice")
    if weights is not None:
        fit = f"needs one weight for each of embedding_matryoshka_dims, which has {len(dims or [])}"
        need(len(weights) == len(dims or []), "embedding_matryoshka_weights", fit)
        sane = all(0 <= w < math.inf for w in weights) and sum(weights) > 0
        need(sane, "embedding_matryoshka_weights", "must be 0 or more, and not all 0")
    check_objective(v, need, v.given if isinstance(v, _Values) else lambda name: False)
    return problems


def _check_embedding(v, problems: list[Problem]) -> None:
    need = _needs(v, problems)
    need(v.pad_negatives in PAD_NEGATIVES, "pad_negatives", f"must be one of {', '.join(PAD_NEGATIVES)}")
    need(v.pooling is None or v.pooling in POOLINGS, "pooling", f"must be one of {', '.join(POOLINGS)}")
    for option in ("max_query_len", "max_passage_len"):
        need(getattr(v, option) >= 2, option, "must be 2 tokens or more: one of text beside a special token")
    need(v.group_size >= 1, "group_size", "must be 1 (the positive alone) or more")
    for option in ("query_template", "passage_template"):
        need(getattr(v, option).count("{text}") == 1, option, "must contain {text} exactly once")
    patience = v.early_stopping_patience
    need(patience is None or patience >= 1, "early_stopping_patience", "must be 1 evaluation or more")
    need(v.early_stopping_threshold >= 0, "early_stopping_threshold", "must be 0 or more")
    files, file_weights = v.train_files, v.train_weights
    if file_weights is not None:
        fit = f"needs one weight for each of train_files, which has {len(files or [])}"
        need(len(file_weights) == len(files or []), "train_weights", fit)
        need(all(0 < w < math.inf for w in file_weights), "train_weights", "must be positive")
    if v.eval_pairs:
        for option in ("eval_queries", "eval_qrels"):
            need(not getattr(v, option), option, "eval_pairs is given as well: evaluate on one of the two")
    else:
        evaluation = [option for option in ("eval_queries", "eval_corpus", "eval_qrels") if getattr(v, option)]
        for option in evaluation:
            need(len(evaluation) == 3, option, "needs eval_queries, eval_corpus and eval_qrels together")


# Options of PaddleNLP's other trainers that an embedding trainer can't honour; silence would be worse than an error.
_UNSUPPORTED = {
    "zero_padding": "packs several texts into one row; embeddings need one text per row. Leave it out",
    "greedy_zero_padding": "packs several texts into one row; embeddings need one text per row. Leave it out",
    "flash_mask": "needs zero_padding, which embeddings can't use. Leave it out; use_flash_attention works",
    "lora": "adapters are not supported: the whole encoder is trained",
    "prefix_tuning": "adapters are not supported: the whole encoder is trained",
    "vera": "adapters are not supported: the whole encoder is trained",
    "reft": "adapters are not supported: the whole encoder is trained",
    "weight_quantize_algo": "quantised training is not supported",
    "neftune": "noisy embeddings are not supported",
    "sequence_parallel": "splits the sequence between devices, and pooling needs all of it",
    "count_trained_tokens": "counts a language model's tokens; pairs_per_second is logged instead",
    "enable_auto_parallel": "PaddleNLP's AutoTrainer is another trainer",
    "use_expert_parallel": "mixtures of experts are not supported",
}


def unsupported_problems(v) -> list[Problem]:
    """Options of PaddleNLP that an embedding trainer can't honour. `v` may be PaddleNLP's TrainingArguments."""
    problems: list[Problem] = []
    for option, message in _UNSUPPORTED.items():
        if getattr(v, option, None):
            problems.append(Problem(option, getattr(v, option), message))
    for option, what in (
        ("pipeline_parallel_degree", "pipeline parallel: its stages never hold all representations at once"),
        ("sep_parallel_degree", "splitting the sequence between devices: pooling needs all of it"),
        ("context_parallel_degree", "splitting the sequence between devices: pooling needs all of it"),
    ):
        if getattr(v, option) > 1:
            problems.append(Problem(option, getattr(v, option), f"must be 1; no {what}"))
    # A text in a configuration; TrainingArguments makes it a list of enum members.
    words = v.sharding.split() if isinstance(v.sharding, str) else [option.value for option in v.sharding]
    if set(words) - {"stage1", "stage2", "stage3", "offload"}:
        problems.append(Problem("sharding", v.sharding, "must be stage1, stage2 or stage3, or empty"))
    elif {"stage2", "stage3"} & set(words) and v.gradient_accumulation_steps > 1:
        problems.append(
            Problem(
                "sharding",
                " ".join(words),
                f"stages 2 and 3 free gradients that gradient_accumulation_steps: {v.gradient_accumulation_steps} "
                "must keep until the last micro-batch: take stage1, or gradient_accumulation_steps: 1",
            )
        )
    elif "stage3" in words:
        # Its forward and backward passes gather parameters layer by layer: processes that run the encoder unequally
        # often, or backwards through other graphs, wait for each other forever.
        uneven = [] if v.dataloader_drop_last else ["dataloader_drop_last: false, whose last batch may be uneven"]
        uneven += ["evaluation, whose texts may be"] if v.do_eval or word(v.evaluation_strategy) != "no" else []
        if uneven:
            message = f"gathers parameters in every pass, and so stands no {' and no '.join(uneven)}: take stage2"
            problems.append(Problem("sharding", " ".join(words), message))
        if getattr(v, "learnable_temperature", False):
            message = "clips gradients by a norm that counts the temperature's once per process: take stage2"
            problems.append(Problem("sharding", " ".join(words), message))
    return problems


def _check_device(v, found: Checked) -> None:
    changes, notes, fp16_problem = resolve_device(v)
    found.changes.update(changes)
    found.notes += notes
    if fp16_problem:
        found.problems.append(Problem("fp16", v.fp16, fp16_problem))
    if v.given("inf_cl_head_dim"):
        found.notes.append("inf_cl_head_dim is not needed: any width of embedding works")
    if v.unified_checkpoint:
        found.changes["unified_checkpoint"] = False
        found.notes.append("unified_checkpoint holds PaddleNLP's own models only: checkpoints are written plainly")


def model_config(path: str | None) -> dict:
    """config.json of a local model folder; empty where there is none, and where loading will say what is wrong."""
    file = Path(os.path.expanduser(path or "")) / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if path and file.is_file() else {}
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


def _looks_local(path: str) -> bool:
    return path.startswith(("/", "./", "../", "~")) or path in (".", "..") or os.path.exists(path)


def _check_model(v, found: Checked) -> None:
    name = v.model_name_or_path
    if not name:
        message = "is needed: a model folder, or a name that PaddleNLP knows"
        found.problems.append(Problem("model_name_or_path", name, message))
        return
    for option in ("model_name_or_path", "tokenizer_name_or_path", "guide_model_name_or_path"):
        path = getattr(v, option)
        if path and _looks_local(path) and not os.path.isdir(os.path.expanduser(path)):
            found.missing.append(Problem(option, path, "there is no such folder"))
    config = model_config(name)
    width = config.get("hidden_size")
    for dim in v.embedding_matryoshka_dims or []:
        if isinstance(width, int) and dim > width:
            message = f"{dim} is above the model's width, {width}"
            found.problems.append(Problem("embedding_matryoshka_dims", v.embedding_matryoshka_dims, message))
    positions = config.get("max_position_embeddings")
    positions = positions if isinstance(positions, int) else None
    if positions and config.get("model_type") in ("roberta", "xlm-roberta", "camembert"):
        positions -= config.get("pad_token_id", 1) + 1  # these count positions from pad_token_id + 1
    for option in ("max_query_len", "max_passage_len"):
        if positions and getattr(v, option) > positions:
            message = f"the model has {positions} positions: take {positions} or less"
            found.problems.append(Problem(option, getattr(v, option), message))


def _data_files(folder: Path, split: str) -> list[str]:
    """PaddleNLP's layouts: train.json, or train/*.json; .jsonl alike."""
    for suffix in (".jsonl", ".json"):
        if (folder / (split + suffix)).is_file():
            return [str(folder / (split + suffix))]
    return sorted(str(f) for f in (folder / split).glob("*") if f.suffix in (".jsonl", ".json"))


def _check_data(v, found: Checked) -> None:
    name = v.dataset_name_or_path
    if v.train_files and name:
        message = "train_files are given as well: name the data once"
        found.problems.append(Problem("dataset_name_or_path", name, message))
    elif v.train_files:
        found.train_files = [os.path.expanduser(f) for f in v.train_files]
        for file in found.train_files:
            if not os.path.isfile(file):
                there = "is a folder: name its files, or dataset_name_or_path" if os.path.isdir(file) else None
                found.missing.append(Problem("train_files", file, there or "there is no such file"))
    elif not name:
        message = "is needed, or dataset_name_or_path: JSONL files with a query, its passage and negatives per line"
        found.problems.append(Problem("train_files", None, message))
    else:
        path = Path(os.path.expanduser(name))
        found.train_files = [str(path)] if path.is_file() else _data_files(path, "train")
        if not found.train_files:
            message = "no data there: name a JSONL file, or a folder with train.jsonl, train.json or files in train/"
            found.missing.append(Problem("dataset_name_or_path", name, message))
        dev = _data_files(path, "dev")
        if len(dev) == 1 and v.do_eval and not (v.eval_pairs or v.eval_queries):
            found.changes["eval_pairs"] = v.eval_pairs = dev[0]
    for option in ("eval_pairs", "eval_queries", "eval_corpus", "eval_qrels"):
        file = os.path.expanduser(getattr(v, option) or "")
        if file and not os.path.isfile(file):
            found.missing.append(Problem(option, file, "there is no such file"))
        if file != (getattr(v, option) or ""):
            found.changes[option] = file
    resume = v.resume_from_checkpoint
    if resume and str(resume).lower() not in ("true", "false") and not os.path.isdir(os.path.expanduser(str(resume))):
        found.missing.append(Problem("resume_from_checkpoint", resume, "there is no such folder"))


def metric_problem(metric: str | None, metrics: Iterable[str]) -> str | None:
    """What is wrong with metric_for_best_model, given the metrics that evaluation will have."""
    metrics = list(metrics)
    if metric is None or metric.removeprefix("eval_") in metrics:
        return None
    return f"evaluation has no such metric; there are {', '.join(metrics)}"


def _check_evaluation(v, found: Checked) -> None:
    need = _needs(v, found.problems)
    strategy = word(v.evaluation_strategy)
    evaluates = v.do_eval or strategy != "no"
    has_data = bool(v.eval_pairs or v.eval_queries)
    where = "eval_pairs, or eval_queries, eval_corpus and eval_qrels"
    if evaluates:
        option = "do_eval" if strategy == "no" else "evaluation_strategy"
        need(has_data, option, f"needs something to evaluate on: {where}")
    if v.load_best_model_at_end:
        need(evaluates, "load_best_model_at_end", "needs evaluation_strategy: steps or epoch")
        save = word(v.save_strategy)
        same = not evaluates or save == (strategy if strategy != "no" else "steps")
        need(same, "save_strategy", "must be the same as evaluation_strategy for load_best_model_at_end")
        every = v.eval_steps or v.logging_steps
        fit = not evaluates or save != "steps" or (every and v.save_steps % every == 0)
        need(fit, "save_steps", f"must be a multiple of eval_steps, {every}, for load_best_model_at_end")
        need(v.metric_for_best_model is not None, "metric_for_best_model", "is needed for load_best_model_at_end")
    if v.early_stopping_patience is not None:
        need(v.load_best_model_at_end, "early_stopping_patience", "needs load_best_model_at_end: true")
    if evaluates and has_data and v.metric_for_best_model is not None:
        from paddle_infcl.evaluation.retrieval import METRICS

        message = metric_problem(v.metric_for_best_model, METRICS)
        need(message is None, "metric_for_best_model", message or "")
