# SPDX-License-Identifier: Apache-2.0
"""InfoNCE over blocks, and the two losses that most users call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import paddle
from paddle import Tensor

from paddle_infcl import kernels
from paddle_infcl.functional.blocks import Block, check_groups, own_columns
from paddle_infcl.functional.candidates import passage_owners
from paddle_infcl.functional.dense import dense_info_nce
from paddle_infcl.functional.hops import block_functions
from paddle_infcl.functional.matryoshka import Matryoshka, prefix_groups
from paddle_infcl.functional.options import check_margin, check_positive
from paddle_infcl.functional.prefixes import prefix_info_nce
from paddle_infcl.functional.row_losses import Debiased, RowLoss
from paddle_infcl.functional.smoothing import check_smoothing, own_above_mean
from paddle_infcl.functional.streaming import streaming_info_nce
from paddle_infcl.functional.tiles import accumulation_dtype
from paddle_infcl.functional.two_pass import two_pass_loss


def as_scale(temperature: float | Tensor, dtype: paddle.dtype) -> Tensor:
    """1/T as a tensor of one element; a learnable temperature keeps its graph.

    Raises:
        ValueError: T is a float that is not positive and finite, or a tensor of more than one element.
    """
    if isinstance(temperature, Tensor):
        if temperature.size != 1:
            raise ValueError(f"temperature: a tensor of one element is needed, got shape {list(temperature.shape)}")
        return 1.0 / temperature.astype(accumulation_dtype(dtype))
    check_positive("temperature", temperature)
    return paddle.full([], 1.0 / temperature, dtype=accumulation_dtype(dtype))


def info_nce(
    groups: Sequence[Sequence[Block]],
    *,
    temperature: float | Tensor,
    row_weights: float | Tensor | None = None,
    row_loss: RowLoss | None = None,
    label_smoothing: float = 0.0,
    matryoshka: Matryoshka | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """The loss that every objective here is: mean over groups of sum_i w_i (logsumexp_j z_ij - z_i,own).

    Args:
        groups: one softmax per group, over all of its blocks. In each group every row has one own entry.
        temperature: T, z = <left, right> / T. A tensor of one element gets its gradient; that it is positive is not
            checked, since the device would have to be waited for: learn log T, as `losses.InfCLLoss` does.
        row_weights: w, a float or [B]; None is 1/B.
        row_loss: another function of a row's log-sum-exp and own logit; None is the InfoNCE above. See `row_losses`.
        label_smoothing: e, the share of the target that is spread evenly over all candidates of a row. Sums over
            columns for blocks without rules; with rules two to four products in plain Paddle operators (`smoothing`).
        matryoshka: add up the losses of these prefixes of the vectors, each scaled to length 1 again. The paddle
            backend computes them from one sweep over the similarities (`prefixes`), and so do the Triton kernels for
            blocks without hardness, if there is neither a row_loss nor smoothing; everything else, one by one.
        backend: "auto", "triton", "paddle" or "dense"; see `paddle_infcl.kernels.choose_backend`.
        memory_budget: bytes for logits that the streaming backends may hold at once; None: a default per device.

    Returns:
        0-d float32; float64 for float64 inputs.

    Raises:
        ValueError: a block is malformed (`check_groups`), or an option is none of its values.
        BackendError: the backend asked for can't run here; its cause is the original error.
    """
    rows = check_groups(groups)
    if memory_budget is not None and memory_budget < 1:
        raise ValueError(f"memory_budget: a positive number of bytes is needed, got {memory_budget}")
    if isinstance(row_weights, Tensor) and list(row_weights.shape) != [rows]:
        raise ValueError(f"row_weights: needs shape [{rows}], has {list(row_weights.shape)}")
    check_smoothing(label_smoothing)
    weights = 1.0 / max(rows, 1) if row_weights is None else row_weights
    first = groups[0][0].left
    scale = as_scale(temperature, first.dtype)
    chosen = kernels.choose_backend(backend, first)
    if rows == 0:
        # No rows, no loss, but a graph: an empty rank takes part in every collective of the backward pass.
        tensors = {id(t): t for group in groups for block in group for t in (block.left, block.right)}
        return sum((t.sum().astype(scale.dtype) for t in tensors.values()), scale.sum()) * 0.0
    if matryoshka is not None:
        # A row loss may count the negatives that a limit leaves: another number at every prefix.
        together = chosen == "paddle" and not label_smoothing and (row_loss is None or matryoshka.margin is None)
        if together:
            return prefix_info_nce(groups, matryoshka, scale, weights, memory_budget, row_loss)
        if chosen == "triton" and not label_smoothing and row_loss is None:
            loss = _triton_prefixes(groups, matryoshka, scale, weights, memory_budget)
            if loss is not None:
                return loss
        terms = [
            weight
            * info_nce(
                prefix_groups(groups, dim, matryoshka.margin),
                temperature=temperature,
                row_weights=weights,
                row_loss=row_loss,
                label_smoothing=label_smoothing,
                backend=chosen,
                memory_budget=memory_budget,
            )
            for dim, weight in matryoshka.by_width(first.shape[1])
        ]
        return sum(terms[1:], terms[0])
    if chosen == "triton" and row_loss is not None:
        functions = block_functions("triton", first)
        loss = two_pass_loss(groups, scale, weights, memory_budget, row_loss, functions)
    elif chosen == "triton":
        loss = kernels.triton_info_nce(groups, scale, weights, memory_budget)
    elif chosen == "dense":
        loss = dense_info_nce(groups, scale, weights, row_loss)
    else:
        loss = streaming_info_nce(groups, scale, weights, memory_budget, row_loss)
    if label_smoothing:
        loss = loss + label_smoothing * own_above_mean(groups, scale, weights, memory_budget)
    return loss


def _triton_prefixes(groups, matryoshka: Matryoshka, scale: Tensor, weights, memory_budget) -> Tensor | None:
    """All prefixes from one sweep of the Triton kernels; None where they compute them one by one."""
    if any(block.limit is not None for group in groups for block in group) and matryoshka.margin is None:
        return None  # refused there
    prefixes = matryoshka.by_width(groups[0][0].left.shape[1])
    return kernels.triton_prefix_info_nce(groups, prefixes, matryoshka.margin, scale, weights, memory_budget)


def info_nce_groups(
    q: Tensor,
    p: Tensor,
    *,
    own: Tensor | None = None,
    q_ids: Tensor | None = None,
    p_ids: Tensor | None = None,
    margin: float | None = None,
    keep_own_negatives: bool = False,
) -> list[list[Block]]:
    """InfoNCE as a list of blocks: one group, queries against passages. Arguments as in `inf_cl_loss`."""
    if own is None:
        own = own_columns(q.shape[0], p.shape[0])
    check_margin(margin)
    limit = None if margin is None else own_similarity(q, p, own) + margin
    everything = Block(q, p, own=own, row_ids=q_ids, column_ids=p_ids, limit=limit)
    if limit is None or not keep_own_negatives:
        return [[everything]]
    # Owners without hard negatives as well: another process may have some, and what is shared must be listed alike.
    everything.owner, everything.owner_rule = passage_owners(own, p.shape[0]), "exclude"
    if p.shape[0] == q.shape[0]:
        return [[everything]]
    # A row's own negatives are where the row is. The positive is in the first block.
    curated = replace(everything, own=None, self_column=own, owner_rule="only", limit=None, local=True)
    return [[everything, curated]]


def own_similarity(left: Tensor, right: Tensor, own: Tensor) -> Tensor:
    """[B] <left_i, right_own(i)> in the accumulation dtype, without gradient."""
    with paddle.no_grad():
        dtype = accumulation_dtype(left.dtype)
        return (left.detach().astype(dtype) * right.detach().index_select(own).astype(dtype)).sum(axis=1)


def inf_cl_loss(
    q: Tensor,
    p: Tensor,
    *,
    temperature: float | Tensor = 0.02,
    own: Tensor | None = None,
    q_ids: Tensor | None = None,
    p_ids: Tensor | None = None,
    margin: float | None = None,
    keep_own_negatives: bool = False,
    tau_plus: float | Tensor | None = None,
    label_smoothing: float = 0.0,
    row_weights: float | Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """InfoNCE without the B x N matrix of logits (Oord et al. 2018; Cheng et al. 2024, "Inf-CL").

    loss = mean_i [ logsumexp_j <q_i, p_j> / T  -  <q_i, p_own(i)> / T ]

    Inputs are taken as they are: normalise them before for cosines.

    Args:
        q: [B, D] queries, float32, float64, bfloat16 or float16.
        p: [N, D] passages of the same dtype: positives and hard negatives of all queries.
        temperature: T. A tensor of one element gets its gradient; that it is positive is not checked (learn log T).
        own: [B] int64, column of each query's positive; None: arange(B) * (N / B).
        q_ids: [B] or [B, K] int64; a passage is no negative of a query when q_ids and p_ids agree in any k. Negative
            ids match nothing. K = 2 as (document id, query id) catches a document under two queries and a query with
            two documents.
        p_ids: [N] or [N, K] int64.
        margin: drops passages with <q_i, p_j> > <q_i, p_own(i)> + margin, likely false negatives (the rule of
            Qwen3-Embedding, arXiv 2506.05176: *plus* the margin, on the trained model's own similarities).
        keep_own_negatives: a row's own hard negatives are curated, and not for the margin to drop; `own` must then
            increase from 0, a row's negatives following its positive. They become a block of their own: with hard
            negatives, twice the work. Without a margin it changes nothing.
        tau_plus: the debiased loss (Chuang et al. 2020): the chance that a negative is in truth a positive, a number
            in [0, 1) or [B], one per row, whose range is checked on a CPU. For vectors of length 1. See
            `row_losses.Debiased`.
        label_smoothing: the share of the target that is spread evenly over all candidates of a row.
        row_weights: weights of the rows, a float or [B]; None is 1/B, the mean.
        backend: "auto" takes Triton where it runs and the streaming loss in plain Paddle elsewhere, with one warning;
            "triton", "paddle", "dense" insist.
        memory_budget: bytes of logits held at once; None: 8 MiB on a CPU, max(512 MiB, inputs) elsewhere.

    Returns:
        0-d loss, float32 (float64 for float64 inputs).

    Raises:
        ValueError: names the argument that is wrong, what it is and what it should be.
        BackendError: an explicit backend can't run here.

    Example:
        >>> import paddle
        >>> q = paddle.to_tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> p = paddle.to_tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> round(float(inf_cl_loss(q, p, temperature=1.0, backend="paddle")), 4)
        0.3133
    """
    keep = keep_own_negatives and p.shape[0] != q.shape[0]  # without hard negatives there are none to keep
    groups = info_nce_groups(q, p, own=own, q_ids=q_ids, p_ids=p_ids, margin=margin, keep_own_negatives=keep)
    return info_nce(
        groups,
        temperature=temperature,
        row_weights=row_weights,
        row_loss=None if tau_plus is None else Debiased(tau_plus),
        label_smoothing=label_smoothing,
        backend=backend,
        memory_budget=memory_budget,
    )


def contrastive_loss(
    q: Tensor,
    p: Tensor,
    *,
    temperature: float | Tensor = 0.02,
    own: Tensor | None = None,
    q_ids: Tensor | None = None,
    p_ids: Tensor | None = None,
    margin: float | None = None,
    keep_own_negatives: bool = False,
    row_weights: float | Tensor | None = None,
) -> Tensor:
    """The standard contrastive loss, with all its logits in memory: `inf_cl_loss` with the `dense` backend.

    Example:
        >>> import paddle
        >>> q, p = paddle.eye(2), paddle.eye(2)
        >>> round(float(contrastive_loss(q, p, temperature=1.0)), 4)
        0.3133
    """
    return inf_cl_loss(
        q,
        p,
        temperature=temperature,
        own=own,
        q_ids=q_ids,
        p_ids=p_ids,
        margin=margin,
        keep_own_negatives=keep_own_negatives,
        row_weights=row_weights,
        backend="dense",
    )
