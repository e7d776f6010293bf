# SPDX-License-Identifier: Apache-2.0
"""What is wrong with the words of `encode` and `evaluate` by themselves, before a file is read or a model loads."""

from __future__ import annotations

from collections.abc import Sequence

from paddle_infcl.checks import ConfigError, Problem
from paddle_infcl.paths import same_path


def check_options(
    options, *, inputs: Sequence[str], limits: Sequence[str], templates: Sequence[str], names: Sequence[str]
) -> None:
    """Refuses what can't work, all of it in one message.

    An option that was given counts as given, also when it is 0 or empty: None alone stands for the default.

    Args:
        options: the parsed command line; has `batch_size` and `output` beside what is named here.
        inputs: options that name a file to read.
        limits: options that are a number of tokens.
        templates: options with {text} in them.
        names: options that name something else, and so can't be empty.

    Raises:
        ConfigError: options that can't work.
    """
    problems: list[Problem] = []

    def need(condition: bool, option: str, message: str) -> None:
        if not condition:
            problems.append(Problem(f"--{option}", getattr(options, option), message))

    for option in (*inputs, "output"):
        need(getattr(options, option) != "", option, "must name a file")
    for option in names:
        need(getattr(options, option) != "", option, "must not be empty; leave it out for the default")
    for option in inputs:
        file = getattr(options, option)
        if file and options.output and same_path(file, options.output):
            message = f"is the same file as --{option} {file}, which it would overwrite: name another file"
            need(False, "output", message)
    for option in limits:
        limit = getattr(options, option)
        message = "must be 1 token or more, special tokens included; leave it out for the model's limit"
        need(limit is None or limit >= 1, option, message)
    need(options.batch_size >= 1, "batch_size", "must be 1 or more")
    for option in templates:
        template = getattr(options, option)
        need(template is None or template.count("{text}") == 1, option, "must contain {text} exactly once")
    if problems:
        raise ConfigError(problems)
