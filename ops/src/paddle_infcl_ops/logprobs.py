# SPDX-License-Identifier: Apache-2.0
"""`logprobs_of_labels`: log-probabilities of labels under given logits. Formulas: label_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle.autograd import PyLayer

from . import driver
from .label_kernels import label_backward_kernel, label_forward_kernel
from .linear_logprobs import Columns, linear_logprobs_of_labels

_DTYPES = (paddle.float32, paddle.float16, paddle.bfloat16)
# Bytes of logits that a lane loads at once, and that a step of the backward kernel takes.
_VECTOR = 16
_BYTES_PER_STEP = 4096


def logprobs_of_labels(
    logits,
    labels,
    *,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    inplace_backward: bool = False,
):
    """log softmax(logits / T) at the labels, fp32, and optionally the entropies.

    Args:
        logits: [..., T, V] fp32, fp16 or bf16, any strides; read in place.
        labels: [..., T] or [..., T - 1] integers (then the last position has no label).
        ignore_index: positions with this label give 0, and gradient 0; their logits are not read.
        temperature: T.
        return_entropy: also return entropies; they have a gradient.
        inplace_backward: write the gradient over the logits.

    Returns:
        fp32 tensor with the shape of `labels`, or a pair of them. NaN where the label is outside 0 ... V - 1.

    Raises:
        TypeError: a dtype that the kernels do not take.
        ValueError: in place, over logits whose leading axes cannot be walked with three strides.
    """
    if logits.dtype not in _DTYPES:
        raise TypeError(f"logits: {logits.dtype} is none of float32, float16, bfloat16")
    wanted = paddle.is_grad_enabled() and not logits.stop_gradient
    plan = _Plan(labels.detach(), wanted, ignore_index, 1.0 / temperature, return_entropy, inplace_backward)
    return _LabelLogprobs.apply(logits, plan)


@dataclass(eq=False)
class _Plan:
    """Everything but the logits. A PyLayer would take labels among its arguments for an input that gets a gradient."""

    labels: Any
    wanted: bool
    ignore_index: int | None
    scale: float
    return_entropy: bool
    inplace: bool


class _Walk:
    """How rows are found: the axes before T merged into two, with strides in logits and labels."""

    def __init__(self, logits, labels):
        *lead, self.T = logits.shape[:-1]
        self.n2, self.V = labels.shape[-1], logits.shape[-1]
        axes: list[list[int]] = []
        for n, s, l in zip(lead, logits.strides[:-2], labels.strides[:-1], strict=True):
            if n == 1:
                continue
            if axes and axes[-1][1] == s * n and axes[-1][2] == l * n:
                axes[-1] = [axes[-1][0] * n, s, l]
            else:
                axes.append([n, s, l])
        self.walkable = len(axes) <= 2
        axes = [[1, 0, 0]] * (2 - len(axes)) + axes
        (self.n0, *_), (self.n1, *_) = axes[-2:]
        self.logits = (axes[-2][1], axes[-2 + 1][1], *logits.strides[-2:])
        self.wide = self.V * logits.strides[-1] >= 2**31
        self.labels = (axes[-2][2], axes[-2 + 1][2], labels.strides[-1])

    def contiguous(self) -> tuple[int, int, int, int]:
        """The strides of a new tensor of the logits' shape."""
        row = self.T * self.V
        return self.n1 * row if self.n0 > 1 else 0, row if self.n1 > 1 else 0, self.V, 1


def _forward_tile(V: int, itemsize: int) -> dict:
    """Vectors per lane and step, lanes and entries per vector of the forward kernel."""
    if driver.is_interpreting():
        # Where every step is slow: several steps for small vocabularies, few for large ones.
        return {"U": 2, "LANES": 16, "VEC": 2} if V <= 512 else {"U": 4, "LANES": 256, "VEC": 4}
    vectors, warps, vec = 4, 4, _VECTOR // itemsize
    while warps > 1 and vectors * warps * 16 * vec >= V:
        warps //= 2
    while vectors > 1 and vectors * warps * 16 * vec >= V:
        vectors //= 2
    return {"U": vectors, "LANES": 32 * warps, "VEC": vec, "num_warps": warps}


