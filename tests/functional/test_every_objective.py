# SPDX-License-Identifier: Apache-2.0
"""What must hold for every objective on every backend: no floor, no bias, no lost gradient, no swallowed NaN."""

from __future__ import annotations

import os
import sys

import numpy as np
import paddle
import pytest

from paddle_infcl import kernels
from paddle_infcl.functional import inf_cl_loss
from paddle_infcl.functional.linear_logprobs import linear_logprobs_of_labels
from paddle_infcl.functional.logprobs import logprobs_of_labels
from tests import oracle
from tests.functional.every_objective import CASES, WIDTH, arrays, run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and kernels.triton_status()[0]
BACKENDS = ["paddle", "dense", *(["triton"] if INTERPRETED else [])]
# The interpreter is slow: of the kernels, one pass and two passes where a test does not depend on the objective.
RUNS = [(c, b) for b in ("paddle", "dense") for c in CASES]
RUNS += [(c, b) for b in BACKENDS[2:] for c in ("infonce", "guided")]


def opposed(rows=8):
    """Positives point away from their anchors, those of every other row are at them: own cosine -1, others 1."""
    rng = np.random.default_rng(0)
    sign = np.where(np.arange(rows) % 2, -1.0, 1.0)[:, None]
    axis = rng.standard_normal((1, WIDTH))
    noise = [0.02 * rng.standard_normal((rows, WIDTH)) for _ in range(4)]
    return [sign * axis + noise[0], -sign * axis + noise[1], *(x * 50 for x in noise[2:])]


def trained(rows=8):
    """Positives at a cosine of .97 or so, all else near 0."""
    rng = np.random.default_rng(1)
    anchor = rng.standard_normal((rows, WIDTH))
    return [anchor, *(anchor * a + 0.25 * rng.standard_normal((rows, WIDTH)) for a in (1.0, 0.0, 0.0))]


def exact(case, columns, temperature):
    """Loss and gradients in float64 by the dense backend, which shares code with the others: hence the oracle."""
    found = run(case, columns, "float64", backend="dense", temperature=temperature)
    if case == "infonce":
        q, p = (c.astype("float32").astype("float64") for c in columns[:2])
        q, p = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, p))
        assert found[0] == pytest.approx(oracle.plain(q, p, temperature)["loss"], rel=1e-10)
    return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_losses_beyond_64_have_no_floor(case, backend):
    """Logits 200 apart: Paddle's own log-softmax on a CPU would say 64, and give no gradient."""
    want = exact(case, opposed(), 0.01)
    got = run(case, opposed(), "float32", backend=backend, temperature=0.01)
    if case in ("infonce", "four directions", "hard negatives", "symmetric", "debiased", "smoothed"):
        assert want[0] > 150
    assert got[0] == pytest.approx(want[0], rel=2e-5, abs=1e-6)
    largest = max(np.abs(g).max() for g in want[1])
    for a, b in zip(got[1], want[1], strict=True):
        assert np.abs(a - b).max() <= 5e-4 * largest
    assert got[2] == pytest.approx(want[2], rel=1e-4, abs=0.1)  # its terms are 1 / T^2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_small_losses_are_unbiased_and_not_negative(case, backend):
    """A numerator and a denominator of different precision give losses below 0 and gradients of noise."""
    want = exact(case, trained(), 0.05)
    got = run(case, trained(), "float32", backend=backend, temperature=0.05)
    assert got[0] >= 0 and got[0] == pytest.approx(want[0], rel=1e-4)
    for a, b in zip(got[1], want[1], strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b) + 1e-6 * np.linalg.norm(want[1][0])
    if backend != "triton" or case in ("infonce", "guided"):
        assert run(case, trained(), "bfloat16", backend=backend, temperature=0.05)[0] >= 0


