# SPDX-License-Identifier: Apache-2.0
"""Who may import whom, read from the sources; and that importing the package costs and needs little."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "paddle_infcl"

# What modules of a part may import from the package. A module that is not listed here fails the test.
FREE = {"log"}
ALLOWED = {
    "log": set(),
    "kernels": set(),
    "functional": {"functional", "kernels"},
    "distributed": {"distributed", "functional"},
    "gradcache": set(),
    "pooling": {"functional"},
    "losses": {"functional", "distributed", "kernels"},
    "objectives": {"functional", "distributed", "kernels", "losses"},
    "data": {"data"},
    "evaluation": {"evaluation", "data"},
    "device": {"kernels"},
    "objective_options": set(),
    "paths": set(),
    "training_options": {"device", "paths"},
    "checks": {"data", "device", "evaluation", "objective_options", "training_options"},
    "checkpoints": set(),
    "modeling": {"checkpoints", "pooling", "functional", "data"},
    "arguments": {"checks", "device", "kernels", "evaluation", "data", "objective_options"},
    "encode": {"modeling", "data", "paths"},
    "callbacks": set(),
    "trainer": None,  # everything below cli
    "cli": None,
    "commands": None,
    "__main__": None,
}
MAY_USE_PADDLENLP = {"trainer", "callbacks", "arguments", "modeling", "encode", "cli", "commands"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Full names of everything that a module imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # A relative import stays in its own package; the package's own modules name theirs in full.
            assert node.level == 0 or PACKAGE not in path.parents, f"{path}: relative imports hide the arrows"
            names |= {f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows(path):
    part = part_of(path)
    if part == "__init__":
        return
    assert part in ALLOWED, f"{part} is new: say in tests/test_imports.py what it may import"
    for name in imported(path):
        top = name.split(".")[0]
        if top == "paddle_infcl":
            target = name.split(".")[1]
            if ALLOWED[part] is None:
                assert target not in {"cli", "commands"} or part in {"cli", "commands", "__main__"}, name
            else:
                assert target in ALLOWED[part] | FREE | {part}, f"{part} must not import {name}"
        if top == "paddlenlp":
            assert part in MAY_USE_PADDLENLP, f"{part} must not import paddlenlp ({name})"
        if top == "paddle_infcl_ops":
            assert part == "kernels", f"only kernels imports the Triton package, not {part}"
        assert top != "torch", f"{path}: the product imports no torch"


def test_the_ops_package_imports_nothing_of_ours():
    for path in (ROOT / "ops" / "src").rglob("*.py"):
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & {"paddle_infcl", "paddlenlp"}, path


def run_python(code: str, **environment) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_needs_neither_triton_nor_paddlenlp():
    code = """
import sys
sys.modules["triton"] = None
sys.modules["paddle_infcl_ops"] = None
import paddle_infcl, paddle_infcl.functional
assert "paddlenlp" not in sys.modules
import paddle
q = paddle.eye(3)
print(float(paddle_infcl.inf_cl_loss(q, q)) >= 0)
"""
    assert run_python(code).strip() == "True"


def test_without_paddle_the_error_says_what_to_install():
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "paddle" else find(name, *a)
try:
    import paddle_infcl
except ImportError as error:
    print(error)
"""
    text = run_python(code)
    assert "[cpu]" in text and "[gpu]" in text and "www.paddlepaddle.org.cn" in text


def test_public_names_exist():
    import paddle_infcl

    for name in paddle_infcl.__all__:
        assert getattr(paddle_infcl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        paddle_infcl.nonsense  # noqa: B018
    assert set(paddle_infcl.__all__) <= set(dir(paddle_infcl))


def test_files_stay_short():
    # Code grows most where it is longest already.
    for folder in (PACKAGE, ROOT / "ops" / "src", ROOT / "scripts"):
        for path in folder.rglob("*.py"):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            assert lines <= 450, f"{path.relative_to(ROOT)} has {lines} lines: split it"
