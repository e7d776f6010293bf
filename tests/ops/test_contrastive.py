# SPDX-License-Identifier: Apache-2.0
"""The contrastive operators under the interpreter, against the float64 oracle: every mask, dtype and odd size."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
import paddle_infcl_ops as ops

from tests.ops.blocks import close, compare, prepare, rng, vectors

DTYPES = ("float32", "bfloat16", "float16")


def pair(B=37, N=71, D=33, seed=0, cosine=0.3):
    """Queries and passages whose own pairs agree somewhat."""
    g = rng(seed)
    q, p = vectors(g, B, D), vectors(g, N, D)
    own = g.permutation(N)[:B]
    p[own] = cosine * q + (1 - cosine) * p[own]
    return {"q": q, "p": p}, own


def q_to_p(own, **fields):
    return {"left": "q", "right": "p", "own": own, **fields}


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain(dtype):
    arrays, own = pair()
    compare(ops, arrays, [[q_to_p(own)]], dtype)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 5, 3), (33, 33, 64), (64, 96, 96), (40, 17, 100), (5, 130, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_sizes(shape, dtype):
    B, N, D = shape
    g = rng(1)
    own = g.integers(0, N, B)  # rows may share a column
    compare(ops, {"q": vectors(g, B, D), "p": vectors(g, N, D)}, [[q_to_p(own)]], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_give_the_same(dtype, monkeypatch):
    """A budget too small for one chunk: rows are cut (one pass), rows and columns (two passes)."""
    from paddle_infcl_ops import one_pass, two_pass

    monkeypatch.setattr(one_pass, "FEWEST_ROWS", 32)
    monkeypatch.setattr(two_pass, "_ROWS", 32)
    arrays, own = pair(B=100, N=130, D=40)
    compare(ops, arrays, [[q_to_p(own)]], dtype, budget=45_000)
    monkeypatch.setattr(one_pass, "FEWEST_ROWS", 10**9)
    compare(ops, arrays, [[q_to_p(own)]], dtype, budget=9_000)


MASKS = {
    "ids": lambda g, B, N, own: {"row_ids": g.integers(-1, 6, B), "column_ids": g.integers(-1, 6, N)},
    "two ids": lambda g, B, N, own: {
        "row_ids": g.integers(-1, 9, (B, 2)) + 2**40, "column_ids": g.integers(-1, 9, (N, 2)) + 2**40,
    },
    "ids that agree in their low words": lambda g, B, N, own: {
        "row_ids": g.integers(0, 3, B) << 32 | 5, "column_ids": g.integers(0, 3, N) << 32 | 5,
    },
    "self": lambda g, B, N, own: {"self_column": np.where(g.random(B) < 0.3, -1, (own + 1) % N)},
    "only own negatives": lambda g, B, N, own: {
        "owner": g.integers(-1, B + 3, N), "row_offset": 2, "owner_rule": "only",
    },
    "no documents of the row": lambda g, B, N, own: {"owner": g.integers(-1, B, N), "owner_rule": "exclude"},
    "limit": lambda g, B, N, own: {"limit": g.uniform(-0.2, 0.2, B)},
    "guide": lambda g, B, N, own: {
        "guide": {"left": "gq", "right": "gp", "threshold": g.uniform(-0.2, 0.2, B)},
    },
    "guide that keeps own negatives": lambda g, B, N, own: {
        "owner": g.integers(-1, B, N),
        "guide": {"left": "gq", "right": "gp", "threshold": g.uniform(-0.3, 0.1, B), "keep_own": True},
    },
    "harder own": lambda g, B, N, own: {
        "owner": g.integers(-1, 5, N), "hardness": {"strength": 4.0, "columns": "own"},
    },
    "harder others": lambda g, B, N, own: {
        "owner": g.integers(-1, 5, N), "hardness": {"strength": 4.0, "columns": "others"},
    },
    "harder all": lambda g, B, N, own: {"hardness": {"strength": 4.0, "columns": "all"}},
}  # fmt: skip


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])  # one pass and two
def test_masks(mask, dtype):
    B, N = 37, 71
    arrays, own = pair(B, N)
    g = rng(3)
    arrays |= {"gq": vectors(g, B, 20), "gp": vectors(g, N, 20)}
    if dtype == "float16":  # thresholds near a similarity are decided by rounding, in any dtype
        arrays = {k: np.round(v * 16) / 16 for k, v in arrays.items()}
    compare(ops, arrays, [[q_to_p(own, **MASKS[mask](g, B, N, own))]], dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everything_at_once(dtype):
    B, N = 37, 71
    arrays, own = pair(B, N)
    g = rng(4)
    arrays |= {"gq": vectors(g, B, 20), "gp": vectors(g, N, 20)}
    arrays = {k: np.round(v * 16) / 16 for k, v in arrays.items()}
    fields = {}
    for mask in ("two ids", "self", "limit", "guide that keeps own negatives", "harder others"):
        fields |= MASKS[mask](g, B, N, own)
    compare(ops, arrays, [[q_to_p(own, **fields)]], dtype)


def test_rules_in_chunks(monkeypatch):
    """Thresholds, limits, ids and row numbers belong to the row, not to its place in a chunk of rows."""
    from paddle_infcl_ops import two_pass

    monkeypatch.setattr(two_pass, "_ROWS", 32)
    B, N = 70, 80
    arrays, own = pair(B, N)
    g = rng(8)
    arrays |= {"gq": vectors(g, B, 20), "gp": vectors(g, N, 20)}
    arrays = {k: np.round(v * 16) / 16 for k, v in arrays.items()}
    fields = {}
    for mask in ("two ids", "self", "limit", "guide that keeps own negatives", "harder others"):
        fields |= MASKS[mask](g, B, N, own)
    compare(ops, arrays, [[q_to_p(own, **fields)]], "float32", budget=1_000)


def gte(B, own, N):
    """Every direction in one softmax, as GTE has it."""
    return [[
        {"left": "q", "right": "p", "own": own},
        {"left": "q", "right": "q", "self_column": np.arange(B)},
        {"left": "p", "right": "q", "self_column": np.arange(B)},
        {"left": "p", "right": "p", "self_column": np.arange(B)},
    ]]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_in_one_softmax(dtype):
    """A tensor as left and right of several blocks, and of one: its gradients add up."""
    arrays, _ = pair(40, 40)
    compare(ops, arrays, gte(40, np.arange(40), 40), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocks", [(0, 2), (0, 1, 2, 3), (1, 3, 0)])
def test_blocks_in_one_pass(blocks, dtype, monkeypatch):
    """Chunk by chunk: a tensor is a left side of one block and a right side of another, the own entries come late."""
    from paddle_infcl_ops import one_pass, two_pass

    monkeypatch.setattr(one_pass, "FEWEST_ROWS", 32)
    monkeypatch.setattr(two_pass, "gradients", None)
    arrays, _ = pair(70, 70, 40)
    directions = gte(70, np.arange(70), 70)[0]
    compare(ops, arrays, [[directions[k] for k in blocks]], dtype, budget=(4 * 70 * 4 + 500) * 40)


@pytest.mark.parametrize("temperature", [0.005, 0.02])
def test_a_block_far_above_the_others(temperature):
    """References come from all blocks, and rows that they miss are computed again in all of them."""
    arrays, _ = pair(40, 40, 64)
    arrays["q"][7] *= 12
    arrays["q"][11] = arrays["q"][7]
    compare(ops, arrays, gte(40, np.arange(40), 40), "float32", temperature=temperature, tolerance=2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_groups(dtype):
    """The symmetric loss: two log-sum-exps, averaged."""
    arrays, _ = pair(40, 40)
    own = np.arange(40)
    groups = [[q_to_p(own)], [{"left": "p", "right": "q", "own": own}]]
    compare(ops, arrays, groups, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_views_in_one_tensor(dtype, monkeypatch):
    """NT-Xent: one tensor on both sides, own entries among its rows. No launch stores rows that it also adds to."""
    from paddle_infcl_ops import one_pass

    real, writes = one_pass.launch, []

    def launch(kernel, grid, *args, **meta):
        if kernel is one_pass.finish_kernel:
            given = dict(zip(inspect.signature(kernel.fn).parameters, args, strict=False))
            writes.append({name for name in ("out", "right_out") if given[name] is not None})
        real(kernel, grid, *args, **meta)

    monkeypatch.setattr(one_pass, "launch", launch)
    arrays, _ = pair(40, 40)
    rows = np.arange(40)
    group = [{"left": "q", "right": "q", "own": (rows + 20) % 40, "self_column": rows}]
    compare(ops, arrays, [group], dtype)
    assert {"out"} in writes and {"right_out"} in writes and {"out", "right_out"} not in writes


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_weights(dtype):
    arrays, own = pair()
    weights = rng(5).uniform(0, 2, 37)
    weights[3] = 0.0
    compare(ops, arrays, [[q_to_p(own)]], dtype, weights=weights)


def test_own_entries_spread_over_blocks():
    """A shard holds the positives of some rows, another block those of the others."""
    arrays, own = pair(40, 64)
    first, second = arrays["p"][:30], arrays["p"][30:]
    arrays = {"q": arrays["q"], "a": first, "b": second}
    group = [
        {"left": "q", "right": "a", "own": np.where(own < 30, own, -1)},
        {"left": "q", "right": "b", "own": np.where(own >= 30, own - 30, -1)},
    ]
    compare(ops, arrays, [group], "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.005, 0.02])
@pytest.mark.parametrize("kind", ["trained", "long vectors", "one long passage", "one long query"])
def test_ranges(kind, temperature, dtype):
    """Logits from -5000 to 5000, and positives that lead by hundreds: no overflow, no lost gradient."""
    arrays, own = pair(40, 70, 64, cosine=0.95 if kind == "trained" else 0.3)
    if kind == "long vectors":
        arrays = {k: 5 * v for k, v in arrays.items()}
    if kind == "one long passage":
        arrays["p"][7] *= 10
    if kind == "one long query":
        arrays["q"][7] *= 10
    # Where a handful of rows have all the gradient, rounding doesn't average out; the logits of fp32 themselves are
    # only good to eps * |z|.
    tolerance = {"float32": 2e-3, "bfloat16": 4e-2}[dtype]
    compare(ops, arrays, [[q_to_p(own)]], dtype, temperature=temperature, tolerance=tolerance)


def test_every_candidate_masked():
    """Nothing to compete against: loss 0, gradients 0."""
    arrays, _ = pair(8, 8)
    fields = {"row_ids": np.ones(8), "column_ids": np.ones(8)}
    loss = compare(ops, arrays, [[q_to_p(np.arange(8), **fields)]], "float32")
    assert float(loss) == 0.0
    compare(ops, arrays, [[q_to_p(np.arange(8), **fields)]], "float16")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_bad_numbers_reach_the_loss(bad, dtype):
    arrays, own = pair(33, 40)
    arrays["p"][5, 2] = bad
    _, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], dtype)
    loss = ops.info_nce(blocks, scale=50.0, row_weights=1 / 33)
    assert not np.isfinite(float(loss))


def test_zero_vectors():
    arrays, own = pair(33, 40)
    arrays["p"][own[0]] = 0
    arrays["q"][3] = 0
    compare(ops, arrays, [[q_to_p(own)]], "float32")


def test_value_without_gradients():
    """Under no_grad only the log-sum-exp is computed; the value is that of training."""
    arrays, own = pair()
    for dtype in DTYPES:
        _, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], dtype)
        trained = ops.info_nce(blocks, scale=20.0, row_weights=1 / 37)
        with paddle.no_grad():
            value = ops.info_nce(blocks, scale=20.0, row_weights=1 / 37)
        assert value.stop_gradient and not trained.stop_gradient
        np.testing.assert_allclose(float(value), float(trained), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_that_nobody_wants(dtype):
    arrays, own = pair()
    whole, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], dtype)
    ops.info_nce(blocks, scale=20.0, row_weights=1 / 37).backward()
    for frozen, free in (("q", "p"), ("p", "q")):
        tensors, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], dtype)
        tensors[frozen].stop_gradient = True
        ops.info_nce(blocks, scale=20.0, row_weights=1 / 37).backward()
        assert tensors[frozen].grad is None
        np.testing.assert_array_equal(tensors[free].grad.numpy(), whole[free].grad.numpy())
    tensors, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], dtype)
    for tensor in tensors.values():
        tensor.stop_gradient = True
    scale = paddle.to_tensor(20.0)
    scale.stop_gradient = False
    ops.info_nce(blocks, scale=scale, row_weights=1 / 37).backward()
    assert scale.grad.shape == [] and float(scale.grad) != 0


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_incoming_gradient_and_two_backwards(dtype):
    arrays, own = pair()
    tensors, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], dtype)
    scale = paddle.to_tensor([20.0])
    scale.stop_gradient = False
    loss = ops.info_nce(blocks, scale=scale, row_weights=1 / 37)
    inputs = [scale, tensors["q"], tensors["p"]]
    once = paddle.grad(loss, inputs, retain_graph=True)
    thrice = paddle.grad(3 * loss, inputs, retain_graph=True)
    again = paddle.grad(loss, inputs)
    for a, b, c in zip(once, thrice, again, strict=True):
        close(b, 3 * a.astype("float32").numpy(), 1e-3)
        np.testing.assert_array_equal(a.numpy(), c.numpy())


def test_copies_do_not_wait_for_the_backward(monkeypatch):
    """Of vectors that are stored the other way round, in one pass: the gradients are there, nothing else is kept."""
    from paddle_infcl_ops import contrastive

    jobs, real = [], contrastive._Job.forward
    monkeypatch.setattr(contrastive._Job, "forward", lambda job: jobs.append(job) or real(job))
    arrays, own = pair()
    stored = [paddle.to_tensor(arrays[name].T.copy()).T for name in "qp"]
    assert not any(t.is_contiguous() for t in stored)
    for t in stored:
        t.stop_gradient = False
    names = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
    one = SimpleNamespace(left=stored[0], right=stored[1], own=paddle.to_tensor(own), row_offset=0)
    vars(one).update(dict.fromkeys(names))
    loss = ops.info_nce([[one]], scale=10.0, row_weights=1 / 37)
    assert jobs[0].gradients is not None and jobs[0].groups is None
    loss.backward()
    assert all(t.grad.shape == t.shape for t in stored)


def test_refusals():
    arrays, own = pair(8, 8)
    _, blocks, _, _ = prepare(arrays, [[q_to_p(own)]], "float32")
    with pytest.raises(ValueError, match="memory_budget"):
        ops.info_nce(blocks, scale=20.0, row_weights=1.0, memory_budget=0)
    with pytest.raises(ValueError, match="own"):
        blocks[0][0].own = None
        ops.info_nce(blocks, scale=20.0, row_weights=1.0)
    with pytest.raises(ValueError, match="groups"):
        ops.info_nce([[]], scale=20.0, row_weights=1.0)
    blocks[0][0].left = blocks[0][0].left.astype("float64")
    with pytest.raises(TypeError, match="float64"):
        ops.info_nce(blocks, scale=20.0, row_weights=1.0)
