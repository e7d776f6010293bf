# SPDX-License-Identifier: Apache-2.0
"""Every objective on the Triton backend, under the interpreter, equals the plain Paddle one."""

from __future__ import annotations

import os

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
pytest.importorskip("paddle_infcl_ops")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from paddle_infcl.functional import (
    guided_inf_cl_loss,
    inf_cl_loss,
    info_nce,
    multiple_negatives_ranking_loss,
    qwen3_loss,
    symmetric_loss,
)
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.matryoshka import Matryoshka
from paddle_infcl.functional.vectors import l2_normalize

ROWS, WIDTH = 7, 12
FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")


def arrays(seed, width, negatives=2):
    rng = np.random.default_rng(seed)
    anchor = rng.standard_normal((ROWS, width))
    return [anchor] + [0.5 * anchor + rng.standard_normal((ROWS, width)) for _ in range(1 + negatives)]


GUIDES = [g.astype("float32") for g in arrays(1, 5)]


def guides():
    return [paddle.to_tensor(g) for g in GUIDES]


def pairs(columns):
    """The first two columns with length 1."""
    return [l2_normalize(c) for c in columns[:2]]


CASES = {
    "infonce": lambda c, **o: inf_cl_loss(*pairs(c), **o),
    "guided": lambda c, **o: guided_inf_cl_loss(c, guides(), margin=0.1, **o),
    "guided, relative, own negatives kept": lambda c, **o: guided_inf_cl_loss(
        c, guides(), margin=0.3, margin_strategy="relative", keep_own_negatives=True, **o
    ),
    "guided, published diagonals": lambda c, **o: guided_inf_cl_loss(c, guides(), published_diagonals=True, **o),
    "four directions": lambda c, **o: multiple_negatives_ranking_loss(c, directions=FOUR, **o),
    "hard negatives": lambda c, **o: multiple_negatives_ranking_loss(
        c, hardness_mode="hard_negatives", hardness_strength=3.0, **o
    ),
    "in-batch negatives": lambda c, **o: multiple_negatives_ranking_loss(
        c, directions=FOUR, hardness_mode="in_batch_negatives", hardness_strength=3.0, **o
    ),
    "symmetric": lambda c, **o: symmetric_loss(*pairs(c), **o),
    "qwen3": lambda c, **o: qwen3_loss(c, margin=0.1, **o),
    "debiased": lambda c, **o: inf_cl_loss(*pairs(c), tau_plus=0.05, **o),
    "debiased with ids": lambda c, **o: inf_cl_loss(
        *pairs(c), tau_plus=0.05, q_ids=paddle.arange(ROWS) // 2, p_ids=paddle.arange(ROWS) // 2, **o
    ),
    "smoothed": lambda c, **o: inf_cl_loss(*pairs(c), label_smoothing=0.1, **o),
    "matryoshka": lambda c, **o: info_nce(
        info_nce_groups(c[0], c[1], margin=0.1), matryoshka=Matryoshka([3, 12, 8], margin=0.1), **o
    ),
}


def run(case, backend, dtype):
    columns = [paddle.to_tensor(c.astype("float32")).astype(dtype) for c in arrays(0, WIDTH)]
    for c in columns:
        c.stop_gradient = False
    t = paddle.to_tensor([0.2], dtype="float32", stop_gradient=False)
    loss = CASES[case](columns, temperature=t, backend=backend)
    loss.backward()
    zero = np.zeros([ROWS, WIDTH], "float32")
    grads = [zero if c.grad is None else c.grad.astype("float32").numpy() for c in columns]
    return float(loss), grads, float(t.grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_it_equals_plain_paddle(case, dtype):
    want, got = run(case, "paddle", dtype), run(case, "triton", dtype)
    tolerance = 1e-4 if dtype == "float32" else 0.02
    assert got[0] == pytest.approx(want[0], rel=tolerance)
    largest = max(np.abs(g).max() for g in want[1])
    for a, b in zip(got[1], want[1], strict=True):
        assert np.abs(a - b).max() <= tolerance * largest
    assert got[2] == pytest.approx(want[2], rel=2 * tolerance, abs=2 * tolerance)
