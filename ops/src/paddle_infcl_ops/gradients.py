# SPDX-License-Identifier: Apache-2.0
"""Where the gradient of a tensor is gathered: in fp32 when several products add to it, else straight in its dtype."""

from __future__ import annotations

import math

import paddle

from .dispatch import launch
from .driver import empty
from .rows import scale_kernel, scale_pair_kernel
from .views import number

_BLOCK = 4096


def fill_zeros(out) -> None:
    """out = 0; `out` is contiguous."""
    _scale(None, out, 1.0)


def scaled(x, factor, dtype):
    """x * factor as a new tensor of `dtype`; factor is a number or a tensor of one element."""
    out = empty(x.shape, dtype, x)
    _scale(x, out, factor)
    return out


def scaled_pair(x, x_dtype, y, y_dtype, factor):
    """Both `scaled`, in one launch: a small loss's backward is nothing but launches."""
    outs = [empty(t.shape, dtype, t) for t, dtype in ((x, x_dtype), (y, y_dtype))]
    sizes = [math.prod(t.shape) for t in outs]
    launch(
        scale_pair_kernel, (sum(-(-n // _BLOCK) for n in sizes),), x, outs[0], sizes[0], y, outs[1], sizes[1],
        number(factor), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return outs


def _scale(x, out, factor) -> None:
    n = math.prod(out.shape)  # `size` asks NumPy, which takes as long as a launch
    if n:
        launch(scale_kernel, (-(-n // _BLOCK),), x, out, number(factor), n, BLOCK=_BLOCK, num_warps=8)


class Gradient:
    """The gradient of one tensor [rows, D], which several blocks may add to.

    Args:
        like: the tensor.
        once: whether exactly one launch per row will write, so that no fp32 accumulator is needed.
        zeros: whether writers touch rows in no particular order, so that it has to start at zero.
    """

    def __init__(self, like, *, once: bool, zeros: bool = False):
        self.like = like
        self.once = once
        self.buffer = empty(like.shape, like.dtype if once else paddle.float32, like)
        self.written = False
        if zeros:
            fill_zeros(self.buffer)
            self.written = True

    @classmethod
    def holding(cls, like, buffer, *, written: bool = True):
        """The gradient of `like` in a buffer that is there."""
        gradient = cls.__new__(cls)
        gradient.like, gradient.once, gradient.buffer, gradient.written = like, False, buffer, written
        return gradient

    def result(self):
        """The gradient in the tensor's dtype; the accumulator is given up."""
        buffer, self.buffer = self.buffer, None
        if not self.written:
            fill_zeros(buffer)
        return buffer if buffer.dtype == self.like.dtype else scaled(buffer, 1.0, self.like.dtype)


def scaled_results(gradients, incoming):
    """What each of these holds times the incoming gradient, in its tensor's dtype; None stays None."""
    there = [g for g in gradients if g is not None]
    if len(there) == 2:
        done = scaled_pair(*(x for g in there for x in (g.buffer, g.like.dtype)), incoming)
    else:
        done = [scaled(g.buffer, incoming, g.like.dtype) for g in there]
    done = iter(done)
    return [g and next(done) for g in gradients]


def accumulators(groups, tensors, wanted, chunks, *, interleaved=False):
    """A `Gradient` per wanted tensor, else None; one that is written once needs no fp32 sums.

    A tensor on both sides of a block starts at zero; `interleaved` (chunk by chunk, not block by block), also one on
    both sides of a group.

    Args:
        groups: lists of `Similarity`, whose sources are among the tensors.
        wanted: bool per tensor.
        chunks: how many products add to the right side's gradient of a block.
    """
    of = {id(t): k for k, t in enumerate(tensors)}
    writes = [0] * len(tensors)
    both = set()
    for group in groups:
        if interleaved:
            both |= {of[id(s.left_source)] for s in group} & {of[id(s.right_source)] for s in group}
        for s in group:
            left, right = of[id(s.left_source)], of[id(s.right_source)]
            writes[left] += 1
            writes[right] += chunks(s) + (s.own is not None)
            if left == right:
                both.add(left)
    return [Gradient(t, once=writes[k] == 1, zeros=k in both) if wanted[k] else None for k, t in enumerate(tensors)]
