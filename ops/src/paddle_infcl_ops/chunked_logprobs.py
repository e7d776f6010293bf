# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities from hidden states where the tiles of the contrastive loss do not fit: a bias, or a weight [D, V].

Some rows at a time, by the framework's matrix products, in the inputs' dtype:

    forward     z = h W (+ b)             label_forward_kernel over the chunk; kept are three numbers per row
    backward    z = h W (+ b) again       label_backward_kernel writes dz over z
                dh = dz W^T               dW += h^T dz in fp32               db += 1^T dz

The logits of a chunk are rounded to the inputs' dtype, as the dense loss rounds them; the tiles do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import paddle
from paddle.autograd import PyLayer

from . import tuning
from .driver import empty, is_interpreting, launch
from .gradients import fill_zeros, scaled
from .label_kernels import label_backward_kernel, label_forward_kernel
from .launch import product
from .views import rows_from

_FEWEST_ROWS = 128
_BYTES_PER_TILE = 16384


@dataclass(eq=False)
class Plan:
    """Everything but the tensors that get gradients."""

    labels: Any
    scale: float
    transposed: bool
    budget: int
    wanted: list[bool]

    def chunks(self, hidden, V: int):
        rows = max(_FEWEST_ROWS, self.budget // (V * hidden.element_size()))
        R = hidden.shape[0]
        return [(r, min(r + rows, R)) for r in range(0, R, rows)]

    @staticmethod
    def part(hidden, r0: int, r1: int):
        """Rows r0 ... r1; where slices copy, all rows should not."""
        return hidden if (r0, r1) == (0, hidden.shape[0]) else hidden[r0:r1]

    def logits(self, hidden, weight):
        return paddle.matmul(hidden, weight, transpose_y=not self.transposed)


def tile_of(V: int, itemsize: int) -> dict:
    """Entries per step and warps of the label kernels: 16 KiB of logits in flight per program."""
    if is_interpreting():
        # Where every step is slow: several steps for small vocabularies, few for large ones.
        return {"BLOCK": 64 if V <= 512 else 4096}
    block = _BYTES_PER_TILE // itemsize
    while block > 256 and block // 2 >= V:
        block //= 2
    return {"BLOCK": block, "num_warps": max(1, min(8, block // 256))}


class Chunked(PyLayer):
    """Arguments: plan, hidden [R, D], weight [V, D] or [D, V], and the bias [V] if there is one."""

    @staticmethod
    def forward(ctx, plan, hidden, weight, bias=None):
        V = weight.shape[1 if plan.transposed else 0]
        rows = [empty([hidden.shape[0]], paddle.float32, hidden) for _ in range(3)]
        with paddle.amp.auto_cast(enable=False):
            for r0, r1 in plan.chunks(hidden, V):
                z = plan.logits(plan.part(hidden, r0, r1), weight)
                launch(
                    label_forward_kernel, (r1 - r0,), z, bias, rows_from(plan.labels, r0),
                    *[rows_from(x, r0) for x in rows], None, 1, r1 - r0, 0, 0, V, 1, 0, 0, 1, V, plan.scale, 0,
                    HAS_IGNORE=False, WIDE=False, **tile_of(V, z.element_size()),
                )  # fmt: skip
        ctx.save_for_backward(hidden, weight, bias)
        ctx.plan, ctx.rows = plan, [x.detach() for x in rows]
        return rows[0]

    @staticmethod
    def backward(ctx, g):
        (hidden, weight, bias), plan, g = ctx.saved_tensor(), ctx.plan, g.contiguous()
        V, D = weight.shape[1 if plan.transposed else 0], hidden.shape[1]
        wants_hidden, wants_weight, wants_bias = plan.wanted
        like = SimpleNamespace(D=D, fp32=hidden.dtype == paddle.float32, dtype=hidden.dtype)
        like.arch, like.sms = tuning.device(hidden)
        parts, dweight, dbias = [], None, None
        chunks = plan.chunks(hidden, V)
        if wants_weight:
            dweight = empty(weight.shape, paddle.float32, hidden)
            if not chunks:
                fill_zeros(dweight)
        with paddle.amp.auto_cast(enable=False):
            for r0, r1 in chunks:
                n, h = r1 - r0, plan.part(hidden, r0, r1)
                z = plan.logits(h, weight)
                launch(
                    label_backward_kernel, (n,), z, bias, rows_from(plan.labels, r0), z,
                    *[rows_from(x, r0) for x in ctx.rows], None, rows_from(g, r0), None, 1, n, n, 0, 0, V, 1, 0, 0, 1,
                    0, 0, V, 1, V, plan.scale, 0, HAS_IGNORE=False, WIDE=False, **tile_of(V, z.element_size()),
                )  # fmt: skip
                if wants_hidden:
                    parts.append(paddle.matmul(z, weight, transpose_y=plan.transposed))
                if wants_weight:
                    a, b, M, N = (h, z, D, V) if plan.transposed else (z, h, V, D)
                    product("right", like, a, b, dweight, 1.0, M=M, N=N, K=n, transposed=True, accumulate=r0 > 0)
                if wants_bias:
                    part = paddle.matmul(paddle.ones([1, n], dtype=z.dtype), z).squeeze(0).astype("float32")
                    dbias = part if dbias is None else dbias + part
        dhidden = None
        if wants_hidden:
            dhidden = parts[0] if len(parts) == 1 else paddle.concat(parts)
        if wants_weight and dweight.dtype != weight.dtype:
            dweight = scaled(dweight, 1.0, weight.dtype)
        if bias is None:
            return dhidden, dweight
        return dhidden, dweight, None if dbias is None else dbias.astype(bias.dtype)
