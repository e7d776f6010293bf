# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities from hidden states against float64; Triton's backend runs under the interpreter."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import pytest

from paddle_infcl import kernels
from paddle_infcl.functional.linear_logprobs import (
    linear_label_terms,
    linear_logprobs_of_labels,
    merge_label_terms,
)
from tests.functional.oracle_logprobs import linear_label_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROUNDING = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 1.2e-2, "float16": 2e-3}


def make(lead, D, V, *, dtype="float32", seed=0, short=0, spread=1.0):
    rng = np.random.default_rng(seed)

    def tensor(*shape, scale=1.0):
        return paddle.to_tensor(rng.standard_normal(shape) * scale, dtype="float32").astype(dtype)

    labels = rng.integers(0, V, [*lead[:-1], lead[-1] - short])
    return tensor(*lead, D, scale=spread), tensor(V, D), tensor(V), labels, rng.standard_normal(labels.shape)


def run(hidden, weight, labels, g, bias=None, function=linear_logprobs_of_labels, **options):
    """Value and gradients of hidden, weight and bias as NumPy arrays; gradients keep the tensors' dtypes."""
    leaves = [None if t is None else t.detach() for t in (hidden, weight, bias)]
    for leaf in leaves:
        if leaf is not None:
            leaf.stop_gradient = False
    h, w, b = leaves
    value = function(h, w, paddle.to_tensor(labels), bias=b, **options)
    value.backward(paddle.to_tensor(g).astype(value.dtype))
    assert all(t is None or (t.grad.dtype == t.dtype and t.grad.shape == t.shape) for t in leaves)
    return value.numpy(), *(None if t is None else t.grad.astype("float64").numpy() for t in leaves)


def exact(t):
    return None if t is None else t.astype("float64").numpy()


def close(got, want, rounding):
    for a, b in zip(got, want, strict=True):
        if a is not None:
            np.testing.assert_allclose(a, b, rtol=rounding, atol=rounding * np.abs(b).max(initial=1e-30))


def fewest_rows(monkeypatch, rows, roundings=4):
    """The kernels' backend takes pieces of as few rows, and adds up as many in the gradient's own dtype."""
    from paddle_infcl_ops import linear_plan

    monkeypatch.setattr(linear_plan, "FEWEST_ROWS", rows)
    monkeypatch.setattr(linear_plan, "ROUNDINGS", roundings)
    monkeypatch.setattr(linear_plan, "cut", linear_plan.cut.__wrapped__)  # without what it has seen before


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("budget", [None, 4000, 1])
def test_values_and_gradients(dtype, transposed, with_bias, budget):
    hidden, weight, bias, labels, g = make([2, 9], 13, 101, dtype=dtype, short=1)
    bias = bias if with_bias else None
    options = {"temperature": 0.8, "backend": "paddle", "memory_budget": budget}
    given = weight.t().contiguous() if transposed else weight
    got = run(hidden, given, labels, g, bias, transposed_weight=transposed, **options)
    assert got[0].dtype == ("float64" if dtype == "float64" else "float32") and got[0].shape == labels.shape
    want = linear_label_logprobs(exact(hidden), exact(weight), labels, bias=exact(bias), temperature=0.8, g=g)
    if transposed:
        got = (got[0], got[1], got[2].T, got[3])
    close(got[:1], want[:1], ROUNDING["float64" if dtype == "float64" else "float32"])
    close(got[1:], want[1:], ROUNDING[dtype])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("R, D, V, fewest", [(5, 16, 33, 2048), (70, 24, 130, 2048), (70, 24, 75, 32)])
def test_the_kernels(dtype, transposed, with_bias, R, D, V, fewest, monkeypatch):
    """Uneven sizes; with a small budget several pieces of the vocabulary, with few rows per piece several of both."""
    fewest_rows(monkeypatch, fewest)
    hidden, weight, bias, labels, g = make([R], D, V, dtype=dtype, spread=0.5)
    hidden, labels, g = hidden.unsqueeze(0), labels[None], g[None]
    bias = bias if with_bias else None
    given = weight.t().contiguous() if transposed else weight
    got = run(hidden, given, labels, g, bias, transposed_weight=transposed, backend="triton", temperature=0.8,
              memory_budget=None if R == 5 else 1)  # fmt: skip
    want = linear_label_logprobs(exact(hidden), exact(weight), labels, bias=exact(bias), temperature=0.8, g=g)
    if transposed:
        got = (got[0], got[1], got[2].T, got[3])
    close(got[:1], want[:1], 1e-5)
    # The interpreter cuts bfloat16 off instead of rounding.
    close(got[1:], want[1:], 2 * ROUNDING[dtype])


