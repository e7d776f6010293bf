# SPDX-License-Identifier: Apache-2.0
"""The operators: `info_nce` with its gradients, and the pieces of it for shards and ring hops.

    loss = mean over groups of sum_i w_i * (log-sum-exp over the group's blocks of z_ij  -  z_i,own)

`info_nce` takes one pass in bf16 and fp32 if a gradient is wanted and whole rows of a group fit the budget, else two.
See one_pass.py and two_pass.py for the formulas and for what is saved.
"""

from __future__ import annotations

import math
import sys

import paddle
import triton
from paddle.autograd import PyLayer

from . import one_pass, replay, static, tuning, two_pass
from .dispatch import launch
from .driver import empty, is_interpreting
from .gradients import Gradient, accumulators, scaled, scaled_results
from .launch import Similarity
from .rows import loss_kernel, sum_kernel
from .views import dense, number, rows_from, vectors

_DTYPES = (paddle.float32, paddle.float16, paddle.bfloat16)
_LEAST_BUDGET = 512 << 20


def as_it_is(function):
    """Keeps to_static from rewriting a function that knows static graphs itself.

    Where a graph may break (full_graph=False) it breaks here; in a full graph the function adds an operator.
    """
    marker = getattr(paddle.jit, "marker", None)
    if hasattr(marker, "force_dynamic"):
        marker.force_dynamic(function)
    return paddle.jit.not_to_static(function)


@as_it_is
def info_nce(groups, *, scale, row_weights, memory_budget: int | None = None):
    """Contrastive loss over groups of blocks, with gradients for every left, every right and the scale.

    Args:
        groups: list of lists of blocks (see the package's README); one log-sum-exp per group, exactly one block of a
            group holds a row's own entry; groups are averaged.
        scale: 1/T: number, or a tensor of one element, which then gets its gradient.
        row_weights: weight of every row's loss: number (1/B for the mean) or [B] tensor.
        memory_budget: bytes of scratch beyond the gradients and their fp32 sums; None: the inputs' size, at least
            512 MiB.

    Returns:
        Scalar fp32 tensor.

    Raises:
        TypeError: a dtype that the kernels don't take.
        ValueError: shapes that don't fit, no block with `own` in a group, a budget that is not positive.
    """
    groups = [list(group) for group in groups]
    if not paddle.in_dynamic_mode():
        return static.info_nce(info_nce, groups, scale, row_weights, memory_budget)
    tensors = distinct(t for group in groups for block in group for t in (block.left, block.right))
    check(groups, tensors, memory_budget)
    row_weights = as_row_weights(row_weights, tensors[0].shape[0])
    learns = paddle.is_grad_enabled()
    wanted = [learns and not t.stop_gradient for t in tensors]
    job = _Job(groups, tensors, scale, row_weights, memory_budget, wanted, learns)
    with static.Untraced():
        return RunsJob.apply(job, scale, *tensors) if job.scale_is_tensor else RunsJob.apply(job, *tensors)


def as_row_weights(weights, rows: int):
    """Weights of rows as kernels take them: a float, or [rows] fp32."""
    if isinstance(weights, paddle.Tensor):
        weights = weights.detach()
        return dense(weights if weights.dtype == paddle.float32 else weights.astype("float32"))
    if is_interpreting():  # which hands over bare floats, that have no type to ask for
        return paddle.full([rows], float(weights), dtype="float32")
    return float(weights)


class RunsJob(PyLayer):
    """No arithmetic of its own: runs a job. The tensors are arguments so that Paddle ties the gradients to them."""

    @staticmethod
    def forward(ctx, job, *tensors):
        ctx.job = job
        return job.forward()

    @staticmethod
    def backward(ctx, incoming):
        return ctx.job.backward(incoming)


