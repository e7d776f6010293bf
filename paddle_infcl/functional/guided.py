# SPDX-License-Identifier: Apache-2.0
"""The guided loss: a second model says which negatives are none (Solatorio 2024, GISTEmbed, arXiv 2402.16829)."""

from __future__ import annotations

from collections.abc import Sequence

import paddle
from paddle import Tensor

from paddle_infcl.functional.blocks import Block, Guide
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import info_nce
from paddle_infcl.functional.options import check_number
from paddle_infcl.functional.tiles import accumulation_dtype
from paddle_infcl.functional.vectors import l2_normalize

MARGIN_STRATEGIES = ("absolute", "relative")


def guide_threshold(queries: Tensor, positives: Tensor, margin_strategy: str, margin: float) -> Tensor:
    """Above which guide similarity a negative of a row counts as a false one.

    With t_i the guide similarity of the row's own pair: t_i - margin ("absolute"), t_i - |t_i| margin ("relative").
    Mind the sign: the margin is *subtracted*, unlike that of `inf_cl_loss`, which is added to the trained model's own
    similarity.

    Args:
        queries: [B, Dg] guide vectors of length 1.
        positives: [B, Dg] likewise.
        margin_strategy: "absolute" or "relative".
        margin: m.

    Returns:
        [B] float32, float64 for float64.

    Raises:
        ValueError: an unknown strategy, or a margin that is no finite number.
    """
    if margin_strategy not in MARGIN_STRATEGIES:
        raise ValueError(f"margin_strategy: {margin_strategy!r} is none of {', '.join(MARGIN_STRATEGIES)}")
    check_number("margin", margin, "a finite number is needed")
    dtype = accumulation_dtype(queries.dtype)
    own = (queries.astype(dtype) * positives.astype(dtype)).sum(axis=1)
    return own - margin if margin_strategy == "absolute" else own - own.abs() * margin


@paddle.no_grad()
def check_finite_guide(name: str, vectors: Tensor, hint: str = "") -> None:
    """Refuses vectors with NaN or infinity: nothing is above a threshold then, so such a guide drops nothing.

    Waits for the device.

    Args:
        name: of the vectors.
        vectors: [n, Dg].
        hint: what may be the cause.

    Raises:
        ValueError: says how many vectors are not finite, and which is the first.
    """
    wrong = ~paddle.isfinite(vectors.astype(accumulation_dtype(vectors.dtype))).all(axis=-1).numpy()
    if wrong.any():
        raise ValueError(
            f"{name}: {int(wrong.sum())} of {len(wrong)} vectors of the guide are not finite, the first is number "
            f"{int(wrong.argmax())}: such a guide would drop nothing{hint}"
        )


@paddle.no_grad()
def guide_vectors(vectors: Tensor, dtype: paddle.dtype, name: str = "guide") -> Tensor:
    """[n, Dg] the guide's vectors with length 1, without gradient, in the dtype of the trained ones.

    One dtype for all products of a tile; thresholds are then made from the vectors that they are compared with.

    Args:
        vectors: [n, Dg].
        dtype: of the trained vectors.
        name: of the vectors, for the error.

    Raises:
        ValueError: vectors on a CPU are not finite. Elsewhere the device would have to be waited for.
    """
    if vectors.place.is_cpu_place():
        check_finite_guide(name, vectors)
    return l2_normalize(vectors.detach().astype(accumulation_dtype(vectors.dtype))).astype(dtype)


def guided_groups(
    batch: Candidates,
    guide: Candidates,
    *,
    margin_strategy: str = "absolute",
    margin: float = 0.0,
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    published_diagonals: bool = False,
    keep_own_negatives: bool = False,
) -> list[list[Block]]:
    """The guided loss as a list of blocks, one softmax over all: anchors against documents, anchors, positives.

    Args:
        batch: the trained model's vectors.
        guide: the guide's, of the same texts in the same order, as `guide_vectors` makes them.
        margin_strategy, margin: see `guide_threshold`.
        contrast_anchors: also against the anchors of this process.
        contrast_positives: also each row's positive against the other positives.
        published_diagonals: leave it to the guide to drop a row's similarity with itself, as published.
        keep_own_negatives: the guide doesn't drop a row's own hard negatives.
    """
    threshold = guide_threshold(guide.queries, guide.positives, margin_strategy, margin)
    itself = None if published_diagonals else batch.row_numbers
    group = []
    for k, documents in enumerate(batch.documents):
        group.append(
            Block(
                batch.queries,
                documents,
                own=batch.own if k == 0 else None,
                owner=batch.owners[k] if keep_own_negatives else None,
                guide=Guide(guide.queries, guide.documents[k], threshold, keep_own_negatives),
                **batch.ids(batch.query_ids, batch.document_ids[k]),
            )
        )
    sides = [(contrast_anchors, "queries", True), (contrast_positives, "positives", False)]
    for wanted, name, local in sides:
        if wanted:
            vectors, seen = getattr(batch, name), getattr(guide, name)
            group.append(
                Block(
                    vectors,
                    vectors,
                    self_column=itself,
                    guide=Guide(seen, seen, threshold),
                    local=local,
                    **batch.ids(batch.query_ids, batch.query_ids),
                )
            )
    return [group]


