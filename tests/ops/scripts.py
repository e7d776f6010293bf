# SPDX-License-Identifier: Apache-2.0
"""Runs this folder's scripts, which need compiled kernels: the tests' own process has Triton's interpreter on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(name: str, *arguments: str, cache: Path | None = None) -> str:
    """What the script prints; it must succeed.

    Args:
        name: of a file beside this one.
        arguments: its own.
        cache: folder for what Triton compiles; None: Triton's usual one.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / name, *arguments], env=environment, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
