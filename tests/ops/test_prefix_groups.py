# SPDX-License-Identifier: Apache-2.0
"""The Matryoshka operator over guides, owners and groups of several blocks, against the float64 oracle."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
from paddle_infcl_ops import prefixes

from paddle_infcl.functional import Matryoshka, info_nce
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.guided import guide_vectors, guided_groups
from paddle_infcl.functional.qwen3 import qwen3_groups
from paddle_infcl.functional.ranking import DIRECTIONS, ranking_groups
from paddle_infcl.functional.symmetric import symmetric_groups
from tests.ops.blocks import prepare, rng, vectors
from tests.ops.prefix_losses import compare

B, N, D = 37, 71, 40
DIMS = [8, 20, 36]


def sides(B=B, N=N, D=D, width=17):
    """Queries, as many positives, N other passages, of any length; a guide's vectors of them ("gq", "gx", "gn")."""
    g = rng(7)
    q = vectors(g, B, D, 1.5)
    made = {"q": q, "x": 0.4 * q + vectors(g, B, D, 0.5), "n": vectors(g, N, D, 0.7)}
    seen = {f"g{k}": x[:, :width] + 0.3 * vectors(g, len(x), width) for k, x in made.items()}
    return made | {k: (x / np.linalg.norm(x, axis=1, keepdims=True)).astype("float32") for k, x in seen.items()}


def guide(left, right, rows=B, keep_own=False, threshold=None):
    threshold = rng(1).uniform(-0.1, 0.4, rows) if threshold is None else np.full(rows, threshold)
    return {"left": f"g{left}", "right": f"g{right}", "threshold": threshold, "keep_own": keep_own}


