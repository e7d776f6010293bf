# SPDX-License-Identifier: Apache-2.0
"""The launchers of the label log-probabilities: what they launch, where they write. Numbers: tests/functional."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
from paddle_infcl_ops import driver, logprobs
from paddle_infcl_ops.logprobs import _Walk, logprobs_of_labels

from tests.functional.oracle_logprobs import label_logprobs
from tests.ops.scripts import run

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def launches(monkeypatch):
    """Counts launches."""
    seen = []
    real = driver.launch

    def launch(kernel, grid, *args, **meta):
        seen.append((kernel.__name__, grid))
        real(kernel, grid, *args, **meta)

    monkeypatch.setattr(driver, "launch", launch)
    return seen


@pytest.mark.parametrize("rows", [1, 7])
def test_two_launches_whatever_the_rows(launches, rows):
    z = paddle.randn([rows, 3, 10])
    z.stop_gradient = False
    logprobs_of_labels(z, paddle.zeros([rows, 2], dtype="int64")).sum().backward()
    assert launches == [("label_forward_kernel", (rows * 2,)), ("label_backward_kernel", (rows * 3,))]


def test_nothing_is_kept_that_no_gradient_needs(monkeypatch):
    sizes = []
    real = driver.empty
    monkeypatch.setattr(driver, "empty", lambda shape, *rest: sizes.append(shape) or real(shape, *rest))
    z, y = paddle.randn([2, 3, 10]), paddle.zeros([2, 3], dtype="int64")
    logprobs_of_labels(z, y)
    assert sizes == [[2, 3]]
    z.stop_gradient = False
    with paddle.no_grad():
        logprobs_of_labels(z, y)
    assert sizes == [[2, 3]] * 2
    out = logprobs_of_labels(z, y)
    assert sizes == [[2, 3]] * 5
    out.sum().backward()
    assert sizes[5:] == [[2, 3, 10]]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_nothing_around_the_logits_is_read_or_written(dtype):
    """Logits inside a larger tensor full of NaN, with the gradient written over them."""
    band = paddle.full([4, 7, 90], float("nan"), dtype=dtype)
    band[1:3, 1:6, 5:75] = paddle.randn([2, 5, 70]).astype(dtype)
    inner = band[1:3, 1:6, 5:75].detach()
    assert inner.data_ptr() != band.data_ptr() and not inner.is_contiguous()
    inner.stop_gradient = False
    logits = inner.detach()
    logits.stop_gradient = False
    out = logprobs_of_labels(logits, paddle.randint(0, 70, [2, 4]), inplace_backward=True)
    assert not np.isnan(out.numpy()).any()
    out.sum().backward()
    values = band.astype("float32").numpy()
    outside = np.ones(values.shape, bool)
    outside[1:3, 1:6, 5:75] = False
    assert np.isnan(values[outside]).all() and not np.isnan(values[~outside]).any()
    assert not values[1:3, 5, 5:75].any()


@pytest.mark.parametrize(
    "shape, axes, walkable, n",
    [
        ([6, 5, 4], [0, 1, 2], True, (1, 6)),
        ([2, 3, 5, 4], [0, 1, 2, 3], True, (1, 6)),
        ([2, 1, 3, 1, 5, 4], [0, 1, 2, 3, 4, 5], True, (1, 6)),
        ([2, 3, 5, 4], [1, 0, 2, 3], True, (3, 2)),
        ([2, 3, 2, 5, 4], [2, 1, 0, 3, 4], False, None),
        ([5, 4], [0, 1], True, (1, 1)),
    ],
)
def test_leading_axes_merge_where_they_can(shape, axes, walkable, n):
    z = paddle.randn(shape).transpose(axes)
    walk = _Walk(z, paddle.zeros(z.shape[:-1], dtype="int64"))
    assert walk.walkable == walkable
    if walkable:
        assert (walk.n0, walk.n1) == n
    labels = paddle.randint(0, shape[-1], z.shape[:-1])
    np.testing.assert_allclose(
        logprobs_of_labels(z, labels).numpy(), logprobs_of_labels(z.contiguous(), labels).numpy(), rtol=1e-6
    )


def test_what_cannot_be_walked_is_not_written_in_place():
    z = paddle.randn([2, 3, 2, 5, 4]).transpose([2, 1, 0, 3, 4]).detach()
    z.stop_gradient = False
    with pytest.raises(ValueError, match="cannot be walked in place"):
        logprobs_of_labels(z, paddle.zeros(z.shape[:-1], dtype="int64"), inplace_backward=True)


def test_a_label_out_of_range_is_nan_at_its_row_only():
    z = paddle.randn([3, 10])
    z.stop_gradient = False
    out = logprobs_of_labels(z, paddle.to_tensor([1, 10, 2]))
    assert np.isnan(out.numpy()).tolist() == [False, True, False]
    out.sum().backward()
    assert np.isnan(z.grad.numpy()).any(axis=1).tolist() == [False, True, False]


def test_dtypes_that_the_kernels_do_not_take():
    with pytest.raises(TypeError, match="float64"):
        logprobs_of_labels(paddle.zeros([2, 3], dtype="float64"), paddle.zeros([2], dtype="int64"))


def test_tiles_follow_the_vocabulary(monkeypatch):
    monkeypatch.setattr(driver, "is_interpreting", lambda: False)
    assert logprobs._forward_tile(64000, 2) == {"U": 4, "LANES": 128, "VEC": 8, "num_warps": 4}
    assert logprobs._forward_tile(64000, 4)["VEC"] == 4
    assert logprobs._backward_tile(64000, 2) == {"BLOCK": 2048, "VEC": 8, "num_warps": 4}
    for itemsize in (2, 4):
        for V in (1, 100, 300, 512, 513, 1000, 2048, 2049, 5000):
            tile = logprobs._forward_tile(V, itemsize)
            lanes, step = tile["LANES"], tile["U"] * tile["LANES"] * tile["VEC"]
            assert lanes == 32 * tile["num_warps"] >= 2 * tile["VEC"]
            # No more than twice the vocabulary, and no smaller than it must be.
            assert step < 2 * V or step == 32 * tile["VEC"]
            assert step >= V or step == 4 * 128 * tile["VEC"]
            block = logprobs._backward_tile(V, itemsize)["BLOCK"]
            assert (block < 2 * V or block == 256) and (block >= V or block == 4096 // itemsize)


def layouts(V):
    """Logits [2, 4, V] whose rows lie differently to the aligned addresses, with (ALIGN, SAME) for each."""
    whole, even = paddle.randn([2, 5, V]), V % 16 == 0
    wide = paddle.randn([2, 4, -(-V // 16) * 16])
    yield whole[:, :4].contiguous(), not even, True
    yield whole[:, :4], not even, even or V % 2 == 0
    yield whole[:, 1:], not even, even or V % 2 == 0
    yield whole.transpose([1, 0, 2])[:4].contiguous().transpose([1, 0, 2]), not even, even or V % 2 == 0
    yield wide[:, :, :V], not even, even or V % 2 == 0


@pytest.mark.parametrize("V", [32, 34, 33, 17, 3, 2, 1])
@pytest.mark.parametrize("vec", [2, 8])
def test_rows_are_read_in_whole_vectors_wherever_they_start(V, vec, monkeypatch):
    forward = {"U": 2, "LANES": 16, "VEC": vec}
    monkeypatch.setattr(logprobs, "_forward_tile", lambda *_: forward)
    monkeypatch.setattr(logprobs, "_backward_tile", lambda *_: {"BLOCK": 16, "VEC": vec})
    seen = []
    real = driver.launch
    monkeypatch.setattr(driver, "launch", lambda *args, **meta: seen.append(meta) or real(*args, **meta))
    for index, (view, align, same) in enumerate(layouts(V)):
        logits = view.detach()
        if V > 2:
            logits[0, 0, 1], logits[0, 1, V - 1], logits[0, 2, 0], logits[0, 3, 2] = 1e4, -1e4, -np.inf, -np.inf
        logits.stop_gradient = False
        rng = np.random.default_rng(index)
        labels = np.stack([[0, V - 1, min(1, V - 1), V // 2], rng.integers(0, V, 4)])
        g, h = (rng.standard_normal([2, 4]).astype("float32") for _ in range(2))
        out, entropy = logprobs_of_labels(logits, paddle.to_tensor(labels), return_entropy=True)
        paddle.autograd.backward([out, entropy], [paddle.to_tensor(g), paddle.to_tensor(h)])
        want = label_logprobs(logits.numpy(), labels, g=g, h=h)
        np.testing.assert_allclose(out.numpy(), want[0], rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(entropy.numpy(), want[1], rtol=3e-6, atol=3e-6)
        np.testing.assert_allclose(logits.grad.numpy(), want[2], rtol=3e-6, atol=3e-6)
        assert seen[-1]["ALIGN"] == align
        if vec == 2 and align:
            assert seen[-1]["SAME"] == same


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_wrong_at_the_ends_of_a_row_is_seen(bad):
    """The entries before the first whole vector and after the last one take another way."""
    z = paddle.randn([1, 5, 35]).numpy()
    for column in (0, 1, 33, 34):
        values = z.copy()
        values[0, 1::2, column] = bad
        out = logprobs_of_labels(paddle.to_tensor(values), paddle.full([1, 5], 7, dtype="int64"))
        assert np.isnan(out.numpy()).tolist() == [[False, True, False, True, False]]


@pytest.mark.parametrize("arch", [80, 90])
def test_every_launch_compiles(arch):
    assert f"launches compile for sm_{arch}" in run("compile_logprobs.py", str(arch))
