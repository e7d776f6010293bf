# SPDX-License-Identifier: Apache-2.0
"""The loss of Qwen3-Embedding (Zhang et al. 2025, arXiv 2506.05176)."""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor

from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import info_nce, own_similarity
from paddle_infcl.functional.options import check_margin


def qwen3_groups(
    batch: Candidates,
    *,
    margin: float | None = 0.1,
    query_to_query: bool = True,
    doc_to_doc: bool = True,
    keep_own_negatives: bool = False,
) -> list[list[Block]]:
    """Qwen3-Embedding's loss as a list of blocks, one softmax over all. Arguments as in `qwen3_loss`."""
    check_margin(margin)
    limit, rows, ids = None, batch.row_numbers, batch.document_ids[0]
    if margin is not None:
        limit = own_similarity(batch.queries, batch.positives, rows) + margin
    ids = batch.ids(batch.query_ids, None if ids is None else ids.index_select(batch.own))
    group = [Block(batch.queries, batch.positives, own=rows, limit=limit, **ids)]
    for wanted, vectors in ((query_to_query, batch.queries), (doc_to_doc, batch.positives)):
        if wanted:
            ids = batch.ids(batch.query_ids, batch.query_ids)
            group.append(Block(vectors, vectors, self_column=rows, limit=limit, **ids))
    # A row's own negatives are where the row is. Last: processes without any list the blocks before alike.
    for documents, owner, ids in batch.hard_negatives():
        ids = batch.ids(batch.query_ids, ids)
        own_only = {"owner": owner, "owner_rule": "only", "local": True}
        group.append(Block(batch.queries, documents, limit=None if keep_own_negatives else limit, **own_only, **ids))
    return [group]


def qwen3_loss(
    columns: Sequence[Tensor],
    *,
    temperature: float | Tensor = 0.01,
    margin: float | None = 0.1,
    query_to_query: bool = True,
    doc_to_doc: bool = True,
    keep_own_negatives: bool = False,
    column_ids: Sequence[Tensor] | None = None,
    row_weights: float | Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """InfoNCE with Qwen3-Embedding's denominator.

    A query q_i competes for its positive d_i against its own hard negatives (not those of other rows), the other
    positives, the other queries, s(q_i, q_j), and by way of its positive the other positives again, s(d_i, d_j). Any
    of these whose similarity exceeds s(q_i, d_i) + margin is taken for a false negative and dropped. Mind the sign:
    the margin is *added* to the trained model's own similarity, unlike that of `guided_inf_cl_loss`, which is
    subtracted from the guide's. The paper's temperature is not published.

    Args:
        columns: [query, positive, negative 1, ...], each [B, D]; scaled to length 1 here.
        temperature: T. A tensor of one element gets its gradient.
        margin: see above; None drops nothing.
        query_to_query: contrast queries with each other.
        doc_to_doc: contrast positives with each other.
        keep_own_negatives: a row's own hard negatives are curated, and not for the margin to drop.
        column_ids: [B] or [B, K] int64 per column, such as (document, query) with -1 for none: two texts that share
            one are no negatives of each other, in any block. The first column's are those of the rows.
        row_weights: weights of the rows, a float or [B]; None is 1/B, the mean.
        backend: as in `inf_cl_loss`.
        memory_budget: as in `inf_cl_loss`.

    Returns:
        0-d loss.

    Raises:
        ValueError: columns that don't fit each other, or a margin that is no finite number.

    Example:
        >>> import paddle
        >>> columns = [paddle.eye(2), paddle.eye(2)]
        >>> round(float(qwen3_loss(columns, temperature=1.0, backend="paddle")), 4)
        0.7437
    """
    groups = qwen3_groups(
        Candidates.from_columns(columns, column_ids),
        margin=margin,
        query_to_query=query_to_query,
        doc_to_doc=doc_to_doc,
        keep_own_negatives=keep_own_negatives,
    )
    return info_nce(
        groups, temperature=temperature, row_weights=row_weights, backend=backend, memory_budget=memory_budget
    )
