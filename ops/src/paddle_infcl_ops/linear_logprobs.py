# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and the output matrix. The logits are never stored.

    z_ij     = (<hidden_i, weight_j> + bias_j) / T
    own_i    = z_i,y(i)          others_i = log sum_{j != y(i)} exp(z_ij)          the two terms of a row
    logprob_i = -softplus(others_i - own_i)

Forward: tiles of z end in a maximum and a sum per row; two numbers per row are kept. Backward, a_i and b_i being the
gradients of own_i and others_i: for a piece of the vocabulary

    P_ij = b_i exp(z_ij - others_i), a_i at the label           tiles of z again, stored in the inputs' dtype
    dweight = P^T hidden / T,  dhidden += P weight / T,  dbias = 1^T P / T

Pieces are some rows of some columns (linear_plan.py). Only the sums of dhidden over a piece's rows are kept in fp32;
dweight is written by the first piece of rows, in its own dtype, and added to by the others. fp16 can't hold the range
of P: there it is scaled so that the largest of a and b is 2^15.
"""

from __future__ import annotations

from types import SimpleNamespace

import paddle
from paddle.autograd import PyLayer

from . import linear_plan, tuning
from .dispatch import launch
from .driver import empty, is_interpreting
from .gradients import fill_zeros, scaled
from .launch import cdiv, precision, product, upcast
from .linear_kernels import add_up_kernel, label_gradient_kernel, largest_kernel, vocabulary_kernel
from .rows import loss_kernel, merge_kernel
from .views import Rows, can_describe, contiguous_rows, describe, empty_rows, number, row_stride, rows_from, vectors

# Scratch of the forward pass: a sum and a maximum for every row and tile.
_PARTS = 32 << 20
_BLOCK = 4096


def linear_logprobs_of_labels(
    hidden, weight, labels, *, bias=None, transposed_weight: bool = False, temperature: float = 1.0,
    terms: bool = False, memory_budget: int | None = None,
):  # fmt: skip
    """log softmax((hidden @ weight^T + bias) / T) at the labels.

    Args:
        hidden: [R, D] fp32, bf16 or fp16.
        weight: [V, D], or [D, V] with `transposed_weight`, same dtype.
        labels: [R] int64, 0 ... V - 1.
        bias: [V], same dtype, or None.
        temperature: T.
        terms: for a shard of the vocabulary: return the two numbers per row that it adds to a log-probability. Labels
            then count from the shard's first row, and -1 is a label of another shard.
        memory_budget: bytes of scratch; more than the default saves up to a tenth of the backward pass. Pieces have
            2048 rows at least, whatever the budget. None: see `linear_plan.default_budget`.

    Returns:
        [R] fp32, with gradients for hidden, weight and bias; with `terms` a pair of such: the label's logit over T or
        -inf, and the log-sum-exp of the other logits.
    """
    plan = _Plan(labels.detach(), 1.0 / temperature, transposed_weight, memory_budget)
    tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
    plan.wanted = [paddle.is_grad_enabled() and t is not None and not t.stop_gradient for t in (hidden, weight, bias)]
    own, others = _Terms.apply(plan, *tensors)
    return (own, others) if terms else _Merge.apply(own, others)


class _Plan:
    """Everything but the tensors that get gradients."""

    def __init__(self, labels, scale: float, transposed: bool, budget: int | None):
        self.labels, self.scale, self.transposed, self.budget = labels.contiguous(), scale, transposed, budget
        self.wanted: list[bool] = []


class Columns(Rows):
    """A tensor from column `start` on."""

    def __init__(self, tensor, start: int):
        super().__init__(tensor, 0)
        self._bytes += start * tensor.element_size()


class _Vocabulary:
    """The operands, and the launches over any of their rows and columns."""

    def __init__(self, plan: _Plan, hidden, weight, bias):
        self.hidden, self.weight = contiguous_rows(hidden), contiguous_rows(weight)
        self.bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
        self.labels, self.transposed, self.scale = plan.labels, plan.transposed, number(plan.scale)
        self.R, self.D = hidden.shape
        self.V = weight.shape[1 if plan.transposed else 0]
        self.dtype, self.itemsize = hidden.dtype, hidden.element_size()
        self.arch, self.sms = tuning.device(hidden)
        self.fp32 = self.dtype == paddle.float32
        self.described = can_describe(self.arch, self.hidden, self.weight)
        inputs = sum(t.size * t.element_size() for t in (hidden, weight))
        self.budget = plan.budget or linear_plan.default_budget(self.R, self.D, self.itemsize, inputs)

    def tile(self, kind: str) -> tuning.Tile:
        return linear_plan.tile(kind, self.arch, self.D, self.fp32, self.described, self.bias is not None)

    def like(self, width: int) -> SimpleNamespace:
        """What `product` asks about its operands; the width of its result picks the tile."""
        return SimpleNamespace(arch=self.arch, sms=self.sms, D=width, fp32=self.fp32, dtype=self.dtype)

    def launch(self, kind, rows, columns, *, out=None, own_logit=None, others=None, gradients=(None, None), gain=None,
               parts=(None, None, None), part_stride=0):  # fmt: skip
        """One launch of the tiles over rows [r0, r1) and columns [c0, c1); `parts` and `out` are the launch's own."""
        (r0, r1), (c0, c1), tile = rows, columns, self.tile(kind)
        count = r1 - r0
        hidden, weight = rows_from(self.hidden, r0), self.weight
        strides = row_stride(self.hidden), row_stride(self.weight), 0 if out is None else row_stride(out)
        tma_out = out is not None and tile.tma_out and self.described
        if self.described:
            hidden = describe(hidden, count, self.D, strides[0], [tile.BM, tile.BK])
            shape, block = [self.V, self.D], [tile.BN, tile.BK]
            if self.transposed:
                shape, block = shape[::-1], block[::-1]
            weight = describe(weight, *shape, strides[1], block)
        if tma_out:
            out = describe(out, count, c1 - c0, strides[2], [tile.BM, tile.BN // tile.parts])
        tiles = cdiv(count, tile.BM) * cdiv(c1 - c0, tile.BN)
        part_sum, part_max, part_bias = parts
        launch(
            vocabulary_kernel, (min(tiles, tile.per_sm * self.sms) if tile.per_sm else tiles,),
            hidden, weight, self.bias, out, self.scale, rows_from(self.labels, r0), rows_from(own_logit, r0),
            rows_from(others, r0), *[rows_from(x, r0) for x in gradients], gain, part_sum, part_max, part_bias,
            count, c0, c1, self.D, *strides, part_stride,
            PROB=kind == "prob", TRANSPOSED=self.transposed, TMA=self.described, OUT_TMA=tma_out, PARTS=tile.parts,
            BM=tile.BM, BN=tile.BN, BK=tile.BK, GROUP=tile.group, FLATTEN=tile.flatten,
            PRECISION=precision(self.dtype), UPCAST=upcast(self.dtype),
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def terms(self):
        """(own [R], others [R]), fp32."""
        own, others = (empty([self.R], paddle.float32, self.hidden) for _ in range(2))
        tile = self.tile("lse")
        tiles = cdiv(self.V, tile.BN)
        rows = min(self.budget, _PARTS) // (8 * tiles) // tile.BM * tile.BM
        rows = min(self.R, max(rows, tile.BM))
        parts = vectors([tiles * rows] * 2, self.hidden)
        for r0 in range(0, self.R, rows):
            r1 = min(r0 + rows, self.R)
            self.launch("lse", (r0, r1), (0, self.V), own_logit=own, parts=(*parts, None), part_stride=rows)
            launch(
                merge_kernel, (cdiv(r1 - r0, 32),), *parts, rows_from(others, r0), r1 - r0, tiles, rows,
                MERGE=False, ROWS=32, BT=64 if self.arch else 8, num_warps=4,
            )  # fmt: skip
        return own, others

    def gradients(self, others, own_gradient, others_gradient, wanted):
        """[dhidden, dweight, dbias], None where not wanted."""
        R, V, D, fp32 = self.R, self.V, self.D, paddle.float32
        wants_hidden, wants_weight, wants_bias = wanted
        tile = self.tile("prob")
        problem = linear_plan.Problem(R, V, D, self.itemsize, self.sms, tile.BM, tile.BN, wants_hidden)
        rows, columns, splits = linear_plan.cut(problem, self.budget)
        gain = None
        if self.dtype == paddle.float16:
            gain = empty([1], fp32, others)
            launch(largest_kernel, (1,), own_gradient, others_gradient, gain, R, BLOCK=1024)
        P = empty_rows(rows, columns, self.dtype, self.hidden)
        dhidden = empty([R, D], self.dtype, self.hidden) if wants_hidden else None
        split_rows = cdiv(rows, 256) * 256 if splits > 1 else rows
        sums = empty([splits * split_rows, D], fp32, self.hidden) if wants_hidden else None
        dweight = dbias = part_bias = None
        if wants_weight:
            rounded = cdiv(R, rows) <= linear_plan.ROUNDINGS
            dweight = empty(self.weight.shape, self.dtype if rounded else fp32, self.hidden)
        if wants_bias:
            dbias = empty([V], fp32, self.hidden)
            part_bias = empty([cdiv(rows, tile.BM) * columns], fp32, self.hidden)
        for r0 in range(0, R, rows):
            r1, used, split_rows = min(r0 + rows, R), splits, 0
            hidden = rows_from(self.hidden, r0)
            for c0 in range(0, V, columns):
                c1 = min(c0 + columns, V)
                n, m = c1 - c0, r1 - r0
                self.launch("prob", (r0, r1), (c0, c1), out=P, others=others, gain=gain,
                            gradients=(own_gradient, others_gradient), parts=(None, None, part_bias),
                            part_stride=columns)  # fmt: skip
                if wants_hidden:
                    weight = Columns(self.weight, c0) if self.transposed else rows_from(self.weight, c0)
                    found = product(
                        "left", self.like(D), P, weight, sums, self.scale, M=m, N=D, K=n, gain=gain,
                        b_transposed=self.transposed, splits=used, accumulate=c0 > 0,
                    )  # fmt: skip
                    if c0 == 0:  # a short piece at the end may need fewer splits, and the sums still are in all
                        used, split_rows = found
                if wants_weight:
                    kind = "right" if r0 > 0 else "right_once"
                    ends = {"K": m, "transposed": True, "gain": gain, "accumulate": r0 > 0}
                    if self.transposed:
                        out = Columns(dweight, c0)
                        product(kind, self.like(n), hidden, P, out, self.scale, M=D, N=n, **ends)
                    else:
                        out = rows_from(dweight, c0)
                        product(kind, self.like(D), P, hidden, out, self.scale, M=n, N=D, **ends)
                if wants_bias:
                    _add_up(part_bias, rows_from(dbias, c0), self.scale, gain, cdiv(m, tile.BM), columns, n, r0 > 0)
            if wants_hidden:
                _add_up(sums, rows_from(dhidden, r0), None, None, used, split_rows * D, m * D, False)
        if R == 0:
            for zeros in (dhidden, dweight, dbias):
                if zeros is not None:
                    fill_zeros(zeros)
        return dhidden, _cast(dweight, self.dtype), _cast(dbias, self.dtype)


def _add_up(source, out, factor, gain, parts: int, part_stride: int, n: int, add: bool) -> None:
    launch(
        add_up_kernel, (cdiv(n, _BLOCK),), source, out, number(1.0) if factor is None else factor, gain, parts,
        part_stride, n, ADD=add, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def _cast(gradient, dtype):
    return gradient if gradient is None or gradient.dtype == dtype else scaled(gradient, 1.0, dtype)


class _Terms(PyLayer):
    """Arguments: plan, hidden [R, D], weight [V, D] or [D, V], and the bias [V] if there is one."""

    @staticmethod
    def forward(ctx, plan, hidden, weight, bias=None):
        own, others = _Vocabulary(plan, hidden, weight, bias).terms()
        ctx.save_for_backward(hidden, weight, bias)
        ctx.plan, ctx.others = plan, others.detach()
        return own, others

    @staticmethod
    def backward(ctx, g_own, g_others):
        tensors, plan = ctx.saved_tensor(), ctx.plan
        work = _Vocabulary(plan, *tensors)
        gradients = work.gradients(ctx.others, g_own.contiguous(), g_others.contiguous(), plan.wanted)
        return gradients[: 2 if tensors[2] is None else 3]


class _Merge(PyLayer):
    """-softplus(others - own)."""

    @staticmethod
    def forward(ctx, own, others):
        logprobs, n = empty(own.shape, paddle.float32, own), own.shape[0]
        # The interpreter hands over bare floats, and the kernel asks for the type.
        minus = paddle.full([n], -1.0) if is_interpreting() else -1.0
        launch(loss_kernel, (cdiv(n, 256),), others, own, number(1.0), minus, 1.0, logprobs, n, ROWS=256)
        ctx.save_for_backward(own, others)
        return logprobs

    @staticmethod
    def backward(ctx, g):
        own, others = ctx.saved_tensor()
        n = own.shape[0]
        gradients = [empty([n], paddle.float32, own) for _ in range(2)]
        launch(label_gradient_kernel, (cdiv(n, 256),), own, others, g.contiguous(), *gradients, n, BLOCK=256)
        return tuple(gradients)
