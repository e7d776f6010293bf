# SPDX-License-Identifier: Apache-2.0
"""Options that are numbers, checked: NaN compares as false and would switch a rule off without a word."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

from paddle import Tensor


def check_number(name: str, value: Any, needed: str, fits: Callable[[float], bool] = math.isfinite) -> None:
    """Refuses what is no number, tensors among it, or a number that does not fit.

    Args:
        name: of the option.
        value: what was given.
        needed: what should be, for the message.
        fits: whether a number will do; false for NaN.

    Raises:
        ValueError: names the option, what it should be and what it is.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        # Not a tensor's values: a device would be waited for.
        got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}: {needed}, got {got}")


def check_positive(name: str, value: Any) -> None:
    """Refuses what is no positive and finite number: see `check_number`."""
    check_number(name, value, "must be positive and finite", lambda x: 0 < x < math.inf)


def check_temperature(temperature: float, learnt: str) -> None:
    """Refuses temperatures that are no positive and finite number.

    Args:
        temperature: T.
        learnt: how T is learnt, for whoever gives a tensor, which would get no gradient.

    Raises:
        ValueError: see there.
    """
    if isinstance(temperature, Tensor):
        raise ValueError(f"temperature: a number is needed, got a tensor, which would get no gradient; {learnt}")
    check_positive("temperature", temperature)


def check_margin(margin: float | None, name: str = "margin") -> None:
    """Refuses margins that are no finite number; None is no rule. Raises ValueError."""
    if margin is not None:
        check_number(name, margin, "a finite number is needed, or None for no rule")
