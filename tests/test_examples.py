# SPDX-License-Identifier: Apache-2.0
"""The examples in public docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "paddle_infcl.functional.contrastive",
    "paddle_infcl.functional.guided",
    "paddle_infcl.functional.qwen3",
    "paddle_infcl.functional.ranking",
    "paddle_infcl.functional.symmetric",
    "paddle_infcl.evaluation.retrieval",
    "paddle_infcl.arguments",
    "paddle_infcl.data.jsonl",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.attempted > 0 and result.failed == 0
