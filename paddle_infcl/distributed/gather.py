# SPDX-License-Identifier: Apache-2.0
"""All rows of all processes, with a gradient: forward gathers, backward sums.

A passage that serves as a negative on every process gets gradient from every process, so the backward pass of a
gather is a sum over the processes (a reduce-scatter), not the process's own part of it. With each process's loss
weighted as W / total rows times the sum over its own rows, the mean over processes, which data parallel training
takes of parameter gradients, is then the gradient of the whole batch.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.distributed.ranks import Ranks, all_counts, padded, sum_slices


def _gather(rows: Tensor, counts: list[int], group) -> Tensor:
    """[n, ...] of this process -> [sum(counts), ...] of all, by rank."""
    longest = max(counts)
    if longest == 0:
        return rows
    # Into one tensor: a list of tensors costs a copy each, on some devices through the host.
    out = paddle.empty([longest * len(counts), *rows.shape[1:]], dtype=rows.dtype)
    dist.stream.all_gather(out, padded(rows, longest), group=group)
    if min(counts) == longest:
        return out
    return paddle.concat([out[k * longest : k * longest + n] for k, n in enumerate(counts)])


class _GatherRows(PyLayer):
    @staticmethod
    def forward(ctx, rows, counts, group):
        ctx.counts, ctx.group = counts, group
        return _gather(rows, counts, group)

    @staticmethod
    def backward(ctx, dgathered):
        return sum_slices(dgathered, ctx.counts, ctx.group)


def gather_rows(rows: Tensor, ranks: Ranks) -> Tensor:
    """The rows of all processes, in the order of `Ranks.rank`; gradients are summed over the processes.

    Args:
        rows: [n, ...]; n may differ between processes, and be 0.
        ranks: who takes part. All of them must call, in the same order.

    Returns:
        [sum of n, ...].
    """
    for group in ranks.groups:
        rows = _GatherRows.apply(rows, all_counts(rows.shape[0], group), group)
    return rows


def gather_constants(rows: Tensor, ranks: Ranks) -> Tensor:
    """`gather_rows` for what has no gradient: ids, guide features."""
    with paddle.no_grad():
        for group in ranks.groups:
            rows = _gather(rows, all_counts(rows.shape[0], group), group)
    return rows


def row_counts(count: int, ranks: Ranks) -> list[int]:
    """The number of rows of every process, by `Ranks.rank`."""
    counts = paddle.to_tensor([count], dtype="int64")
    return [int(c) for c in gather_constants(counts, ranks)]
