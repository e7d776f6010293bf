# SPDX-License-Identifier: Apache-2.0
"""Every kernel launch of the contrastive operators compiles for the supported architectures, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles(architecture, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).parent / "compile_all.py"
    done = subprocess.run(
        [sys.executable, script, str(architecture)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(rf"\d+ launches compile for sm_{architecture}", done.stdout)
