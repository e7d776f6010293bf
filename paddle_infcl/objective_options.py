# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: UP006, UP035, UP045, RUF009 - PaddleNLP's PdArgumentParser knows typing's generics only; option is a field
"""The options of objectives, and what they need to make sense together. What they do is in docs/losses.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import List, Optional

# The names that `objectives`, `functional` and `pooling` use; written again because options are read before Paddle is
# imported. A test compares them.
OBJECTIVES = ("infonce", "guided", "ranking", "symmetric", "qwen3")
MARGIN_STRATEGIES = ("absolute", "relative")
DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
PARTITIONS = ("joint", "per_direction")
HARDNESS_MODES = ("hard_negatives", "in_batch_negatives", "all_negatives")
DISTILLATIONS = ("kl", "margin_mse")
GUIDE_DTYPES = ("float32", "bfloat16", "float16")
POOLINGS = ("cls", "mean", "last")


def option(default, help: str, **metadata):
    """A field of a dataclass of options."""
    return field(default=default, metadata={"help": help, **metadata})


@dataclass
class ObjectiveArgument:
    """Which objective, and its options."""

    objective: str = option(
        "infonce", "infonce, guided, ranking, symmetric or qwen3; see docs/losses.md.", choices=OBJECTIVES
    )
    tau_plus: Optional[float] = option(
        None, "Debiased loss: the chance that a negative is in truth a positive, 0 to 1; for normalised embeddings."
    )
    label_smoothing: float = option(0.0, "Share of the target that is spread evenly over all candidates of a row.")

    guide_model_name_or_path: Optional[str] = option(
        None, "guided: the model that says which negatives are none; a folder, or a name that PaddleNLP knows."
    )
    guide_from_data: bool = option(
        False, "guided: the guide's vectors come with the data: query_guide, pos_guide, neg_guide."
    )
    guide_pooling: Optional[str] = option(
        None, "guided: cls, mean or last token; default: what the guide's checkpoint says.", choices=POOLINGS
    )
    guide_dtype: str = option("float32", "guided: float32, bfloat16 or float16, of the guide.", choices=GUIDE_DTYPES)
    guide_batch_size: int = option(32, "guided: texts that go through the guide at once.")
    guide_query_template: str = option("{text}", "guided: text around every query for the guide.")
    guide_passage_template: str = option("{text}", "guided: text around every passage for the guide.")
    guide_max_len: Optional[int] = option(
        None, "guided: most tokens of a text for the guide; default: max_query_len and max_passage_len."
    )
    guide_margin_strategy: str = option(
        "absolute",
        "guided: with t the guide's similarity of a pair, drop above t - guide_margin (absolute) or "
        "t - abs(t) * guide_margin (relative).",
        choices=MARGIN_STRATEGIES,
    )
    guide_margin: float = option(0.0, "guided: see guide_margin_strategy.")
    guide_contrast_anchors: bool = option(True, "guided: contrast with the other queries of the same process.")
    guide_contrast_positives: bool = option(True, "guided: contrast positives with each other.")
    guide_keep_own_negatives: bool = option(False, "guided: a row's own hard negatives are not for the guide to drop.")

    ranking_directions: Optional[List[str]] = option(
        None, "ranking: of query_to_doc, query_to_query, doc_to_query, doc_to_doc; default: query_to_doc."
    )
    ranking_partition: str = option(
        "joint", "ranking: joint, one softmax over all directions, or per_direction, one each.", choices=PARTITIONS
    )
    hardness_mode: Optional[str] = option(
        None,
        "ranking: whose similarity counts more, hard_negatives, in_batch_negatives or all_negatives.",
        choices=HARDNESS_MODES,
    )
    hardness_strength: float = option(0.0, "ranking: how much more.")

    qwen3_query_to_query: bool = option(True, "qwen3: contrast queries with each other.")
    qwen3_doc_to_doc: bool = option(True, "qwen3: contrast positives with each other.")

    distillation: Optional[str] = option(
        None, "Learn a teacher's scores as well (pos_scores, neg_scores in the data): kl or margin_mse.",
        choices=DISTILLATIONS,
    )  # fmt: skip
    distillation_weight: float = option(1.0, "Weight of the distillation term.")
    contrastive_weight: float = option(1.0, "Weight of the contrastive term beside distillation; 0: none.")
    distillation_teacher_temperature: float = option(1.0, "distillation kl: the teacher's scores are divided by it.")

    def row_needs(self) -> list[str]:
        """What every row of the data must have: of "scores" and "guide"."""
        return ["scores"] * (self.distillation is not None) + ["guide"] * self.guide_from_data


_OF_GUIDE = (
    "guide_model_name_or_path", "guide_from_data", "guide_pooling", "guide_dtype", "guide_batch_size",
    "guide_query_template", "guide_passage_template", "guide_max_len", "guide_margin_strategy", "guide_margin",
    "guide_contrast_anchors", "guide_contrast_positives", "guide_keep_own_negatives",
)  # fmt: skip
_OF_RANKING = ("ranking_directions", "ranking_partition", "hardness_mode", "hardness_strength")
_OF_QWEN3 = ("qwen3_query_to_query", "qwen3_doc_to_doc")
_OF_DISTILLATION = ("distillation_weight", "contrastive_weight", "distillation_teacher_temperature")


def check_objective(v, need: Callable[[bool, str, str], None], given: Callable[[str], bool]) -> None:
    """Checks the options by themselves and together.

    Args:
        v: options by attribute.
        need: (condition, option, message) -> None; notes a problem when the condition is false.
        given: whether somebody set an option.
    """
    for name, choices in (
        ("objective", OBJECTIVES),
        ("guide_dtype", GUIDE_DTYPES),
        ("guide_margin_strategy", MARGIN_STRATEGIES),
        ("ranking_partition", PARTITIONS),
    ):
        need(getattr(v, name) in choices, name, f"must be one of {', '.join(choices)}")
    for name, choices in (
        ("guide_pooling", POOLINGS),
        ("hardness_mode", HARDNESS_MODES),
        ("distillation", DISTILLATIONS),
    ):
        need(getattr(v, name) in (None, *choices), name, f"must be one of {', '.join(choices)}")
    need(v.tau_plus is None or 0 <= v.tau_plus < 1, "tau_plus", "must be 0 or more and less than 1; 0.1 is usual")
    need(0 <= v.label_smoothing < 1, "label_smoothing", "must be 0 or more and less than 1; 0.1 is usual")
    need(v.guide_batch_size >= 1, "guide_batch_size", "must be 1 or more")
    need(v.guide_max_len is None or v.guide_max_len >= 2, "guide_max_len", "must be 2 tokens or more")
    for name in ("guide_query_template", "guide_passage_template"):
        need(getattr(v, name).count("{text}") == 1, name, "must contain {text} exactly once")
    for name in ("guide_margin", "hardness_strength"):
        need(math.isfinite(getattr(v, name)), name, "must be a finite number")
    need(0 < v.distillation_weight < math.inf, "distillation_weight", "must be positive")
    need(0 <= v.contrastive_weight < math.inf, "contrastive_weight", "must be 0 or more")
    need(0 < v.distillation_teacher_temperature < math.inf, "distillation_teacher_temperature", "must be positive")
    _check_ranking(v, need)
    for options, wanted in ((_OF_GUIDE, "guided"), (_OF_RANKING, "ranking"), (_OF_QWEN3, "qwen3")):
        for name in options:
            need(v.objective == wanted or not given(name), name, f"has no effect without objective: {wanted}")
    for name in _OF_DISTILLATION:
        need(v.distillation is not None or not given(name), name, "has no effect without distillation")
    if given("false_negative_margin"):
        fits = v.objective in ("infonce", "qwen3")
        need(fits, "false_negative_margin", f"has no effect with objective: {v.objective}; infonce and qwen3 have it")
    if v.false_negative_keep_own_negatives:
        need(*_keeps_own_negatives(v))


def check_guide(v, need: Callable[[bool, str, str], None]) -> None:
    """Checks that a guided objective has a guide. Arguments as for `check_objective`."""
    if v.objective == "guided":
        both = v.guide_model_name_or_path and v.guide_from_data
        need(not both, "guide_from_data", "guide_model_name_or_path is given as well: take one of the two")
        one = v.guide_model_name_or_path or v.guide_from_data
        need(bool(one), "guide_model_name_or_path", "is needed for objective: guided; or guide_from_data: true")


def _keeps_own_negatives(v) -> tuple[bool, str, str]:
    """`need`'s arguments where false_negative_keep_own_negatives is on."""
    message = f"has no effect with objective: {v.objective}; infonce and qwen3 have it"
    if v.objective == "guided":
        message = "has no effect with objective: guided, whose option is guide_keep_own_negatives"
    elif v.objective == "infonce":
        message = "has no effect without false_negative_margin"
    # Qwen3-Embedding's loss has a margin also where none is given.
    works = v.objective == "qwen3" or (v.objective == "infonce" and v.false_negative_margin is not None)
    return works, "false_negative_keep_own_negatives", message


def _check_ranking(v, need) -> None:
    directions = v.ranking_directions
    if directions is None:
        directions = ["query_to_doc"]
    known = bool(directions) and set(directions) <= set(DIRECTIONS) and len(set(directions)) == len(directions)
    need(known, "ranking_directions", f"must be one or more of {', '.join(DIRECTIONS)}, each once")
    if not known:
        return
    has_positive = "query_to_doc" in directions or (
        v.ranking_partition == "per_direction" and "doc_to_query" in directions
    )
    need(has_positive, "ranking_directions", "lacks query_to_doc, where the positive of a query is")
    apart = v.ranking_partition == "per_direction" and {"query_to_query", "doc_to_doc"} & set(directions)
    message = "per_direction can't be with query_to_query or doc_to_doc, which hold no positive"
    need(not apart, "ranking_partition", message)
    hard = v.hardness_mode is None or "query_to_doc" in directions
    need(hard, "hardness_mode", "needs the direction query_to_doc, whose logits it changes")
