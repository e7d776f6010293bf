# SPDX-License-Identifier: Apache-2.0
"""What Triton 3.3 and 3.4 can't compile stays out of the kernels; tests run with a newer one, which can."""

from __future__ import annotations

import ast
from pathlib import Path

import paddle_infcl_ops
import pytest

SOURCES = Path(paddle_infcl_ops.__file__).parent
# Made for Triton 3.6 only.
GLUON = "hopper_kernels.py"


def kernels():
    for path in sorted(SOURCES.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
            if path.name != GLUON and any(d.startswith("triton.jit") or d == "changing" for d in decorators):
                yield pytest.param(node, id=f"{path.stem}.{node.name}")


@pytest.mark.parametrize("kernel", kernels())
def test_no_recursion_and_no_chain_of_booleans(kernel):
    for node in ast.walk(kernel):
        if isinstance(node, ast.Call):
            assert getattr(node.func, "id", None) != kernel.name, "Triton 3.4 follows calls without end"
        if isinstance(node, ast.BoolOp):
            assert len(node.values) == 2, f"Triton 3.3 wants parentheses in: {ast.unparse(node)}"
