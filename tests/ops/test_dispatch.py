# SPDX-License-Identifier: Apache-2.0
"""The shortcut for launches, and tapes for losses, that were made before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the shortcut is taken on Triton 3.6 only")
@pytest.mark.parametrize("script", ["dispatch_twice.py", "replay_thrice.py"])
def test_shortcut_hands_over_the_same(tmp_path, script):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parent / script
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "the same" in done.stdout, done.stdout + done.stderr[-4000:]
