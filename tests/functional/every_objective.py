# SPDX-License-Identifier: Apache-2.0
"""Every objective as a function of [anchors, positives, negatives, negatives] and of the options all of them take."""

from __future__ import annotations

import numpy as np
import paddle

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


def arrays(seed, width, negatives=2, rows=ROWS):
    """[rows, width] each: an anchor, a positive that resembles it, and negatives that do so too."""
    rng = np.random.default_rng(seed)
    anchor = rng.standard_normal((rows, width))
    return [anchor] + [0.5 * anchor + rng.standard_normal((rows, width)) for _ in range(1 + negatives)]


def guides(columns):
    """A guide's vectors, of width 5, for as many rows and columns."""
    made = arrays(1, 5, len(columns) - 2, columns[0].shape[0])
    return [paddle.to_tensor(g.astype("float32")) for g in made]


def pairs(columns):
    """The first two columns with length 1."""
    return [l2_normalize(c) for c in columns[:2]]


def flat(columns):
    """Anchors, and passages of which every row has its positive first; with length 1."""
    unit = [l2_normalize(c) for c in columns]
    return unit[0], paddle.stack(unit[1:], axis=1).reshape([-1, unit[0].shape[1]])


def ids(columns):
    """Two rows each share a document."""
    rows = paddle.arange(columns[0].shape[0]) // 2
    return {"q_ids": rows, "p_ids": rows}


CASES = {
    "infonce": lambda c, **o: inf_cl_loss(*pairs(c), **o),
    "guided": lambda c, **o: guided_inf_cl_loss(c, guides(c), margin=0.1, **o),
    "guided, relative, own negatives kept": lambda c, **o: guided_inf_cl_loss(
        c, guides(c), margin=0.3, margin_strategy="relative", keep_own_negatives=True, **o
    ),
    "guided, published diagonals": lambda c, **o: guided_inf_cl_loss(c, guides(c), published_diagonals=True, **o),
    "four directions": lambda c, **o: multiple_negatives_ranking_loss(c, directions=FOUR, **o),
    "hard negatives": lambda c, **o: multiple_negatives_ranking_loss(
        c, hardness_mode="hard_negatives", hardness_strength=3.0, **o
    ),
    "in-batch negatives": lambda c, **o: multiple_negatives_ranking_loss(
        c, directions=FOUR, hardness_mode="in_batch_negatives", hardness_strength=3.0, **o
    ),
    "symmetric": lambda c, **o: symmetric_loss(*pairs(c), **o),
    "margin, own negatives kept": lambda c, **o: inf_cl_loss(*flat(c), margin=0.0, keep_own_negatives=True, **o),
    "qwen3": lambda c, **o: qwen3_loss(c, margin=0.1, **o),
    "debiased": lambda c, **o: inf_cl_loss(*pairs(c), tau_plus=0.05, **o),
    # At T = 0.2 or 0.1 three rows of `arrays(0, WIDTH)` are at the floor, four above it.
    "debiased, rows at the floor": lambda c, **o: inf_cl_loss(*pairs(c), tau_plus=0.3, **o),
    "debiased with ids": lambda c, **o: inf_cl_loss(*pairs(c), tau_plus=0.05, **ids(c), **o),
    "smoothed": lambda c, **o: inf_cl_loss(*pairs(c), label_smoothing=0.1, **o),
    "matryoshka": lambda c, **o: info_nce(
        info_nce_groups(c[0], c[1], margin=0.1), matryoshka=Matryoshka([3, 12, 8], margin=0.1), **o
    ),
}


def run(case, columns, dtype, *, backend, temperature):
    """Loss, gradients of the columns and gradient of the temperature, as float64."""
    columns = [paddle.to_tensor(np.asarray(c, "float32")).astype(dtype) for c in columns]
    for c in columns:
        c.stop_gradient = False
    t = paddle.to_tensor([temperature], dtype="float64" if dtype == "float64" else "float32", stop_gradient=False)
    loss = CASES[case](columns, temperature=t, backend=backend)
    loss.backward()
    zero = np.zeros(columns[0].shape)
    grads = [zero if c.grad is None else c.grad.astype("float64").numpy() for c in columns]
    return float(loss), grads, float(t.grad)
