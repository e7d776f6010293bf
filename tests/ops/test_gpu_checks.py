# SPDX-License-Identifier: Apache-2.0
"""The script that checks every mask on a GPU, under the interpreter at a tiny size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parent.parent / "gpu" / "check_contrastive.py"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_masks(dtype):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, "cpu", "--only", "masks", "--tiny", "--dtypes", dtype],
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert len(lines) == 17 and all(line.startswith("ok") for line in lines)