def guided_inf_cl_loss(
    columns: Sequence[Tensor],
    guide_columns: Sequence[Tensor],
    *,
    temperature: float | Tensor = 0.01,
    margin_strategy: str = "absolute",
    margin: float = 0.0,
    contrast_anchors: bool = True,
    contrast_positives: bool = True,
    published_diagonals: bool = False,
    keep_own_negatives: bool = False,
    column_ids: Sequence[Tensor] | None = None,
    row_weights: float | Tensor | None = None,
    backend: str = "auto",
    memory_budget: int | None = None,
) -> Tensor:
    """InfoNCE whose false negatives a guide model drops: sentence-transformers' CachedGISTEmbedLoss.

    Every anchor a_i competes for its positive p_i against the other positives, all hard negatives, the other anchors
    (`contrast_anchors`) and, by way of its positive, s(p_i, p_j) (`contrast_positives`), in one softmax. An entry is
    dropped where the guide finds the same pair more similar than a_i and p_i, less the margin. No row competes with
    itself; the published loss leaves that to the guide, which fails where it embeds an anchor and its positive
    identically: `published_diagonals=True` does the same.

    Args:
        columns: [anchor, positive, negative 1, ...], each [B, D]; scaled to length 1 here. A zero vector has
            similarity 0 and gradient 0.
        guide_columns: the guide's vectors of the same texts, each [B, Dg]; scaled here, without gradient. That they
            are finite is checked on a CPU only: elsewhere vectors of NaN drop nothing, and no error says so.
        temperature: T. A tensor of one element gets its gradient.
        margin_strategy: "absolute": dropped above t - margin; "relative": above t - |t| margin.
        margin: m; here it lowers the threshold.
        contrast_anchors: contrast with other anchors.
        contrast_positives: contrast positives with each other.
        published_diagonals: see above.
        keep_own_negatives: a row's own hard negatives are curated, and not for the guide to drop.
        column_ids: [B] or [B, K] int64 per column, such as (document, query) with -1 for none: two texts that share
            one are no negatives of each other, in any block. The first column's are those of the rows.
        row_weights: weights of the rows, a float or [B]; None is 1/B, the mean.
        backend: as in `inf_cl_loss`.
        memory_budget: as in `inf_cl_loss`.

    Returns:
        0-d loss.

    Raises:
        ValueError: columns that don't fit each other, guide vectors on a CPU that are not finite, or an option that
            is none of its values.

    Example:
        >>> import paddle
        >>> anchor, positive = paddle.eye(3), paddle.eye(3)
        >>> guide = paddle.to_tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
        >>> options = {"temperature": 1.0, "backend": "paddle", "contrast_anchors": False, "contrast_positives": False}
        >>> round(float(guided_inf_cl_loss([anchor, positive], [guide, guide], margin=0.5, **options)), 4)
        0.3927
    """
    batch = Candidates.from_columns(columns, column_ids)
    if len(guide_columns) != len(columns) or any(g.shape[0] != batch.rows for g in guide_columns):
        raise ValueError(
            f"guide_columns: {len(guide_columns)} of {[g.shape[0] for g in guide_columns]} rows, for {len(columns)} "
            f"columns of {batch.rows} rows; the guide's vectors of the same texts are needed"
        )
    with paddle.no_grad():
        dtype = columns[0].dtype
        vectors = [guide_vectors(g, dtype, f"guide_columns[{k}]") for k, g in enumerate(guide_columns)]
        guide = Candidates.from_columns(vectors, normalize=False)
        groups = guided_groups(
            batch,
            guide,
            margin_strategy=margin_strategy,
            margin=margin,
            contrast_anchors=contrast_anchors,
            contrast_positives=contrast_positives,
            published_diagonals=published_diagonals,
            keep_own_negatives=keep_own_negatives,
        )
    return info_nce(
        groups, temperature=temperature, row_weights=row_weights, backend=backend, memory_budget=memory_budget
    )
