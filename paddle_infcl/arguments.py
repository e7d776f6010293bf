# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: UP006, UP035, UP045, RUF009 - PaddleNLP's PdArgumentParser knows typing's generics only; _option is a field
"""Options: what they are called, what they default to, and how a file and a command line become objects.

`parse_config` reads PaddleNLP's three groups of options (ModelConfig, DataConfig, SFTConfig) and ours
(`EmbeddingArgument`) from JSON, YAML, a dict or a command line, and reports everything that is wrong at once, before a
model loads. What may be combined is in `checks`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import json
import os
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import List, Optional

from paddle_infcl import checks
from paddle_infcl.checks import ConfigError, Problem
from paddle_infcl.log import warn_once
from paddle_infcl.objective_options import ObjectiveArgument
from paddle_infcl.objective_options import option as _option


@dataclass
class EmbeddingArgument(ObjectiveArgument):
    """Options of the loss, the data and the evaluation: PaddleNLP's EmbeddingArgument and more."""

    # As PaddleNLP names them.
    max_query_len: int = _option(64, "Most tokens of a query, its template and special tokens included.")
    max_passage_len: int = _option(256, "Most tokens of a passage, its template and special tokens included.")
    group_size: int = _option(8, "Passages per query: its positive and up to group_size - 1 hard negatives.")
    query_template: str = _option("{text}", "Text around every query; {text} stands for the query.")
    passage_template: str = _option("{text}", "Text around every passage; {text} stands for the passage.")
    embedding_temperature: float = _option(0.02, "T: similarities are divided by it. Positive.")
    embedding_negatives_cross_device: bool = _option(
        True, "Contrast with the passages of all processes; inf_cl_loss does so anyway, see negatives_strategy."
    )
    embedding_matryoshka_dims: Optional[List[int]] = _option(
        None, "Prefix widths that must work as embeddings by themselves; losses over all of them are added."
    )
    loss_type: str = _option(
        "contrastive", 'PaddleNLP\'s name for the choice: "inf_cl" means inf_cl_loss: true.', choices=checks.LOSS_TYPES
    )
    inf_cl_head_dim: int = _option(64, "Accepted and unneeded: these kernels take any width.")

    # The loss.
    inf_cl_loss: bool = _option(
        False, "The contrastive loss without its similarity matrix: value and gradients in tiles, by inf_cl_backend."
    )
    inf_cl_backend: str = _option(
        "auto",
        "Who computes inf_cl_loss: triton (CUDA), paddle (any device), dense (the textbook loss); auto takes Triton "
        "where it runs and says why where it does not.",
        choices=checks.BACKENDS,
    )
    inf_cl_memory_budget: Optional[int] = _option(
        None, "Bytes of logits held at once; default: 8 MiB on a CPU, 512 MiB or the size of the inputs on a GPU."
    )
    negatives_strategy: str = _option(
        "auto",
        "How negatives travel between processes: gather, ring, or local (only the own process's); auto takes gather "
        "up to a size, see docs/distributed.md.",
        choices=checks.STRATEGIES,
    )
    offload_features: bool = _option(
        False,
        "Keep the representations of a batch in host memory while the encoder runs, for batches beyond GPU memory.",
    )
    learnable_temperature: bool = _option(False, "Train T, starting at embedding_temperature.")
    embedding_matryoshka_weights: Optional[List[float]] = _option(
        None, "A weight for each of embedding_matryoshka_dims; default: 1 each."
    )
    false_negative_margin: Optional[float] = _option(
        None, "Drop a negative whose similarity exceeds the positive's by more than this (Qwen3-Embedding: 0.1)."
    )
    false_negative_keep_own_negatives: bool = _option(
        False, "A row's own hard negatives are not for false_negative_margin to drop."
    )

    # The data.
    train_files: Optional[List[str]] = _option(None, "JSONL files of pairs; instead of dataset_name_or_path.")
    train_weights: Optional[List[float]] = _option(
        None, "How many times the rows of each of train_files come up in an epoch, 0.5: half of them; default: 1 each."
    )
    pad_negatives: str = _option(
        "none",
        "Rows with fewer hard negatives than group_size - 1: none leaves them shorter, repeat draws some again "
        "(PaddleNLP's numbers).",
        choices=checks.PAD_NEGATIVES,
    )
    no_duplicates: bool = _option(False, "Never put two rows with the same query or passage into one batch.")
    ids_from_text: bool = _option(False, "Treat equal texts as the same document, and don't take them as negatives.")
    sort_by_length: bool = _option(
        False, "Fill the micro-batches of a batch by text length: less padding, the same loss."
    )

    # The model.
    pooling: Optional[str] = _option(
        None, "cls, mean or last token; default: what the checkpoint says.", choices=checks.POOLINGS
    )
    normalize_embeddings: Optional[bool] = _option(
        None, "Scale embeddings to length 1; default: what the checkpoint says, true where it says nothing."
    )

    # Evaluation while training.
    eval_pairs: Optional[str] = _option(None, "JSONL file of held-out pairs to evaluate retrieval on.")
    eval_queries: Optional[str] = _option(
        None, "JSONL file of queries, _id and text; with eval_corpus and eval_qrels."
    )
    eval_corpus: Optional[str] = _option(
        None, "JSONL file of passages, _id and text; beside eval_pairs: more passages."
    )
    eval_qrels: Optional[str] = _option(None, "Relevance judgements in BEIR's or TREC's format.")
    early_stopping_patience: Optional[int] = _option(
        None, "Stop after this many evaluations in a row without a better metric_for_best_model."
    )
    early_stopping_threshold: float = _option(0.0, "What counts as better, for early_stopping_patience.")

    def __post_init__(self):
        if self.loss_type == "inf_cl":
            self.inf_cl_loss = True

    @classmethod
    def of(cls, arguments) -> EmbeddingArgument:
        """These options from any object that has some of them, such as PaddleNLP's EmbeddingArgument.

        Raises:
            ConfigError: values that can't work.
        """
        values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls) if hasattr(arguments, f.name)}
        if not values:  # a dict, for example: all of it would be passed over
            kind = type(arguments).__name__
            raise ConfigError([Problem("model_args", None, f"is a {kind}: EmbeddingArgument(...) is needed")])
        result = cls(**values)
        if problems := checks.loss_problems(result):
            raise ConfigError(problems)
        return result


