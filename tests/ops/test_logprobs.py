# SPDX-License-Identifier: Apache-2.0
"""The launchers of the label log-probabilities: what they launch, where they write. Numbers: tests/functional."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
from paddle_infcl_ops import driver, logprobs
from paddle_infcl_ops.logprobs import _Walk, logprobs_of_labels

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
    z = paddle.zeros([1, 64000], dtype="float16")
    assert logprobs._tile(z)["BLOCK"] * 2 == logprobs._BYTES_PER_TILE
    for V, block in ((1, 256), (300, 512), (512, 512), (513, 1024)):
        assert logprobs._tile(z[:, :V])["BLOCK"] == block


@pytest.mark.parametrize("arch", [80, 90])
def test_every_launch_compiles(arch):
    script = Path(__file__).parent / "compile_logprobs.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), str(arch)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"launches compile for sm_{arch}" in done.stdout
