# SPDX-License-Identifier: Apache-2.0
"""Plain InfoNCE against the float64 oracle: value and every gradient, on both plain backends."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.functional import contrastive_loss, inf_cl_loss
from tests import oracle

BACKENDS = ["paddle", "dense"]
FLOOR = {"float32": 1e-34, "float64": 1e-300}  # what the type still represents, times 1/T


def unit(rng, n, d, like=None, cosine=0.0):
    x = rng.standard_normal((n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if like is not None:
        noise = x - (x * like).sum(1, keepdims=True) * like
        noise /= np.maximum(np.linalg.norm(noise, axis=1, keepdims=True), 1e-12)
        x = cosine * like + np.sqrt(1 - cosine**2) * noise
    return x


def batch(rng, B, D, G=1, cosine=0.5):
    q = unit(rng, B, D)
    p = unit(rng, B * G, D)
    p[::G] = unit(rng, B, D, like=q, cosine=cosine)
    return q, p


def run(q, p, dtype="float64", temperature=0.02, grad_scale=1.0, **options):
    """Loss and gradients, as float64 arrays, of the arrays as they are in `dtype`."""
    qt, pt = paddle.to_tensor(q.astype(dtype)), paddle.to_tensor(p.astype(dtype))
    qt.stop_gradient = pt.stop_gradient = False
    loss = inf_cl_loss(qt, pt, temperature=temperature, **options)
    (loss * grad_scale).backward()
    return float(loss), qt.grad.numpy().astype("float64"), pt.grad.numpy().astype("float64")


def tolerances(dtype, temperature):
    if dtype == "float64":
        return 1e-12, 1e-10
    return 2e-7 + 3 * 2**-24 / temperature, 2e-6 + 8 * 2**-24 / temperature


def check(got, want, dtype, temperature):
    loss_tolerance, gradient_tolerance = tolerances(dtype, temperature)
    loss, dq, dp = got
    assert abs(loss - want["loss"]) <= loss_tolerance * max(1.0, abs(want["loss"]))
    for name, grad in (("q", dq), ("p", dp)):
        error = np.abs(grad - want["grads"][name]).max()
        assert error <= gradient_tolerance * want["magnitudes"][name] + FLOOR[dtype], name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    B=st.integers(1, 20),
    G=st.integers(1, 4),
    D=st.sampled_from([2, 3, 7, 33]),
    temperature=st.sampled_from([0.005, 0.02, 0.05, 0.3, 1.0]),
    cosine=st.sampled_from([0.1, 0.5, 0.95]),
    K=st.sampled_from([0, 1, 2]),
    margin=st.sampled_from([None, 0.1]),
    chunk=st.integers(1, 21),
    custom_own=st.booleans(),
)
def test_random_settings(backend, dtype, seed, B, G, D, temperature, cosine, K, margin, chunk, custom_own):
    rng = np.random.default_rng(seed)
    q, p = batch(rng, B, D, G, cosine)
    q, p = q.astype(dtype).astype("float64"), p.astype(dtype).astype("float64")
    options, reference = {}, {}
    if custom_own:
        own = rng.integers(0, B * G, B)
        options["own"], reference["own"] = paddle.to_tensor(own), own
    if K:
        ids = [rng.integers(-1, 6, (n, K) if K > 1 else n) for n in (B, B * G)]
        options |= {"q_ids": paddle.to_tensor(ids[0]), "p_ids": paddle.to_tensor(ids[1])}
        reference |= {"q_ids": ids[0], "p_ids": ids[1]}
    if margin is not None:
        options["margin"] = reference["margin"] = margin
    budget = chunk * B * G * (8 if dtype == "float64" else 4)
    got = run(q, p, dtype, temperature, backend=backend, memory_budget=budget, **options)
    check(got, oracle.plain(q, p, temperature, **reference), dtype, temperature)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("B", "N", "D"), [(100, 507, 123), (255, 507, 33)])
def test_odd_sizes_with_own(backend, B, N, D):
    rng = np.random.default_rng(0)
    own = rng.permutation(N)[:B]
    q, p = unit(rng, B, D), unit(rng, N, D)
    p[own] = unit(rng, B, D, like=q, cosine=0.5)
    q, p = q.astype("float32").astype("float64"), p.astype("float32").astype("float64")
    got = run(q, p, "float32", 0.02, own=paddle.to_tensor(own), backend=backend, memory_budget=4096 * 7)
    check(got, oracle.plain(q, p, 0.02, own=own), "float32", 0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_floor_and_extreme_logits(backend):
    # Logits [0, -100]: label 1 costs 100, where Paddle's own log-softmax on a CPU says 64.
    q, p = np.array([[1.0]]), np.array([[0.0], [-1.0]])
    own = paddle.to_tensor([1])
    loss, dq, _ = run(q, p, "float32", 0.01, own=own, backend=backend)
    assert loss == pytest.approx(100.0, abs=1e-4)
    assert dq[0, 0] == pytest.approx(100.0, rel=1e-5)
    for size in (1000.0, -1000.0):
        q, p = np.array([[1.0], [1.0]]), np.array([[size], [-size]])
        got = run(q, p, "float64", 1.0, backend=backend)
        check(got, oracle.plain(q, p, 1.0), "float64", 1.0)
        assert np.isfinite(got[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_trained_model_keeps_its_relative_precision(backend):
    """Own cosine .95 at T = .02: the loss is near 1e-9, and 1 - P would have no digit left in float32."""
    rng = np.random.default_rng(1)
    q, p = batch(rng, 64, 256, cosine=0.95)
    q, p = q.astype("float32").astype("float64"), p.astype("float32").astype("float64")
    want = oracle.plain(q, p, 0.02)
    assert want["loss"] < 1e-14
    loss, dq, dp = run(q, p, "float32", 0.02, backend=backend)
    assert loss == pytest.approx(want["loss"], rel=1e-4)
    for got, name in ((dq, "q"), (dp, "p")):
        assert np.linalg.norm(got - want["grads"][name]) < 1e-4 * np.linalg.norm(want["grads"][name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_competitors_cost_nothing(backend):
    rng = np.random.default_rng(2)
    q, p = batch(rng, 3, 5)
    ids = paddle.to_tensor([7, 7, 7])
    loss, dq, dp = run(q, p, "float32", backend=backend, q_ids=ids, p_ids=ids)
    assert loss == 0.0
    assert not dq.any() and not dp.any()
    loss, dq, dp = run(q[:1], p[:1], "float32", backend=backend)
    assert loss == 0.0 and not dq.any() and not dp.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_zero_vectors_are_finite(backend):
    rng = np.random.default_rng(3)
    q, p = batch(rng, 4, 6)
    q[1], p[2] = 0.0, 0.0
    check(run(q, p, "float64", 0.05, backend=backend), oracle.plain(q, p, 0.05), "float64", 0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rows_that_share_a_document_do_not_compete(backend):
    """Ids as (document, query): duplicates, which dropout hides from a similarity, are masked in both directions."""
    rng = np.random.default_rng(4)
    q, p = batch(rng, 3, 8)
    q_ids = np.array([[10, 0], [11, 1], [10, 2]])
    p_ids = np.array([[10, 0], [11, 1], [10, 2]])
    want = oracle.plain(q, p, 0.05, q_ids=q_ids, p_ids=p_ids)
    got = run(q, p, "float64", 0.05, backend=backend, q_ids=paddle.to_tensor(q_ids), p_ids=paddle.to_tensor(p_ids))
    check(got, want, "float64", 0.05)
    loss, _, dp = run(q[:1], p, "float64", 0.05, backend=backend, own=paddle.to_tensor([0]))
    masked = run(
        q[:1], p, "float64", 0.05, backend=backend, own=paddle.to_tensor([0]),
        q_ids=paddle.to_tensor(q_ids[:1]), p_ids=paddle.to_tensor(p_ids),
    )  # fmt: skip
    assert masked[0] < loss
    assert dp[2].any() and not masked[2][2].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [1.0, 0.05])
def test_learnable_temperature(backend, value):
    rng = np.random.default_rng(5)
    q, p = batch(rng, 9, 8, G=2)
    t = paddle.create_parameter([1], "float64", default_initializer=paddle.nn.initializer.Constant(value))
    qt, pt = paddle.to_tensor(q), paddle.to_tensor(p)
    loss = inf_cl_loss(qt, pt, temperature=t, backend=backend, memory_budget=8 * 18 * 4)
    loss.backward()
    want = oracle.plain(q, p, value)
    assert float(t.grad) == pytest.approx(want["dtemperature"], rel=1e-10)
    assert qt.grad is None and pt.grad is None
    assert float(loss) == pytest.approx(want["loss"], rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_weights_and_incoming_gradient(backend):
    rng = np.random.default_rng(6)
    q, p = batch(rng, 6, 8)
    w = rng.random(6)
    want = oracle.plain(q, p, 0.05, row_weights=w)
    loss, dq, dp = run(q, p, "float64", 0.05, grad_scale=3.0, backend=backend, row_weights=paddle.to_tensor(w))
    check((loss, dq / 3, dp / 3), want, "float64", 0.05)


@pytest.mark.parametrize("backend", BACKENDS)
def test_non_contiguous_inputs(backend):
    rng = np.random.default_rng(7)
    wide = paddle.to_tensor(rng.standard_normal((8, 20)) / 4)
    wide.stop_gradient = False
    q, p = wide[:, 1:11], wide[:, ::2]
    assert not p.is_contiguous()
    inf_cl_loss(q, p, temperature=0.5, backend=backend).backward()
    want = oracle.plain(q.numpy(), p.numpy(), 0.5)["grads"]
    total = np.zeros((8, 20))
    total[:, 1:11] += want["q"]
    total[:, ::2] += want["p"]
    np.testing.assert_allclose(wide.grad.numpy(), total, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_value_without_gradient_is_the_training_value(backend):
    rng = np.random.default_rng(8)
    q, p = (paddle.to_tensor(x.astype("float32")) for x in batch(rng, 10, 16))
    q.stop_gradient = False
    with_graph = inf_cl_loss(q, p, backend=backend)
    with paddle.no_grad():
        without = inf_cl_loss(q, p, backend=backend)
    assert without.stop_gradient
    assert float(with_graph) == float(without)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_tensor_on_both_sides_gets_both_gradients(backend):
    rng = np.random.default_rng(9)
    x = unit(rng, 6, 5)
    t = paddle.to_tensor(x)
    t.stop_gradient = False
    inf_cl_loss(t, t, temperature=0.1, backend=backend).backward()
    want = oracle.info_nce({"x": x}, [[{"left": "x", "right": "x", "own": np.arange(6)}]], 0.1)
    np.testing.assert_allclose(t.grad.numpy(), want["grads"]["x"], rtol=1e-10, atol=1e-13)


def test_an_empty_batch_is_zero_with_a_graph():
    q, p = paddle.zeros([0, 4]), paddle.randn([3, 4])
    q.stop_gradient = p.stop_gradient = False
    loss = inf_cl_loss(q, p, own=paddle.zeros([0], dtype="int64"), backend="paddle")
    loss.backward()
    assert float(loss) == 0.0
    assert not p.grad.numpy().any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_inputs_accumulate_in_float32(dtype):
    rng = np.random.default_rng(10)
    q, p = batch(rng, 12, 16)
    qt, pt = paddle.to_tensor(q.astype("float32")).astype(dtype), paddle.to_tensor(p.astype("float32")).astype(dtype)
    qt.stop_gradient = pt.stop_gradient = False
    loss = inf_cl_loss(qt, pt, temperature=0.05, backend="paddle")
    loss.backward()
    assert loss.dtype == paddle.float32 and qt.grad.dtype == qt.dtype
    want = oracle.plain(qt.astype("float32").numpy(), pt.astype("float32").numpy(), 0.05)
    assert float(loss) == pytest.approx(want["loss"], rel=1e-5)
    error = np.abs(qt.grad.astype("float32").numpy() - want["grads"]["q"]).max()
    assert error <= 2**-8 * np.abs(want["grads"]["q"]).max()


def test_every_pair_of_backends_agrees():
    rng = np.random.default_rng(11)
    q, p = batch(rng, 16, 24, G=2)
    ids = rng.integers(0, 9, 16), rng.integers(0, 9, 32)
    options = {"q_ids": paddle.to_tensor(ids[0]), "p_ids": paddle.to_tensor(ids[1]), "margin": 0.1}
    results = [run(q, p, "float32", 0.02, backend=backend, **options) for backend in ("auto", *BACKENDS)]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_contrastive_loss_is_the_dense_backend():
    q, p = paddle.eye(3), paddle.eye(3)
    assert float(contrastive_loss(q, p)) == float(inf_cl_loss(q, p, backend="dense"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"p": paddle.zeros([5, 3])}, "5 rows for 2 of q"),
        ({"p": paddle.zeros([2, 4])}, "left has width 3, right has width 4"),
        ({"p": paddle.zeros([2, 3], dtype="float64")}, "cast one|must agree"),
        ({"q": paddle.zeros([2, 3, 1])}, "two dimensions"),
        ({"q": paddle.zeros([2, 3], dtype="int64")}, "floating dtype"),
        ({"own": paddle.to_tensor([0, 2])}, r"own\[1\]: column 2 is not between 0 and 1"),
        ({"own": paddle.to_tensor([0, 1], dtype="int32")}, "needs int64"),
        ({"q_ids": paddle.to_tensor([0, 1])}, "row_ids is given, column_ids is not"),
        ({"q_ids": paddle.to_tensor([0, 1]), "p_ids": paddle.to_tensor([[0, 1], [1, 2]])}, "must agree in K"),
        ({"q_ids": paddle.to_tensor([0]), "p_ids": paddle.to_tensor([0, 1])}, r"shape \[2\] or \[2, K\]"),
        ({"temperature": 0.0}, "must be positive"),
        ({"temperature": paddle.zeros([2])}, "one element"),
        ({"memory_budget": 0}, "positive number of bytes"),
        ({"backend": "cuda"}, "none of auto, triton, paddle, dense"),
        ({"row_weights": paddle.ones([3])}, r"row_weights: needs shape \[2\]"),
        ({"own": paddle.to_tensor([1, -1])}, r"own\[1\] is -1, and no other block has the positive of row 1"),
        ({"own": [0, 1]}, r"own: needs an int64 tensor of shape \[2\], is a list"),
        ({"p": np.ones((2, 3), "float32")}, "right: needs a Paddle tensor, is a ndarray"),
        ({"temperature": "0.1"}, "temperature: must be positive and finite, got '0.1'"),
        ({"margin": "0.1"}, "margin: a finite number is needed, or None for no rule, got '0.1'"),
        ({"margin": float("nan")}, "margin: a finite number is needed, or None for no rule, got nan"),
        ({"margin": float("inf")}, "margin: a finite number is needed, or None for no rule, got inf"),
        ({"margin": paddle.zeros([])}, r"margin: a finite number is needed, .* got a tensor of shape \[\]"),
    ],
)
def test_errors_name_what_is_wrong(change, message):
    arguments = {"q": paddle.ones([2, 3]), "p": paddle.ones([2, 3]), **change}
    with pytest.raises((ValueError, TypeError), match=message):
        inf_cl_loss(arguments.pop("q"), arguments.pop("p"), **arguments)
