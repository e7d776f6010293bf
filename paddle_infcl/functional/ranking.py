# SPDX-License-Identifier: Apache-2.0
"""Multiple negatives ranking in up to four directions, with hardness weights."""

from __future__ import annotations

from collections.abc import Sequence

from paddle import Tensor

from paddle_infcl.functional.blocks import Block, Hardness
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import info_nce

DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITIONS = ("joint", "per_direction")
# Mode -> which columns of the query_to_doc block get the bonus.
HARDNESS_MODES = {"hard_negatives": "own", "in_batch_negatives": "others", "all_negatives": "all"}


def check_ranking(directions: Sequence[str], partition: str, hardness_mode: str | None) -> None:
    """Checks options against each other.

    Raises:
        ValueError: names the option, what it is and what it should be.
    """
    unknown = [d for d in directions if d not in DIRECTIONS]
    if unknown or not directions or len(set(directions)) != len(directions):
        raise ValueError(f"directions: {list(directions)} must be one or more of {', '.join(DIRECTIONS)}, each once")
    if partition not in PARTITIONS:
        raise ValueError(f"partition: {partition!r} is none of {', '.join(PARTITIONS)}")
    if "query_to_doc" not in directions and (partition == "joint" or "doc_to_query" not in directions):
        raise ValueError(f"directions: {list(directions)} lacks query_to_doc, where the positive of a query is")
    if partition == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions):
        raise ValueError("partition: per_direction can't be with query_to_query or doc_to_doc, which hold no positive")
    if hardness_mode is not None and hardness_mode not in HARDNESS_MODES:
        raise ValueError(f"hardness_mode: {hardness_mode!r} is none of {', '.join(HARDNESS_MODES)}")
    if hardness_mode is not None and "query_to_doc" not in directions:
        raise ValueError("hardness_mode: needs the direction query_to_doc, whose logits it changes")


def ranking_groups(
    batch: Candidates,
    *,
    directions: Sequence[str] = ("query_to_doc",),
    partition: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
) -> list[list[Block]]:
    """The family as lists of blocks. Arguments as in `multiple_negatives_ranking_loss`."""
    check_ranking(directions, partition, hardness_mode)
    ids, rows = batch.ids, batch.row_numbers
    hardness = None
    if hardness_mode is not None and hardness_strength != 0.0:
        hardness = Hardness(hardness_strength, HARDNESS_MODES[hardness_mode])
    needs_owner = hardness is not None and hardness.columns != "all"
    by_direction = {
        "query_to_doc": lambda: [
            Block(
                batch.queries,
                documents,
                own=batch.own if k == 0 else None,
                owner=batch.owners[k] if needs_owner else None,
                hardness=hardness,
                **ids(batch.query_ids, batch.document_ids[k]),
            )
            for k, documents in enumerate(batch.documents)
        ],
        "query_to_query": lambda: [
            Block(batch.queries, batch.queries, self_column=rows, **ids(batch.query_ids, batch.query_ids))
        ],
        "doc_to_query": lambda: [
            Block(
                batch.positives,
                batch.queries,
                own=rows if partition == "per_direction" else None,
                **ids(batch.query_ids, batch.query_ids),
            )
        ],
        "doc_to_doc": lambda: [
            Block(
                batch.positives,
                documents,
                # The same entries, but a column per row costs no comparison of owners in every tile.
                **({"self_column": rows} if batch.aligned else {"owner": batch.owners[k], "owner_rule": "exclude"}),
                **ids(batch.query_ids, batch.document_ids[k]),
            )
            for k, documents in enumerate(batch.documents)
        ],
    }
    lists = [by_direction[direction]() for direction in DIRECTIONS if direction in directions]
    return lists if partition == "per_direction" else [[block for blocks in lists for block in blocks]]


def multiple_negatives_ranking_loss(
    columns: Sequence[Tensor],
    *,
    temperature: float | Tensor = 0.05,
    directions: Sequence[str] = ("query_to_doc",),
    partition: str = "joint",
    hardness_mode: str | None = None,
    hardness_strength: float = 0.0,
    column_ids: Sequence[Tensor] | None = None,
    row_weights: float | Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """InfoNCE in one to four directions: sentence-transformers' CachedMultipleNegativesRankingLoss.

    - query_to_doc: queries against all positives and hard negatives; alone it is InfoNCE.
    - query_to_query: queries against the other queries.
    - doc_to_query: each row's positive against all queries; together with query_to_doc per direction it is CLIP's
      symmetric loss. In a joint softmax a row's own query is one of these candidates, as published.
    - doc_to_doc: each row's positive against the documents of other rows; all four, joint, are GTE's loss.

    Args:
        columns: [query, positive, negative 1, ...], each [B, D]; scaled to length 1 here.
        temperature: T. A tensor of one element gets its gradient.
        directions: which, see above.
        partition: "joint" puts all directions into one softmax, "per_direction" averages a softmax each; the latter
            goes with query_to_doc and doc_to_query only.
        hardness_mode: adds hardness_strength times the similarity, without gradient, to query_to_doc logits: of a
            row's own hard negatives ("hard_negatives"), of other rows' documents ("in_batch_negatives"), of all but
            the positive ("all_negatives").
        hardness_strength: see there; 0 is off.
        column_ids: [B] or [B, K] int64 per column, such as (document, query) with -1 for none: two texts that share
            one are no negatives of each other, in any block. The first column's are those of the rows.
        row_weights: weights of the rows, a float or [B]; None is 1/B, the mean.
        backend: as in `inf_cl_loss`.
        memory_budget: as in `inf_cl_loss`.

    Returns:
        0-d loss.

    Raises:
        ValueError: columns that don't fit each other, or options that can't be combined.

    Example:
        >>> import paddle
        >>> both = ("query_to_doc", "doc_to_query")
        >>> columns = [paddle.eye(2), paddle.eye(2)]
        >>> options = {"temperature": 1.0, "backend": "paddle"}
        >>> loss = multiple_negatives_ranking_loss(columns, directions=both, partition="per_direction", **options)
        >>> round(float(loss), 4)
        0.3133
    """
    groups = ranking_groups(
        Candidates.from_columns(columns, column_ids),
        directions=directions,
        partition=partition,
        hardness_mode=hardness_mode,
        hardness_strength=hardness_strength,
    )
    return info_nce(
        groups, temperature=temperature, row_weights=row_weights, backend=backend, memory_budget=memory_budget
    )
