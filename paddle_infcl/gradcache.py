# SPDX-License-Identifier: Apache-2.0
"""GradCache: the contrastive loss of a whole window of micro-batches in the memory of one micro-batch.

The loss couples all rows of a batch through their representations only. With r = f(x; w) for every micro-batch x,

    dL/dw = sum over micro-batches of (dr/dw)^T (dL/dr)

so that the encoder f never needs the graph of more than one micro-batch:

    1. forward every micro-batch without a graph; keep the representations and the state of the random generators;
    2. the loss on all representations of the window, and its gradient with respect to them, once;
    3. forward every micro-batch again, with the same random numbers, and hand its rows of that gradient to backward.

Step 3 is the backward pass of the surrogate <r, dL/dr> without forming the product: r's gradient is dL/dr itself, in
r's own dtype. Gradients are the ones of a single batch of all rows, dropout included; the price is a second forward.

Source: Gao, Zhang, Han, Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import paddle
from paddle.base import core

Forward = Callable[[Any], "tuple[paddle.Tensor, paddle.Tensor]"]
Context = Callable[[], "contextlib.AbstractContextManager"]


@dataclass
class Step:
    """What one window gave.

    Attributes:
        loss: 0-d tensor without a graph, not scaled.
        rows: number of queries, B.
        columns: number of passages, N.
        targets: what the loss got beside the representations, see `window_targets`.
    """

    loss: paddle.Tensor
    rows: int
    columns: int
    targets: dict[str, paddle.Tensor] = field(repr=False)


class RandomState:
    """The state of every random generator that a forward pass may use: CPU, the current device's, fleet's tracker."""

    def __init__(self):
        self._cpu = core.default_cpu_generator().get_state()
        on_cpu = isinstance(paddle.framework._current_expected_place_(), paddle.CPUPlace)
        self._device = None if on_cpu else paddle.get_rng_state()
        tracker = _tracker()
        self._tracked = tracker.get_states_tracker() if tracker is not None else None

    def restore(self) -> None:
        """Puts the generators back."""
        core.default_cpu_generator().set_state(self._cpu)
        if self._device is not None:
            paddle.set_rng_state(self._device)
        if self._tracked is not None:
            _tracker().set_states_tracker(self._tracked)


def _tracker():
    """Fleet's tracker of named generators (tensor parallel dropout), or None where nobody registered one."""
    from paddle.distributed import fleet

    tracker = fleet.meta_parallel.get_rng_state_tracker()
    return tracker if tracker.states_ else None


