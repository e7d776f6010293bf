# SPDX-License-Identifier: Apache-2.0
"""The objectives that a configuration can name, as layers: each is a list of blocks and its options.

A new objective is a class here with `groups`, which lists its blocks, and a line in `OBJECTIVES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import paddle
from paddle import Tensor

from paddle_infcl.distributed.gather import row_counts
from paddle_infcl.distributed.negatives import global_counts, global_info_nce
from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.distillation import DISTILLATIONS, distillation_loss
from paddle_infcl.functional.guided import MARGIN_STRATEGIES, guide_vectors, guided_groups
from paddle_infcl.functional.matryoshka import prefix_groups, unit_prefixes
from paddle_infcl.functional.options import check_number
from paddle_infcl.functional.qwen3 import qwen3_groups
from paddle_infcl.functional.ranking import check_ranking, ranking_groups
from paddle_infcl.functional.row_losses import Debiased
from paddle_infcl.functional.smoothing import check_smoothing
from paddle_infcl.functional.symmetric import symmetric_loss
from paddle_infcl.losses import InfCLLoss, build_loss, given_own


@dataclass(eq=False)
class Batch:
    """What a layer's forward was given: see `ObjectiveLoss.forward`."""

    q: Tensor
    p: Tensor
    own: Tensor | None
    q_ids: Tensor | None
    p_ids: Tensor | None
    guide_q: Tensor | None = None
    guide_p: Tensor | None = None

    def candidates(self) -> Candidates:
        return Candidates.from_passages(self.q, self.p, self.own, self.q_ids, self.p_ids)


class Objective(Protocol):
    """An objective's options and the blocks that they make."""

    #: of the rule that drops what is more similar than the own pair by this margin; None without it.
    margin: float | None

    def groups(self, batch: Batch) -> list[list[Block]]:
        """The blocks over one process's tensors; raises ValueError where the batch lacks something."""


@dataclass(frozen=True)
class InfoNCEObjective:
    """Queries against passages. See `functional.inf_cl_loss`."""

    margin: float | None = None
    keep_own_negatives: bool = False

    def groups(self, batch: Batch) -> list[list[Block]]:
        return info_nce_groups(
            batch.q,
            batch.p,
            own=batch.own,
            q_ids=batch.q_ids,
            p_ids=batch.p_ids,
            margin=self.margin,
            keep_own_negatives=self.keep_own_negatives,
        )


@dataclass(frozen=True)
class GuidedObjective:
    """A guide model drops false negatives. See `functional.guided_inf_cl_loss`."""

    margin_strategy: str = "absolute"
    guide_margin: float = 0.0
    contrast_anchors: bool = True
    contrast_positives: bool = True
    published_diagonals: bool = False
    keep_own_negatives: bool = False
    margin = None

    def __post_init__(self):
        check_number("guide_margin", self.guide_margin, "a finite number is needed")
        if self.margin_strategy not in MARGIN_STRATEGIES:
            raise ValueError(f"margin_strategy: {self.margin_strategy!r} is none of {', '.join(MARGIN_STRATEGIES)}")

    def groups(self, batch: Batch) -> list[list[Block]]:
        if batch.guide_q is None or batch.guide_p is None:
            raise ValueError("the guided objective needs the guide's vectors of the queries and of the passages")
        given = {"guide_q": batch.guide_q, "guide_p": batch.guide_p}
        q, p = (guide_vectors(vectors, batch.q.dtype, name) for name, vectors in given.items())
        guide = Candidates.from_passages(q, p, batch.own)
        return guided_groups(
            batch.candidates(),
            guide,
            margin_strategy=self.margin_strategy,
            margin=self.guide_margin,
            contrast_anchors=self.contrast_anchors,
            contrast_positives=self.contrast_positives,
            published_diagonals=self.published_diagonals,
            keep_own_negatives=self.keep_own_negatives,
        )


@dataclass(frozen=True)
class RankingObjective:
    """Up to four directions, and hardness. See `functional.multiple_negatives_ranking_loss`."""

    directions: Sequence[str] = ("query_to_doc",)
    partition: str = "joint"
    hardness_mode: str | None = None
    hardness_strength: float = 0.0
    margin = None

    def __post_init__(self):
        check_ranking(self.directions, self.partition, self.hardness_mode)

    def groups(self, batch: Batch) -> list[list[Block]]:
        return ranking_groups(
            batch.candidates(),
            directions=self.directions,
            partition=self.partition,
            hardness_mode=self.hardness_mode,
            hardness_strength=self.hardness_strength,
        )


SYMMETRIC = RankingObjective(("query_to_doc", "doc_to_query"), "per_direction")


@dataclass(frozen=True)
class Qwen3Objective:
    """Margin mask, queries against queries, positives against positives. See `functional.qwen3_loss`."""

    margin: float | None = 0.1
    query_to_query: bool = True
    doc_to_doc: bool = True
    keep_own_negatives: bool = False

    def groups(self, batch: Batch) -> list[list[Block]]:
        return qwen3_groups(
            batch.candidates(),
            margin=self.margin,
            query_to_query=self.query_to_query,
            doc_to_doc=self.doc_to_doc,
            keep_own_negatives=self.keep_own_negatives,
        )


