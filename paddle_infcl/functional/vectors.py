# SPDX-License-Identifier: Apache-2.0
"""Vectors of length 1."""

from __future__ import annotations

import paddle
from paddle import Tensor


def l2_normalize(vectors: Tensor) -> Tensor:
    """Rows of length 1, computed in fp32 (fp64 for fp64); a zero row stays zero and gets gradient zero.

    `paddle.nn.functional.normalize` divides a zero row by its epsilon, so that the gradient there is 1e11. Rows are
    divided by their largest entry first (a constant to the gradient, since the result does not depend on the scale):
    neither tiny nor huge rows leave the range of fp32 when they are squared.

    Args:
        vectors: [..., D], any floating dtype.

    Returns:
        [..., D] in the dtype of `vectors`.
    """
    wide = vectors if vectors.dtype == paddle.float64 else vectors.astype("float32")
    largest = wide.detach().abs().max(axis=-1, keepdim=True)
    nonzero = largest > 0
    ones = paddle.ones_like(largest)
    scaled = wide / paddle.where(nonzero, largest, ones)
    square = (scaled * scaled).sum(axis=-1, keepdim=True)
    inverse = paddle.where(nonzero, paddle.rsqrt(paddle.where(nonzero, square, ones)), paddle.zeros_like(largest))
    return (scaled * inverse).astype(vectors.dtype)
