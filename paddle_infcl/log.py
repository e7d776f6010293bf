# SPDX-License-Identifier: Apache-2.0
"""The one logger of the package, and warnings that are said once."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("paddle_infcl")
if not logger.handlers:
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("[paddle_infcl] %(levelname)s %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    # paddlenlp puts a handler on the root logger: every line would appear twice.
    logger.propagate = False

_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Logs a warning the first time that `key` is seen in this process.

    Args:
        key: what the warning is about; later calls with the same key say nothing.
        message: the text.
    """
    if key not in _said:
        _said.add(key)
        logger.warning(message)


def forget_warnings() -> None:
    """Lets every warning be said again. For tests."""
    _said.clear()
