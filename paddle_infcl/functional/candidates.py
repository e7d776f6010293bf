# SPDX-License-Identifier: Apache-2.0
"""The vectors of a batch by the part that they play in a loss: what lists of blocks are written in terms of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import paddle
from paddle import Tensor

from paddle_infcl.functional.blocks import own_columns
from paddle_infcl.functional.vectors import l2_normalize


def passage_owners(own: Tensor, N: int) -> Tensor:
    """[N] int64: the row to which each passage of a flat batch belongs, positives and hard negatives.

    Args:
        own: [B] int64, columns of the positives; the hard negatives of a row follow its positive.
        N: number of passages.

    Raises:
        ValueError: `own` does not increase from 0, so that nobody knows whose negatives the others are.
    """
    positions = own.numpy()
    if len(positions) and (positions[0] != 0 or (positions[1:] <= positions[:-1]).any()):
        raise ValueError(
            "own: must increase from 0; the passages of a row stand together, its positive first: "
            f"got {positions[:5].tolist()} ..."
        )
    return paddle.searchsorted(own, paddle.arange(N, dtype="int64"), right=True) - 1


@dataclass(eq=False)
class Candidates:
    """Queries, their positives, and everything that they compete against, of one process.

    Attributes:
        queries: [B, D].
        positives: [B, D], the positive of every query.
        documents: tensors [N_k, D] with all positives and hard negatives; the positives are in the first one.
        own: [B] int64, column of each query's positive in documents[0].
        owners: per tensor of documents [N_k] int64, the row to which a document belongs.
        query_ids: [B, K] int64, ids of a row: of its query and of its positive; None without ids.
        document_ids: per tensor of documents [N_k, K] int64, or Nones.
        aligned: whether column i of every tensor of documents is of row i. What processes must agree on may depend on
            it, so it is never said of passages that happen to be so on one of them.
    """

    queries: Tensor
    positives: Tensor
    documents: list[Tensor]
    own: Tensor
    owners: list[Tensor]
    query_ids: Tensor | None = None
    document_ids: list[Tensor | None] = field(default_factory=list)
    aligned: bool = False

    def __post_init__(self):
        self.document_ids = self.document_ids or [None] * len(self.documents)

    @property
    def rows(self) -> int:
        """B."""
        return self.queries.shape[0]

    @property
    def row_numbers(self) -> Tensor:
        """[B] int64 0 ... B - 1: also the column of a row among `queries` and among `positives`."""
        return paddle.arange(self.rows, dtype="int64")

    @classmethod
    def from_columns(
        cls, columns: Sequence[Tensor], column_ids: Sequence[Tensor] | None = None, normalize: bool = True
    ) -> Candidates:
        """From [anchor, positive, negative 1, ...], as sentence-transformers has them.

        Args:
            columns: two or more tensors [B, D] of one dtype.
            column_ids: [B] or [B, K] int64 per column; None without ids. The first are those of the rows.
            normalize: scale all vectors to length 1.

        Raises:
            ValueError: fewer than two columns, columns of different shapes or dtypes, or ids for not all of them.
        """
        if len(columns) < 2:
            raise ValueError(f"columns: anchors and positives are needed at least, got {len(columns)} of them")
        first = columns[0]
        for k, column in enumerate(columns):
            if column.ndim != 2 or column.shape != first.shape or column.dtype != first.dtype:
                raise ValueError(
                    f"columns[{k}]: has {column.dtype} of shape {list(column.shape)}; all columns need the shape "
                    f"[rows, width] and the dtype of the first one, {first.dtype} of shape {list(first.shape)}"
                )
        if column_ids is not None and len(column_ids) != len(columns):
            raise ValueError(f"column_ids: {len(column_ids)} of them for {len(columns)} columns; one each is needed")
        query_ids, document_ids = (None, []) if column_ids is None else (column_ids[0], list(column_ids[1:]))
        vectors = [l2_normalize(column) for column in columns] if normalize else list(columns)
        rows = paddle.arange(first.shape[0], dtype="int64")
        owners = [rows] * (len(columns) - 1)
        return cls(vectors[0], vectors[1], vectors[1:], rows, owners, query_ids, document_ids, aligned=True)

    @classmethod
    def from_passages(
        cls,
        q: Tensor,
        p: Tensor,
        own: Tensor | None = None,
        q_ids: Tensor | None = None,
        p_ids: Tensor | None = None,
    ) -> Candidates:
        """From a flat batch: p holds every row's positive, followed by its own hard negatives.

        Args:
            q: [B, D].
            p: [N, D].
            own: [B] int64, increasing from 0: column of each row's positive; None: arange(B) * (N / B).
            q_ids: [B, K] int64, ids of the rows.
            p_ids: [N, K] int64.

        Raises:
            ValueError: `own` does not increase from 0, see `passage_owners`.
        """
        B, N = q.shape[0], p.shape[0]
        own = own_columns(B, N) if own is None else own
        owners = passage_owners(own, N)
        # Without hard negatives the passages are the positives, and one tensor on both sides costs no copy.
        positives = p if B == N else p.index_select(own)
        return cls(q, positives, [p], own, [owners], q_ids, [p_ids])

    def hard_negatives(self) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """The documents that are nobody's positive: tensors [n, D], each with the rows it belongs to, and its ids."""
        found = list(zip(self.documents, self.owners, self.document_ids, strict=True))
        columns = found[0][0].shape[0]
        if columns == self.rows:  # positives only
            return found[1:]
        others = paddle.to_tensor(np.setdiff1d(np.arange(columns), self.own.numpy()))
        return [tuple(None if t is None else t.index_select(others) for t in found[0]), *found[1:]]

    def ids(self, left: Tensor | None, right: Tensor | None) -> dict:
        """Fields of a block that drop entries with equal ids; none where one side has no ids."""
        return {} if left is None or right is None else {"row_ids": left, "column_ids": right}
