# SPDX-License-Identifier: Apache-2.0
"""The Matryoshka operator under the interpreter, against the float64 oracle at every prefix."""

from __future__ import annotations

import re

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
from paddle_infcl_ops import prefixes

from paddle_infcl.functional import Block, Guide, Hardness, Matryoshka, inf_cl_loss, info_nce
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.matryoshka import matryoshka_loss
from tests.ops import prefix_losses
from tests.ops.blocks import TOLERANCE, close, prepare, rng
from tests.ops.prefix_losses import pair
from tests.ops.scripts import run

DTYPES = ("float32", "bfloat16", "float16")


def compare(arrays, own, dims, weights=None, dtype="float32", **options):
    """`prefix_losses.compare` for one block of q and p with these rules."""
    fields = {name: options.pop(name) for name in ("row_ids", "column_ids", "self_column") if name in options}
    groups = [[{"left": "q", "right": "p", "own": own, **fields}]]
    return prefix_losses.compare(arrays, groups, dims, weights, dtype, **options)


@pytest.mark.parametrize("dims", [[70], [16, 70], [1, 33, 64], [5, 6, 7, 60], [32, 64]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefixes(dims, dtype):
    """A prefix of one number has gradient 0: all of it cancels, and only rounding is left, which in bf16 is much."""
    arrays, own = pair()
    if dims[0] == 1 and dtype == "bfloat16":
        dims = dims[1:]
    compare(arrays, own, dims, dtype=dtype, tolerance=TOLERANCE[dtype] * (5 if dims[0] == 1 else 1))


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 3), (33, 33, 64), (64, 96, 96), (40, 17, 100), (5, 130, 3)])
def test_sizes(shape):
    arrays, own = pair(*shape)
    compare(arrays, own, [2, shape[2]])
    compare(arrays, own, [shape[2] - 1], dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunks_give_the_same(dtype, monkeypatch):
    monkeypatch.setattr(prefixes, "FEWEST_ROWS", 32)
    arrays, own = pair(B=100, N=130, D=40)
    compare(arrays, own, [8, 20, 40], dtype=dtype, budget=150_000)
    compare(arrays, own, [8, 20, 40], dtype=dtype, budget=90_000, row_weights=rng(2).random(100))


RULES = {
    "ids": lambda g, B, N, own: {"row_ids": g.integers(-1, 6, B), "column_ids": g.integers(-1, 6, N)},
    "two ids": lambda g, B, N, own: {
        "row_ids": g.integers(-1, 9, (B, 2)) + 2**40, "column_ids": g.integers(-1, 9, (N, 2)) + 2**40,
    },
    "self": lambda g, B, N, own: {"self_column": np.where(g.random(B) < 0.3, -1, (own + 1) % N)},
    "margin": lambda g, B, N, own: {"margin": 0.02},
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rules(rule, dtype, monkeypatch):
    monkeypatch.setattr(prefixes, "FEWEST_ROWS", 32)
    B, N = 37, 71
    arrays, own = pair(B, N)
    fields = RULES[rule](rng(3), B, N, own)
    for budget in (None, 60_000):
        compare(arrays, own, [16, 33, 70], dtype=dtype, budget=budget, **fields)


def test_everything_at_once():
    B, N = 37, 71
    arrays, own = pair(B, N)
    fields = {}
    for rule in RULES:
        fields |= RULES[rule](rng(4), B, N, own)
    compare(arrays, own, [16, 70], row_weights=rng(5).random(B), **fields)


@pytest.mark.parametrize("temperature", [0.005, 0.02])
@pytest.mark.parametrize("kind", ["trained", "a duplicate", "long vectors", "short prefix"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranges(kind, temperature, dtype):
    """Positives that lead by hundreds, a passage that no reference foresaw, lengths far from 1."""
    arrays, own = pair(40, 70, 64, cosine=0.95 if kind == "trained" else 0.3)
    if kind == "a duplicate":  # at a column that the 16 samples miss
        other = next(j for j in range(1, 70) if j != own[3] and j not in set(np.arange(16) * 70 // 16))
        arrays["p"][other] = 3 * arrays["q"][3]
    if kind == "long vectors":
        arrays["p"] *= 1e4
        arrays["q"][::3] *= 1e-4
    if kind == "short prefix":
        arrays["q"][5, :16] *= 1e-3
        arrays["p"][:, :16] *= 1e-2
    # Where a handful of rows have all the gradient, rounding doesn't average out.
    tolerance = {"float32": 2e-3, "bfloat16": 4e-2}[dtype]
    compare(arrays, own, [16, 64], dtype=dtype, temperature=temperature, tolerance=tolerance)


def test_every_candidate_masked():
    """Nothing to compete against: loss 0, gradients 0. Then one row of which that is true."""
    arrays, _ = pair(8, 8)
    loss = compare(arrays, np.arange(8), [16, 70], row_ids=np.ones(8), column_ids=np.ones(8))
    assert float(loss) == 0.0
    compare(arrays, np.arange(8), [16, 70], row_ids=np.arange(8) // 7, column_ids=np.ones(8) * 0)


def test_zero_vectors_and_zero_prefixes():
    arrays, own = pair(33, 40)
    arrays["p"][own[0]] = 0
    arrays["p"][(own[1] + 1) % 40, :16] = 0
    arrays["q"][3] = 0
    arrays["q"][4, :20] = 0
    for dtype in ("float32", "bfloat16"):
        compare(arrays, own, [16, 33, 70], dtype=dtype)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_reach_the_loss(bad):
    arrays, own = pair(33, 40)
    arrays["p"][5, 2] = bad
    _, blocks, _, _ = prepare(arrays, [[{"left": "q", "right": "p", "own": own}]], "float32")
    loss = prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 1.0], scale=50.0, row_weights=1 / 33)
    assert not np.isfinite(float(loss))


def options(**changes):
    return {"scale": 20.0, "row_weights": 1 / 37, **changes}


def test_value_without_gradients():
    arrays, own = pair()
    _, blocks, _, _ = prepare(arrays, [[{"left": "q", "right": "p", "own": own}]], "bfloat16")
    trained = prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 2.0], **options())
    with paddle.no_grad():
        value = prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 2.0], **options())
    assert value.stop_gradient and not trained.stop_gradient
    assert float(value) == float(trained)


def test_gradients_that_nobody_wants():
    arrays, own = pair()
    description = [[{"left": "q", "right": "p", "own": own}]]
    whole, blocks, _, _ = prepare(arrays, description, "float32")
    prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 2.0], **options()).backward()
    for frozen, free in (("q", "p"), ("p", "q")):
        tensors, blocks, _, _ = prepare(arrays, description, "float32")
        tensors[frozen].stop_gradient = True
        prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 2.0], **options()).backward()
        assert tensors[frozen].grad is None
        np.testing.assert_array_equal(tensors[free].grad.numpy(), whole[free].grad.numpy())
    tensors, blocks, _, _ = prepare(arrays, description, "float32")
    for tensor in tensors.values():
        tensor.stop_gradient = True
    scale = paddle.to_tensor(20.0, stop_gradient=False)
    prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 2.0], **options(scale=scale)).backward()
    assert scale.grad.shape == [] and float(scale.grad) != 0


