# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and the output matrix; the logits are never stored.

    z_ij = (<hidden_i, weight_j> + bias_j) / T
    own_i = z_{i, y(i)}        others_i = logsumexp_{j != y(i)} z_ij        logprob_i = -softplus(others_i - own_i)

(own, others) are the *terms* of a row. A shard of the vocabulary has terms of its own, and terms merge: the largest
own (-inf where a shard lacks the label) and the log-sum-exp of the others. So a vocabulary that is split over devices
needs two numbers per row and shard, see `linear_label_terms` and `merge_label_terms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl import kernels
from paddle_infcl.functional.budget import CPU_BUDGET, DEVICE_BUDGET
from paddle_infcl.functional.logprobs import (
    check_dtypes,
    check_labels,
    choose,
    row_sums,
    softplus,
    write,
)
from paddle_infcl.functional.options import check_temperature
from paddle_infcl.functional.tiles import accumulation_dtype


def linear_logprobs_of_labels(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    transposed_weight: bool = False,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """log softmax((hidden @ weight^T + bias) / T) at the labels, with gradients for hidden, weight and bias.

    Args:
        hidden: [..., T, D], any floating dtype.
        weight: [V, D] (an embedding matrix); with `transposed_weight` [D, V], as ``nn.Linear`` keeps it, not copied.
        labels: [..., T], integers; or [..., T - 1]: the hidden states at the last position then belong to no label.
        bias: [V] or None.
        ignore_index: positions with this label give 0 and no gradient.
        temperature: T > 0, a number; to learn it, divide the hidden states and the bias by it and leave this 1.
        transposed_weight: whether the weight is [D, V].
        backend: "paddle" (any device), "triton" (CUDA; logits are float32, and only some numbers per row of them are
            kept), or "auto": Triton where it runs.
        memory_budget: bytes of scratch: logits that are held at once, and on Triton the float32 sums of the gradient
            of `hidden`. None: "paddle" takes 8 MiB on a CPU, elsewhere the inputs' size, at least 256 MiB; "triton"
            no more than that, but what it needs to run within a tenth of its best speed (48 MiB, or 56 for 8192 rows
            of 4096).

    Returns:
        log-probabilities with the shape of `labels`, float32 (float64 for float64 inputs). The gradient may be
        anything: for the one case of a weighted mean, `inf_cl_loss` with ``own=labels`` saves the second pass.

    Raises:
        ValueError: shapes do not fit, a label is outside 0 ... V - 1 (on a GPU this waits for the labels), the
            temperature is no positive and finite number, the backend's name is unknown, or the budget is not positive.
        TypeError: dtypes differ, or labels are not integers.
        BackendError: backend="triton" cannot run on these tensors.
    """
    V = _check(hidden, weight, labels, bias, temperature, transposed_weight, memory_budget)
    check_labels(labels, V, ignore_index)
    rows, flat = _rows(hidden, labels)
    ignored = None
    if ignore_index is not None:
        ignored = flat == ignore_index
        flat = paddle.where(ignored, paddle.zeros_like(flat), flat)
    if _choose(backend, hidden) == "triton":
        function = kernels.load_ops()[0].linear_logprobs_of_labels
        logprobs = function(
            rows,
            weight,
            flat,
            bias=bias,
            transposed_weight=transposed_weight,
            temperature=temperature,
            memory_budget=memory_budget,
        )
    else:
        terms = _terms(rows, weight, flat, bias, temperature, transposed_weight, memory_budget)
        logprobs = merge_label_terms([terms])
    if ignored is not None:
        logprobs = paddle.where(ignored, paddle.zeros_like(logprobs), logprobs)
    return logprobs.reshape(labels.shape)


def linear_label_terms(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    shard_start: int = 0,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    transposed_weight: bool = False,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The terms that one shard of the vocabulary adds to the rows' log-probabilities.

    Args:
        hidden: [..., T, D], the same on every shard.
        weight: [V_shard, D] (or [D, V_shard]), the vocabulary from `shard_start` on; bias likewise [V_shard].
        labels: [..., T] in the whole vocabulary; those outside this shard are another shard's.
        others: as in `linear_logprobs_of_labels`.

    Returns:
        own, the label's logit over T, or -inf where this shard lacks the label; others, the log-sum-exp of this
        shard's other logits. Both with the shape of `labels`, float32, and with gradients. Each shard's gradient of
        `hidden` is its own share: the sum over shards is the gradient.
    """
    V = _check(hidden, weight, labels, bias, temperature, transposed_weight, memory_budget)
    rows, flat = _rows(hidden, labels)
    local = flat - shard_start
    local = paddle.where((local < 0) | (local >= V), paddle.full_like(local, -1), local)
    if _choose(backend, hidden) == "triton":
        function = kernels.load_ops()[0].linear_logprobs_of_labels
        own, others = function(
            rows,
            weight,
            local,
            bias=bias,
            transposed_weight=transposed_weight,
            temperature=temperature,
            terms=True,
            memory_budget=memory_budget,
        )
    else:
        own, others = _terms(rows, weight, local, bias, temperature, transposed_weight, memory_budget)
    return own.reshape(labels.shape), others.reshape(labels.shape)


def merge_label_terms(terms: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Log-probabilities from the terms of all shards.

    Args:
        terms: (own, others) of every shard, all of one shape. On several devices: one's own and those gathered.

    Returns:
        log-probabilities of that shape; -inf where no shard has the label.
    """
    own = paddle.stack([own for own, _ in terms])
    others = paddle.stack([others for _, others in terms])
    return _Merge.apply(own, others)


class _Merge(PyLayer):
    """[S, rows] terms of S shards to log-probabilities [rows]."""

    @staticmethod
    def forward(ctx, own, others):
        top = others.max(axis=0)
        top = paddle.where(paddle.isinf(top), paddle.zeros_like(top), top)
        whole = top + paddle.log(paddle.exp(others - top).sum(axis=0))
        gap = whole - own.max(axis=0)
        ctx.save_for_backward(own, others, whole, gap)
        return -softplus(gap)

    @staticmethod
    def backward(ctx, g):
        own, others, whole, gap = ctx.saved_tensor()
        coefficient = g * paddle.nn.functional.sigmoid(gap)
        down = paddle.where(others == -math.inf, others, others - whole)
        has = (own == own.max(axis=0)) & (own > -math.inf)
        return paddle.where(has, coefficient, paddle.zeros_like(own)), -coefficient * paddle.exp(down)


# --- the plain backend -----------------------------------------------------------------------------------------------


def _terms(hidden, weight, labels, bias, temperature, transposed, memory_budget) -> tuple[Tensor, Tensor]:
    """Terms in plain Paddle: hidden [rows, D], labels [rows] int64 with -1 for none."""
    learns = paddle.is_grad_enabled()
    wanted = [learns and t is not None and not t.stop_gradient for t in (hidden, weight, bias)]
    plan = _Plan(hidden, weight, labels, 1.0 / temperature, transposed, memory_budget, wanted)
    with paddle.amp.auto_cast(enable=False):
        tensors = (hidden, weight) if bias is None else (hidden, weight, bias)
        return _Terms.apply(plan, *tensors)


class _Plan:
    """Tiles of rows and columns whose logits, and whose weights where they must be cast, fit the budget."""

    def __init__(self, hidden, weight, labels, scale, transposed, memory_budget, wanted):
        self.labels, self.scale, self.transposed, self.wanted = labels, scale, transposed, wanted
        self.dtype = accumulation_dtype(hidden.dtype)
        self.R, D = hidden.shape
        self.V = weight.shape[1 if transposed else 0]
        budget = memory_budget
        if budget is None and hidden.place.is_cpu_place():
            budget = CPU_BUDGET
        elif budget is None:
            budget = max(DEVICE_BUDGET, sum(t.size * t.element_size() for t in (hidden, weight)))
        entries = max(1, budget // (8 if self.dtype == paddle.float64 else 4))
        self.columns = self.V
        if weight.dtype != self.dtype:
            self.columns = min(self.V, max(1, entries // 2 // D))
            entries //= 2
        self.rows = max(1, min(self.R, entries // self.columns))
        if entries // self.columns < 64 and self.columns > 64:
            # Few rows per product read the whole weight too often: square tiles instead.
            self.rows = max(1, min(self.R, math.isqrt(entries)))
            self.columns = max(1, min(self.columns, entries // self.rows))

    def column_tiles(self):
        return [(c, min(c + self.columns, self.V)) for c in range(0, self.V, self.columns)]

    def row_tiles(self):
        return [(r, min(r + self.rows, self.R)) for r in range(0, self.R, self.rows)]

    def weight_tile(self, weight, bias, c0, c1):
        tile = (weight[:, c0:c1] if self.transposed else weight[c0:c1]).astype(self.dtype)
        return tile, None if bias is None else bias[c0:c1].astype(self.dtype)

    def logits(self, hidden, tile, bias_tile):
        """[rows, columns], freshly allocated."""
        z = paddle.matmul(hidden, tile, transpose_y=not self.transposed)
        if bias_tile is not None:
            z.add_(bias_tile)
        return z.scale_(self.scale)

    def own(self, r0, r1, c0, c1):
        """Where the rows' labels are in a tile: (whether [rows, 1], index [rows, 1])."""
        label = self.labels[r0:r1].unsqueeze(1)
        inside = (label >= c0) & (label < c1)
        return inside, paddle.where(inside, label - c0, paddle.zeros_like(label))


class _Terms(PyLayer):
    @staticmethod
    def forward(ctx, plan, hidden, weight, bias=None):
        h = hidden.astype(plan.dtype)
        own = paddle.full([plan.R, 1], -math.inf, dtype=plan.dtype)
        top = paddle.full([plan.R, 1], -math.inf, dtype=plan.dtype)
        total = paddle.zeros([plan.R, 1], dtype=plan.dtype)
        for c0, c1 in plan.column_tiles():
            tile, bias_tile = plan.weight_tile(weight, bias, c0, c1)
            for r0, r1 in plan.row_tiles():
                z = plan.logits(h[r0:r1], tile, bias_tile)
                inside, index = plan.own(r0, r1, c0, c1)
                found = paddle.take_along_axis(z, index, 1, broadcast=False)
                write(own, slice(r0, r1), paddle.where(inside, found, own[r0:r1]))
                rest = paddle.where(inside, paddle.full_like(found, -math.inf), found)
                z.put_along_axis_(index, rest, 1, broadcast=False)
                before = top[r0:r1]
                new = paddle.maximum(before, z.max(axis=1, keepdim=True))
                safe = paddle.where(new == -math.inf, paddle.zeros_like(new), new)
                z = z.subtract_(safe).exp_()
                write(total, slice(r0, r1), total[r0:r1] * paddle.exp(before - safe) + row_sums(z))
                write(top, slice(r0, r1), new)
        top = paddle.where(top == -math.inf, paddle.zeros_like(top), top)
        log_total = paddle.log(total)
        ctx.save_for_backward(hidden, weight, bias)
        # Apart, not their sum, which has too few digits at logits of 1e4; exp(-inf) where there is nothing.
        ctx.rows = top, paddle.where(total == 0, paddle.full_like(total, math.inf), log_total)
        ctx.plan, ctx.has_bias = plan, bias is not None
        return own.squeeze(1), (top + log_total).squeeze(1)

    @staticmethod
    def backward(ctx, g_own, g_others):
        hidden, weight, bias = ctx.saved_tensor()
        plan, (top, log_total) = ctx.plan, ctx.rows
        wants_hidden, wants_weight, wants_bias = plan.wanted
        h = hidden.astype(plan.dtype)
        g_own, g_others = g_own.unsqueeze(1), g_others.unsqueeze(1)
        dhidden = paddle.zeros(hidden.shape, dtype=plan.dtype) if wants_hidden else None
        dweight = paddle.empty(weight.shape, dtype=weight.dtype) if wants_weight else None
        dbias = paddle.empty(bias.shape, dtype=bias.dtype) if wants_bias else None
        for c0, c1 in plan.column_tiles():
            tile, bias_tile = plan.weight_tile(weight, bias, c0, c1)
            dtile = paddle.zeros(tile.shape, dtype=plan.dtype) if wants_weight else None
            dbias_tile = paddle.zeros([1, c1 - c0], dtype=plan.dtype) if wants_bias else None
            for r0, r1 in plan.row_tiles():
                z = plan.logits(h[r0:r1], tile, bias_tile)
                dz = z.subtract_(top[r0:r1]).subtract_(log_total[r0:r1]).exp_().multiply_(g_others[r0:r1])
                inside, index = plan.own(r0, r1, c0, c1)
                found = paddle.take_along_axis(dz, index, 1, broadcast=False)
                dz.put_along_axis_(index, paddle.where(inside, g_own[r0:r1], found), 1, broadcast=False)
                dz = dz.scale_(plan.scale)
                if wants_hidden:
                    part = paddle.matmul(dz, tile, transpose_y=plan.transposed)
                    write(dhidden, slice(r0, r1), part.add_(dhidden[r0:r1]))
                if wants_weight:
                    a, b = (h[r0:r1], dz) if plan.transposed else (dz, h[r0:r1])
                    dtile.add_(paddle.matmul(a, b, transpose_x=True))
                if wants_bias:
                    dbias_tile.add_(paddle.matmul(paddle.ones([1, r1 - r0], dtype=plan.dtype), dz))
            if wants_weight:
                where = (slice(None), slice(c0, c1)) if plan.transposed else slice(c0, c1)
                write(dweight, where, dtile.astype(weight.dtype))
            if wants_bias:
                write(dbias, slice(c0, c1), dbias_tile.squeeze(0).astype(bias.dtype))
        grads = (None if dhidden is None else dhidden.astype(hidden.dtype), dweight)
        return (*grads, dbias) if ctx.has_bias else grads


# --- arguments -------------------------------------------------------------------------------------------------------


def _check(hidden, weight, labels, bias, temperature, transposed, memory_budget) -> int:
    """Refuses arguments that do not fit; returns V."""
    check_temperature(temperature, "to learn it, divide the hidden states and the bias by it")
    check_dtypes(labels, hidden=hidden, weight=weight)
    if hidden.ndim < 2 or weight.ndim != 2:
        raise ValueError(f"hidden [..., T, D] and weight [V, D] are needed, got {hidden.shape} and {weight.shape}")
    D, V = weight.shape if transposed else weight.shape[::-1]
    if hidden.shape[-1] != D:
        hint = "" if transposed else "; transposed_weight=True takes a weight [D, V]"
        raise ValueError(f"weight: {list(weight.shape)} does not fit hidden {list(hidden.shape)}{hint}")
    if weight.dtype != hidden.dtype or (bias is not None and bias.dtype != hidden.dtype):
        raise TypeError(f"hidden is {hidden.dtype}, weight {weight.dtype}: weight and bias must be of the same dtype")
    if V == 0:
        raise ValueError("weight: the vocabulary is empty")
    if bias is not None and list(bias.shape) != [V]:
        raise ValueError(f"bias: shape [{V}] is needed, got {list(bias.shape)}")
    lead, wanted = list(hidden.shape[:-1]), list(labels.shape)
    if wanted not in (lead, [*lead[:-1], lead[-1] - 1]):
        raise ValueError(f"labels: shape {wanted} does not fit hidden {list(hidden.shape)}: {lead}, or one less in T")
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget: a positive number of bytes is needed, got {memory_budget}")
    return V


def _rows(hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [rows, D] and labels [rows] int64; a last position without a label is cut off."""
    if labels.shape[-1] < hidden.shape[-2]:
        hidden = hidden[..., :-1, :]
    return hidden.reshape([-1, hidden.shape[-1]]), labels.reshape([-1]).astype("int64")


def _choose(backend: str, hidden: Tensor) -> str:
    if hidden.size:
        return choose(backend, hidden)
    if backend == "triton":
        raise kernels.BackendError("backend 'triton' can't run: there are no rows")
    return "paddle" if backend == "auto" else choose(backend, hidden)