def window_targets(
    window: Sequence[Mapping], q_reps: Sequence[paddle.Tensor], p_reps: Sequence[paddle.Tensor]
) -> dict[str, paddle.Tensor]:
    """The targets of the concatenated window, from those of its micro-batches.

    Args:
        window: micro-batches; `own` [b] int64 counts the passages of its own micro-batch, `q_ids` [b, K] and
            `p_ids` [n, K] int64. Without `own`, every query has n / b passages in a row, its positive first.
        q_reps: K representations [b, D].
        p_reps: K representations [n, D].

    Returns:
        `own` [B] int64, shifted to the columns of the concatenation; `q_ids` [B, K] and `p_ids` [N, K] when any
        micro-batch has ids (a micro-batch without gets -1, which matches nothing).

    Raises:
        ValueError: a micro-batch without `own` whose passages don't divide evenly among its queries, or ids of
            different widths.
    """
    own, offset = [], 0
    for index, (batch, q, p) in enumerate(zip(window, q_reps, p_reps, strict=True)):
        b, n = q.shape[0], p.shape[0]
        if batch.get("own") is not None:
            own.append(_int64(batch["own"]) + offset)
        elif b and n % b == 0 and n > 0:
            own.append(paddle.arange(b, dtype="int64") * (n // b) + offset)
        else:
            raise ValueError(
                f"micro-batch {index} has {n} passages for {b} queries and no 'own': without it every query needs the "
                "same number of passages. Give 'own', the column of each query's positive"
            )
        offset += n
    targets = {"own": paddle.concat(own)}
    for name, reps in (("q_ids", q_reps), ("p_ids", p_reps)):
        ids = [batch.get(name) for batch in window]
        widths = {1 if len(i.shape) == 1 else i.shape[1] for i in ids if i is not None}
        if len(widths) > 1:
            raise ValueError(f"{name} has {sorted(widths)} columns in the micro-batches of one window; all must agree")
        for width in widths:
            targets[name] = paddle.concat(
                [
                    paddle.full([r.shape[0], width], -1, dtype="int64")
                    if i is None
                    else _int64(i).reshape([r.shape[0], width])
                    for i, r in zip(ids, reps, strict=True)
                ]
            )
    if len(targets) == 2:
        raise ValueError(f"ids for one side only ({sorted(targets)[-1]}): both q_ids and p_ids are needed")
    return targets


def _int64(values) -> paddle.Tensor:
    return values.astype("int64") if isinstance(values, paddle.Tensor) else paddle.to_tensor(values, dtype="int64")


def _finite_mark(reps: paddle.Tensor) -> paddle.Tensor:
    """0 if all values are finite, NaN if not, whatever their sum would be."""
    return (reps.detach() * 0).sum().astype("float32")


def _check_finite(
    q_reps: Sequence[paddle.Tensor], p_reps: Sequence[paddle.Tensor], marks: Sequence[paddle.Tensor]
) -> None:
    """Raises for the first micro-batch with a NaN or inf: one reduction each, one wait for the device in all.

    Args:
        q_reps, p_reps: of all micro-batches.
        marks: `_finite_mark` of q_reps[0], p_reps[0], q_reps[1], ...
    """
    if bool(paddle.isfinite(paddle.stack(list(marks))).all()):
        return
    reps = [r for pair in zip(q_reps, p_reps, strict=True) for r in pair]
    for index, r in enumerate(reps):
        bad = (~paddle.isfinite(r.detach().astype("float32"))).any(axis=-1).numpy().nonzero()[0]
        if len(bad):
            kind = "passage" if index % 2 else "query"
            raise ValueError(
                f"micro-batch {index // 2} of {len(q_reps)}: NaN or inf in the {kind} representations "
                f"({len(bad)} of {r.shape[0]} rows, first row {bad[0]}). The weights or the inputs are broken: look "
                "at the learning rate, at fp16 overflow and at texts without any token"
            )


def _to_host(tensor: paddle.Tensor) -> paddle.Tensor:
    """In host memory; a tensor that is there stays as it is."""
    return tensor if tensor.place.is_cpu_place() else tensor.cpu()


def _to_place(tensor: paddle.Tensor, place) -> paddle.Tensor:
    """On the device `place`; a tensor that is there stays as it is."""
    return tensor if tensor.place._equals(place) else tensor._copy_to(place, True)


def _detached(reps: Sequence[paddle.Tensor], place) -> paddle.Tensor:
    joined = _to_place((paddle.concat(list(reps)) if len(reps) > 1 else reps[0]).detach(), place)
    joined.stop_gradient = False
    return joined


def window_loss(
    forward: Forward, window: Sequence[Mapping], loss: Callable, *, autocast: Context = contextlib.nullcontext
) -> Step:
    """The loss of a window without any gradient, for evaluation. Arguments and errors as for `window_step`."""
    if not window:
        raise ValueError("the window holds no micro-batch")
    with paddle.no_grad():
        q_reps, p_reps, *_ = _representations(forward, window, autocast, keep_random=False)
        targets = window_targets(window, q_reps, p_reps)
        q, p = paddle.concat(q_reps), paddle.concat(p_reps)
        return Step(loss(q, p, **targets), q.shape[0], p.shape[0], targets)


def window_step(
    forward: Forward,
    window: Sequence[Mapping],
    loss: Callable,
    *,
    scale: Callable[[paddle.Tensor], paddle.Tensor] | None = None,
    autocast: Context = contextlib.nullcontext,
    no_sync: Context = contextlib.nullcontext,
    on_rows: Callable[[int], None] | None = None,
    offload: bool = False,
) -> Step:
    """Adds the gradient of a window's loss to the parameters' gradients.

    A window of one micro-batch takes a single forward and backward pass; more take GradCache's two. The random
    generators end where one forward pass over every micro-batch leaves them: the replay ends there by itself.

    Args:
        forward: micro-batch -> (queries [b, D], passages [n, D]); called inside `autocast`.
        window: the micro-batches of one optimizer step; `own`, `q_ids`, `p_ids` are read, see `window_targets`.
        loss: (q [B, D], p [N, D], own=, q_ids=, p_ids=) -> 0-d loss; called once, outside `autocast`.
        scale: a gradient scaler's `scale`; the parameters' gradients come out scaled.
        autocast: makes the context of a forward pass.
        no_sync: makes the context in which backward must not synchronise gradients between processes (DataParallel's
            `no_sync`); used for all micro-batches but the last, so that a step synchronises once.
        on_rows: called with b after the backward pass of each micro-batch; for progress bars.
        offload: keep representations and their gradients in host memory while the encoder runs: they are on the
            device during the loss alone. Same result; it costs four copies of [B + N, D] per window.

    Returns:
        The step's loss and sizes.

    Raises:
        ValueError: an empty window, targets that don't fit, or NaN or inf in the representations.

    Example:
        >>> import paddle
        >>> encoder = paddle.nn.Linear(3, 4)
        >>> def loss(q, p, own):
        ...     z = q @ p.T
        ...     return (z.exp().sum(-1).log() - z.take_along_axis(own.unsqueeze(1), 1).squeeze(1)).mean()
        >>> window = [{"query": paddle.randn([2, 3]), "passages": paddle.randn([2, 3])} for _ in range(4)]
        >>> step = window_step(lambda batch: (encoder(batch["query"]), encoder(batch["passages"])), window, loss)
        >>> step.rows, step.columns, list(encoder.weight.grad.shape)
        (8, 8, [3, 4])
    """
    if not window:
        raise ValueError("the window holds no micro-batch")
    if len(window) == 1:
        with autocast():
            q, p = forward(window[0])
        _check_finite([q], [p], [_finite_mark(q), _finite_mark(p)])
        targets = window_targets(window, [q], [p])
        value = loss(q, p, **targets)
        (value if scale is None else scale(value)).backward()
        if on_rows is not None:
            on_rows(q.shape[0])
        return Step(value.detach(), q.shape[0], p.shape[0], targets)

    with paddle.no_grad():
        q_reps, p_reps, random_states, place = _representations(
            forward, window, autocast, keep_random=True, offload=offload
        )
    targets = window_targets(window, q_reps, p_reps)
    sizes = [(q.shape[0], p.shape[0]) for q, p in zip(q_reps, p_reps, strict=True)]
    q, p = _detached(q_reps, place), _detached(p_reps, place)
    del q_reps, p_reps
    value = loss(q, p, **targets)
    (value if scale is None else scale(value)).backward()
    value, dq, dp = value.detach(), q.grad, p.grad
    rows, columns = q.shape[0], p.shape[0]
    del q, p
    if offload:
        dq, dp = (None if g is None else _to_host(g) for g in (dq, dp))

    row = column = 0
    for index, (batch, (b, n), random_state) in enumerate(zip(window, sizes, random_states, strict=True)):
        with no_sync() if index + 1 < len(window) else contextlib.nullcontext():
            random_state.restore()
            with autocast():
                reps = forward(batch)
            _backward(reps, (dq, dp), (slice(row, row + b), slice(column, column + n)))
        del reps
        row, column = row + b, column + n
        if on_rows is not None:
            on_rows(b)
    return Step(value, rows, columns, targets)


def _representations(forward, window, autocast, *, keep_random, offload=False):
    """Step 1; checks that everything is finite. Call it without gradients.

    Returns:
        (q_reps, p_reps, states of the random generators, the place of the representations).
    """
    q_reps, p_reps, random_states, marks = [], [], [], []
    for batch in window:
        if keep_random:
            random_states.append(RandomState())
        with autocast():
            q, p = forward(batch)
        place = q.place
        marks += [_finite_mark(q), _finite_mark(p)]
        q_reps.append(_to_host(q) if offload else q)
        p_reps.append(_to_host(p) if offload else p)
    _check_finite(q_reps, p_reps, marks)
    return q_reps, p_reps, random_states, place


def _backward(reps, grads, rows) -> None:
    """Step 3 for one micro-batch: representations [b, D] with a graph, and their rows of the cached gradients."""
    # A side without a graph (a frozen encoder) or without a gradient takes no part.
    sides = [(r, g[s]) for r, g, s in zip(reps, grads, rows, strict=True) if not r.stop_gradient and g is not None]
    if sides:
        paddle.autograd.backward([r for r, _ in sides], [_to_place(g, r.place).astype(r.dtype) for r, g in sides])
