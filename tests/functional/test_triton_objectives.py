# SPDX-License-Identifier: Apache-2.0
"""Every objective on the Triton backend, under the interpreter, equals the plain Paddle one."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("triton")
pytest.importorskip("paddle_infcl_ops")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from tests.functional.every_objective import CASES, WIDTH, arrays, run


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_plain_paddle(case, dtype):
    columns = arrays(0, WIDTH)
    want, got = (run(case, columns, dtype, backend=b, temperature=0.2) for b in ("paddle", "triton"))
    tolerance = 1e-4 if dtype == "float32" else 0.02
    assert got[0] == pytest.approx(want[0], rel=tolerance)
    largest = max(np.abs(g).max() for g in want[1])
    for a, b in zip(got[1], want[1], strict=True):
        assert np.abs(a - b).max() <= tolerance * largest
    assert got[2] == pytest.approx(want[2], rel=2 * tolerance, abs=2 * tolerance)
