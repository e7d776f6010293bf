# SPDX-License-Identifier: Apache-2.0
"""Every kernel launch of the contrastive operators compiles for the supported architectures, without a GPU."""

from __future__ import annotations

import re

import pytest

from tests.ops.scripts import run

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles(architecture, tmp_path):
    printed = run("compile_all.py", str(architecture), cache=tmp_path)
    assert re.search(rf"\d+ launches compile for sm_{architecture}", printed)
