# SPDX-License-Identifier: Apache-2.0
"""The pieces for shards and ring hops: log-sum-exps that merge, gradients that add up."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

pytest.importorskip("triton")
import paddle_infcl_ops as ops

from tests.ops.blocks import TOLERANCE, block, close, guarded, rng, rounded, vectors


def shards(dtype, N=70, cut=41):
    g = rng(0)
    q, p = vectors(g, 37, 33), vectors(g, N, 33)
    own = g.permutation(N)[:37]
    tensors = {"q": guarded(q, dtype), "a": guarded(p[:cut], dtype), "b": guarded(p[cut:], dtype)}
    a = block({"left": "q", "right": "a", "own": np.where(own < cut, own, -1)}, tensors)
    b = block({"left": "q", "right": "b", "own": np.where(own >= cut, own - cut, -1)}, tensors)
    z = 10 * rounded(q, dtype) @ rounded(p, dtype).T
    z[np.arange(37), own] = -np.inf
    return a, b, z, rounded(q, dtype), rounded(p, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_shards_merge_and_add_up(dtype):
    a, b, z, q, p = shards(dtype)
    lse = ops.block_lse(b, 10.0, out=ops.block_lse(a, 10.0))
    expected = np.log(np.exp(z).sum(1))
    np.testing.assert_allclose(lse.numpy(), expected, rtol=1e-5, atol=1e-5)
    weights = rng(1).uniform(-1, 1, 37).astype("float32")
    w = paddle.to_tensor(weights)
    dq, da, terms = ops.block_grads(a, 10.0, lse, w)
    dq, db, terms = ops.block_grads(b, 10.0, lse, w, dleft=dq, terms=terms)
    P = np.exp(z - expected[:, None]) * weights[:, None]
    close(dq, 10 * P @ p, TOLERANCE[dtype])
    close(paddle.concat([da, db]), 10 * P.T @ q, TOLERANCE[dtype])
    close(terms.sum(), (P * (q @ p.T)).sum(), 10 * TOLERANCE[dtype])
    assert dq.dtype == da.dtype == terms.dtype == paddle.float32


def test_gradients_are_added_and_left_out():
    a, _, _, _, _ = shards("float32")
    lse, w = ops.block_lse(a, 10.0), paddle.ones([37])
    dq, da, _ = ops.block_grads(a, 10.0, lse, w)
    twice_q, twice_a = dq.clone(), da.clone()
    ops.block_grads(a, 10.0, lse, w, dleft=twice_q, dright=twice_a)
    close(twice_q, 2 * dq.numpy(), 1e-6)
    close(twice_a, 2 * da.numpy(), 1e-6)
    none, da2, _ = ops.block_grads(a, 10.0, lse, w, left_gradient=False)
    assert none is None
    np.testing.assert_array_equal(da2.numpy(), da.numpy())
    dq2, none, _ = ops.block_grads(a, 10.0, lse, w, right_gradient=False)
    assert none is None
    np.testing.assert_array_equal(dq2.numpy(), dq.numpy())


@pytest.mark.parametrize("first, second", [(1000, -1000), (-1000, 1000), (-60, 60), (1000, 1000), (0, 0)])
def test_merge_is_exact(first, second):
    one = paddle.ones([1, 1])
    hop = [block({"left": "q", "right": k}, {"q": one, "a": one * first, "b": one * second}) for k in ("a", "b")]
    lse = ops.block_lse(hop[1], 1.0, out=ops.block_lse(hop[0], 1.0))
    np.testing.assert_allclose(float(lse), np.logaddexp(first, second), rtol=1e-7)


def test_rows_without_candidates():
    one = paddle.ones([3, 4])
    empty = block({"left": "q", "right": "q", "row_ids": [1, 1, 1], "column_ids": [1, 1, 1]}, {"q": one})
    lse = ops.block_lse(empty, 1.0)
    assert (lse.numpy() == -np.inf).all()
    dq, dp, _ = ops.block_grads(empty, 1.0, lse, paddle.ones([3]))
    assert (dq.numpy() == 0).all() and (dp.numpy() == 0).all()
    merged = ops.block_lse(empty, 1.0, out=paddle.to_tensor([1.0, -np.inf, 3.0]))
    np.testing.assert_array_equal(merged.numpy(), np.array([1, -np.inf, 3], "float32"))


def test_own_similarity():
    g = rng(2)
    q, p = vectors(g, 9, 1200), vectors(g, 5, 1200)
    own = np.array([0, 1, 2, 3, 4, 4, -1, 0, 2])
    got = ops.own_similarity(guarded(q, "float32"), guarded(p, "float32"), paddle.to_tensor(own)).numpy()
    np.testing.assert_allclose(got[own >= 0], (q * p[own]).sum(1)[own >= 0], rtol=1e-5, atol=1e-6)
    assert got[6] == -np.inf