@dataclass
class Config:
    """A whole configuration; iterates as (model, data, training, embedding), like PdArgumentParser's result.

    Attributes:
        model, data, training: PaddleNLP's ModelConfig, DataConfig and SFTConfig.
        embedding: `EmbeddingArgument`.
        given: names of the options that the file or the command line set.
        train_files: files of pairs to train on, resolved from `train_files` or `dataset_name_or_path`.
        missing: files that are named and not there; empty unless the check was turned off.
        notes: what was changed to fit this machine, in words.
    """

    model: typing.Any
    data: typing.Any
    training: typing.Any
    embedding: EmbeddingArgument
    given: set[str]
    train_files: list[str]
    missing: list[Problem]
    notes: list[str]

    def __iter__(self) -> Iterator:
        return iter((self.model, self.data, self.training, self.embedding))


def parse_config(source: str | Path | Mapping | Sequence[str], *, check_files: bool = True) -> Config:
    """Options from a file, a dict or a command line, checked together.

    Args:
        source: a path to a JSON or YAML file; a dict; or a command line: optionally such a path, then
            `--option value`, which wins over the file.
        check_files: refuse files that are named and not there. Otherwise they are listed in `missing`.

    Returns:
        The configuration. On a machine without a GPU, one that asks for a GPU becomes fp32 on the CPU, with a warning.

    Raises:
        ConfigError: everything that is wrong, in one list.

    Example:
        >>> try:
        ...     parse_config({"output_dir": "out", "temperature": 0.02, "group_size": 0})
        ... except ConfigError as error:
        ...     [problem.option for problem in error.problems]
        ['temperature', 'group_size', 'model_name_or_path', 'train_files']
    """
    problems: list[Problem] = []
    raw = _read(source, problems)
    options, classes = _option_table()
    values, given = {}, set()
    for name, value in raw.items():
        if name not in options:
            problems.append(Problem(name, value, "there is no such option" + _suggestion(name, options)))
            continue
        try:
            value = None if value is None else _coerce(value, options[name].type)
            if value is not None:  # null is the default
                values[name] = value
                given.add(name)
        except ValueError as error:
            problems.append(Problem(name, value, f"must be {error}"))
    everything = {name: values.get(name, option.default) for name, option in options.items()}
    broken = {problem.option for problem in problems}
    checked = checks.check_everything(everything, given, broken)
    problems += checked.problems + (checked.missing if check_files else [])
    if problems:
        raise ConfigError(problems)
    for name, value in checked.changes.items():
        values[name] = value
    if checked.notes:
        warn_once("config-notes", "; ".join(checked.notes))
    built = []
    for dataclass_type in classes:
        names = {f.name for f in dataclasses.fields(dataclass_type)}
        try:
            built.append(dataclass_type(**{k: v for k, v in values.items() if k in names}))
        except (ValueError, AssertionError) as error:
            raise ConfigError([Problem(dataclass_type.__name__, None, str(error))]) from error
    return Config(*built, given, checked.train_files, checked.missing, checked.notes)