@dataclass(frozen=True)
class Distillation:
    """A teacher's scores beside the contrastive term. See `functional.distillation_loss`.

    Attributes:
        kind: "kl" or "margin_mse"; weight: of this term.
        contrastive_weight: of the contrastive term; 0 leaves it out.
        teacher_temperature: for "kl".
    """

    kind: str = "kl"
    weight: float = 1.0
    contrastive_weight: float = 1.0
    teacher_temperature: float = 1.0

    def __post_init__(self):
        if self.kind not in DISTILLATIONS:
            raise ValueError(f"distillation: {self.kind!r} is none of {', '.join(DISTILLATIONS)}")
        if self.weight <= 0 or self.contrastive_weight < 0:
            raise ValueError(
                f"distillation: weight {self.weight} must be positive, contrastive_weight {self.contrastive_weight} "
                "0 or more"
            )


class ObjectiveLoss(InfCLLoss):
    """Any objective over the global batch, with everything that goes with every one of them.

    Args:
        objective: which, with its options.
        temperature: T.
        tau_plus: debiased, see `functional.row_losses.Debiased`; None is off.
        label_smoothing: see `functional.info_nce`.
        distillation: see there; `forward` then needs `teacher_scores`.
        **options: `InfCLLoss`'s, except margin and keep_own_negatives, which are the objective's.

    Raises:
        ValueError: an option is none of its values.
    """

    def __init__(
        self,
        objective: Objective,
        temperature: float = 0.02,
        *,
        tau_plus: float | None = None,
        label_smoothing: float = 0.0,
        distillation: Distillation | None = None,
        **options,
    ):
        super().__init__(temperature, margin=objective.margin, **options)
        check_smoothing(label_smoothing)
        self.objective, self.label_smoothing, self.distillation = objective, label_smoothing, distillation
        self.row_loss = None if tau_plus is None else Debiased(tau_plus)

    @property
    def wanted(self) -> list[str]:
        """Of "guide" and "teacher_scores", what `forward` needs."""
        guided = isinstance(self.objective, GuidedObjective) and self._contrastive_weight > 0
        return ["guide"] * guided + ["teacher_scores"] * (self.distillation is not None)

    @property
    def _contrastive_weight(self) -> float:
        return 1.0 if self.distillation is None else self.distillation.contrastive_weight

    def forward(
        self,
        q: Tensor,
        p: Tensor,
        own: Tensor | None = None,
        q_ids: Tensor | None = None,
        p_ids: Tensor | None = None,
        guide_q: Tensor | None = None,
        guide_p: Tensor | None = None,
        teacher_scores: Tensor | None = None,
    ) -> Tensor:
        """The loss of this process: W / total rows times the sum over its own rows.

        Args:
            q, p, own, q_ids, p_ids: as for `InfCLLoss.forward`; every objective but infonce, and infonce with
                keep_own_negatives, needs `own` increasing from 0: a row's negatives follow its positive.
            guide_q: [B, Dg] the guide's vectors of the queries, for the guided objective.
            guide_p: [N, Dg] of the passages.
            teacher_scores: [B, G] a teacher's scores of each row's positive and hard negatives, in the order of p;
                entries beyond a row's passages are ignored.

        Returns:
            0-d loss.
        """
        own = given_own(own, q)
        temperature = self._differentiable_temperature()
        weight, terms = self._contrastive_weight, []
        if weight:
            batch = Batch(q, p, own, q_ids, p_ids, guide_q, guide_p)
            loss = self._contrastive(batch, temperature)
            terms.append(loss if weight == 1.0 else weight * loss)
        if self.distillation is not None:
            terms.append(self.distillation.weight * self._distilled(q, p, own, teacher_scores, temperature))
        return sum(terms[1:], terms[0])

    def _contrastive(self, batch: Batch, temperature) -> Tensor:
        alone = self.ranks.world == 1
        options = {
            "temperature": temperature,
            "backend": self.backend,
            "memory_budget": self.memory_budget,
        }
        extras = {"row_loss": self.row_loss, "label_smoothing": self.label_smoothing}
        plain = self.row_loss is None and not self.label_smoothing and not self.matryoshka_dims
        if alone and plain and self.objective is SYMMETRIC and batch.q.shape[0] == batch.p.shape[0]:
            return symmetric_loss(batch.q, batch.p, q_ids=batch.q_ids, p_ids=batch.p_ids, **options)
        groups = self.objective.groups(batch)
        options |= extras
        return global_info_nce(
            groups, ranks=self.ranks, strategy=self.strategy, matryoshka=self._matryoshka(), **options
        )

    def _distilled(self, q, p, own, scores, temperature) -> Tensor:
        if scores is None:
            raise ValueError("distillation needs teacher_scores with the data: a score for each passage of a row")
        total = sum(row_counts(q.shape[0], self.ranks)) if self.ranks.world > 1 else q.shape[0]
        candidates = own_candidates(q.shape[0], p.shape[0], own, scores.shape[1])
        return distillation_loss(
            q,
            p,
            candidates,
            scores,
            kind=self.distillation.kind,
            temperature=temperature,
            teacher_temperature=self.distillation.teacher_temperature,
            row_weights=self.ranks.world / max(total, 1),
        )

    @paddle.no_grad()
    def effective_negatives(
        self,
        q: Tensor,
        p: Tensor,
        own: Tensor | None = None,
        q_ids: Tensor | None = None,
        p_ids: Tensor | None = None,
        guide_q: Tensor | None = None,
        guide_p: Tensor | None = None,
        teacher_scores: Tensor | None = None,
    ) -> float:
        """The mean number of candidates that a row of this process really competes against. Arguments as `forward`.

        All processes must call. With a margin or a guide it costs a forward pass of the loss; at full width for
        Matryoshka; in the first direction where directions have a softmax each.
        """
        own = given_own(own, q)
        groups = self.objective.groups(Batch(q, p, own, q_ids, p_ids, guide_q, guide_p))
        if self.matryoshka_dims:
            groups = (
                unit_prefixes(groups, q.shape[1])
                if self.margin is None
                else prefix_groups(groups, q.shape[1], self.margin)
            )
        counts = global_counts(groups[0], ranks=self.ranks, strategy=self.strategy, memory_budget=self.memory_budget)
        return float(counts.mean()) if q.shape[0] else 0.0


