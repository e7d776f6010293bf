# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels from hidden states and the output matrix: the tiles of the contrastive loss.

z_ij = <hidden_i, weight_j> / T            never stored: two passes over tiles, see two_pass.py
logprob_i = -softplus(others_i - own_i)    others_i the log-sum-exp without the label, own_i its logit
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle.autograd import PyLayer

from . import one_pass, two_pass
from .chunked_logprobs import Chunked, Plan
from .driver import empty, is_interpreting, launch
from .gradients import Gradient
from .launch import Similarity, cdiv
from .rows import loss_kernel
from .views import number

_LEAST_BUDGET = 256 << 20


@dataclass(eq=False)
class _Vocabulary:
    """A block without any mask but the label's own column."""

    left: Any
    right: Any
    own: Any
    self_column: Any = None
    row_ids: Any = None
    column_ids: Any = None
    owner: Any = None
    row_offset: int = 0
    owner_rule: Any = None
    limit: Any = None
    guide: Any = None
    hardness: Any = None


def linear_logprobs_of_labels(
    hidden, weight, labels, *, bias=None, transposed_weight: bool = False, temperature: float = 1.0,
    terms: bool = False, memory_budget: int | None = None,
):  # fmt: skip
    """log softmax(hidden @ weight^T / T) at the labels.

    Args:
        hidden: [R, D] fp32, bf16 or fp16.
        weight: [V, D], same dtype.
        labels: [R] int64, 0 ... V - 1.
        bias: [V], same dtype, or None.
        transposed_weight: whether the weight is [D, V]. With it or a bias chunked_logprobs.py does the work, in fp32
            or bf16, and without `terms`.
        temperature: T.
        terms: for a shard of the vocabulary: return the two numbers per row that it adds to a log-probability. Labels
            then count from the shard's first row, and -1 is a label of another shard.
        memory_budget: bytes of scratch; None: the inputs' size, at least 256 MiB.

    Returns:
        [R] fp32, with gradients for hidden and weight; with `terms` a pair of such: the label's logit over T or -inf,
        and the log-sum-exp of the other logits.
    """
    if bias is not None or transposed_weight:
        if terms or hidden.dtype == paddle.float16:
            raise TypeError("a bias or a weight [D, V] goes with float32 or bfloat16, and not with terms")
        tensors = [hidden, weight] if bias is None else [hidden, weight, bias]
        learns = paddle.is_grad_enabled()
        wanted = [learns and t is not None and not t.stop_gradient for t in (hidden, weight, bias)]
        budget = memory_budget or max(_LEAST_BUDGET, sum(t.size * t.element_size() for t in tensors))
        plan = Plan(labels.detach().contiguous(), 1.0 / temperature, transposed_weight, budget, wanted)
        return Chunked.apply(plan, *tensors)
    layer = _Terms if terms else _Linear
    return layer.apply(hidden, weight, _Work(hidden, weight, labels, 1.0 / temperature, memory_budget))


class _Work:
    """What both layers share: the block, its first pass, and the gradients of its second."""

    def __init__(self, hidden, weight, labels, scale, memory_budget):
        learns = paddle.is_grad_enabled()
        self.wanted = [learns and not t.stop_gradient for t in (hidden, weight)]
        self.s = Similarity(_Vocabulary(hidden.detach(), weight.detach(), labels))
        self.plain_scale, self.scale = scale, number(scale)
        self.budget = memory_budget or max(_LEAST_BUDGET, sum(t.size * t.element_size() for t in (hidden, weight)))
        self.own = self.others = None

    def first_pass(self) -> None:
        self.others = empty([self.s.B], paddle.float32, self.s.left)
        two_pass.streaming_lse(self.s, self.scale, self.others, merge=False, budget=self.budget)
        self.own = one_pass.own_similarity_of(self.s, empty([self.s.B], paddle.float32, self.s.left))

    def second_pass(self, factors) -> tuple:
        # The weight's is summed in fp32: chunks of rows add to it, and labels that occur more than once.
        sides = [
            Gradient(t, once=once) if wanted else None
            for t, once, wanted in zip((self.s.left, self.s.right), (True, False), self.wanted, strict=True)
        ]
        two_pass.gradients(self.s, self.scale, *factors, left=sides[0], right=sides[1], budget=self.budget)
        return tuple(None if side is None else side.result() for side in sides)


class _Linear(PyLayer):
    @staticmethod
    def forward(ctx, hidden, weight, work):
        # Paddle ties the gradients to the tensors; the work holds them detached.
        work.first_pass()
        logprobs = empty([work.s.B], paddle.float32, hidden)
        # The interpreter hands over bare floats, and the kernel asks for the type.
        minus = paddle.full([work.s.B], -1.0) if is_interpreting() else -1.0
        launch(
            loss_kernel, (cdiv(work.s.B, 256),), work.others, work.own, work.scale, minus, 1.0, logprobs, work.s.B,
            ROWS=256,
        )  # fmt: skip
        ctx.work = work
        return logprobs

    @staticmethod
    def backward(ctx, g):
        work = ctx.work
        g = g.contiguous()
        factors = two_pass.row_factors(work.s, work.others, work.own, work.scale, g, -1.0, None)
        return work.second_pass(factors)


class _Terms(PyLayer):
    @staticmethod
    def forward(ctx, hidden, weight, work):
        # Paddle ties the gradients to the tensors; the work holds them detached.
        work.first_pass()
        ctx.work = work
        # The label's logit is scaled by Paddle: one number per row.
        return work.own * work.plain_scale, work.others.clone()

    @staticmethod
    def backward(ctx, g_own, g_others):
        work = ctx.work
        reference, factor, _, gain = two_pass.row_factors(
            work.s, work.others, None, work.scale, g_others.contiguous(), 1.0, None
        )
        return work.second_pass((reference, factor, g_own * work.plain_scale, gain))
