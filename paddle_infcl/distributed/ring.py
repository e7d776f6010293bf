# SPDX-License-Identifier: Apache-2.0
"""The ring: columns travel from process to process, and their gradients with them; memory stays that of one process.

W processes stand in a ring, each with the columns of its shard. In W steps every process sees every shard:

    step t: process r holds shard (r - t) mod W; while it works on it, the shard goes on to process r + 1

Forward, the log-sum-exp of the rows is merged step by step. Backward, the shards go round a second time. A shard's
gradient sets out at its first stop, process s + 1, goes along from stop to stop, each adding its part, and arrives at
home from process s - 1, where the part of the first step has been waiting. So shards and gradients are passed on
W - 1 times each: with S bytes of columns and G of gradients a process sends

    2 (W - 1) S + (W - 1) G    for a loss with gradient,    (W - 1) S    for a loss without.

A gradient can leave only when the work on it is done. Large shards are therefore worked on in two halves: one half's
gradient travels during the work on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import paddle
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.distributed.columns import Layout, with_columns
from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.budget import distinct_sides
from paddle_infcl.functional.counting import count_negatives
from paddle_infcl.functional.hops import BlockFunctions
from paddle_infcl.functional.smoothing import EvenShare
from paddle_infcl.functional.tiles import accumulation_dtype

# Shards of at least so many columns are worked on in two halves.
_FEWEST_TO_HALVE = 512


class Hop(NamedTuple):
    """One step of a process.

    Attributes:
        step: 0 is the work on the process's own shard.
        shard: whose columns are here.
        arriving: whose columns arrive during the step; None in the last one.
        gradient_arriving: whose gradient arrives after the step's, in exchange for the one of `shard`; None in step 0.
    """

    step: int
    shard: int
    arriving: int | None
    gradient_arriving: int | None


def schedule(place: int, world: int) -> list[Hop]:
    """The steps of the process at a place of a ring. It sends what it holds to the next, who expects just that."""
    return [
        Hop(
            step,
            (place - step) % world,
            (place - step - 1) % world if step + 1 < world else None,
            (place - step - 1) % world if step else None,
        )
        for step in range(world)
    ]


def bytes_sent(world: int, column_bytes: int, gradient_bytes: int) -> int:
    """What a process sends for one loss with gradient, from the bytes of a process's columns and their gradients."""
    return (world - 1) * (2 * column_bytes + gradient_bytes)


def part_of(columns: int, k: int, parts: int) -> slice:
    """Part k of a shard whose gradient travels in so many parts, 1 or 2; of two, small shards have all in part 0."""
    middle = columns if parts == 1 or columns < _FEWEST_TO_HALVE else columns // 2 // 128 * 128
    return slice(0, middle) if k == 0 else slice(middle, columns)


class RingPlan:
    """Everything that the sweeps of one loss need.

    An object on purpose: Paddle looks into tuples and lists of arguments for tensors to differentiate.

    Args:
        groups: blocks over this process's tensors, rows numbered over all (`columns.numbered_owners`).
        layout: of these blocks.
        exchange: has `place`, `world` and `start`, see `exchange.Exchange`.
        functions: of the backend.
        row_losses: one per group, see `functional.row_losses`.
        weights: [B] weights of the rows within one group.
        memory_budget: bytes for logits held at once.
        label_smoothing: e, see `functional.smoothing`; candidates are counted and added up in the forward sweep.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Block]],
        layout: Layout,
        exchange: Any,
        functions: BlockFunctions,
        row_losses: Sequence[Any],
        weights: Tensor,
        memory_budget: int | None,
        label_smoothing: float = 0.0,
    ):
        self.groups, self.layout, self.exchange, self.functions = groups, layout, exchange, functions
        self.row_losses, self.weights, self.memory_budget = row_losses, weights, memory_budget
        self.label_smoothing = label_smoothing
        self.even = [EvenShare(group, memory_budget) for group in groups] if label_smoothing else None
        self.tensors, _ = distinct_sides(groups)
        self.rights = layout.entries[: layout.rights]
        self.hops = schedule(exchange.place, exchange.world)
        largest = max((n for counts in layout.counts for n in counts[: layout.rights]), default=0)
        self.parts = 1 if largest < _FEWEST_TO_HALVE else 2

    def travel(self) -> Iterator[tuple[Hop, list[Tensor]]]:
        """Yields the steps, each with the columns that are here; the next ones are on their way meanwhile."""
        here = [t.detach().contiguous() for t in self.layout.entries]
        for hop in self.hops:
            if hop.arriving is None:
                yield hop, here
                continue
            counts = self.layout.counts[hop.arriving]
            coming = [paddle.empty([n, *t.shape[1:]], t.dtype) for n, t in zip(counts, here, strict=True)]
            wait = self.exchange.start(here, coming)
            yield hop, here
            wait()
            here = coming

    def at_home(self, block: Block) -> Block:
        """The block over this process's own columns, without graph."""
        return replace(block, left=block.left.detach(), right=block.right.detach())

    def at(self, hop: Hop, g: int, b: int, columns: Sequence[Tensor], k: int = -1) -> Block | None:
        """Block b of group g over the columns that are here, or part k of them; None where it has no entries.

        Own and self columns are at home, where all columns are taken at once.
        """
        block = self.groups[g][b]
        if hop.step == 0:
            moved = self.at_home(block)
        elif block.local:
            return None
        else:

            def tensor_of(name: str) -> Tensor:
                here = columns[self.layout.places[g, b, name]]
                part = slice(0, here.shape[0]) if k < 0 else part_of(here.shape[0], k, self.parts)
                return here if part.stop - part.start == here.shape[0] else here[part]

            moved = with_columns(block, tensor_of, left=block.left.detach(), own=None, self_column=None)
        return moved if moved.left.shape[0] and moved.right.shape[0] else None

    def room(self, shard: int, k: int) -> list[tuple[list[int], paddle.dtype]]:
        """Per right side of a shard, shape and dtype of part k of its gradient."""
        rooms = []
        for tensor, n in zip(self.rights, self.layout.counts[shard], strict=False):
            part = part_of(n, k, self.parts)
            rooms.append(([part.stop - part.start, tensor.shape[1]], accumulation_dtype(tensor.dtype)))
        return rooms