def own_candidates(B: int, N: int, own: Tensor | None, G: int) -> Tensor:
    """[B, G] int64 columns of each row's positive and negatives, -1 where a row has fewer.

    Raises:
        ValueError: a row has more passages than G.
    """
    starts = paddle.arange(B, dtype="int64") * (N // max(B, 1)) if own is None else own
    if B == 0:
        return paddle.zeros([0, G], dtype="int64")
    ends = paddle.concat([starts[1:], paddle.full([1], N, dtype="int64")])
    longest = int((ends - starts).max())
    if longest > G:
        raise ValueError(f"teacher_scores has {G} scores per row, a row has {longest} passages: one score each")
    columns = starts.unsqueeze(1) + paddle.arange(G, dtype="int64").unsqueeze(0)
    return paddle.where(columns < ends.unsqueeze(1), columns, paddle.full_like(columns, -1))


OBJECTIVES = ("infonce", "guided", "ranking", "symmetric", "qwen3")


def objective_from(arguments) -> Objective:
    """The objective that the options name. Raises ValueError: an option is none of its values."""

    def option(name, default=None):
        value = getattr(arguments, name, None)
        return default if value is None else value

    name, margin = option("objective", "infonce"), getattr(arguments, "false_negative_margin", None)
    keep_own_negatives = option("false_negative_keep_own_negatives", False)
    if name == "infonce":
        return InfoNCEObjective(margin, keep_own_negatives)
    if name == "guided":
        return GuidedObjective(
            option("guide_margin_strategy", "absolute"),
            option("guide_margin", 0.0),
            option("guide_contrast_anchors", True),
            option("guide_contrast_positives", True),
            keep_own_negatives=option("guide_keep_own_negatives", False),
        )
    if name == "ranking":
        return RankingObjective(
            tuple(option("ranking_directions", ("query_to_doc",))),
            option("ranking_partition", "joint"),
            option("hardness_mode"),
            option("hardness_strength", 0.0),
        )
    if name == "symmetric":
        return SYMMETRIC
    if name == "qwen3":
        return Qwen3Objective(
            0.1 if margin is None else margin,
            option("qwen3_query_to_query", True),
            option("qwen3_doc_to_doc", True),
            keep_own_negatives,
        )
    raise ValueError(f"objective: {name!r} is none of {', '.join(OBJECTIVES)}")


def build_objective(arguments, ranks=None) -> InfCLLoss:
    """The loss that the options ask for: `losses.build_loss`'s, or an objective beyond it.

    Args:
        arguments: `EmbeddingArgument`, or any object with (some of) its fields, such as PaddleNLP's.
        ranks: the processes that share the batch; None: found at the first call.

    Returns:
        The layer; see `ObjectiveLoss.forward`.
    """
    kind = getattr(arguments, "distillation", None)
    tau_plus, smoothing = getattr(arguments, "tau_plus", None), getattr(arguments, "label_smoothing", 0.0) or 0.0
    objective = objective_from(arguments)
    plain = build_loss(arguments, ranks)
    if isinstance(objective, InfoNCEObjective) and kind is None and tau_plus is None and not smoothing:
        return plain
    distillation = None
    if kind is not None:
        distillation = Distillation(
            kind,
            getattr(arguments, "distillation_weight", 1.0),
            getattr(arguments, "contrastive_weight", 1.0),
            getattr(arguments, "distillation_teacher_temperature", 1.0),
        )
    return ObjectiveLoss(
        objective,
        plain.temperature,
        tau_plus=tau_plus,
        label_smoothing=smoothing,
        distillation=distillation,
        learnable_temperature=plain.log_temperature is not None,
        matryoshka_dims=plain.matryoshka_dims,
        matryoshka_weights=plain.matryoshka_weights,
        backend=plain.backend,
        memory_budget=plain.memory_budget,
        strategy=plain.strategy,
        ranks=ranks,
    )
