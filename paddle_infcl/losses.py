# SPDX-License-Identifier: Apache-2.0
"""The training losses as layers: temperature, masks, Matryoshka, and the passages of the other processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import paddle
from paddle import Tensor, nn

from paddle_infcl import kernels
from paddle_infcl.distributed.negatives import check_strategy, global_counts, global_info_nce
from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.functional.blocks import Block
from paddle_infcl.functional.contrastive import info_nce_groups
from paddle_infcl.functional.matryoshka import Matryoshka, prefix_weights
from paddle_infcl.functional.options import check_margin, check_temperature
from paddle_infcl.functional.vectors import l2_normalize


class InfCLLoss(nn.Layer):
    """InfoNCE of a whole global batch: own queries against the passages of all processes.

    Averaged over the processes, as data parallel training does with gradients, value and gradients are those of one
    process that holds all rows, also when processes hold different numbers of them.

    Args:
        temperature: T.
        learnable_temperature: T becomes a parameter, kept as log T so that it stays positive; same gradient on all
            processes after averaging.
        margin: drops likely false negatives, see `functional.inf_cl_loss`.
        keep_own_negatives: but not a row's own hard negatives, see there.
        matryoshka_dims: also train these prefixes, see `functional.matryoshka_loss`.
        matryoshka_weights: one per dim.
        backend: "auto", "triton", "paddle" or "dense".
        memory_budget: bytes of logits held at once.
        strategy: how negatives of other processes take part: "gather", "ring", "auto", or "local", not at all. See
            `distributed.negatives`.
        ranks: the processes that share the batch; None: `Ranks.current()` at the first call.

    Raises:
        ValueError: an option is none of its values.
    """

    def __init__(
        self,
        temperature: float = 0.02,
        *,
        learnable_temperature: bool = False,
        margin: float | None = None,
        keep_own_negatives: bool = False,
        matryoshka_dims: Sequence[int] | None = None,
        matryoshka_weights: Sequence[float] | None = None,
        backend: str = "auto",
        memory_budget: int | None = None,
        strategy: str = "auto",
        ranks: Ranks | None = None,
    ):
        super().__init__()
        check_temperature(temperature, "learnable_temperature=True makes a parameter of it")
        check_margin(margin)
        if backend not in kernels.BACKENDS:
            raise ValueError(f"backend: {backend!r} is none of {', '.join(kernels.BACKENDS)}")
        check_strategy(strategy)
        if matryoshka_dims:
            prefix_weights(max(matryoshka_dims), matryoshka_dims, matryoshka_weights)
        self._temperature, self.margin, self.backend, self.memory_budget = temperature, margin, backend, memory_budget
        self.keep_own_negatives = keep_own_negatives
        self.matryoshka_dims = list(matryoshka_dims) if matryoshka_dims else None
        self.matryoshka_weights = list(matryoshka_weights) if matryoshka_weights else None
        self.strategy, self._ranks = strategy, ranks
        self.log_temperature = None
        if learnable_temperature:
            self.log_temperature = self.create_parameter(
                [1], dtype="float32", default_initializer=nn.initializer.Constant(math.log(temperature))
            )

    @property
    def temperature(self) -> float:
        """T as it is now."""
        return self._temperature if self.log_temperature is None else math.exp(float(self.log_temperature))

    @property
    def ranks(self) -> Ranks:
        """The processes that share the batch."""
        if self._ranks is None:
            self._ranks = Ranks.current()
        return self._ranks

    def forward(
        self,
        q: Tensor,
        p: Tensor,
        own: Tensor | None = None,
        q_ids: Tensor | None = None,
        p_ids: Tensor | None = None,
    ) -> Tensor:
        """The loss of this process: W / total rows times the sum over its own rows.

        Args:
            q: [B, D] this process's queries. B may differ between processes, and be 0.
            p: [N, D] this process's passages.
            own: [B] int64, columns of the positives among p; None: arange(B) * (N / B).
            q_ids: [B, K] int64, see `functional.inf_cl_loss`; given on all processes or on none.
            p_ids: [N, K] int64.

        Returns:
            0-d loss.
        """
        own = given_own(own, q)
        return global_info_nce(
            self._groups(q, p, own, q_ids, p_ids),
            temperature=self._differentiable_temperature(),
            ranks=self.ranks,
            strategy=self.strategy,
            backend=self.backend,
            memory_budget=self.memory_budget,
            matryoshka=self._matryoshka(),
        )

    def _groups(self, q, p, own, q_ids, p_ids) -> list[list[Block]]:
        return info_nce_groups(
            q,
            p,
            own=own,
            q_ids=q_ids,
            p_ids=p_ids,
            margin=self.margin,
            keep_own_negatives=self.keep_own_negatives,
        )

    def _differentiable_temperature(self) -> float | Tensor:
        """T, a tensor with a graph where it is learnt."""
        return self._temperature if self.log_temperature is None else paddle.exp(self.log_temperature)

    def _matryoshka(self) -> Matryoshka | None:
        if not self.matryoshka_dims:
            return None
        return Matryoshka(self.matryoshka_dims, self.matryoshka_weights, self.margin)

    @paddle.no_grad()
    def effective_negatives(
        self,
        q: Tensor,
        p: Tensor,
        own: Tensor | None = None,
        q_ids: Tensor | None = None,
        p_ids: Tensor | None = None,
    ) -> float:
        """The mean number of passages that a query of this process really competes against. Arguments as `forward`.

        All processes must call. With a margin it costs a forward pass of the loss; at full width for Matryoshka.
        """
        if self.matryoshka_dims:
            q, p = l2_normalize(q.astype("float32")), l2_normalize(p.astype("float32"))
        groups = self._groups(q, p, given_own(own, q), q_ids, p_ids)
        counts = global_counts(groups[0], ranks=self.ranks, strategy=self.strategy, memory_budget=self.memory_budget)
        return float(counts.mean()) if q.shape[0] else 0.0


def given_own(own: Tensor | None, q: Tensor) -> Tensor | None:
    """Without rows, no number of passages per query follows."""
    return paddle.zeros([0], dtype="int64") if own is None and q.shape[0] == 0 else own


def build_loss(arguments, ranks: Ranks | None = None) -> InfCLLoss:
    """The loss that the options ask for.

    `inf_cl_loss: true` streams the softmax; otherwise it is the standard contrastive loss, all logits in memory. Both
    have the same value, gradients and negatives. Negatives come from all processes, by `negatives_strategy`;
    PaddleNLP's `embedding_negatives_cross_device: false` turns that off for the standard loss, as it does there.

    Args:
        arguments: `EmbeddingArgument`, or any object with (some of) its fields, such as PaddleNLP's.
        ranks: the processes that share the batch; None: found at the first call.

    Returns:
        The layer; see `InfCLLoss.forward`.
    """

    def option(name, default=None):
        return getattr(arguments, name, default)

    streams = option("inf_cl_loss", False) or option("loss_type") == "inf_cl"
    strategy = option("negatives_strategy", "auto")
    if not streams and not option("embedding_negatives_cross_device", True):
        strategy = "local"
    return InfCLLoss(
        option("embedding_temperature", 0.02),
        learnable_temperature=option("learnable_temperature", False),
        margin=option("false_negative_margin"),
        keep_own_negatives=option("false_negative_keep_own_negatives", False),
        matryoshka_dims=option("embedding_matryoshka_dims"),
        matryoshka_weights=option("embedding_matryoshka_weights"),
        backend=option("inf_cl_backend", "auto") if streams else "dense",
        memory_budget=option("inf_cl_memory_budget"),
        strategy=strategy,
        ranks=ranks,
    )
