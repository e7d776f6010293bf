# SPDX-License-Identifier: Apache-2.0
"""All rows of all processes, with a gradient: forward gathers, backward sums.

A passage that serves as a negative on every process gets gradient from every process, so the backward pass of a
gather is a sum over the processes (a reduce-scatter), not the process's own part of it. With each process's loss
weighted as W / total rows times the sum over its own rows, the mean over processes, which data parallel training
takes of parameter gradients, is then the gradient of the whole batch.

With S bytes of rows on each of W processes, a process receives (W - 1) S forward and, with NCCL's reduce-scatter, as
much backward; it holds W S, and W times the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.distributed.ranks import Ranks, padded, sum_slices


def _gather(rows: Tensor, counts: Sequence[int], group) -> Tensor:
    """[n, ...] of this process -> [sum(counts), ...] of all, by rank."""
    longest = max(counts)
    if longest == 0:
        return paddle.zeros(rows.shape, rows.dtype)
    # Into one tensor: a list of tensors costs a copy each, on some devices through the host.
    out = paddle.empty([longest * len(counts), *rows.shape[1:]], dtype=rows.dtype)
    dist.stream.all_gather(out, padded(rows, longest), group=group)
    if min(counts) == longest:
        return out
    return paddle.concat([out[k * longest : k * longest + n] for k, n in enumerate(counts)])


class _Stages:
    """Per group the counts of its members, in the order of gathering, from the counts of all processes."""

    def __init__(self, counts: Sequence[int], ranks: Ranks):
        self._stages, counts, place = [], list(counts), ranks.rank
        for group in ranks.groups:
            n = group.nranks
            first = place // n * n
            self._stages.append((group, counts[first : first + n]))
            counts = [sum(counts[k : k + n]) for k in range(0, len(counts), n)]
            place //= n

    def gather(self, rows: Tensor) -> Tensor:
        """[n, ...] -> [sum of n, ...], in the order of `Ranks.rank`."""
        for group, counts in self._stages:
            rows = _gather(rows, counts, group)
        return rows

    def scatter_sums(self, gathered: Tensor) -> Tensor:
        """[sum of n, ...] -> this process's [n, ...] of the sum over processes."""
        for group, counts in reversed(self._stages):
            gathered = sum_slices(gathered, counts, group)
        return gathered


class _GatherRows(PyLayer):
    @staticmethod
    def forward(ctx, stages, anchor, *tensors):
        ctx.stages, ctx.wanted = stages, [not t.stop_gradient for t in tensors]
        return tuple(s.gather(t) for s, t in zip(stages, tensors, strict=True))

    @staticmethod
    def backward(ctx, *gradients):
        sums = [s.scatter_sums(g) for s, g in zip(ctx.stages, gradients, strict=True)]
        return (None, *(g if want else None for g, want in zip(sums, ctx.wanted, strict=True)))


def gather_rows(
    tensors: Sequence[Tensor], ranks: Ranks, counts: Sequence[Sequence[int]], differentiates: bool
) -> list[Tensor]:
    """The rows of all processes, in the order of `Ranks.rank`; gradients are summed over the processes.

    All tensors at once, so that the collectives of the backward pass come in the same order everywhere, whatever the
    graphs above look like.

    Args:
        tensors: [n, ...] each; n may differ between processes, and be 0.
        ranks: who takes part. All of them must call, in the same order.
        counts: per tensor n of every process, by `Ranks.rank`.
        differentiates: whether any process wants a gradient: then all take part in the backward pass, also those
            whose own rows need none.

    Returns:
        [sum of n, ...] per tensor.
    """
    anchor = paddle.zeros([1])
    anchor.stop_gradient = not differentiates
    out = _GatherRows.apply([_Stages(c, ranks) for c in counts], anchor, *tensors)
    return list(out) if isinstance(out, list | tuple) else [out]


@paddle.no_grad()
def gather_constants(rows: Tensor, ranks: Ranks, counts: Sequence[int]) -> Tensor:
    """`gather_rows` for one tensor that has no gradient: ids, guide features."""
    return _Stages(counts, ranks).gather(rows)


def row_counts(count: int, ranks: Ranks) -> list[int]:
    """The number of rows of every process, by `Ranks.rank`."""
    counts = gather_constants(paddle.to_tensor([count], dtype="int64"), ranks, [1] * ranks.world)
    return [int(c) for c in counts.numpy()]
