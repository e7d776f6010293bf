# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for contrastive losses and label log-probabilities in Paddle.

Importing this package needs neither Triton nor a GPU: `availability` and `can_run` say what is missing. The operators
are imported when they are first used.
"""

from __future__ import annotations

import importlib

from .driver import availability, can_run

__version__ = "0.1.0"

_OPERATORS = {
    "info_nce": "contrastive",
    "block_lse": "contrastive",
    "block_grads": "contrastive",
    "own_similarity": "contrastive",
    "logprobs_of_labels": "logprobs",
    "linear_logprobs_of_labels": "logprobs",
}


def __getattr__(name: str):
    if name in _OPERATORS:
        return getattr(importlib.import_module(f".{_OPERATORS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "availability",
    "block_grads",
    "block_lse",
    "can_run",
    "info_nce",
    "linear_logprobs_of_labels",
    "logprobs_of_labels",
    "own_similarity",
]
