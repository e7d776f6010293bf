# SPDX-License-Identifier: Apache-2.0
"""`functional.info_nce` over the columns of all processes, by either strategy.

- gather: every process gets all columns and computes its own rows. One pass of the backend over everything, the least
  bytes; memory for the columns of all processes and their gradients.
- ring: columns travel, see `ring`. Memory of one process's columns; two passes, and more bytes, most of which travel
  during the work.
- local: no columns but the process's own.

Whichever, the mean over the processes is the loss of the whole batch, and so are averaged gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from paddle_infcl.distributed.columns import Layout, meet, numbered_owners, with_columns
from paddle_infcl.distributed.exchange import Exchange
from paddle_infcl.distributed.gather import gather_constants, gather_rows, row_counts
from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.distributed.ring import RingPlan, ring_counts, ring_loss
from paddle_infcl.functional.blocks import Block, check_groups
from paddle_infcl.functional.contrastive import as_scale, info_nce
from paddle_infcl.functional.counting import count_negatives
from paddle_infcl.functional.hops import block_functions
from paddle_infcl.functional.matryoshka import Matryoshka, prefix_groups
from paddle_infcl.functional.row_losses import InfoNCE, RowLoss
from paddle_infcl.functional.smoothing import check_smoothing
from paddle_infcl.functional.tiles import accumulation_dtype
from paddle_infcl.log import logger

STRATEGIES = ("auto", "gather", "ring", "local")
# Gathered columns with their gradients may take so many bytes before `auto` turns to the ring. The same number on all
# processes, whatever memory each has: they must come to the same decision. A million bf16 vectors of 1024 take 8 GB.
GATHER_LIMIT = {"cpu": 2 * 2**30, "device": 8 * 2**30}

_told: set[str] = set()


def check_strategy(strategy: str) -> None:
    """Raises ValueError: no such strategy."""
    if strategy not in STRATEGIES:
        raise ValueError(f"negatives_strategy: {strategy!r} is none of {', '.join(STRATEGIES)}")


def gathered_bytes(layout: Layout) -> int:
    """What a process holds for the gathered columns: themselves, their gradients, and the sums of these."""
    total = 0
    for k, tensor in enumerate(layout.entries):
        rows = sum(counts[k] for counts in layout.counts)
        wide = 8 if tensor.dtype == paddle.float64 else 4
        each = 2 * tensor.element_size() + wide if k < layout.rights else tensor.element_size()
        total += rows * (tensor.shape[1] if tensor.ndim > 1 else 1) * each
    return total


def choose_strategy(strategy: str, layout: Layout, rank: int = 0) -> str:
    """The strategy, gather or ring; says once what "auto" took, and why."""
    if strategy != "auto":
        return strategy
    on_cpu = not layout.entries or layout.entries[0].place.is_cpu_place()
    limit, size = GATHER_LIMIT["cpu" if on_cpu else "device"], gathered_bytes(layout)
    chosen = "gather" if size <= limit else "ring"
    if chosen not in _told and rank == 0:
        _told.add(chosen)
        logger.info(
            f"negatives_strategy: auto takes {chosen}: gathered from {len(layout.rows)} processes, passages and their "
            f"gradients take {size / 2**20:,.0f} MiB on each; up to {limit / 2**20:,.0f} MiB it gathers"
        )
    return chosen


def gathered_groups(groups: Sequence[Sequence[Block]], layout: Layout, ranks: Ranks) -> list[list[Block]]:
    """The blocks of one process with the columns of all.

    Args:
        groups: blocks whose rows are numbered over all processes (`columns.numbered_owners`).
        layout: from `columns.meet`.
        ranks: who takes part.
    """
    counts = [[line[k] for line in layout.counts] for k in range(len(layout.entries))]
    r = layout.rights
    gathered = gather_rows(layout.entries[:r], ranks, counts[:r], layout.differentiates)
    gathered += [gather_constants(t, ranks, c) for t, c in zip(layout.entries[r:], counts[r:], strict=True)]

    def moved(column: Tensor | None, right: int) -> Tensor | None:
        if column is None:
            return None
        before = sum(line[right] for line in layout.counts[: ranks.rank])
        return paddle.where(column < 0, column, column + before)

    def at(g: int, b: int, block: Block) -> Block:
        if block.local:
            return block
        right = layout.places[g, b, "right"]
        own, self_column = moved(block.own, right), moved(block.self_column, right)
        return with_columns(block, lambda name: gathered[layout.places[g, b, name]], own=own, self_column=self_column)

    return [[at(g, b, block) for b, block in enumerate(group)] for g, group in enumerate(groups)]


def global_info_nce(
    groups: Sequence[Sequence[Block]],
    *,
    temperature: float | Tensor,
    ranks: Ranks,
    strategy: str = "auto",
    row_weights: float | Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
    row_loss: RowLoss | None = None,
    label_smoothing: float = 0.0,
    matryoshka: Matryoshka | None = None,
) -> Tensor:
    """This process's part of the loss of all: its rows, against the columns of all processes.

    Args:
        groups: as for `functional.info_nce`, over this process's tensors. All processes list the same blocks; the
            numbers of rows and columns may differ, and be 0.
        temperature: T; a tensor of one element gets this process's part of its gradient.
        ranks: the processes that share the batch. All must call, and run the backward pass if one does.
        strategy: "gather", "ring", "local" or "auto".
        row_weights: w, a float or [B]; None is 1 / total rows. The mean over processes of the results is then the sum
            over all rows of w_i loss_i.
        backend, memory_budget: as for `functional.info_nce`.
        row_loss, label_smoothing: as for `functional.info_nce`.
        matryoshka: as for `functional.info_nce`; columns are gathered once for all prefixes, and go round the ring
            once for each.

    Returns:
        0-d: W times the sum over own rows of w_i loss_i.

    Raises:
        ValueError: a malformed block, an unknown strategy, one that can't do what is asked, or processes that
            disagree about what they share.
    """
    check_strategy(strategy)
    check_smoothing(label_smoothing)
    rows = check_groups(groups)
    options = {"backend": backend, "memory_budget": memory_budget}
    options |= {} if row_loss is None else {"row_loss": row_loss}
    options |= {"label_smoothing": label_smoothing} if label_smoothing else {}
    prefixes = {} if matryoshka is None else {"matryoshka": matryoshka}
    if ranks.world == 1 or strategy == "local":
        total = sum(row_counts(rows, ranks)) if ranks.world > 1 else rows
        weights = ranks.world * (1.0 / max(total, 1) if row_weights is None else row_weights)
        return info_nce(groups, temperature=temperature, row_weights=weights, **options, **prefixes)
    scale = as_scale(temperature, groups[0][0].left.dtype)
    layout = meet(groups, ranks, scale)
    weights = ranks.world * (1.0 / max(sum(layout.rows), 1) if row_weights is None else row_weights)
    own_groups, groups = groups, numbered_owners(groups, layout, ranks.rank)
    if choose_strategy(strategy, layout, ranks.rank) == "gather":
        gathered = gathered_groups(groups, layout, ranks)
        return info_nce(gathered, temperature=temperature, row_weights=weights, **options, **prefixes)
    if matryoshka is not None:
        terms = [
            part_weight
            * global_info_nce(
                prefix_groups(own_groups, dim, matryoshka.margin),
                temperature=temperature,
                ranks=ranks,
                strategy="ring",
                row_weights=row_weights,
                **options,
            )
            for dim, part_weight in matryoshka.by_width(groups[0][0].left.shape[1])
        ]
        return sum(terms[1:], terms[0])
    plan = _ring_plan(groups, layout, ranks, scale, weights, row_loss, backend, memory_budget, label_smoothing)
    return ring_loss(plan, scale)


def _ring_plan(
    groups: Sequence[Sequence[Block]],
    layout: Layout,
    ranks: Ranks,
    scale: Tensor,
    weights: float | Tensor,
    row_loss: RowLoss | None,
    backend: str,
    memory_budget: int | None,
    label_smoothing: float = 0.0,
) -> RingPlan:
    first = groups[0][0].left
    dtype = accumulation_dtype(first.dtype)
    weights = weights.astype(dtype) if isinstance(weights, Tensor) else paddle.full([first.shape[0]], weights, dtype)
    # The dense backend's promise is one array for all logits: of a step, here.
    budget = 2**62 if backend == "dense" else memory_budget
    functions = block_functions(backend, first)
    plan = RingPlan(
        groups, layout, Exchange(ranks), functions, [InfoNCE()] * len(groups), weights / len(groups), budget,
        label_smoothing,
    )  # fmt: skip
    if row_loss is not None:
        counts = ring_counts(plan)
        plan.row_losses = [
            row_loss.bind(group, scale.detach(), budget, counts=n) for group, n in zip(groups, counts, strict=True)
        ]
    return plan


@paddle.no_grad()
def global_counts(
    group: Sequence[Block], *, ranks: Ranks, strategy: str = "auto", memory_budget: int | None = None
) -> Tensor:
    """`functional.count_negatives` over the columns of all processes.

    Args:
        group: the blocks of one softmax, over this process's tensors.
        ranks, strategy, memory_budget: as for `global_info_nce`; all processes must call.

    Returns:
        [B] float32.
    """
    check_groups([group])
    if ranks.world == 1 or strategy == "local":
        return count_negatives(group, memory_budget)
    layout = meet([group], ranks, paddle.ones([]))
    groups = numbered_owners([group], layout, ranks.rank)
    if choose_strategy(strategy, layout, ranks.rank) == "gather":
        groups = gathered_groups(groups, layout, ranks)
        return count_negatives(groups[0], memory_budget) if layout.rows[ranks.rank] else paddle.zeros([0])
    plan = _ring_plan(groups, layout, ranks, paddle.ones([]), 1.0, None, "paddle", memory_budget)
    return ring_counts(plan)[0]