def test_incoming_gradient_and_two_backwards():
    arrays, own = pair()
    tensors, blocks, _, _ = prepare(arrays, [[{"left": "q", "right": "p", "own": own}]], "float32")
    scale = paddle.to_tensor([20.0], stop_gradient=False)
    loss = prefixes.prefix_info_nce(blocks, [16, 70], [1.0, 2.0], **options(scale=scale))
    inputs = [scale, tensors["q"], tensors["p"]]
    once = paddle.grad(loss, inputs, retain_graph=True)
    thrice = paddle.grad(3 * loss, inputs, retain_graph=True)
    again = paddle.grad(loss, inputs)
    for a, b, c in zip(once, thrice, again, strict=True):
        close(b, 3 * a.numpy(), 1e-6)
        np.testing.assert_array_equal(a.numpy(), c.numpy())


# --- through `info_nce` ----------------------------------------------------------------------------------------------


def leaves(dtype="float32", **shape):
    arrays, own = pair(**shape)
    return [paddle.to_tensor(arrays[k]).astype(dtype).detach() for k in "qp"], paddle.to_tensor(own)


def gradients(loss, tensors):
    loss.backward()
    result = [t.grad.astype("float32").numpy().copy() for t in tensors]
    for t in tensors:
        t.clear_gradient()
    return result


