# SPDX-License-Identifier: Apache-2.0
"""Both backends against float64; Triton's runs under the interpreter."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import paddle
import pytest

from paddle_infcl import kernels, log
from paddle_infcl.functional import logprobs as module
from paddle_infcl.functional.logprobs import chunks, logprobs_of_labels
from tests.functional.oracle_logprobs import label_logprobs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BACKENDS = ["paddle", "triton"]
# Paddle's exp on a CPU gives 3e-39, not 0, for -inf.
FLOOR = 1e-33
# float16 and bfloat16 gradients are rounded once; the interpreter's rounding of bfloat16 is a truncation.
ROUNDING = {"float64": 1e-12, "float32": 3e-6, "float16": 6e-4, "bfloat16": 4.5e-3}


def make(shape, *, short=0, dtype="float32", seed=0, spread=3.0):
    """Logits as the given dtype holds them, labels, and incoming gradients."""
    rng = np.random.default_rng(seed)
    z = paddle.to_tensor(rng.standard_normal(shape, "float32") * np.float32(spread)).astype(dtype)
    lead = [*shape[:-2], shape[-2] - short]
    labels = rng.integers(0, shape[-1], lead)
    return z, labels, rng.normal(size=lead).astype("float32"), rng.normal(size=lead).astype("float32")


def run(z, labels, g=None, h=None, **options):
    """Log-probabilities, entropies and the gradient of z, as NumPy arrays."""
    z = z.detach()
    z.stop_gradient = False
    logits = z * 1.0 if options.get("inplace_backward") else z
    out = logprobs_of_labels(logits, paddle.to_tensor(labels), return_entropy=h is not None, **options)
    values = out if h is not None else (out,)
    if g is not None:
        paddle.autograd.backward(
            list(values),
            [paddle.to_tensor(x).astype(v.dtype) for x, v in zip((g, h)[: len(values)], values, strict=True)],
        )
    gradient = None if g is None else (z.grad if z.dtype == paddle.float64 else z.grad.astype("float32")).numpy()
    return values[0].numpy(), values[1].numpy() if h is not None else None, gradient


def close(got, want, rounding):
    assert got.shape == want.shape
    np.testing.assert_allclose(
        got, want, rtol=rounding, atol=rounding * min(1.0, max(np.abs(want).max(initial=0), 1e-30))
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shape, short", [((2, 7, 11), 0), ((2, 7, 131), 1), ((2, 3, 4, 65), 1), ((5, 33), 0)])
def test_values_and_gradients(backend, dtype, shape, short):
    z, labels, g, h = make(shape, short=short, dtype=dtype)
    logprobs, entropies, dz = run(z, labels, g, h, temperature=0.7, backend=backend)
    want = label_logprobs(z.astype("float64").numpy(), labels, temperature=0.7, g=g, h=h)
    assert logprobs.dtype == np.float32
    close(logprobs, want[0], 3e-6)
    close(entropies, want[1], 3e-6)
    rounding = ROUNDING[dtype] * (2 if backend == "triton" and dtype == "bfloat16" else 1)
    close(dz, want[2], rounding)


@pytest.mark.parametrize("dtype", ["float64", "int32", "int16"])
def test_other_dtypes(dtype):
    """float64 logits give float64; labels may be any integers."""
    z, labels, g, _ = make((3, 6, 17))
    if dtype == "float64":
        z = z.astype("float64")
    logprobs, _, dz = run(z, labels if dtype == "float64" else labels.astype(dtype), g)
    want = label_logprobs(z.numpy(), labels, g=g)
    rounding = ROUNDING["float64" if dtype == "float64" else "float32"]
    close(logprobs, want[0], rounding)
    close(dz, want[2], rounding)


@pytest.mark.parametrize("shape", [(4, 129, 50257)])
def test_a_real_vocabulary(shape):
    z, labels, g, h = make(shape, short=1)
    labels[:, :100] = -100
    logprobs, entropies, dz = run(z, labels, g, h, ignore_index=-100, backend="paddle")
    rows = slice(98, 104)
    want = label_logprobs(z.numpy()[:, rows], labels[:, rows], ignore_index=-100, g=g[:, rows], h=h[:, rows])
    close(logprobs[:, rows], want[0], 3e-6)
    close(entropies[:, rows], want[1], 1e-5)
    close(dz[:, rows], want[2], 3e-6)
    assert not dz[:, :100].any() and not dz[:, 128].any() and not logprobs[:, :100].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_result_does_not_depend_on_the_chunks(backend, monkeypatch):
    z, labels, g, h = make((3, 5, 19))
    whole = run(z, labels, g, h, backend=backend)
    monkeypatch.setattr(module, "_CPU_CHUNK", 19 * 4 * 2)
    for a, b in zip(whole, run(z, labels, g, h, backend=backend), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits(backend):
    """+-1e4, where log-softmax on a CPU stops at -64 and exp overflows."""
    z = np.array([[1e4, -1e4, 0.0], [1e4, 1e4 - 1, 9990.0], [-1e4, -1e4, -1e4], [0.0, -100.0, -200.0]])
    for label in range(3):
        labels = np.full([4], label)
        logprobs, entropies, dz = run(paddle.to_tensor(z, dtype="float32"), labels, *np.ones([2, 4]), backend=backend)
        want = label_logprobs(z, labels, g=np.ones(4), h=np.ones(4))
        np.testing.assert_allclose(logprobs, want[0], rtol=1e-6, atol=FLOOR)
        np.testing.assert_allclose(entropies, want[1], rtol=1e-5, atol=FLOOR)
        np.testing.assert_allclose(dz, want[2], rtol=1e-5, atol=FLOOR)
    assert run(paddle.to_tensor([[0.0, -100.0]]), np.array([1]), backend=backend)[0][0] == -100


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype, masked", [("float32", -math.inf), ("float32", np.finfo("float32").min),
                                           ("bfloat16", -math.inf), ("bfloat16", -3.3e38)])  # fmt: skip
def test_a_masked_vocabulary(backend, dtype, masked):
    z, labels, g, h = make((2, 4, 150), dtype=dtype)
    values = z.astype("float32").numpy()
    values[:, :, :70] = masked
    values[0, 0, 1:] = masked
    labels[:] = np.maximum(labels, 70)
    labels[0, 0], labels[0, 1] = 0, 3
    values[0, 0, 0] = 1.0
    z = paddle.to_tensor(values).astype(dtype)
    logprobs, entropies, dz = run(z, labels, g, h, backend=backend)
    want = label_logprobs(z.astype("float64").numpy(), labels, g=g, h=h)
    assert abs(logprobs[0, 0]) < FLOOR and (logprobs[0, 1] == -math.inf) == (masked == -math.inf)
    np.testing.assert_allclose(logprobs, want[0], rtol=3e-6, atol=FLOOR)
    close(entropies, want[1], 3e-6)
    np.testing.assert_allclose(dz, want[2], rtol=2 * ROUNDING[dtype], atol=1e-6)
    assert (np.abs(dz[1, :, :70]) < FLOOR).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gradient_of_a_certain_label_keeps_its_digits(backend):
    """1 - p rounds to 0 in float32 long before p is 1."""
    z = np.array([[20.0, 0.0, 1.0], [40.0, 0.0, -1.0]], "float32")
    logprobs, _, dz = run(paddle.to_tensor(z), np.array([0, 0]), np.ones(2, "float32"), backend=backend)
    want = label_logprobs(z, np.array([0, 0]), g=np.ones(2))
    np.testing.assert_allclose(logprobs, want[0], rtol=1e-5)
    np.testing.assert_allclose(dz, want[2], rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_vocabulary_of_one(backend):
    z, labels, g, h = make((2, 3, 1))
    logprobs, entropies, dz = run(z, labels, g, h, backend=backend)
    assert not logprobs.any() and not entropies.any() and not dz.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape, short", [((0, 3, 5), 0), ((2, 0, 5), 0), ((2, 1, 5), 1)])
def test_nothing(backend, shape, short):
    z, labels, g, h = make(shape, short=short)
    logprobs, entropies, dz = run(z, labels, g, h, backend=backend)
    assert list(logprobs.shape) == list(entropies.shape) == list(labels.shape) and list(dz.shape) == list(shape)
    assert not dz.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_position(backend):
    z, labels, g, _ = make((3, 1, 9))
    logprobs, _, dz = run(z, labels, g, backend=backend)
    want = label_logprobs(z.numpy(), labels, g=g)
    close(logprobs, want[0], 3e-6)
    close(dz, want[2], 3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ignored_positions(backend):
    z, labels, g, h = make((2, 6, 80))
    labels[0, 1:4], labels[1, 5] = -100, -100
    values = z.numpy()
    values[0, 2, 7] = np.nan
    logprobs, entropies, dz = run(paddle.to_tensor(values), labels, g, h, ignore_index=-100, backend=backend)
    values[0, 2, 7] = 0
    want = label_logprobs(values, labels, ignore_index=-100, g=g, h=h)
    close(logprobs, want[0], 3e-6)
    close(entropies, want[1], 3e-6)
    close(dz, want[2], 3e-6)
    assert not dz[0, 1:4].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_bad_row_stays_one_bad_row(backend):
    z, labels, g, _ = make((3, 8))
    for bad in (np.nan, np.inf):
        values = z.numpy()
        values[1, 3] = bad
        for label in (3, 4):
            labels[1] = label
            logprobs, _, dz = run(paddle.to_tensor(values), labels, g, backend=backend)
            assert np.isnan(logprobs[1]) and np.isfinite(logprobs[[0, 2]]).all() and np.isfinite(dz[[0, 2]]).all()


def _views(z):
    """The same [2, 5, 12] logits, lying in memory in different ways."""
    B, T, V = z.shape
    wide = paddle.full([B, T + 2, 2 * V], float("nan"))
    wide[:, 1:-1, ::2] = z
    return {
        "slice": paddle.concat([z, paddle.full([B, 1, V], float("nan"))], axis=1)[:, :-1],
        "inner": wide[:, 1:-1, ::2],
        "time first": z.transpose([1, 0, 2]).contiguous().transpose([1, 0, 2]),
        "vocabulary first": z.transpose([2, 0, 1]).contiguous().transpose([1, 2, 0]),
        "reversed axes": z.transpose([2, 1, 0]).contiguous().transpose([2, 1, 0]),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("view", ["slice", "inner", "time first", "vocabulary first", "reversed axes"])
def test_any_strides(backend, view):
    z, labels, g, h = make((2, 5, 12), short=0)
    logits = _views(z)[view]
    assert not logits.is_contiguous()
    for a, b in zip(run(logits, labels, g, h, backend=backend), run(z, labels, g, h, backend=backend), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_is_not_copied_as_a_whole(backend):
    """logits[:, :-1], and better all logits with one label less: the peak is far below one copy."""
    from paddle.base import core

    B, T, V = (4, 33, 5000) if backend == "paddle" else (2, 9, 5000)
    z, labels, _, _ = make((B, T, V), short=1)
    labels = paddle.to_tensor(labels)
    whole = logprobs_of_labels(z, labels, backend=backend)
    size = B * T * V * 4
    chunk = module._CPU_CHUNK
    module._CPU_CHUNK = 2**16
    try:
        for call in (lambda: logprobs_of_labels(z[:, :-1], labels, backend=backend),
                     lambda: logprobs_of_labels(z, labels, backend=backend)):  # fmt: skip
            core.host_memory_stat_reset_peak_value("Allocated", 0)
            before = core.host_memory_stat_current_value("Allocated", 0)
            got = call()
            assert core.host_memory_stat_peak_value("Allocated", 0) - before < size // 4
            np.testing.assert_allclose(got.numpy(), whole.numpy(), rtol=1e-6)
    finally:
        module._CPU_CHUNK = chunk


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("inplace", [False, True])
def test_a_training_step_takes_one_gradient_at_most(backend, inplace, monkeypatch):
    """Beside the logits there is their gradient, and with inplace_backward not even that."""
    from paddle.base import core

    B, T, V = (4, 33, 5000) if backend == "paddle" else (2, 9, 5000)
    z, labels, _, _ = make((B, T, V), short=1)
    z.stop_gradient, labels, size = False, paddle.to_tensor(labels), B * T * V * 4
    monkeypatch.setattr(module, "_CPU_CHUNK", 2**16)
    logits = z * 1.0 if inplace else z
    core.host_memory_stat_reset_peak_value("Allocated", 0)
    before = core.host_memory_stat_current_value("Allocated", 0)
    logprobs_of_labels(logits, labels, backend=backend, inplace_backward=inplace).sum().backward()
    assert core.host_memory_stat_peak_value("Allocated", 0) - before < size * 1.25
    assert z.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("entropy", [False, True])
def test_the_gradient_may_lie_over_the_logits(backend, short, entropy):
    z, labels, g, h = make((2, 5, 70), short=short)
    h = h if entropy else None
    labels[1, 2] = -1
    beside = run(z, labels, g, h, backend=backend, ignore_index=-1)
    leaf = z.detach()
    leaf.stop_gradient = False
    logits = leaf * 1.0
    address = logits.data_ptr()
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    out = logprobs_of_labels(
        logits,
        paddle.to_tensor(labels),
        return_entropy=entropy,
        inplace_backward=True,
        backend=backend,
        ignore_index=-1,
    )
    values = list(out) if entropy else [out]
    paddle.autograd.backward(values, [paddle.to_tensor(x) for x in (g, h) if x is not None])
    assert seen == [address]
    np.testing.assert_array_equal(leaf.grad.numpy(), beside[2])
    np.testing.assert_array_equal(logits.numpy(), beside[2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("first", [True, False])
def test_logits_that_another_gradient_needs_are_not_overwritten_unseen(backend, first):
    """Paddle walks the last part of the graph first: there the other gradient finds the logits overwritten."""
    leaf, labels, _, _ = make((2, 5, 7))
    leaf.stop_gradient = False
    logits = leaf * 1.0
    y = paddle.to_tensor(labels)
    if first:
        own = logprobs_of_labels(logits, y, inplace_backward=True, backend=backend).sum()
        loss = (logits * logits).sum() + own
    else:
        loss = (logits * logits).sum()
        loss = logprobs_of_labels(logits, y, inplace_backward=True, backend=backend).sum() + loss
    try:
        loss.backward()
    except Exception as error:
        assert "inplace" in str(error)
    else:
        want = label_logprobs(leaf.numpy(), labels, g=np.ones(labels.shape))[2] + 2 * leaf.numpy()
        close(leaf.grad.numpy(), want, 3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_what_is_asked_for_gets_a_gradient(backend):
    z, labels, g, h = make((2, 5, 30))
    z.stop_gradient = False
    y = paddle.to_tensor(labels)
    _, entropy = logprobs_of_labels(z, y, return_entropy=True, backend=backend)
    (from_entropy,) = paddle.grad([entropy], [z], [paddle.to_tensor(h)])
    logprobs, _ = logprobs_of_labels(z, y, return_entropy=True, backend=backend)
    (from_logprobs,) = paddle.grad([logprobs], [z], [paddle.to_tensor(g)])
    zero = np.zeros_like(g)
    close(from_entropy.numpy(), label_logprobs(z.numpy(), labels, g=zero, h=h)[2], 3e-6)
    close(from_logprobs.numpy(), label_logprobs(z.numpy(), labels, g=g)[2], 3e-6)
    with paddle.no_grad():
        assert logprobs_of_labels(z, y, backend=backend).stop_gradient


def test_bfloat16_is_the_float32_value_of_the_given_logits():
    z, labels, _, _ = make((2, 7, 500), dtype="bfloat16")
    for backend in BACKENDS:
        got = run(z, labels, backend=backend)[0]
        np.testing.assert_allclose(got, run(z.astype("float32"), labels, backend=backend)[0], rtol=1e-6)


def test_autocast_is_off_inside(monkeypatch):
    """On a CPU autocast does nothing, so the switch is watched: on a GPU the sums would lose half their bits."""
    state, real, seen = [True], module._forward_chunk, []

    @contextlib.contextmanager
    def auto_cast(enable=True):
        before, state[0] = state[0], enable
        yield
        state[0] = before

    monkeypatch.setattr(paddle.amp, "auto_cast", auto_cast)
    monkeypatch.setattr(module, "_forward_chunk", lambda *a: seen.append(state[0]) or real(*a))
    z, labels, _, _ = make((2, 5, 30))
    run(z, labels, backend="paddle")
    assert seen == [False] and state == [True]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_label_out_of_range_is_named(backend):
    z, labels, _, _ = make((2, 4, 10))
    labels[1, 2], labels[1, 3] = 10, -100
    with pytest.raises(
        ValueError, match=r"labels\[1, 2\] is 10, outside 0 \.\.\. 9 \(such labels: 2\); set ignore_index"
    ):
        run(z, labels, backend=backend)
    with pytest.raises(ValueError, match=r"labels\[1, 2\] is 10, outside 0 \.\.\. 9 \(such labels: 1\)$"):
        run(z, labels, backend=backend, ignore_index=-100)


def test_arguments_that_do_not_fit():
    z, labels, _, _ = make((2, 4, 10))
    y = paddle.to_tensor(labels)
    with pytest.raises(
        ValueError, match=r"labels: shape \[2, 2\] does not fit logits \[2, 4, 10\]; needed is \[2, 4\], or \[2, 3\]"
    ):
        logprobs_of_labels(z, y[:, :2])
    with pytest.raises(ValueError, match=r"\[\.\.\., T, V\] is needed, got \[10\]"):
        logprobs_of_labels(z[0, 0], y[0, 0])
    with pytest.raises(ValueError, match="the vocabulary is empty"):
        logprobs_of_labels(z[:, :, :0], y)
    with pytest.raises(TypeError, match="logits: a floating dtype"):
        logprobs_of_labels(z.astype("int64"), y)
    with pytest.raises(TypeError, match="labels: an integer dtype"):
        logprobs_of_labels(z, y.astype("float32"))
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature: must be positive"):
            logprobs_of_labels(z, y, temperature=temperature)
    with pytest.raises(ValueError, match="backend: 'dense' is none of"):
        logprobs_of_labels(z, y, backend="dense")
    with pytest.raises(kernels.BackendError, match="float64"):
        logprobs_of_labels(z.astype("float64"), y, backend="triton")


def test_auto_takes_triton_where_it_runs_and_says_why_not(monkeypatch, caplog):
    assert module.choose("auto", paddle.zeros([1])) == "triton"
    cause = OSError("no libcuda")
    monkeypatch.setattr(kernels, "triton_status", lambda tensor=None: (False, "the driver is gone", cause))
    assert module.choose("auto", paddle.zeros([1])) == "paddle"
    with pytest.raises(kernels.BackendError, match="the driver is gone") as caught:
        module.choose("triton", paddle.zeros([1]))
    assert caught.value.__cause__ is cause

    class OnGpu:
        dtype = paddle.float32

        class place:
            is_cpu_place = staticmethod(lambda: False)

    said = []
    monkeypatch.setattr(module, "warn_once", lambda key, text: said.append(text))
    assert module.choose("auto", OnGpu) == "paddle" and "the driver is gone" in said[0]
    assert log.logger.name == "paddle_infcl"


def test_chunks_cover_an_array_in_order():
    for shape in ([7], [3, 4], [2, 3, 5], [4, 1, 6], [2, 2, 2, 3]):
        array = np.arange(np.prod(shape)).reshape(shape)
        for rows in (0, 1, 2, 5, 6, 7, 30, 1000):
            pieces = [(array[index], count) for index, count in chunks(shape, rows)]
            np.testing.assert_array_equal(np.concatenate([p.reshape(-1) for p, _ in pieces]), array.reshape(-1))
            assert all(p.size == count <= max(rows, 1) for p, count in pieces)
    assert list(chunks([3, 0], 5)) == []