@pytest.mark.parametrize("case, backend", RUNS)
def test_a_learnable_temperature_of_exactly_one_gets_its_gradient(case, backend):
    columns, step = arrays(0, WIDTH), 1e-5
    values = [run(case, columns, "float64", backend="dense", temperature=1 + h)[0] for h in (step, -step)]
    dtype, tolerance = ("float32", 1e-4) if backend == "triton" else ("float64", 1e-7)
    got = run(case, columns, dtype, backend=backend, temperature=1.0)[2]
    assert got != 0 and got == pytest.approx((values[0] - values[1]) / (2 * step), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("case, backend", RUNS)
def test_the_value_without_gradients_is_that_of_training(case, backend):
    columns = [paddle.to_tensor(c.astype("float32"), stop_gradient=False) for c in arrays(0, WIDTH)]
    copies = [c.numpy().copy() for c in columns]
    loss = CASES[case](columns, temperature=0.1, backend=backend)
    loss.backward()
    with paddle.no_grad():
        value = CASES[case](columns, temperature=0.1, backend=backend)
    assert value.stop_gradient and float(value) == pytest.approx(float(loss), rel=1e-5)
    for column, copy in zip(columns, copies, strict=True):
        np.testing.assert_array_equal(column.numpy(), copy)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("case, backend", RUNS)
def test_broken_vectors_never_give_a_usual_loss(case, backend, bad):
    for column in (0, 1):
        columns = arrays(0, WIDTH)
        columns[column][2, 1] = bad
        columns = [paddle.to_tensor(c.astype("float32"), stop_gradient=False) for c in columns]
        assert not np.isfinite(float(CASES[case](columns, temperature=0.1, backend=backend)))


@pytest.mark.parametrize("case, backend", RUNS)
def test_zero_vectors_have_no_gradient(case, backend):
    columns = arrays(0, WIDTH)
    columns[0][1], columns[1][2] = 0.0, 0.0
    loss, grads, _ = run(case, columns, "float32", backend=backend, temperature=0.05)
    assert np.isfinite(loss) and all(np.isfinite(g).all() and np.abs(g).max() < 1e3 for g in grads)
    assert not grads[0][1].any() and not grads[1][2].any() and grads[0].any()


@pytest.mark.parametrize("case, backend", RUNS)
def test_a_batch_of_one(case, backend):
    columns = arrays(0, WIDTH, rows=1)
    want = exact(case, columns, 0.1)
    got = run(case, columns, "float32", backend=backend, temperature=0.1)
    assert got[0] == pytest.approx(want[0], rel=1e-4, abs=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4 * max(np.abs(b).max(), 1e-2))


def bf16(x):
    return paddle.to_tensor(np.asarray(x, "float32")).astype("bfloat16").astype("float32").numpy().astype("float64")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature, cosine", [(0.02, 0.7), (0.05, 0.3)])
def test_bfloat16_gradients_are_no_noisier_than_the_textbooks(backend, temperature, cosine):
    """Row by row, so that one which has only small probabilities counts as much as the others."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((48, 32))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    noise = rng.standard_normal((64, 32))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    p = noise.copy()
    p[:48] = cosine * q + np.sqrt(1 - cosine**2) * noise[:48]
    q, p = bf16(q), bf16(p)

    def gradients(rounded):
        z = rounded(q @ p.T) / temperature
        own = np.eye(48, 64, dtype=bool)
        if rounded is bf16:
            g = rounded(np.exp(rounded(z) - np.logaddexp.reduce(rounded(z), axis=1, keepdims=True))) - own
        else:
            g = np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
            g[own] = -np.where(own, 0, g).sum(1)
        g = g / temperature / 48
        return rounded(g @ p), rounded(g.T @ q)

    want, textbook = gradients(lambda x: x), gradients(bf16)
    tensors = [paddle.to_tensor(x.astype("float32")).astype("bfloat16") for x in (q, p)]
    for tensor in tensors:
        tensor.stop_gradient = False
    inf_cl_loss(*tensors, own=paddle.arange(48), temperature=temperature, backend=backend).backward()
    # Two roundings of an output; the interpreter truncates.
    epsilon = 2**-8 if backend != "triton" else 2**-6
    for tensor, exact, theirs in zip(tensors, want, textbook, strict=True):
        got = tensor.grad.astype("float32").numpy().astype("float64")
        size = np.linalg.norm(exact, axis=1)
        error, other = (np.linalg.norm(x - exact, axis=1) / size for x in (got, theirs))
        assert error.max() <= max(epsilon, other.max()) and np.median(error) <= max(epsilon / 2, np.median(other))
        assert error.max() <= 2 * epsilon


def calls(run):
    """Calls of compiled functions, Paddle's operators among them, in a forward and a backward pass."""
    count = 0

    def profile(frame, event, function):
        nonlocal count
        count += event == "c_call"

    sys.setprofile(profile)
    try:
        run().sum().backward()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["logits", "hidden states", *CASES])
def test_no_python_loop_over_rows(name):
    """In plain Paddle; a chunk holds all rows here. Triton: the launches below."""

    def work(rows):
        if name == "logits":
            z = paddle.randn([rows, 3, 10])
            z.stop_gradient = False
            return lambda: logprobs_of_labels(z, paddle.zeros([rows, 2], "int64"), backend="paddle")
        if name == "hidden states":
            h, w = paddle.randn([rows, 3, 4]), paddle.randn([10, 4])
            h.stop_gradient = w.stop_gradient = False
            return lambda: linear_logprobs_of_labels(h, w, paddle.zeros([rows, 2], "int64"), backend="paddle")
        columns = [paddle.to_tensor(c.astype("float32"), stop_gradient=False) for c in arrays(0, WIDTH, rows=rows)]
        return lambda: CASES[name](columns, temperature=0.1, backend="paddle")

    few, many = work(4), work(64)
    calls(few), calls(many)  # imports, warnings and caches
    assert calls(many) < calls(few) + 30


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("case", ["infonce", "guided"])
def test_launches_do_not_grow_with_rows(case, monkeypatch):
    from paddle_infcl_ops import driver

    launches, real = [], driver.launch
    monkeypatch.setattr(driver, "launch", lambda kernel, *a, **m: launches.append(kernel) or real(kernel, *a, **m))
    counts = []
    for rows in (2, 20):
        columns = [paddle.to_tensor(c.astype("float32"), stop_gradient=False) for c in arrays(0, 8, rows=rows)]
        launches.clear()
        CASES[case](columns, temperature=0.1, backend="triton").backward()
        counts.append(len(launches))
    assert counts[0] == counts[1] > 0