@dataclass(frozen=True)
class Option:
    """One option: the group it belongs to, its type and its default."""

    group: str
    type: typing.Any
    default: typing.Any


def _option_table() -> tuple[dict[str, Option], list[type]]:
    from paddlenlp.trl import DataConfig, ModelConfig, SFTConfig

    classes = [ModelConfig, DataConfig, SFTConfig, EmbeddingArgument]
    table = {}
    for dataclass_type in classes:
        hints = typing.get_type_hints(dataclass_type)
        for f in dataclasses.fields(dataclass_type):
            default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
            default = None if default is dataclasses.MISSING else default
            table[f.name] = Option(dataclass_type.__name__, hints[f.name], default)
    return table, classes


def _suggestion(name: str, options: Mapping) -> str:
    # A part of a name ("temperature") first: it is too far away for difflib.
    close = [option for option in sorted(options, key=len) if len(name) > 3 and name in option][:2]
    close = close or difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _read(source, problems: list[Problem]) -> dict[str, typing.Any]:
    if isinstance(source, Mapping):
        return dict(source)
    if isinstance(source, str | os.PathLike):
        return _read_file(Path(source))
    arguments = list(source)
    raw = {}
    if arguments and not arguments[0].startswith("--"):
        raw = _read_file(Path(arguments.pop(0)))
    raw.update(_read_command_line(arguments, problems))
    return raw


