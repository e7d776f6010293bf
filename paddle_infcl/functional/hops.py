# SPDX-License-Identifier: Apache-2.0
"""One block at a time: its log-sum-exp and its gradient, so that parts of a softmax that lie elsewhere can be merged.

With z the logits of the entries that are neither own nor dropped,

    lse_i  = log sum_j exp(z_ij)                           merged over parts by logaddexp
    P_ij   = w_i exp(z_ij - lse_i)                         lse over all parts, w the gradient that reaches it
    dleft += scale P @ right,   dright += scale P^T @ left

and the own entries, whose gradients are known in full precision without any part, by themselves (`add_own_grads`).
Here in plain Paddle operators for any device; `block_functions` takes the Triton ones where they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import paddle
from paddle import Tensor

from paddle_infcl import kernels
from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import chunk_rows
from paddle_infcl.functional.row_losses import logaddexp
from paddle_infcl.functional.streaming import reference, row_sums
from paddle_infcl.functional.tiles import accumulation_dtype, exponentials_, other_logits, own_logits

_NEGATIVE_INFINITY = float("-inf")


@paddle.no_grad()
def block_lse(block: Block, scale: Tensor, *, out: Tensor | None = None, memory_budget: int | None = None) -> Tensor:
    """The log-sum-exp of every row over the block's entries that are neither own nor dropped.

    Args:
        block: one block; `own` may be None.
        scale: one element, 1/T.
        out: [B], the log-sum-exp over other blocks, to merge with.
        memory_budget: bytes for logits held at once.

    Returns:
        [B] in the accumulation dtype; -inf where there are no entries.
    """
    dtype = accumulation_dtype(block.left.dtype)
    rows, columns = block.left.shape[0], block.right.shape[0]
    if out is None:
        out = paddle.full([rows], _NEGATIVE_INFINITY, dtype=dtype)
    if rows == 0 or columns == 0:
        return out
    left, right_t = block.left.astype(dtype), block.right.astype(dtype).T.contiguous()
    scale = scale.astype(dtype).reshape([])
    parts = []
    step = chunk_rows([[block]], memory_budget)
    for start in range(0, rows, step):
        logits = other_logits(block, left[start : start + step], right_t, scale, start)
        top = reference([logits])
        exponentials_(block, logits.subtract_(top.unsqueeze(1)), start)
        parts.append(top + paddle.log(row_sums(logits)))
        del logits
    return logaddexp(out, paddle.concat(parts))


@paddle.no_grad()
def block_grads(
    block: Block,
    scale: Tensor,
    lse: Tensor,
    weights: Tensor,
    *,
    dleft: Tensor | None = None,
    dright: Tensor | None = None,
    terms: Tensor | None = None,
    memory_budget: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds the gradients of sum_i weights_i lse_i through one block, own entries excluded.

    Args:
        block: one block.
        scale: one element, 1/T.
        lse: [B] log-sum-exp of the rows over everything but their own entries.
        weights: [B] w.
        dleft: [B, D] accumulator of the accumulation dtype, changed in place; None makes one.
        dright: [N, D] likewise.
        terms: [B] likewise, each row's part of the gradient of `scale`.
        memory_budget: bytes for logits held at once.

    Returns:
        (dleft, dright, terms).
    """
    dtype = accumulation_dtype(block.left.dtype)
    rows, columns = block.left.shape[0], block.right.shape[0]
    dleft = paddle.zeros(block.left.shape, dtype=dtype) if dleft is None else dleft
    dright = paddle.zeros(block.right.shape, dtype=dtype) if dright is None else dright
    terms = paddle.zeros([rows], dtype=dtype) if terms is None else terms
    if rows == 0 or columns == 0:
        return dleft, dright, terms
    left, right = block.left.astype(dtype), block.right.astype(dtype)
    right_t, scale = right.T.contiguous(), scale.astype(dtype).reshape([])
    # A row without any entry: exp(-inf - 0) = 0.
    lse = paddle.where(lse == _NEGATIVE_INFINITY, paddle.zeros_like(lse), lse)
    step = chunk_rows([[block]], memory_budget)
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        P = other_logits(block, left[part], right_t, scale, start)
        exponentials_(block, P.subtract_(lse[part].unsqueeze(1)), start)
        P.multiply_((weights[part] * scale).unsqueeze(1))
        product = paddle.matmul(P, right)
        dleft[part].add_(product)
        terms[part].add_((product * left[part]).sum(axis=1) / scale)
        dright.addmm_(P.T.contiguous(), left[part])
        del P
    return dleft, dright, terms


@paddle.no_grad()
def own_of_block(block: Block, scale: Tensor) -> Tensor:
    """[B] scale * <left_i, right_own(i)>, -inf where the block doesn't hold the row's own entry."""
    dtype = accumulation_dtype(block.left.dtype)
    rows = block.left.shape[0]
    if block.own is None or rows == 0 or block.right.shape[0] == 0:
        return paddle.full([rows], _NEGATIVE_INFINITY, dtype=dtype)
    left, right = block.left.astype(dtype), block.right.astype(dtype)
    return own_logits(block, left, right, scale.astype(dtype).reshape([]), 0)


@paddle.no_grad()
def add_own_grads(block: Block, scale: Tensor, weights: Tensor, dleft: Tensor, dright: Tensor, terms: Tensor) -> None:
    """Adds the gradients of sum_i weights_i own_i, own_i the own logits of a block; changes the last three in place.

    Args:
        block: a block with `own`.
        scale: one element, 1/T.
        weights: [B].
        dleft: [B, D]; dright: [N, D]; terms: [B]; as for `block_grads`.
    """
    dtype = accumulation_dtype(block.left.dtype)
    if block.left.shape[0] == 0 or block.right.shape[0] == 0:
        return
    own = block.own.clip(min=0)
    weights = paddle.where(block.own < 0, paddle.zeros_like(weights), weights)
    left, right = block.left.astype(dtype), block.right.astype(dtype).index_select(own)
    terms.add_(weights * (left * right).sum(axis=1))
    factors = (weights * scale.astype(dtype).reshape([])).unsqueeze(1)
    dleft.add_(right * factors)
    dright.index_add_(own, 0, left * factors)


def add(total: Tensor, part: Tensor) -> None:
    """total += part."""
    total.add_(part)


def total_gradient(like: Tensor, as_left: Tensor | None, as_right: Tensor | None) -> Tensor:
    """The gradient of a tensor in its dtype, from what it has as a left and as a right side; both are given up."""
    if as_left is None and as_right is None:
        return paddle.zeros_like(like)
    if as_left is None or as_right is None:
        return (as_right if as_left is None else as_left).astype(like.dtype)
    return as_left.add_(as_right).astype(like.dtype)


@dataclass(frozen=True)
class BlockFunctions:
    """What a loss whose columns lie on several devices is made of; each is the function of that name in this module.

    Attributes:
        lse: `block_lse`.
        grads: `block_grads`.
        own: `own_of_block`.
        add_own: `add_own_grads`.
        add: `add`.
        total: `total_gradient`.
    """

    lse: Callable
    grads: Callable
    own: Callable = own_of_block
    add_own: Callable = add_own_grads
    add: Callable = add
    total: Callable = total_gradient


def block_functions(backend: str, tensor: Tensor) -> BlockFunctions:
    """The functions of the backend that `kernels.choose_backend` picks for a tensor."""
    if kernels.choose_backend(backend, tensor) == "triton":
        return BlockFunctions(*kernels.triton_block_functions())
    return BlockFunctions(block_lse, block_grads)
