# SPDX-License-Identifier: Apache-2.0
"""All prefixes from one sweep are the sum of separate losses, gradients included."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.functional import Block, inf_cl_loss, info_nce
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.matryoshka import Matryoshka, matryoshka_loss
from paddle_infcl.functional.row_losses import Debiased
from tests.functional.random_groups import FIELDS, random_groups, to_paddle, unit
from tests.functional.test_blocks import allocated_by

NO_LIMIT = [f for f in FIELDS if f != "limit"]


def loss_and_gradients(arrays, groups, dtype, **options):
    tensors, blocks = to_paddle(arrays, groups, dtype)
    t = paddle.to_tensor([options.pop("temperature")], dtype=dtype, stop_gradient=False)
    loss = info_nce(blocks, temperature=t, **options)
    loss.backward()
    zero = {k: np.zeros(v.shape) for k, v in tensors.items()}
    return float(loss), {k: zero[k] if v.grad is None else v.grad.numpy() for k, v in tensors.items()}, float(t.grad)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31), B=st.integers(1, 8), N=st.integers(1, 9), groups=st.integers(1, 2),
    blocks=st.integers(1, 3), fields=st.sampled_from([[], ["guide"], NO_LIMIT]),
    dims=st.sampled_from([[4], [1, 4], [6, 2, 3], [5, 1]]), temperature=st.sampled_from([0.005, 0.05, 0.5]),
    budget=st.sampled_from([1, 1000, None]),
)  # fmt: skip
def test_one_sweep_is_the_sum_of_separate_losses(seed, B, N, groups, blocks, fields, dims, temperature, budget):
    """`dense` adds separate losses up. Vectors of any length, several groups and blocks, all rules but the limit."""
    rng = np.random.default_rng(seed)
    arrays, made = random_groups(rng, B=B, N=N, D=6, groups=groups, blocks=blocks, fields=fields, size=3.0)
    options = {
        "temperature": temperature,
        "matryoshka": Matryoshka(dims, [float(w) for w in rng.random(len(dims))]),
        "row_weights": paddle.to_tensor(rng.random(B)),
    }
    a = loss_and_gradients(arrays, made, "float64", backend="paddle", memory_budget=budget, **options)
    b = loss_and_gradients(arrays, made, "float64", backend="dense", **options)
    assert a[0] == pytest.approx(b[0], rel=1e-11, abs=1e-13)
    largest = max(np.abs(g).max() for g in b[1].values()) + 1 / temperature
    for name in arrays:
        np.testing.assert_allclose(a[1][name], b[1][name], rtol=1e-9, atol=1e-12 * largest, err_msg=name)
    assert a[2] == pytest.approx(b[2], rel=1e-8, abs=1e-10 / temperature**2)


def batch(rows=40, width=32, seed=0, dtype="float32"):
    rng = np.random.default_rng(seed)
    q = unit(rng, rows, width)
    p = q + unit(rng, rows, width)
    return [paddle.to_tensor(x.astype(dtype), stop_gradient=False) for x in (q, p)]


def gradients(loss, tensors):
    loss.backward()
    result = [t.grad.numpy().copy() for t in tensors]
    for t in tensors:
        t.clear_gradient()
    return result


@pytest.mark.parametrize("margin", [None, 0.1])
@pytest.mark.parametrize("temperature", [0.01, 0.05])
def test_float32_with_and_without_a_margin(margin, temperature):
    """The limit of the margin rule is another one at every prefix."""
    q, p = batch()
    dims, weights = [32, 8, 16], [1.0, 0.5, 2.0]
    options = {"temperature": temperature, "backend": "paddle"}
    separate = matryoshka_loss(lambda a, b: inf_cl_loss(a, b, margin=margin, **options), q, p, dims, weights)
    groups = info_nce_groups(q, p, margin=margin)
    together = info_nce(groups, matryoshka=Matryoshka(dims, weights, margin), **options)
    assert float(together) == pytest.approx(float(separate), rel=1e-5)
    for a, b in zip(gradients(together, [q, p]), gradients(separate, [q, p]), strict=True):
        assert np.abs(a - b).max() <= (2e-6 + 8 * 2**-24 / temperature) * np.abs(b).max() * 4


def test_the_lengths_of_prefixes_have_a_gradient():
    """Without it the gradient has a component along each prefix; a re-normalised prefix has none along itself."""
    q, p = batch(dtype="float64")
    info_nce(info_nce_groups(q, p), temperature=0.1, matryoshka=Matryoshka([5]), backend="paddle").backward()
    for tensor in (q, p):
        along = (tensor.grad.numpy() * tensor.numpy())[:, :5].sum(axis=1)
        assert np.abs(along).max() < 1e-12 * np.abs(tensor.grad.numpy()).max()
        assert not tensor.grad.numpy()[:, 5:].any()
    q, p = batch(dtype="float64")
    info_nce(info_nce_groups(q, p), temperature=0.1, matryoshka=Matryoshka([5, 32]), backend="paddle").backward()
    along = (q.grad.numpy() * q.numpy()).sum(axis=1)  # the whole: at both prefixes nothing along the vector
    assert np.abs(along).max() < 1e-12 * np.abs(q.grad.numpy()).max() * 32


def test_zero_prefixes_are_finite():
    q, p = batch(rows=6)
    with paddle.no_grad():
        q[1, :8] = 0.0
        p[2] = 0.0
    loss = info_nce(info_nce_groups(q, p), temperature=0.05, matryoshka=Matryoshka([8, 32]), backend="paddle")
    loss.backward()
    assert np.isfinite(float(loss))
    assert np.isfinite(q.grad.numpy()).all() and np.abs(q.grad.numpy()).max() < 1e3
    assert not p.grad.numpy()[2].any()


def test_row_losses_and_smoothing_at_every_prefix():
    q, p = batch(dtype="float64")
    for options in ({"row_loss": Debiased(0.1)}, {"label_smoothing": 0.1}):
        values = [
            float(
                info_nce(
                    info_nce_groups(q, p), temperature=0.2, matryoshka=Matryoshka([8, 32]), backend=backend, **options
                )
            )
            for backend in ("paddle", "dense")
        ]
        assert values[0] == pytest.approx(values[1], rel=1e-12)


def test_half_precision_and_an_empty_batch():
    q, p = batch()
    half = [t.detach().astype("bfloat16") for t in (q, p)]
    for t in half:
        t.stop_gradient = False
    loss = info_nce(info_nce_groups(*half), temperature=0.05, matryoshka=Matryoshka([8, 32]), backend="paddle")
    loss.backward()
    assert half[0].grad.dtype == paddle.bfloat16 and loss.dtype == paddle.float32
    empty = paddle.zeros([0, 32])
    empty.stop_gradient = False
    block = Block(empty, p, own=paddle.zeros([0], dtype="int64"))
    info_nce([[block]], temperature=0.05, matryoshka=Matryoshka([8, 32]), backend="paddle").backward()


def test_a_limit_needs_its_margin():
    q, p = batch(rows=4)
    groups = info_nce_groups(q, p, margin=0.1)
    for backend in ("paddle", "dense"):
        with pytest.raises(ValueError, match="one per prefix"):
            info_nce(groups, temperature=0.05, matryoshka=Matryoshka([8, 32]), backend=backend)


def test_the_budget_holds():
    q, p = batch(rows=3000, width=64)

    def run():
        info_nce(
            info_nce_groups(q, p), temperature=0.05, matryoshka=Matryoshka([8, 16, 32, 64]), backend="paddle",
            memory_budget=4 * 2**20,
        ).backward()  # fmt: skip

    inputs = 2 * 3000 * 64 * 4
    assert allocated_by(run) <= 4 * 2**20 + 12 * inputs  # where one prefix's logits alone take 36 MiB
