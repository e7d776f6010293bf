# SPDX-License-Identifier: Apache-2.0
"""Losses as functions: tensors in, tensors out."""

from paddle_infcl.functional.blocks import Block, Guide, Hardness
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import contrastive_loss, inf_cl_loss, info_nce
from paddle_infcl.functional.distillation import distillation_loss
from paddle_infcl.functional.guided import guided_inf_cl_loss
from paddle_infcl.functional.linear_logprobs import linear_label_terms, linear_logprobs_of_labels, merge_label_terms
from paddle_infcl.functional.logprobs import logprobs_of_labels
from paddle_infcl.functional.matryoshka import Matryoshka, matryoshka_loss
from paddle_infcl.functional.qwen3 import qwen3_loss
from paddle_infcl.functional.ranking import multiple_negatives_ranking_loss
from paddle_infcl.functional.sequence_logprobs import sequence_logprobs
from paddle_infcl.functional.symmetric import symmetric_loss

__all__ = [
    "Block",
    "Candidates",
    "Guide",
    "Hardness",
    "Matryoshka",
    "contrastive_loss",
    "distillation_loss",
    "guided_inf_cl_loss",
    "inf_cl_loss",
    "info_nce",
    "linear_label_terms",
    "linear_logprobs_of_labels",
    "logprobs_of_labels",
    "matryoshka_loss",
    "merge_label_terms",
    "multiple_negatives_ranking_loss",
    "qwen3_loss",
    "sequence_logprobs",
    "symmetric_loss",
]
