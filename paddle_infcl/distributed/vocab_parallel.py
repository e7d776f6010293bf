# SPDX-License-Identifier: Apache-2.0
"""Label log-probabilities with the vocabulary split over a tensor-parallel group: two numbers per row travel.

Every process of the group holds the same hidden states and labels, and its part of the output layer's weight. Each
computes its shard's terms (`linear_label_terms`), gathers the others', and merges them: the same log-probabilities on
every process. Since the loss behind them is the same everywhere as well, the backward pass of the gather is a
process's own slice, without communication; each process then holds its share of the gradient of the hidden states, and
those are summed over the group, as a column-parallel layer does.
"""

from __future__ import annotations

import paddle
import paddle.distributed as dist
from paddle import Tensor
from paddle.autograd import PyLayer

from paddle_infcl.functional.linear_logprobs import linear_label_terms, merge_label_terms


def vocab_parallel_logprobs_of_labels(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    group,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    transposed_weight: bool = False,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """`linear_logprobs_of_labels` over a group of which process r holds the r-th part of the vocabulary.

    Args:
        hidden: [..., T, D], the same on every process of the group.
        weight: [V_r, D] (or [D, V_r] with `transposed_weight`), this process's part; parts may differ in size.
        labels: [..., T] or [..., T - 1] in the whole vocabulary, the same on every process. A label that no process
            holds has log-probability -inf.
        group: a group of paddle.distributed (PaddleNLP's: ``hcg.get_model_parallel_group()``); all processes of it
            call this together.
        others: as in `linear_logprobs_of_labels`; bias is this process's [V_r].

    Returns:
        log-probabilities with the shape of `labels`, the same on every process. Gradients are right when every process
        derives the same loss from them: each one's for its weight and bias, and the whole one for `hidden`.
    """
    rank, world = group.rank, group.nranks
    sizes = paddle.zeros([world], dtype="int64")
    sizes[rank] = weight.shape[1 if transposed_weight else 0]
    dist.all_reduce(sizes, group=group)
    own, others = linear_label_terms(
        _Replicated.apply(hidden, group),
        weight,
        labels,
        shard_start=int(sizes[:rank].sum()),
        bias=bias,
        temperature=temperature,
        transposed_weight=transposed_weight,
        backend=backend,
        memory_budget=memory_budget,
    )
    terms = _GatherTerms.apply(paddle.stack([own, others]), group)
    return merge_label_terms([(pair[0], pair[1]) for pair in terms.unbind(0)])


class _Replicated(PyLayer):
    """The tensor itself; backward sums its gradient over the group."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return paddle.assign(tensor)

    @staticmethod
    def backward(ctx, gradient):
        # In float32: gloo and few-bit sums do not go together, and the shares differ in size.
        total = gradient.astype("float32") if gradient.dtype != paddle.float64 else gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total.astype(gradient.dtype)


class _GatherTerms(PyLayer):
    """[2, ...] of every process as [W, 2, ...]; backward is a process's own slice."""

    @staticmethod
    def forward(ctx, terms, group):
        ctx.rank = group.rank
        gathered: list[Tensor] = []
        dist.all_gather(gathered, terms, group=group)
        return paddle.stack(gathered)

    @staticmethod
    def backward(ctx, gradient):
        return gradient[ctx.rank].clone()