class _Job:
    """One evaluation of the loss: which pass it takes, and what lies between forward and backward."""

    def __init__(self, groups, tensors, scale, row_weights, memory_budget, wanted, learns):
        # detach: the graph of the inputs must not be kept alive from here, nor the blocks' tensors taken for leaves
        self.tensors = [t.detach() for t in tensors]
        self.blocks, self.sources = groups, {id(t): k for k, t in enumerate(tensors)}
        self.of = {id(t): k for k, t in enumerate(self.tensors)}
        self.scale_is_tensor = isinstance(scale, paddle.Tensor)
        self.scale = scale.detach() if self.scale_is_tensor else number(float(scale))
        self.wanted, self.wanted_scale = wanted, learns and self.scale_is_tensor and not scale.stop_gradient
        self.weights, self.share = row_weights, 1.0 / len(groups)
        self.budget = memory_budget or max(_LEAST_BUDGET, sum(math.prod(t.shape) * t.element_size() for t in tensors))
        self.B = groups[0][0].left.shape[0]
        self.groups = self.lse = self.own = self.gradients = self.scale_terms = None

    def forward(self):
        blocks, self.blocks = self.blocks, None  # their tensors bring the graph of the inputs along
        gradients = (any(self.wanted) or self.wanted_scale) and self.tensors[0].dtype != paddle.float16
        if gradients:  # one pass, if whole rows fit: what tapes are for
            key, inputs = self._signature(blocks)
            tape = replay.find(key, inputs[0])
            if tape is not None:
                loss, *buffers = tape.play(inputs)
                self._take(buffers)
                return loss
        self.groups = [
            [Similarity(b, *(self.tensors[self.sources[id(t)]] for t in (b.left, b.right))) for b in group]
            for group in blocks
        ]
        plans = [one_pass.plan(group, self.budget) for group in self.groups] if gradients else [None]
        if not all(plans):
            losses = empty([len(self.groups) * self.B], paddle.float32, self.tensors[0])
            self._log_sum_exps(losses)
            return total_of(losses)
        sums = sum(4 * math.prod(t.shape) for t in self.tensors)
        with replay.recording(key, inputs, self.budget, sums) as keep:
            losses = empty([len(self.groups) * self.B], paddle.float32, self.tensors[0])
            self._one_pass(plans, losses)
            loss = total_of(losses)
            results = [loss, *(g.buffer for g in self.gradients if g is not None)]
            keep(results if self.scale_terms is None else [*results, self.scale_terms])
        return loss

    def _signature(self, blocks):
        """(what the launches follow from besides addresses, the tensors that they may read)."""
        inputs, shape = list(self.tensors), [self.share, self.budget, *self.wanted, self.wanted_scale]
        shape.append(tuning.HOPPER)
        for group in blocks:
            shape.append(len(group))
            for b in group:
                guide, hardness = b.guide, b.hardness
                shape += [self.sources[id(b.left)], self.sources[id(b.right)], b.row_offset, b.owner_rule]
                shape += [guide and guide.keep_own, hardness and (hardness.columns, float(hardness.strength))]
                inputs += [b.own, b.self_column, b.owner, b.limit, b.row_ids, b.column_ids]
                if guide is not None:
                    inputs += [guide.left, guide.right, guide.threshold]
        for number_or_tensor in (self.scale, self.weights):
            if isinstance(number_or_tensor, paddle.Tensor):
                inputs.append(number_or_tensor)
            else:
                shape.append(number_or_tensor)
        shape += map(replay.layout, inputs)
        inputs = [t for t in inputs if t is not None]
        first_seen: dict = {}
        shape += [first_seen.setdefault(id(t), k) for k, t in enumerate(inputs)]
        place = inputs[0].place
        return (str(place), *shape), inputs

    def _take(self, buffers):
        """The results of a tape, as `_one_pass` leaves them."""
        buffers = iter(buffers)
        self.gradients = [
            Gradient.holding(t, next(buffers)) if wanted else None
            for t, wanted in zip(self.tensors, self.wanted, strict=True)
        ]
        self.scale_terms = next(buffers, None)

    def backward(self, incoming):
        if self.gradients is None:
            gradients, terms = self._two_passes(incoming)
            gradients = [g and g.result() for g in gradients]
            incoming = None
        else:
            gradients = scaled_results(self.gradients, incoming)
            terms = self.scale_terms
        scale_gradient = None
        if terms is not None:
            total = empty(self.scale.shape, paddle.float32, terms)
            launch(sum_kernel, (1,), terms, total, int(terms.size), 1.0, LARGEST=False, BLOCK=4096, num_warps=8)
            scale_gradient = scaled(total, 1.0 if incoming is None else incoming, self.scale.dtype)
        return (scale_gradient, *gradients) if self.scale_is_tensor else tuple(gradients)

    def _one_pass(self, plans, losses):
        chunks = {id(s): -(-s.B // plan.rows) for g, plan in zip(self.groups, plans, strict=True) for s in g}
        gradients = accumulators(self.groups, self.tensors, self.wanted, lambda s: chunks[id(s)], interleaved=True)
        terms = empty([self.B], paddle.float32, losses) if self.wanted_scale else None
        for k, (group, plan) in enumerate(zip(self.groups, plans, strict=True)):
            one_pass.loss_and_gradients(
                group, self.scale, self.weights, self.share, rows_from(losses, k * self.B), plan,
                lefts=[self._of(gradients, s.left_source) for s in group],
                rights=[self._of(gradients, s.right_source) for s in group], terms=terms, add_terms=k > 0,
            )  # fmt: skip
        self.gradients, self.scale_terms = gradients, terms
        self.groups = None  # the backward needs neither the blocks nor what was copied to read them

    def _log_sum_exps(self, losses):
        self.lse, self.own = [], []
        for k, group in enumerate(self.groups):
            lse, own = vectors([self.B] * 2, losses)
            found = False
            for n, s in enumerate(group):
                two_pass.streaming_lse(s, self.scale, lse, merge=n > 0, budget=self.budget)
                if s.own is not None:
                    one_pass.own_similarity_of(s, own, keep=found)
                    found = True
            launch(
                loss_kernel, (-(-self.B // 256),), lse, own, self.scale, self.weights, self.share,
                rows_from(losses, k * self.B), self.B, ROWS=256,
            )  # fmt: skip
            self.lse.append(lse)
            self.own.append(own)

    def _two_passes(self, incoming):
        gradients = accumulators(
            self.groups, self.tensors, self.wanted, lambda s: -(-s.B // two_pass.chunk(s, self.budget)[0])
        )
        terms = empty([self.B], paddle.float32, self.tensors[0]) if self.wanted_scale else None
        added = False
        for group, lse, own in zip(self.groups, self.lse, self.own, strict=True):
            for s in group:
                rows = two_pass.row_factors(s, lse, own, self.scale, self.weights, self.share, incoming)
                two_pass.gradients(
                    s, self.scale, *rows, left=self._of(gradients, s.left_source),
                    right=self._of(gradients, s.right_source), terms=terms, add_terms=added, budget=self.budget,
                )  # fmt: skip
                added = True
        return gradients, terms

    def _of(self, gradients, tensor):
        return gradients[self.of[id(tensor)]]


def block_lse(block, scale, *, out=None, memory_budget: int | None = None):
    """Log-sum-exp over a block's entries that are neither own nor dropped.

    Args:
        block: see the package's README.
        scale: number or tensor of one element, 1/T.
        out: [B] fp32 to merge into (another block's, shard's or hop's), or None.
        memory_budget: bytes of scratch.

    Returns:
        [B] fp32: `out`, or a new tensor; -inf where a row has no candidate.
    """
    s = Similarity(block)
    scale = number(scale)
    merge = out is not None
    if not merge:
        out = empty([s.B], paddle.float32, s.left)
    two_pass.streaming_lse(s, scale, out, merge=merge, budget=memory_budget or _LEAST_BUDGET)
    return out


def block_grads(
    block, scale, lse, weights, *, dleft=None, dright=None, left_gradient: bool = True, right_gradient: bool = True,
    terms=None, memory_budget: int | None = None,
):  # fmt: skip
    """Gradients of sum_i weights_i * lse_i through one block, own terms excluded.

    P_ij = exp(z_ij - lse_i) * weights_i at entries that are neither own nor dropped, dleft = scale * P @ right,
    dright = scale * P^T @ left.

    Args:
        block: see the package's README.
        scale: number or tensor of one element, 1/T.
        lse: [B] fp32, the row's log-sum-exp over everything it competes with.
        weights: [B] fp32.
        dleft, dright: fp32 sums to add to, or None for new ones.
        left_gradient, right_gradient: whether they are wanted at all.
        terms: [B] fp32 to add each row's part of dL/dscale to, or None for a new one.
        memory_budget: bytes of scratch.

    Returns:
        (dleft [B, D] fp32 or None, dright [N, D] fp32 or None, terms [B] fp32); dL/dscale is the sum of the terms.
    """
    s = Similarity(block)
    scale = number(scale)
    budget = memory_budget or max(_LEAST_BUDGET, (s.B + s.N) * s.D * s.itemsize)
    left = _given(s.left, dleft) if left_gradient else None
    right = _given(s.right, dright) if right_gradient else None
    add_terms = terms is not None
    if terms is None:
        terms = empty([s.B], paddle.float32, s.left)
    rows = two_pass.row_factors(s, lse, None, scale, weights, 1.0, None)
    two_pass.gradients(s, scale, *rows, left=left, right=right, terms=terms, add_terms=add_terms, budget=budget)
    return left and left.buffer, right and right.buffer, terms


def own_similarity(left, right, own):
    """<left_i, right_own(i)> in fp32, -inf where own_i is negative.

    Args:
        left: [B, D]; right: [N, D]; own: [B] int64.

    Returns:
        [B] fp32, without the scale.
    """
    s = Similarity(_Pair(left, right, own))
    out = empty([s.B], paddle.float32, s.left)
    one_pass.own_similarity_of(s, out)
    return out


class _Pair:
    """The smallest block."""

    self_column = row_ids = column_ids = owner = owner_rule = limit = guide = hardness = None
    row_offset = 0

    def __init__(self, left, right, own=None):
        self.left, self.right, self.own = left, right, own


def total_of(losses):
    """Their sum, 0-d."""
    loss = empty([], paddle.float32, losses)
    launch(sum_kernel, (1,), losses, loss, int(losses.size), 1.0, LARGEST=False, BLOCK=4096, num_warps=8)
    return loss


def _given(like, buffer):
    if buffer is not None:
        return Gradient.holding(like, buffer)
    return Gradient.holding(like, empty(like.shape, paddle.float32, like), written=False)


def distinct(tensors):
    return list({id(t): t for t in tensors}.values())


def check(groups, tensors, memory_budget):
    if not groups or not all(groups):
        raise ValueError("groups: at least one group, and every group with at least one block")
    if memory_budget is not None and memory_budget <= 0:
        raise ValueError(f"memory_budget: {memory_budget} bytes; it must be positive, or None for the default")
    dtype, rows = tensors[0].dtype, groups[0][0].left.shape[0]
    for t in tensors:
        if t.dtype not in _DTYPES:
            raise TypeError(f"the kernels take float32, bfloat16 and float16, not {t.dtype}")
        if t.dtype != dtype:
            raise TypeError(f"all vectors of a loss share one dtype; found {dtype} and {t.dtype}")
        if t.shape[0] == 0:
            raise ValueError("a block without rows or columns")
    for g, group in enumerate(groups):
        if not any(block.own is not None for block in group):
            raise ValueError(f"groups[{g}]: no block says which column is the row's own (`own`)")
        for block in group:
            if block.left.shape[0] != rows:
                raise ValueError(f"groups[{g}]: a block has {block.left.shape[0]} rows, the first one {rows}")


static.keep_out(sys.modules[__package__], triton)

__all__ = ["block_grads", "block_lse", "info_nce", "own_similarity"]
