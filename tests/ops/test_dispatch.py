# SPDX-License-Identifier: Apache-2.0
"""The shortcut for launches, and tapes for losses, that were made before."""

from __future__ import annotations

import pytest

from tests.ops.scripts import run

triton = pytest.importorskip("triton")


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the shortcut is taken on Triton 3.6 only")
@pytest.mark.parametrize("script", ["dispatch_twice.py", "replay_thrice.py"])
def test_shortcut_hands_over_the_same(tmp_path, script):
    assert "the same" in run(script, cache=tmp_path)