def _backward_tile(V: int, itemsize: int) -> dict:
    """Entries per step of the backward kernel, whose loads run two steps ahead."""
    if driver.is_interpreting():
        return {"BLOCK": 64 if V <= 512 else 4096, "VEC": 2}
    block, vec = _BYTES_PER_STEP // itemsize, _VECTOR // itemsize
    while block > 256 and block // 2 >= V:
        block //= 2
    return {"BLOCK": block, "VEC": vec, "num_warps": max(1, min(4, block // (32 * vec)))}


def _ragged(tensor, strides) -> bool:
    """Whether rows must look for their aligned entries: not all are aligned, or not so that the compiler sees it."""
    uneven = any(x % 16 for x in (tensor.shape[-1], *strides[:-1]))
    return strides[-1] == 1 and (uneven or tensor.data_ptr() % _VECTOR != 0)


def _aligned(tensor):
    """(the tensor as if it began at the aligned address before it, entries in between)."""
    shift = tensor.data_ptr() % _VECTOR // tensor.element_size()
    return (Columns(tensor, -shift) if shift else tensor), shift


class _LabelLogprobs(PyLayer):
    @staticmethod
    def forward(ctx, logits, plan):
        labels, wanted, return_entropy, ignore_index = plan.labels, plan.wanted, plan.return_entropy, plan.ignore_index
        walk = _Walk(logits, labels)
        if not walk.walkable:
            if plan.inplace and wanted:
                raise ValueError(f"inplace_backward: logits with strides {logits.strides} cannot be walked in place")
            logits = logits.contiguous()
            labels = labels.contiguous()
            walk = _Walk(logits, labels)
        fp32, shape = paddle.float32, labels.shape
        keep = wanted or return_entropy
        logprobs = driver.empty(shape, fp32, logits)
        top, log_sum = (driver.empty(shape, fp32, logits) if keep else None for _ in range(2))
        entropy = driver.empty(shape, fp32, logits) if return_entropy else None
        if logprobs.size:
            ragged = _ragged(logits, walk.logits)
            source, shift = _aligned(logits) if ragged else (logits, 0)
            driver.launch(
                label_forward_kernel, (logprobs.size,),
                source, labels, logprobs, top, log_sum, entropy, walk.n1, walk.n2, shift, *walk.logits, *walk.labels,
                walk.V, plan.scale, ignore_index or 0, HAS_IGNORE=ignore_index is not None, WIDE=walk.wide,
                ALIGN=ragged, **_forward_tile(walk.V, logits.element_size()),
            )  # fmt: skip
        if wanted:
            ctx.save_for_backward(logits)
            # Detached: a layer must not hold its own outputs.
            ctx.rows = logprobs.detach(), top, log_sum, None if entropy is None else entropy.detach()
            ctx.plan, ctx.labels, ctx.walk = plan, labels, walk
        return (logprobs, entropy) if return_entropy else logprobs

    @staticmethod
    def backward(ctx, g, h=None):
        (logits,) = ctx.saved_tensor()
        plan, labels, walk, ignore_index = ctx.plan, ctx.labels, ctx.walk, ctx.plan.ignore_index
        logprobs, top, log_sum, entropy = ctx.rows
        if plan.inplace:
            dlogits, strides = logits.detach(), walk.logits
            dlogits._bump_inplace_version()
        else:
            dlogits, strides = driver.empty(logits.shape, logits.dtype, logits), walk.contiguous()
        rows = walk.n0 * walk.n1 * walk.T
        if rows:
            tile = _backward_tile(walk.V, logits.element_size())
            ragged = walk.logits[-1] == 1 and (_ragged(logits, walk.logits) or _ragged(dlogits, strides))
            (source, shift), (out, out_shift) = (_aligned(x) if ragged else (x, 0) for x in (logits, dlogits))
            apart = (shift - out_shift, *(x - y for x, y in zip(walk.logits, strides, strict=True)))
            driver.launch(
                label_backward_kernel, (rows,),
                source, labels, out, logprobs, top, log_sum, entropy if h is not None else None, g.contiguous(),
                None if h is None else h.contiguous(), walk.n1, walk.n2, walk.T, shift, *walk.logits, *walk.labels,
                out_shift, *strides, walk.V, plan.scale, ignore_index or 0, HAS_IGNORE=ignore_index is not None,
                WIDE=walk.wide, ALIGN=ragged, SAME=not any(x % tile["VEC"] for x in apart),
                **tile,
            )  # fmt: skip
        return dlogits


__all__ = ["linear_logprobs_of_labels", "logprobs_of_labels"]