def rounded_to(dtype):
    return lambda x: exact(paddle.to_tensor(np.asarray(x, "float32")).astype(dtype))


def rare_tokens_and_sure_rows(dtype):
    """Tokens 40 and on have small probabilities in all rows, and in the first rows so has all but the label."""
    rng = np.random.default_rng(3)
    weight = rng.standard_normal([120, 24])
    labels = rng.integers(0, 40, [60])
    hidden = 0.3 * rng.standard_normal([60, 24])
    hidden[:12] += 0.8 * weight[labels[:12]]
    bias = np.where(np.arange(120) < 40, 0.0, -9.5)
    return [rounded_to(dtype)(x) for x in (hidden, weight, bias)], labels, rng.standard_normal(60)


def textbook_gradients(hidden, weight, bias, labels, g, rounded):
    """Every array in a half-precision type, as the dense loss has them; sums over an axis are exact."""
    z = rounded(rounded(hidden @ weight.T) + bias)
    p = np.exp(rounded(z - np.logaddexp.reduce(z, axis=1, keepdims=True)))
    dz = rounded(rounded(g)[:, None] * (np.eye(len(bias))[labels] - rounded(p)))
    return rounded(dz @ weight), rounded(dz.T @ hidden), rounded(dz.sum(0))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend, budget", [("paddle", None), ("paddle", 1), ("triton", None), ("triton", 1)])
def test_half_precision_gradients_row_by_row_are_no_noisier_than_the_textbooks(backend, budget, dtype):
    """So that a rare token, or a row that is sure of its label, counts as much as what has large gradients."""
    (hidden, weight, bias), labels, g = rare_tokens_and_sure_rows(dtype)
    z = hidden @ weight.T + bias
    p = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
    p[np.arange(12), labels[:12]] = 0.0
    assert p[:, 40:].max() < 2.0**-12 and np.median(p[:12].max(1)) < 2.0**-12
    want = linear_label_logprobs(hidden, weight, labels, bias=bias, g=g)[1:]
    textbook = textbook_gradients(hidden, weight, bias, labels, g, rounded_to(dtype))
    tensors = [paddle.to_tensor(x.astype("float32")).astype(dtype) for x in (hidden, weight, bias)]
    h, w, b = tensors
    _, *got = run(h, w, labels, g, b, backend=backend, memory_budget=budget)
    # Roundings of the results, which are truncations in bfloat16 under the interpreter; float16 has a smallest number.
    epsilon = 2.0**-10 if dtype == "float16" else 2.0**-6 if backend == "triton" else 2.0**-8
    for ours, theirs, right in zip(got, textbook, want, strict=True):
        rows = [x.reshape(len(x), -1) for x in (ours, theirs, right)]
        size = np.linalg.norm(rows[2], axis=1)
        floor = 2.0**-25 * np.sqrt(rows[0].shape[1]) / size if dtype == "float16" else 0.0
        error, other = (np.linalg.norm(x - rows[2], axis=1) / size for x in rows[:2])
        assert (error <= epsilon + floor).all() and np.median(error) <= max(epsilon / 2, np.median(other))
        assert other.max() > 2 * epsilon  # these are rows that half precision can lose


@pytest.mark.parametrize("budget", [1, 40000])
def test_pieces_of_rows_beyond_a_few_add_up_in_fp32(budget, monkeypatch):
    fewest_rows(monkeypatch, 32, roundings=2)
    hidden, weight, _, labels, g = make([1, 130], 24, 75, dtype="bfloat16", spread=0.5)
    got = run(hidden, weight, labels, g, backend="triton", memory_budget=budget)
    close(got[:3], linear_label_logprobs(exact(hidden), exact(weight), labels, g=g)[:3], 2 * ROUNDING["bfloat16"])


@pytest.mark.parametrize("V", [96 + 7, 96 + 40])
def test_a_last_piece_too_short_for_all_splits(V, monkeypatch):
    """Its product takes fewer splits than those before it; the sums of theirs count all the same."""
    from paddle_infcl_ops import linear_plan

    monkeypatch.setattr(linear_plan, "cut", lambda *_: (70, 96, 3))
    hidden, weight, _, labels, g = make([1, 70], 24, V, spread=0.5)
    got = run(hidden, weight, labels, g, backend="triton")
    close(got[:3], linear_label_logprobs(exact(hidden), exact(weight), labels, g=g)[:3], 2 * ROUNDING["float32"])