def ring_lse(plan: RingPlan, scale: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The forward sweep.

    Returns:
        (per group [B] log-sum-exp over the others, per group [B] own logits), in the accumulation dtype.
    """
    lse: list[Tensor | None] = [None] * len(plan.groups)
    for hop, columns in plan.travel():
        for g, group in enumerate(plan.groups):
            for b, block in enumerate(group):
                here = plan.at(hop, g, b, columns)
                if here is None:
                    continue
                lse[g] = plan.functions.lse(here, scale, out=lse[g], memory_budget=plan.memory_budget)
                if plan.even is not None:
                    plan.even[g].see(id(block.left), here)
    own = []
    for group in plan.groups:
        values = [plan.functions.own(plan.at_home(block), scale) for block in group if block.own is not None]
        for other in values[1:]:
            values[0] = paddle.maximum(values[0], other)
        own.append(values[0])
    return [paddle.full_like(o, float("-inf")) if x is None else x for x, o in zip(lse, own, strict=True)], own


def ring_counts(plan: RingPlan) -> list[Tensor]:
    """Per group [B] float32: candidates of every row that are neither its own entry nor dropped. One sweep."""
    counts = [paddle.zeros([group[0].left.shape[0]]) for group in plan.groups]
    for hop, columns in plan.travel():
        for g, group in enumerate(plan.groups):
            for b in range(len(group)):
                here = plan.at(hop, g, b, columns)
                if here is not None:
                    counts[g] += count_negatives([here], plan.memory_budget)
    return counts


def _made(sums: dict[int, Tensor], tensor: Tensor) -> Tensor:
    """The sum of a tensor's gradients, zeros to begin with."""
    if id(tensor) not in sums:
        sums[id(tensor)] = paddle.zeros(tensor.shape, accumulation_dtype(tensor.dtype))
    return sums[id(tensor)]


def ring_gradients(
    plan: RingPlan,
    scale: Tensor,
    lse: Sequence[Tensor],
    dothers: Sequence[Tensor],
    down: Sequence[Tensor],
    dmean: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The backward sweep.

    Args:
        plan: the same as for `ring_lse`.
        scale: 1/T.
        lse: per group [B], from `ring_lse`.
        dothers: per group [B], gradient that reaches lse.
        down: per group [B], gradient that reaches the own logits.
        dmean: [B] gradient that reaches the mean logits of every group; with label smoothing.

    Returns:
        (per tensor of plan.tensors its gradient, 0-d gradient of scale).
    """
    dleft: dict[int, Tensor] = {}  # by id of the tensor
    dright: dict[int, Tensor] = {}
    first = plan.groups[0][0].left
    terms = paddle.zeros([first.shape[0]], accumulation_dtype(first.dtype))

    def add(hop: Hop, columns: Sequence[Tensor], k: int, sums: dict[int, Tensor]) -> None:
        """Adds a step's part; `sums` are those of the columns that are here, by id at home, by entry elsewhere."""
        nonlocal terms
        for g, group in enumerate(plan.groups):
            for b, block in enumerate(group):
                here = plan.at(hop, g, b, columns, k)
                if here is None:
                    continue
                key = id(block.right) if hop.step == 0 else plan.layout.places[g, b, "right"]
                dleft[id(block.left)], sums[key], terms = plan.functions.grads(
                    here, scale, lse[g], dothers[g], dleft=dleft.get(id(block.left)), dright=sums.get(key),
                    terms=terms, memory_budget=plan.memory_budget,
                )  # fmt: skip
                if plan.even is not None:
                    plan.even[g].add_right(id(block.left), here, scale, dmean, sums[key])

    on_the_way: list[tuple[list[Tensor], Any]] = []  # per part: gradients that come here, and the wait for them
    for hop, columns in plan.travel():
        if hop.step == 0:
            add(hop, columns, -1, dright)
            continue
        arrived, on_the_way = on_the_way, []
        for k in range(plan.parts):
            sums: dict[int, Tensor] = {}
            if arrived:
                values, wait = arrived[k]
                wait()
                sums = dict(enumerate(values))
            add(hop, columns, k, sums)
            leaving = [sums[e] if e in sums else paddle.zeros(*room) for e, room in enumerate(plan.room(hop.shard, k))]
            coming = [paddle.empty(*room) for room in plan.room(hop.gradient_arriving, k)]
            on_the_way.append((coming, plan.exchange.start(leaving, coming)))
    for k, (values, wait) in enumerate(on_the_way):  # home again
        wait()
        for tensor, value in zip(plan.rights, values, strict=True):
            n, part = tensor.shape[0], part_of(tensor.shape[0], k, plan.parts)
            if part.stop > part.start:
                sums = _made(dright, tensor)
                plan.functions.add(sums if part == slice(0, n) else sums[part], value)

    for g, group in enumerate(plan.groups):
        for block in group:
            if block.own is not None:
                sides = _made(dleft, block.left), _made(dright, block.right)
                plan.functions.add_own(plan.at_home(block), scale, down[g], *sides, terms)
    for even in plan.even or ():
        for name in even.sides:
            even.add_left(name, scale, dmean, dleft[name])
        terms.add_(dmean * even.means(scale) / scale)
    gradients = [plan.functions.total(t, dleft.get(id(t)), dright.get(id(t))) for t in plan.tensors]
    return gradients, terms.sum()


class _Ring(PyLayer):
    @staticmethod
    def forward(ctx, plan, anchor, scale, *tensors):
        wide = scale.detach()
        lse, own = ring_lse(plan, wide)
        rows = slice(0, own[0].shape[0])
        terms = [
            row_loss(x, o, rows) if rows.stop else None
            for row_loss, x, o in zip(plan.row_losses, lse, own, strict=True)
        ]
        losses = [(plan.weights * t.losses).sum() for t in terms if t is not None]
        if plan.even is not None and rows.stop:
            above = [o - even.means(wide) for o, even in zip(own, plan.even, strict=True)]
            losses += [plan.label_smoothing * (plan.weights * a).sum() for a in above]
        ctx.plan, ctx.scale, ctx.lse, ctx.terms = plan, wide, lse, terms
        ctx.wanted = [not t.stop_gradient for t in (scale, *tensors)]
        return sum(losses[1:], losses[0]) if losses else paddle.zeros([], own[0].dtype)

    @staticmethod
    def backward(ctx, dloss):
        plan, weights = ctx.plan, ctx.plan.weights * dloss.astype(ctx.plan.weights.dtype)
        none = paddle.zeros_like(weights)
        dothers = [none if t is None else weights * t.dothers for t in ctx.terms]
        e = plan.label_smoothing
        down = [none if t is None else weights * (t.down + e) for t in ctx.terms]
        gradients, dscale = ring_gradients(plan, ctx.scale, ctx.lse, dothers, down, -e * weights)
        for t in ctx.terms:
            if t is not None and t.dscale is not None:
                dscale = dscale + (weights * t.dscale).sum()
        out = [dscale.astype(ctx.scale.dtype).reshape(ctx.scale.shape), *gradients]
        return (None, *(g if want else None for g, want in zip(out, ctx.wanted, strict=True)))


def ring_loss(plan: RingPlan, scale: Tensor) -> Tensor:
    """The mean over groups of sum_i w_i loss_i over this process's rows and the columns of all.

    All processes of the ring must call, and all must run the backward pass if one does.

    Args:
        plan: groups, sizes, exchange, functions.
        scale: one element, 1/T; gets this process's part of its gradient.

    Returns:
        0-d float32 (float64 for float64 inputs).
    """
    # A process that has nothing to differentiate still passes on what others need.
    anchor = paddle.zeros([1])
    anchor.stop_gradient = not plan.layout.differentiates
    return _Ring.apply(plan, anchor, scale, *plan.tensors)