def _read_file(path: Path) -> dict[str, typing.Any]:
    kind = path.suffix.lower()
    if kind not in (".json", ".yaml", ".yml"):
        raise ConfigError([Problem(str(path), None, "a configuration ends in .json, .yaml or .yml")])
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin with a byte-order mark
        if kind == ".json":
            content = json.loads(text, object_pairs_hook=_without_repeats)
        else:
            content = _load_yaml(text)
    except ConfigError as error:
        raise ConfigError([Problem(str(path), None, problem.message) for problem in error.problems]) from None
    except UnicodeDecodeError as error:
        message = f"is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}; save the file as UTF-8"
        raise ConfigError([Problem(str(path), None, message)]) from error
    except OSError as error:
        raise ConfigError([Problem(str(path), None, f"can't be read: {error.strerror}")]) from error
    except ValueError as error:
        raise ConfigError([Problem(str(path), None, f"is not JSON: {error}")]) from error
    except Exception as error:  # yaml.YAMLError, without importing yaml for JSON
        raise ConfigError([Problem(str(path), None, f"is not YAML: {error}")]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError([Problem(str(path), None, f"must hold options by name, holds a {type(content).__name__}")])
    return {str(name): value for name, value in content.items()}


def _without_repeats(pairs: list[tuple]) -> dict:
    names = [name for name, _ in pairs]
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError([Problem("", None, f"names {', '.join(twice)} twice: the last one would win silently")])
    return dict(pairs)


def _load_yaml(text: str):
    """safe_load, but options that stand there twice are an error: YAML would take the last one."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            _without_repeats([(key.value, None) for key, _ in node.value if isinstance(key, yaml.ScalarNode)])
            return super().construct_mapping(node, deep)

    return yaml.load(text, Loader)


def _read_command_line(arguments: Sequence[str], problems: list[Problem]) -> dict[str, typing.Any]:
    """`--name value ...`, `--name=value`, `--flag`, `--no_flag`; dashes in names are underscores."""
    raw: dict[str, typing.Any] = {}
    name = None
    for token in arguments:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            name = name.replace("-", "_")
            raw[name] = [value] if equals else []
        elif name is None:
            problems.append(Problem(token, None, "is no option; options start with --, a configuration comes first"))
        else:
            raw[name].append(token)
    options, _ = _option_table()
    result = {}
    for name, words in raw.items():
        positive = name.removeprefix("no_")
        if name not in options and name.startswith("no_") and positive in options and not words:
            result[positive] = False
        elif not words:
            result[name] = True
        else:
            result[name] = words[0] if len(words) == 1 else words
    return result


_TRUE, _FALSE = ("true", "yes", "t", "y", "1", "on"), ("false", "no", "f", "n", "0", "off")


def _coerce(value, kind):
    """`value`, from YAML, JSON or a command line, as `kind`. ValueError says what it must be."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [k for k in typing.get_args(kind) if k is not type(None)]
        return _coerce(value, inner[0])
    # PaddleNLP's parser turns null into "None", and declares `str = None`: None says nothing wherever it stands. As a
    # text, "none" is a value (report_to: none).
    if value == "None" or (
        kind in (int, float, bool) and isinstance(value, str) and value.lower() in ("none", "null")
    ):
        return None
    if origin is list or kind is list:
        (item,) = typing.get_args(kind) or (str,)
        return _coerce_list(value, item)
    if origin is dict or kind is dict:
        value = _json(value, "a mapping") if isinstance(value, str) else value
        if not isinstance(value, dict):
            raise ValueError("a mapping")
        return value
    if isinstance(value, list | tuple | dict):
        raise ValueError(f"{_kind_name(kind)}, not a {type(value).__name__}")
    if kind is bool:
        word = str(value).strip().lower()
        if word in _TRUE + _FALSE:
            return word in _TRUE
        raise ValueError("true or false")
    if kind in (int, float):
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)  # also "1e-4", which YAML reads as a text
            if kind is int and number != int(number):
                raise ValueError
            return kind(number)
        except (ValueError, OverflowError):
            raise ValueError(_kind_name(kind)) from None
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(str(value).lower() if not isinstance(value, bool) else {False: "no", True: "yes"}[value])
        except ValueError:
            raise ValueError("one of " + ", ".join(str(member.value) for member in kind)) from None
    return str(value)


def _coerce_list(value, item):
    if isinstance(value, str) and value.strip().startswith("["):
        value = _json(value, "a list, such as [64, 128]")
    elif isinstance(value, str) and item is not str:
        value = value.replace(",", " ").split()
    if not isinstance(value, list | tuple):
        value = [value]
    if None in (items := [None if v is None else _coerce(v, item) for v in value]):
        raise ValueError("a list without null")
    return items


def _json(text: str, what: str):
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(what) from None


def _kind_name(kind) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}.get(kind, str(kind))
