# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels under given logits, without a copy of the logits.

With s = 1/T, y the label of a row, and the label's own entry kept out of the sum:

    lse_others = logsumexp_{j != y} s z_j               logprob = -softplus(lse_others - s z_y)
    p_j        = exp(s z_j - lse)                       entropy = lse - sum_j p_j s z_j
    dz_j       = -s p_j (g + h (log p_j + entropy))     dz_y    = s (g (1 - p_y) - h p_y (log p_y + entropy))

for incoming gradients g of the log-probability and h of the entropy. 1 - p_y is -expm1(logprob): it keeps its digits
when p_y is near 1. Kept for the backward pass are a few numbers per row; the probabilities are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl import kernels
from paddle_infcl.functional.options import check_temperature
from paddle_infcl.functional.tiles import accumulation_dtype
from paddle_infcl.log import warn_once

_CPU_CHUNK = 4 * 2**20
_DEVICE_CHUNK = 64 * 2**20
_SUMMED = 4096
# Stands for -inf where that would meet a factor of 0; its exponential is 0.
_LOWEST = -1e4


def logprobs_of_labels(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    inplace_backward: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(logits / T) at the labels, and optionally the entropy of the distribution.

    Neither pass stores anything of the size of the logits but their gradient, and the logits are read where they lie:
    ``logits[:, :-1]`` is not copied. Better still, hand over all the logits with ``labels[:, 1:]``, one label less:
    then the gradient needs no padding either.

    Args:
        logits: [..., T, V], any floating dtype, any strides.
        labels: [..., T], integers; or [..., T - 1]: the logits at the last position then belong to no label, and
            their gradient is 0.
        ignore_index: positions with this label give log-probability 0, entropy 0 and gradient 0.
        temperature: T > 0, a number; to learn it, divide the logits by it and leave this 1.
        return_entropy: also return the entropy in nats; it has a gradient.
        inplace_backward: write the gradient over the logits instead of beside them. Nothing else may need the logits
            for its own backward pass, which Paddle checks.
        backend: "paddle" (any device), "triton" (CUDA; one kernel that reads the logits once), or "auto": Triton
            where it runs.

    Returns:
        log-probabilities with the shape of `labels`, float32 (float64 for float64 logits); with `return_entropy` the
        pair (log-probabilities, entropies). A label whose logit is -inf has log-probability -inf.

    Raises:
        ValueError: shapes do not fit, a label is outside 0 ... V - 1, the temperature is no positive and finite
            number, or the backend's name is unknown. On a GPU the Triton backend does not wait for the device to look
            at the labels: there a label out of range gives NaN at its position, in the result and in the gradient.
        TypeError: logits are not floating point, or labels not integers.
        BackendError: backend="triton" cannot run on these tensors.

    The case this is for is that of trlx's and TRL's functions of the same purpose (`logprobs_of_labels`,
    `selective_log_softmax`), which copy the logits or loop over rows.
    """
    check_logits(logits, labels)
    check_temperature(temperature, "to learn it, divide the logits by it")
    if choose(backend, logits) == "triton":
        if labels.place.is_cpu_place():
            check_labels(labels, logits.shape[-1], ignore_index)
        function = kernels.load_ops()[0].logprobs_of_labels
        return function(
            logits,
            labels,
            ignore_index=ignore_index,
            temperature=temperature,
            return_entropy=return_entropy,
            inplace_backward=inplace_backward,
        )
    check_labels(labels, logits.shape[-1], ignore_index)
    plan = _Plan(labels, ignore_index, 1.0 / temperature, return_entropy, inplace_backward)
    with paddle.amp.auto_cast(enable=False):
        return _LabelLogprobs.apply(logits, plan)


@dataclass(eq=False)
class _Plan:
    """Everything but the logits. A PyLayer would take tensors in a tuple for inputs that get a gradient."""

    labels: Tensor
    ignore_index: int | None
    scale: float
    return_entropy: bool
    inplace: bool


class _LabelLogprobs(PyLayer):
    """The plain backend: some rows at a time."""

    @staticmethod
    def forward(ctx, logits, plan):
        labels, return_entropy = plan.labels, plan.return_entropy
        results = [
            _forward_chunk(logits[index], label, plan.scale, plan.ignore_index, return_entropy)
            for index, label in _label_chunks(logits, labels)
        ]
        if results:
            logprobs, top, log_sum, entropy = (
                None if part[0] is None else paddle.concat(part) for part in zip(*results, strict=True)
            )
        else:
            logprobs = top = log_sum = entropy = paddle.zeros([0], dtype=accumulation_dtype(logits.dtype))
        ctx.save_for_backward(logits)
        ctx.plan, ctx.saved = plan, (logprobs, top, log_sum, entropy)
        if return_entropy:
            return logprobs.reshape(labels.shape), entropy.reshape(labels.shape)
        return logprobs.reshape(labels.shape)

    @staticmethod
    def backward(ctx, g, h=None):
        (logits,) = ctx.saved_tensor()
        labels, scale, ignore_index, inplace = ctx.plan.labels, ctx.plan.scale, ctx.plan.ignore_index, ctx.plan.inplace
        dlogits = logits.detach() if inplace else paddle.empty(logits.shape, dtype=logits.dtype)
        row = 0
        for index, label in _label_chunks(logits, labels):
            rows = slice(row, row + label.shape[0])
            row = rows.stop
            incoming = [x if x is None else x.reshape([-1])[rows] for x in (g, h)]
            dz = _backward_chunk(
                logits[index], label, scale, ignore_index, incoming, [x if x is None else x[rows] for x in ctx.saved]
            )
            write(dlogits, index, dz.astype(logits.dtype))
        if inplace:
            dlogits._bump_inplace_version()
        if labels.shape[-1] < logits.shape[-2]:
            dlogits[..., -1, :] = 0.0
        return dlogits


def _forward_chunk(logits: Tensor, label: Tensor, scale: float, ignore_index: int | None, return_entropy: bool):
    """One chunk's log-probabilities and what its backward pass needs.

    Args:
        logits: [..., V], a slice.
        label: [rows, 1] int64, 0 ... V - 1 or ignore_index.

    Returns:
        logprobs [rows]; top [rows], the largest logit; log_sum [rows], log sum_j exp(s (z_j - top)); entropy [rows] or
        None. All in the accumulation dtype.
    """
    z, top = _accumulated(logits)
    index, ignored = _as_index(label, ignore_index)
    z = (z - top).scale_(scale)
    own = paddle.take_along_axis(z, index, 1, broadcast=False)
    z.put_along_axis_(index, paddle.full_like(own, -math.inf), 1, broadcast=False)
    if return_entropy:
        exps = paddle.exp(z)
        # -inf times 0 would be NaN.
        others_dot = row_sums(exps * z.clip(min=_LOWEST))
    else:
        exps = z.exp_()
    others = row_sums(exps)
    own_exp = paddle.exp(own)
    total = others + own_exp
    logprobs = -softplus(paddle.log(others) - own)
    entropy = None
    if return_entropy:
        entropy = paddle.log(total) - (others_dot + own_exp * own.clip(min=_LOWEST)) / total
    if ignored is not None:
        zeros = paddle.zeros_like(own)
        logprobs = paddle.where(ignored, zeros, logprobs)
        entropy = None if entropy is None else paddle.where(ignored, zeros, entropy)
    parts = (logprobs, top, paddle.log(total), entropy)
    return tuple(None if part is None else part.squeeze(1) for part in parts)


def _backward_chunk(logits, label, scale, ignore_index, incoming, saved) -> Tensor:
    """[rows, V] gradient of one chunk's logits. Arguments as in `_forward_chunk`; `incoming` are g and h [rows]."""
    g, h = (None if x is None else x.unsqueeze(1) for x in incoming)
    logprobs, top, log_sum, entropy = (None if x is None else x.unsqueeze(1) for x in saved)
    z, _ = _accumulated(logits, top)
    index, ignored = _as_index(label, ignore_index)
    if ignored is not None:
        g = paddle.where(ignored, paddle.zeros_like(g), g)
        h = None if h is None else paddle.where(ignored, paddle.zeros_like(h), h)
    z = (z - top).scale_(scale).subtract_(log_sum)
    own = -paddle.expm1(logprobs) * g
    if h is None:
        dz = z.exp_().multiply_(g * -scale)
    else:
        p = paddle.exp(z)
        factor = z.clip(min=_LOWEST).add_(entropy).multiply_(h)
        own = own - paddle.take_along_axis(p * factor, index, 1, broadcast=False)
        dz = factor.add_(g).multiply_(p).scale_(-scale)
    dz.put_along_axis_(index, own * scale, 1, broadcast=False)
    if ignored is not None and bool(ignored.any()):
        # Also where the logits of an ignored position are NaN.
        dz = dz.masked_fill(ignored, 0.0)
    return dz


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) with full relative precision; inf at inf (where a clip would stop at 3.4e38)."""
    return paddle.nn.functional.relu(x) + paddle.log1p(paddle.exp(-paddle.abs(x)))


def row_sums(x: Tensor) -> Tensor:
    """[rows, 1] sums of x [rows, n].

    As products with ones, several times faster on a CPU than a sum along a long axis; and in pieces, since either
    adds up in float32 with a relative error that reaches 1e-5 (6e-5) for 50257 entries of mixed sizes.
    """
    pieces = [x[:, start : start + _SUMMED] for start in range(0, x.shape[1], _SUMMED)]
    ones = paddle.ones([min(_SUMMED, x.shape[1]), 1], dtype=x.dtype)
    total = paddle.matmul(pieces[0], ones)
    for piece in pieces[1:]:
        total = total + paddle.matmul(piece, ones[: piece.shape[1]])
    return total


def _accumulated(logits: Tensor, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[rows, V] logits in the accumulation dtype, and their row maxima [rows, 1] (0 where all are -inf)."""
    z = logits.reshape([-1, logits.shape[-1]])
    z = z.astype(accumulation_dtype(z.dtype))
    if top is None:
        top = z.max(axis=1, keepdim=True)
        top = paddle.where(top == -math.inf, paddle.zeros_like(top), top)
    return z, top


