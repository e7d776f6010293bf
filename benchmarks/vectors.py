# SPDX-License-Identifier: Apache-2.0
"""Random unit vectors made on the device: a million of them take a host longer than the whole benchmark."""

from __future__ import annotations

import paddle
import triton
import triton.language as tl
from paddle_infcl_ops import driver

#: How much of its query a passage holds: own cosines are about this.
OWN = tl.constexpr(0.12)


@triton.jit
def unit_kernel(out, seed, near_seed, step, D, NEAR: tl.constexpr, BD: tl.constexpr):
    """out_i = x_i / |x_i|, x_i normal; with NEAR each step-th row has OWN times row i / step of near_seed added."""
    i = tl.program_id(0).to(tl.int64)
    total = 0.0
    for d in range(0, D, BD):
        x = _row(i, d, seed, near_seed, step, D, NEAR, BD)
        total += tl.sum(x * x)
    factor = 1.0 / tl.sqrt(total)
    for d in range(0, D, BD):
        c = d + tl.arange(0, BD)
        x = _row(i, d, seed, near_seed, step, D, NEAR, BD) * factor
        tl.store(out + i * D + c, x.to(out.dtype.element_ty), mask=c < D)


@triton.jit
def _row(i, d, seed, near_seed, step, D, NEAR: tl.constexpr, BD: tl.constexpr):
    c = d + tl.arange(0, BD)
    x = tl.randn(seed, i * D + c)
    if NEAR:
        if i % step == 0:
            x += OWN * tl.randn(near_seed, i // step * D + c)
    return tl.where(c < D, x, 0.0)


def unit_vectors(rows: int, width: int, dtype: str, seed: int, near: tuple[int, int] | None = None) -> paddle.Tensor:
    """[rows, width] unit vectors on the current device.

    Args:
        rows, width: the shape.
        dtype: "bfloat16", "float16" or "float32".
        seed: of the generator.
        near: (rows, seed) of other vectors, OWN of which are mixed into every (rows / its rows)-th row.
    """
    out = paddle.empty([rows, width], dtype=dtype)
    step, other = (1, 0) if near is None else (rows // near[0], near[1])
    driver.launch(
        unit_kernel, (rows,), out, seed, other, step, width, NEAR=near is not None, BD=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip
    return out