@pytest.mark.parametrize("margin", [None, 0.02])
@pytest.mark.parametrize("temperature", [0.01, 0.1])
def test_the_sum_of_separate_losses(margin, temperature, monkeypatch):
    """The backend asked for by name, dims in any order; separate losses of the same kernels."""
    tensors, own = leaves()
    t = paddle.to_tensor([temperature], stop_gradient=False)
    for tensor in tensors:
        tensor.stop_gradient = False
    dims, weights = [70, 8, 33], [1.0, 0.5, 2.0]
    given = {"temperature": t, "backend": "triton"}
    separate = matryoshka_loss(
        lambda a, b: inf_cl_loss(a, b, own=own, margin=margin, **given), *tensors, dims, weights
    )
    want = gradients(separate, [*tensors, t])
    calls = []
    run = prefixes.prefix_info_nce
    monkeypatch.setattr(prefixes, "prefix_info_nce", lambda *a, **k: calls.append(run(*a, **k)) or calls[-1])
    groups = info_nce_groups(*tensors, own=own, margin=margin)
    together = info_nce(groups, matryoshka=Matryoshka(dims, weights, margin), **given)
    got = gradients(together, [*tensors, t])
    assert len(calls) == 1 and calls[0] is together
    assert float(together) == pytest.approx(float(separate), rel=1e-5)
    for a, b in zip(got, want, strict=True):
        assert np.abs(a - b).max() <= (2e-6 + 8 * 2**-24 / temperature) * np.abs(b).max() * 4


def test_what_is_computed_one_by_one():
    """Own entries in two blocks, hardness, a tiny budget; a guide in the vectors' dtype, where prefixes are fp32."""
    (q, p), own = leaves("bfloat16")
    itself, half = paddle.arange(37), paddle.arange(37) % 2 == 0
    nowhere = paddle.full_like(own, -1)
    guide = Guide(q.detach()[:, :32], p.detach()[:, :32], paddle.zeros([37]))
    cases = {
        "two owns": [
            Block(q, p, own=paddle.where(half, own, nowhere)),
            Block(q, p, own=paddle.where(half, nowhere, own)),
        ],
        "hardness": [Block(q, p, own=own, hardness=Hardness(2.0)), Block(q, q, self_column=itself)],
        "tiny budget": [Block(q, p, own=own, guide=guide), Block(q, q, self_column=itself)],
    }
    for name, group in cases.items():
        for tensor in (q, p):
            tensor.stop_gradient = False
        budget = 5_000 if name == "tiny budget" else None
        given = {"temperature": 0.1, "matryoshka": Matryoshka([16, 70]), "memory_budget": budget}
        assert prefixes.sweeps([group]) == (name == "tiny budget")
        values, grads = [], []
        for backend in ("triton", "dense"):
            loss = info_nce([group], backend=backend, **given)
            values.append(float(loss))
            grads.append(gradients(loss, [q, p]))
        assert values[0] == pytest.approx(values[1], rel=1e-5), name
        for a, b in zip(*grads, strict=True):
            assert np.abs(a - b).max() <= 4e-3 * np.abs(b).max(), name


def test_triton_3_3_computes_prefixes_one_by_one(monkeypatch):
    (q, p), own = leaves()
    groups = [[Block(q, p, own=own)]]
    assert prefixes.sweeps(groups)
    monkeypatch.setattr("triton.__version__", "3.3.1")
    assert not prefixes.sweeps(groups)


def test_a_margin_must_be_said():
    (q, p), own = leaves()
    groups = info_nce_groups(q, p, own=own, margin=0.1)
    with pytest.raises(ValueError, match="one per prefix"):
        info_nce(groups, temperature=0.1, matryoshka=Matryoshka([8, 70]), backend="triton")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_compiles(architecture, tmp_path):
    printed = run("compile_prefixes.py", str(architecture), cache=tmp_path)
    assert re.search(rf"\d+ launches compile for sm_{architecture}", printed)