def _as_index(label: Tensor, ignore_index: int | None) -> tuple[Tensor, Tensor | None]:
    """Labels that can be gathered with, and where they are ignored (None: nowhere)."""
    if ignore_index is None:
        return label, None
    ignored = label == ignore_index
    return paddle.where(ignored, paddle.zeros_like(label), label), ignored


def _label_chunks(logits: Tensor, labels: Tensor) -> Iterator[tuple[tuple, Tensor]]:
    """Pieces of the logits, as indices, with their labels [rows, 1] int64."""
    budget = _CPU_CHUNK if logits.place.is_cpu_place() else _DEVICE_CHUNK
    itemsize = 8 if logits.dtype == paddle.float64 else 4
    flat = labels.astype("int64").reshape([-1, 1])
    row = 0
    for index, rows in chunks(labels.shape, budget // (itemsize * logits.shape[-1])):
        yield index, flat[row : row + rows]
        row += rows


def chunks(shape: Sequence[int], rows: int) -> Iterator[tuple[tuple, int]]:
    """Cuts an array into pieces of about `rows` entries each, in their order, without merging its axes.

    Args:
        shape: of the array; at least one axis.
        rows: entries per piece; fewer than 1 counts as 1.

    Yields:
        (an index that selects the piece, the number of entries in it).
    """
    if 0 in shape:
        return
    axis, size = len(shape), 1
    while axis > 1 and size * shape[axis - 1] <= rows:
        axis -= 1
        size *= shape[axis]
    step = max(1, rows // size)
    inner = tuple(slice(0, n) for n in shape[axis:])
    for outer in np.ndindex(*shape[: axis - 1]):
        for start in range(0, shape[axis - 1], step):
            stop = min(start + step, shape[axis - 1])
            yield (*outer, slice(start, stop), *inner), (stop - start) * size


def choose(backend: str, tensor: Tensor) -> str:
    """The backend that runs: "triton" or "paddle".

    Raises:
        ValueError: the name is unknown.
        BackendError: "triton" was asked for and cannot run on the tensor; its cause is the original error.
    """
    if backend not in ("auto", "triton", "paddle"):
        raise ValueError(f"backend: {backend!r} is none of auto, triton, paddle")
    if backend == "paddle" or (backend == "auto" and tensor.dtype == paddle.float64):
        return "paddle"
    runs, reason, error = kernels.triton_status(tensor)
    if runs and tensor.dtype == paddle.float64:
        runs, reason = False, "its kernels compute in float32, and the logits are float64"
    if runs:
        return "triton"
    if backend == "triton":
        raise kernels.BackendError(f"backend 'triton' can't run: {reason}") from error
    if not tensor.place.is_cpu_place():
        warn_once(
            "triton-logprobs",
            f"log-probabilities of labels are computed in plain Paddle: {reason}. Same values, same gradients.",
        )
    return "paddle"


def write(tensor: Tensor, index, values: Tensor) -> None:
    """tensor[index] = values, through a view where there are views: assigning by index takes seven times longer."""
    view = tensor[index]
    values = values.reshape(view.shape)
    if view._is_shared_buffer_with(tensor):
        view.copy_(values, True)
    else:
        tensor[index] = values


def check_logits(logits: Tensor, labels: Tensor) -> None:
    """Refuses shapes and dtypes that do not fit; see `logprobs_of_labels`."""
    if logits.ndim < 2:
        raise ValueError(f"logits: shape [..., T, V] is needed, got {list(logits.shape)}")
    check_dtypes(labels, logits=logits)
    lead, wanted = list(logits.shape[:-1]), list(labels.shape)
    if wanted != lead and wanted != [*lead[:-1], lead[-1] - 1]:
        raise ValueError(
            f"labels: shape {wanted} does not fit logits {list(logits.shape)}; needed is {lead}, or "
            f"{[*lead[:-1], lead[-1] - 1]} when the last position has no label"
        )
    if logits.shape[-1] == 0:
        raise ValueError("logits: the vocabulary is empty")


def check_dtypes(labels: Tensor, **floats: Tensor) -> None:
    """Refuses labels that are not integers, and tensors that are not floating point."""
    for name, tensor in floats.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name}: a floating dtype is needed, got {tensor.dtype}")
    if labels.dtype not in (paddle.int64, paddle.int32, paddle.int16, paddle.int8, paddle.uint8):
        raise TypeError(f"labels: an integer dtype is needed, got {labels.dtype}")


def check_labels(labels: Tensor, V: int, ignore_index: int | None) -> None:
    """Refuses labels outside 0 ... V - 1 that are not `ignore_index`, and says where the first one is."""
    values = labels.numpy()
    wrong = (values < 0) | (values >= V)
    if ignore_index is not None:
        wrong &= values != ignore_index
    if wrong.any():
        place = [int(i) for i in np.argwhere(wrong)[0]]
        hint = "" if ignore_index is not None else "; set ignore_index to skip positions"
        first, count = int(values[tuple(place)]), int(wrong.sum())
        raise ValueError(f"labels{place} is {first}, outside 0 ... {V - 1} (such labels: {count}){hint}")
