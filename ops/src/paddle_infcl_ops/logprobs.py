# SPDX-License-Identifier: Apache-2.0
"""`logprobs_of_labels`: log-probabilities of labels under given logits. Formulas: label_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle.autograd import PyLayer

from . import driver
from .label_kernels import label_backward_kernel, label_forward_kernel
from .linear_logprobs import linear_logprobs_of_labels

_DTYPES = (paddle.float32, paddle.float16, paddle.bfloat16)
_BYTES_PER_TILE = 16384


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
        return self.n1 * row, row, self.V, 1


def _tile(logits) -> dict:
    """Entries per step and warps of the kernels: 16 KiB of logits in flight per program."""
    V = logits.shape[-1]
    if driver.is_interpreting():
        # Where every step is slow: several steps for small vocabularies, few for large ones.
        return {"BLOCK": 64 if V <= 512 else 4096}
    block = _BYTES_PER_TILE // logits.element_size()
    while block > 256 and block // 2 >= V:
        block //= 2
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


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
            driver.launch(
                label_forward_kernel, (logprobs.size,),
                logits, None, labels, logprobs, top, log_sum, entropy, walk.n1, walk.n2, *walk.logits, *walk.labels,
                walk.V, plan.scale, ignore_index or 0, HAS_IGNORE=ignore_index is not None, WIDE=walk.wide,
                **_tile(logits),
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
            driver.launch(
                label_backward_kernel, (rows,),
                logits, None, labels, dlogits, logprobs, top, log_sum, entropy if h is not None else None,
                g.contiguous(), None if h is None else h.contiguous(), walk.n1, walk.n2, walk.T, *walk.logits,
                *walk.labels, *strides, walk.V, plan.scale, ignore_index or 0, HAS_IGNORE=ignore_index is not None,
                WIDE=walk.wide, **_tile(logits),
            )  # fmt: skip
        return dlogits


__all__ = ["linear_logprobs_of_labels", "logprobs_of_labels"]
