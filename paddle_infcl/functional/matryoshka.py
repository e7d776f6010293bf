# SPDX-License-Identifier: Apache-2.0
"""Matryoshka losses: every prefix of the vectors is an embedding of its own (Kusupati et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import paddle
from paddle import Tensor

from paddle_infcl.functional.vectors import l2_normalize


def prefix_weights(width: int, dims: Sequence[int], weights: Sequence[float] | None) -> dict[int, float]:
    """Dims and their weights, checked.

    Args:
        width: D.
        dims: prefix widths, in any order.
        weights: one per dim; None is 1 each.

    Returns:
        width of prefix -> weight.

    Raises:
        ValueError: no dims, a dim twice, outside 1 ... D, or another number of weights than of dims.
    """
    if not dims:
        raise ValueError("matryoshka dims: at least one is needed")
    for dim in dims:
        if not 1 <= dim <= width:
            raise ValueError(f"matryoshka dims: {dim} is not between 1 and {width}, the width of the vectors")
    if len(set(dims)) != len(dims):
        raise ValueError(f"matryoshka dims: {list(dims)} has a dim twice")
    if weights is not None and len(weights) != len(dims):
        raise ValueError(f"matryoshka weights: {len(weights)} of them for {len(dims)} dims; one each is needed")
    return dict(zip(dims, weights if weights is not None else [1.0] * len(dims), strict=True))


def matryoshka_loss(
    loss: Callable[[Tensor, Tensor], Tensor],
    q: Tensor,
    p: Tensor,
    dims: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """sum_d weight_d loss(normalise(q[:, :d]), normalise(p[:, :d])).

    Args:
        loss: takes [B, d] and [N, d] float32 (float64 for float64), gives a 0-d tensor.
        q: [B, D].
        p: [N, D].
        dims: prefix widths between 1 and D, in any order.
        weights: one per dim; None is 1 each.

    Returns:
        0-d.

    Raises:
        ValueError: see `prefix_weights`.
    """
    terms = []
    for dim, weight in prefix_weights(q.shape[1], dims, weights).items():
        # In fp32: the squares of half-precision vectors lose too much.
        wide = "float64" if q.dtype == paddle.float64 else "float32"
        terms.append(weight * loss(l2_normalize(q[:, :dim].astype(wide)), l2_normalize(p[:, :dim].astype(wide))))
    return sum(terms[1:], terms[0])