def guided(rows=B, **options):
    """Anchors against positives, against others of which some belong to a row, and both sides against themselves."""
    own = np.arange(rows)
    owner = np.arange(N) % (2 * rows)
    return [
        {"left": "q", "right": "x", "own": own, "guide": guide("q", "x", rows, **options)},
        {"left": "q", "right": "n", "owner": owner, "guide": guide("q", "n", rows, keep_own=True, **options)},
        {"left": "q", "right": "q", "self_column": own, "guide": guide("q", "q", rows, **options)},
        {"left": "x", "right": "x", "self_column": own, "guide": guide("x", "x", rows, **options)},
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dims", [[40], [8, 20, 36]])
def test_one_guided_block(dims, dtype):
    block = {"left": "q", "right": "n", "own": rng().permutation(N)[:B], "guide": guide("q", "n")}
    compare(sides(), [[block]], dims, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_guided_over_four_blocks(dtype):
    compare(sides(), [guided()], DIMS, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_give_the_same(dtype, monkeypatch):
    """Three of them, the last one short; a sum of tiles lies between those of other blocks."""
    monkeypatch.setattr(prefixes, "FEWEST_ROWS", 16)
    rows, budget = 70, {"float32": 180_000, "bfloat16": 100_000}[dtype]
    compare(sides(rows), [guided(rows)], DIMS, dtype=dtype, budget=budget, row_weights=rng(2).random(rows))


def symmetric():
    own = np.arange(B)
    ids = {"row_ids": own // 2, "column_ids": own // 2}
    return [[{"left": "q", "right": "x", "own": own, **ids}], [{"left": "x", "right": "q", "own": own, **ids}]]


def four_directions():
    own = np.arange(B)
    owner = np.arange(N) - 10
    return [
        [
            {"left": "q", "right": "x", "own": own},
            {"left": "q", "right": "n"},
            {"left": "q", "right": "q", "self_column": own},
            {"left": "x", "right": "q"},
            {"left": "x", "right": "n", "owner": owner, "owner_rule": "exclude"},
            {"left": "x", "right": "x", "self_column": own},
        ]
    ]


def own_negatives():
    own = np.arange(B)
    return [
        [
            {"left": "q", "right": "n", "owner": np.arange(N) // 2 - 1, "owner_rule": "only", "row_offset": 0},
            {"left": "q", "right": "x", "own": own},
            {"left": "x", "right": "x", "self_column": own},
        ]
    ]


def itself():
    """One tensor on both sides of the block that has the own entries, which rows share."""
    other = (np.arange(B) // 2 + B // 2 + 1) % B
    return [[{"left": "q", "right": "q", "own": other, "self_column": np.arange(B)}]]


GROUPS = {
    "symmetric": symmetric, "four directions": four_directions, "own negatives": own_negatives, "itself": itself,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", GROUPS)
def test_groups(name, dtype):
    compare(sides(), GROUPS[name](), DIMS, dtype=dtype, margin=0.05 if name == "own negatives" else None)


@pytest.mark.parametrize("name", ["symmetric", "own negatives", "itself"])
def test_groups_in_chunks(name, monkeypatch):
    monkeypatch.setattr(prefixes, "FEWEST_ROWS", 16)
    compare(sides(), GROUPS[name](), DIMS, budget=40_000, margin=0.05 if name == "own negatives" else None)


def test_several_groups_of_several_blocks():
    groups = [guided(), four_directions()[0][3:], own_negatives()[0]]
    groups[1][-1]["own"] = (np.arange(B) + 3) % B
    compare(sides(), groups, [16, 40])


@pytest.mark.parametrize("temperature", [0.005, 0.02])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bad_guess_in_another_block(dtype, temperature):
    """A duplicate in a column that no sample sees, in the block that comes last; a long vector in the first."""
    arrays = sides()
    arrays["n"][1] = 3 * arrays["q"][3]
    arrays["x"][4] *= 1e3
    own = np.arange(B)
    group = [
        {"left": "q", "right": "x", "own": own},
        {"left": "x", "right": "x", "self_column": own},
        {"left": "q", "right": "n"},
    ]
    # Where a handful of rows have all the gradient, rounding doesn't average out.
    tolerance = {"float32": 2e-3, "bfloat16": 4e-2}[dtype]
    compare(arrays, [group], [16, 40], dtype=dtype, temperature=temperature, tolerance=tolerance)


def test_a_guide_that_drops_everything():
    """Nothing to compete against: loss 0, gradients 0. Then all rows but a few."""
    own = np.arange(B)
    loss = compare(sides(), [[d for d in guided(threshold=-2.0) if d["right"] != "n"]], DIMS)
    assert float(loss) == 0.0
    group = [d for d in guided() if d["right"] != "n"]
    for d in group:
        d["guide"]["threshold"] = np.where(own % 9 == 0, 0.3, -2.0)
    compare(sides(), [group], DIMS)


def test_zero_vectors():
    arrays = sides()
    arrays["q"][3] = 0
    arrays["q"][4, :8] = 0
    arrays["x"][3] = 0
    arrays["x"][9, :20] = 0
    arrays["n"][::7] = 0
    for dtype in ("float32", "bfloat16"):
        compare(arrays, [guided()], DIMS, dtype=dtype)
    compare(arrays, symmetric(), DIMS)


@pytest.mark.parametrize("shape", [(1, 1, 8), (33, 64, 64), (5, 130, 3)])
def test_sizes(shape):
    rows, columns, width = shape
    own = np.arange(rows)
    group = [
        {"left": "q", "right": "x", "own": own, "guide": guide("q", "x", rows)},
        {"left": "q", "right": "n", "guide": guide("q", "n", rows)},
        {"left": "x", "right": "x", "self_column": own},
    ]
    arrays = sides(rows, columns, width, width - 1)
    compare(arrays, [group], [2, width])
    compare(arrays, [group], [width - 1], dtype="bfloat16")


@pytest.mark.parametrize("learns", ["q", "x", "n", "qn", "xn", ""])
def test_gradients_that_are_wanted(learns):
    compare(sides(), [guided()], [16, 40], learns=learns)
    compare(sides(), symmetric(), [16, 40], learns=learns.replace("n", ""))


def test_a_value_without_gradients():
    _, blocks, _, _ = prepare(sides(), [guided()], "bfloat16")
    options = {"scale": 20.0, "row_weights": 1 / B}
    trained = prefixes.prefix_info_nce(blocks, DIMS, [1.0] * 3, **options)
    with paddle.no_grad():
        value = prefixes.prefix_info_nce(blocks, DIMS, [1.0] * 3, **options)
    assert value.stop_gradient and not trained.stop_gradient
    assert float(value) == float(trained)


# --- through `info_nce` ----------------------------------------------------------------------------------------------


def columns(dtype):
    """[anchors, positives, two negatives], and a guide's vectors of them."""
    arrays = sides()
    made = [arrays["q"], arrays["x"], arrays["n"][:B], arrays["n"][-B:]]
    seen = [arrays["gq"], arrays["gx"], arrays["gn"][:B], arrays["gn"][-B:]]
    made = [paddle.to_tensor(x).astype(dtype).detach() for x in made]
    for x in made:
        x.stop_gradient = False
    seen = [guide_vectors(paddle.to_tensor(x), made[0].dtype) for x in seen]
    return made, Candidates.from_columns(made), Candidates.from_columns(seen, normalize=False)


LOSSES = {
    "guided": lambda batch, seen: guided_groups(batch, seen, margin=0.05),
    "guided, relative, own negatives kept": lambda batch, seen: guided_groups(
        batch, seen, margin=0.2, margin_strategy="relative", keep_own_negatives=True
    ),
    "guided, one block": lambda batch, seen: guided_groups(
        batch, seen, margin=0.1, contrast_anchors=False, contrast_positives=False
    )[:1],
    "symmetric": lambda batch, seen: symmetric_groups(batch.queries, batch.positives, None, None),
    "four directions": lambda batch, seen: ranking_groups(batch, directions=DIRECTIONS),
    # A limit in all blocks but one.
    "qwen3": lambda batch, seen: qwen3_groups(batch, margin=0.1, keep_own_negatives=True),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_sum_of_separate_losses(name, dtype, monkeypatch):
    """Every objective takes the one sweep, and comes out as the textbook loss does, prefix by prefix."""
    calls, run = [], prefixes.prefix_info_nce
    monkeypatch.setattr(prefixes, "prefix_info_nce", lambda *a, **k: calls.append(run(*a, **k)) or calls[-1])
    results = []
    for backend in ("triton", "dense"):
        made, batch, seen = columns(dtype)
        t = paddle.to_tensor([0.1], stop_gradient=False)
        margin = 0.1 if name == "qwen3" else None
        matryoshka = Matryoshka([36, 8, 20], [1.0, 0.5, 2.0], margin)
        loss = info_nce(LOSSES[name](batch, seen), temperature=t, matryoshka=matryoshka, backend=backend)
        loss.backward()
        grads = [np.zeros((B, D)) if x.grad is None else x.grad.astype("float32").numpy() for x in made]
        results.append((float(loss), grads, float(t.grad)))
    assert len(calls) == 1 and calls[0] is not None
    (value, grads, dt), (want, wanted, want_dt) = results
    tolerance = {"float32": 1e-5, "bfloat16": 2e-2}[dtype]
    assert value == pytest.approx(want, rel=1e-5)
    if dtype == "float32":  # it cancels
        assert dt == pytest.approx(want_dt, rel=1e-4)
    largest = max(np.abs(g).max() for g in wanted)
    for a, b in zip(grads, wanted, strict=True):
        assert np.abs(a - b).max() <= tolerance * largest
