# SPDX-License-Identifier: Apache-2.0
"""The shortcut for launches that were made before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="the shortcut is taken on Triton 3.6 only")
def test_shortcut_hands_over_the_same(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parent / "dispatch_twice.py"
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "the same" in done.stdout, done.stdout + done.stderr[-4000:]