@pytest.mark.parametrize("transposed", [False, True])
def test_a_vocabulary_masked_by_its_bias(transposed):
    hidden, weight, bias, labels, g = make([1, 6], 8, 40)
    bias[:20] = -np.inf
    labels[0] = [25, 39, 20, 3, 30, 22]
    g[0, 3] = 0.0
    given = weight.t().contiguous() if transposed else weight
    got = run(hidden, given, labels, g, bias, backend="triton", transposed_weight=transposed)
    assert got[0][0, 3] == -np.inf
    rest = [0, 1, 2, 4, 5]
    want = linear_label_logprobs(
        exact(hidden)[:, rest], exact(weight)[20:], labels[:, rest] - 20, bias=exact(bias)[20:], g=g[:, rest]
    )
    dweight = got[2].T if transposed else got[2]
    close([got[0][:, rest], got[1][:, rest]], want[:2], 1e-5)
    close([dweight[20:], got[3][20:]], want[2:], 1e-5)
    assert not dweight[:20].any() and not got[3][:20].any() and not got[1][0, 3].any()


@pytest.mark.parametrize("backend", ["paddle", "triton"])
def test_large_logits_and_certain_labels(backend):
    hidden = paddle.to_tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]]) * 1e4
    weight = paddle.to_tensor([[1.0, 0.0], [-1.0, 0.002], [0.0, 1.0], [0.0, 0.9995]])
    for label in range(4):
        labels = np.full([1, 3], label)
        got = run(hidden, weight, labels, np.ones([1, 3]), backend=backend)
        want = linear_label_logprobs(exact(hidden), exact(weight), labels, g=np.ones([1, 3]))
        close(got[:3], want[:3], 2e-4)
    hidden = paddle.to_tensor([[[40.0]]])
    got = run(hidden, paddle.to_tensor([[1.0], [0.0], [0.1]]), np.array([[0]]), np.ones([1, 1]), backend=backend)
    want = linear_label_logprobs(exact(hidden), np.array([[1.0], [0.0], [0.1]]), np.array([[0]]), g=np.ones([1, 1]))
    assert want[0] > -1e-15
    for a, b in zip(got[:3], want[:3], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


@pytest.mark.parametrize("backend", ["paddle", "triton"])
def test_ignored_positions(backend):
    hidden, weight, _, labels, g = make([2, 6], 8, 30)
    labels[0, :3], labels[1, 5] = -100, -100
    got = run(hidden, weight, labels, g, backend=backend, ignore_index=-100)
    close(got[:3], linear_label_logprobs(exact(hidden), exact(weight), labels, ignore_index=-100, g=g)[:3], 1e-5)
    assert not got[0][0, :3].any() and not got[1][0, :3].any()


@pytest.mark.parametrize("backend", ["paddle", "triton"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("cuts", [[0, 40], [0, 7, 40], [0, 1, 2, 39, 40]])
def test_shards_of_the_vocabulary_merge(backend, cuts, dtype):
    hidden, weight, bias, labels, g = make([2, 5], 12, 40, dtype=dtype)
    hidden.stop_gradient = weight.stop_gradient = False
    y = paddle.to_tensor(labels)
    terms = [
        linear_label_terms(hidden, weight[a:b], y, shard_start=a, temperature=0.5, backend=backend,
                           bias=None if bias is None else bias[a:b])
        for a, b in itertools.pairwise(cuts)
    ]  # fmt: skip
    logprobs = merge_label_terms(terms)
    logprobs.backward(paddle.to_tensor(g, dtype="float32"))
    want = linear_label_logprobs(exact(hidden), exact(weight), labels, bias=exact(bias), temperature=0.5, g=g)
    close((logprobs.numpy(),), want[:1], 1e-5)
    close((exact(hidden.grad), exact(weight.grad)), want[1:3], 2 * ROUNDING[dtype])


def test_merging_is_exact_far_apart():
    """Terms of -1000 and 1000 alike, missing labels, shards without others; equal terms have half the gradient."""
    inf = float("inf")
    own = paddle.to_tensor([[-inf, 1000.0, -inf, 0.0], [-1000.0, -inf, -inf, -inf]], stop_gradient=False)
    others = paddle.to_tensor([[1000.0, -inf, 0.0, 0.0], [-1000.0, -1000.0, 1.0, -inf]], stop_gradient=False)
    logprobs = merge_label_terms([(own[0], others[0]), (own[1], others[1])])
    np.testing.assert_allclose(logprobs.numpy(), [-2000.0, 0.0, -inf, -np.log(2.0)], rtol=1e-6, atol=1e-30)
    logprobs.backward(paddle.ones([4]))
    np.testing.assert_allclose(own.grad.numpy(), [[0, 0, 0, 0.5], [1, 0, 0, 0]], atol=1e-30)
    p = np.exp([0.0, 1.0]) / np.exp([0.0, 1.0]).sum()
    np.testing.assert_allclose(others.grad.numpy(), [[-1, 0, -p[0], -0.5], [0, 0, -p[1], 0]], rtol=1e-6, atol=1e-30)


def test_memory_is_the_budget_not_the_logits():
    from paddle.base import core

    hidden, weight, _, labels, _ = make([1, 600], 16, 5000)
    hidden.stop_gradient = weight.stop_gradient = False
    y, budget = paddle.to_tensor(labels), 2**18

    def peak(call):
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        out = call()
        return out, core.host_memory_stat_peak_value("Allocated", 0) - before

    logprobs, forward = peak(
        lambda: linear_logprobs_of_labels(hidden, weight, y, backend="paddle", memory_budget=budget)
    )
    assert forward < 4 * budget < 600 * 5000 * 4 // 10
    _, backward = peak(logprobs.sum().backward)
    gradients = 4 * (hidden.size + weight.size)
    assert backward < 4 * budget + 3 * gradients


@pytest.mark.parametrize("backend", ["paddle", "auto"])
def test_nothing(backend):
    hidden, weight, bias, labels, g = make([0, 3], 4, 7)
    got = run(hidden, weight, labels, g, bias if backend == "paddle" else None, backend=backend)
    assert got[0].shape == (0, 3) and got[1].shape == (0, 3, 4) and not got[2].any()


def test_only_what_is_asked_for_gets_a_gradient():
    hidden, weight, bias, labels, _ = make([2, 3], 4, 7)
    y = paddle.to_tensor(labels)
    for tensor in (hidden, weight, bias):
        tensor.stop_gradient = False
        linear_logprobs_of_labels(hidden, weight, y, bias=bias, backend="paddle").sum().backward()
        assert tensor.grad is not None
        assert sum(t.grad is not None for t in (hidden, weight, bias)) == 1
        tensor.clear_gradient(False)
        tensor.stop_gradient = True
    hidden.stop_gradient = False
    linear_logprobs_of_labels(hidden, weight, y, backend="triton").sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_equal_to_the_contrastive_loss_with_labels_as_own():
    from paddle_infcl.functional import inf_cl_loss

    hidden, weight, _, labels, _ = make([1, 9], 6, 20)
    y = paddle.to_tensor(labels)
    loss = inf_cl_loss(hidden[0], weight, own=y[0], temperature=1.0, backend="paddle")
    want = -linear_logprobs_of_labels(hidden, weight, y, backend="paddle").mean()
    np.testing.assert_allclose(loss.numpy(), want.numpy(), rtol=1e-6)


def test_arguments_that_do_not_fit():
    hidden, weight, bias, labels, _ = make([2, 3], 4, 7)
    y = paddle.to_tensor(labels)
    f = linear_logprobs_of_labels
    with pytest.raises(ValueError, match=r"weight: \[4, 7\] does not fit hidden \[2, 3, 4\]; transposed_weight=True"):
        f(hidden, weight.t(), y)
    with pytest.raises(ValueError, match=r"labels: shape \[2, 1\] does not fit hidden"):
        f(hidden, weight, y[:, :1])
    with pytest.raises(ValueError, match=r"bias: shape \[7\]"):
        f(hidden, weight, y, bias=bias[:3])
    with pytest.raises(ValueError, match="are needed, got"):
        f(hidden[0, 0], weight, y)
    with pytest.raises(ValueError, match="the vocabulary is empty"):
        f(hidden, weight[:0], y)
    with pytest.raises(ValueError, match="memory_budget: a positive"):
        f(hidden, weight, y, memory_budget=0)
    with pytest.raises(ValueError, match=r"labels\[0, 0\] is 7, outside 0 \.\.\. 6"):
        f(hidden, weight, paddle.full_like(y, 7))
    with pytest.raises(TypeError, match="must be of the same dtype"):
        f(hidden, weight.astype("float64"), y)
    with pytest.raises(kernels.BackendError, match="there are no rows"):
        f(hidden[:0], weight, y[:0], backend="triton")
    with pytest.raises(ValueError, match="none of auto"):
        f(hidden, weight, y, bias=bias, backend="dense")
