# SPDX-License-Identifier: Apache-2.0
"""Matryoshka losses: every prefix of the vectors is an embedding of its own (Kusupati et al. 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import paddle
from paddle import Tensor

from paddle_infcl.functional.blocks import Block, Guide
from paddle_infcl.functional.budget import distinct_sides
from paddle_infcl.functional.options import check_margin
from paddle_infcl.functional.tiles import accumulation_dtype
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


@dataclasses.dataclass(frozen=True)
class Matryoshka:
    """Which prefixes `info_nce` adds up: sum_d weight_d times the loss of re-normalised prefixes.

    Attributes:
        dims: prefix widths, in any order.
        weights: one per dim; None is 1 each.
        margin: of the margin rule, for blocks that have a `limit`: at every prefix the limit is the similarity of the
            row's own pair there plus the margin.
    """

    dims: Sequence[int]
    weights: Sequence[float] | None = None
    margin: float | None = None

    def __post_init__(self):
        check_margin(self.margin)

    def by_width(self, width: int) -> list[tuple[int, float]]:
        """(dim, weight), ascending. Raises ValueError: see `prefix_weights`."""
        return sorted(prefix_weights(width, self.dims, self.weights).items())


def unit_prefixes(groups: Sequence[Sequence[Block]], dim: int) -> list[list[Block]]:
    """The blocks with the first `dim` numbers of all vectors, scaled to length 1, in fp32 (fp64 for fp64)."""
    tensors, sides = distinct_sides(groups)
    # In fp32: the squares of half-precision vectors lose too much.
    wide = accumulation_dtype(tensors[0].dtype)
    unit = [l2_normalize(t[:, :dim].astype(wide)) for t in tensors]
    return [
        [
            dataclasses.replace(block, left=unit[l], right=unit[r], guide=_wide_guide(block.guide, wide))
            for block, (l, r) in zip(group, places, strict=True)
        ]
        for group, places in zip(groups, sides, strict=True)
    ]


def _wide_guide(guide: Guide | None, dtype: paddle.dtype) -> Guide | None:
    """The guide in the type of the vectors beside it, which is one type for all products of a tile."""
    if guide is None or guide.left.dtype == dtype:
        return guide
    return dataclasses.replace(guide, left=guide.left.astype(dtype), right=guide.right.astype(dtype))


@paddle.no_grad()
def own_cosines(group: Sequence[Block], dim: int) -> Tensor:
    """[B] cosines of the rows' own pairs, of the first `dim` numbers."""
    cosines = None
    for block in group:
        if block.own is not None:
            wide = accumulation_dtype(block.left.dtype)
            left = l2_normalize(block.left[:, :dim].astype(wide))
            right = l2_normalize(block.right[:, :dim].index_select(block.own.clip(min=0)).astype(wide))
            here = paddle.where(block.own < 0, paddle.full_like(left[:, 0], -2.0), (left * right).sum(axis=1))
            cosines = here if cosines is None else paddle.maximum(cosines, here)
    return cosines


def prefix_groups(groups: Sequence[Sequence[Block]], dim: int, margin: float | None) -> list[list[Block]]:
    """`unit_prefixes` with the margin rule's limits at this prefix.

    Raises:
        ValueError: a block has a limit, and `margin` is None.
    """
    result = []
    for group, unit in zip(groups, unit_prefixes(groups, dim), strict=True):
        if any(block.limit is not None for block in group):
            if margin is None:
                raise ValueError("matryoshka: blocks with a limit need Matryoshka(margin=...), to have one per prefix")
            limit = own_cosines(group, dim) + margin
            unit = [b if b.limit is None else dataclasses.replace(b, limit=limit) for b in unit]
        result.append(unit)
    return result


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
