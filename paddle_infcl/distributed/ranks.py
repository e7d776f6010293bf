# SPDX-License-Identifier: Apache-2.0
"""The processes that share one batch, and the few collectives that losses need from them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import paddle
import paddle.distributed as dist
from paddle import Tensor


@dataclass(frozen=True)
class Ranks:
    """The processes whose rows form one batch: data parallel x sharding, as PaddleNLP's Trainer builds them.

    Tensor-parallel processes hold copies of the same rows and are not among them.

    Attributes:
        groups: Paddle's communication groups, the innermost first; a gather over all of them in turn meets every
            process once. Empty for a single process.
    """

    groups: tuple = field(default=())

    @property
    def world(self) -> int:
        """W, the number of processes."""
        product = 1
        for group in self.groups:
            product *= group.nranks
        return product

    @property
    def rank(self) -> int:
        """This process's place in the order in which gathered rows stand."""
        place, stride = 0, 1
        for group in self.groups:
            place += stride * group.rank
            stride *= group.nranks
        return place

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """Global ranks of the processes, by `rank`. The first call is a collective."""
        ranks = paddle.to_tensor([dist.get_rank()], dtype="int64")
        for group in self.groups:
            out = paddle.empty([group.nranks * ranks.shape[0]], dtype="int64")
            dist.stream.all_gather(out, ranks, group=group)
            ranks = out
        return tuple(int(r) for r in ranks.numpy())

    @classmethod
    def current(cls) -> Ranks:
        """All processes that hold different rows in this run: of fleet's topology where there is one, else all."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls()
        from paddle.distributed import fleet

        topology = getattr(fleet.fleet, "_hcg", None)
        if topology is None:
            # Plain data parallel without fleet.
            return cls((dist.get_group(),))
        groups = (topology.get_sharding_parallel_group(), topology.get_data_parallel_group())
        return cls(tuple(group for group in groups if group is not None and group.nranks > 1))


def backend_of(group) -> str:
    """Name of the transport of a group, in capitals: "GLOO", "NCCL", ..."""
    return group.process_group.name().upper()


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Says what a failing message between processes most often means.

    Args:
        what: what is being done, "passing columns on".
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"{what} failed: {error}. Most often another process has ended, or waited longer for this one than its "
            "transport allows (gloo: 30 s): look for the first error among the logs of all processes"
        ) from error


def padded(rows: Tensor, length: int) -> Tensor:
    """[n, ...] with zero rows appended up to `length`."""
    missing = length - rows.shape[0]
    if missing == 0:
        return rows.contiguous()
    return paddle.concat([rows, paddle.zeros([missing, *rows.shape[1:]], dtype=rows.dtype)])


def sum_slices(gathered: Tensor, counts: Sequence[int], group) -> Tensor:
    """The sum over processes of `gathered` [sum(counts), ...], this process's rows of it.

    Gloo has no reduce_scatter, and its sum of fp16 overflows to inf: there everything is summed, in fp32.
    """
    rank, longest = group.rank, max(counts)
    if backend_of(group) != "GLOO":
        even = min(counts) == longest
        if longest == 0:
            return gathered
        parts = gathered if even else paddle.concat([padded(x, longest) for x in paddle.split(gathered, counts)])
        out = paddle.empty([longest, *gathered.shape[1:]], dtype=gathered.dtype)
        dist.stream.reduce_scatter(out, parts.contiguous(), group=group)
        return out if even else out[: counts[rank]]
    total = gathered.astype("float32") if gathered.dtype in (paddle.float16, paddle.bfloat16) else gathered.clone()
    dist.all_reduce(total, group=group)
    start = sum(counts[:rank])
    return total[start : start + counts[rank]].astype(gathered.dtype)
