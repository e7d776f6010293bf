# SPDX-License-Identifier: Apache-2.0
"""Losses as functions: tensors in, tensors out."""

from paddle_infcl.functional.blocks import Block, Guide, Hardness
from paddle_infcl.functional.candidates import Candidates
from paddle_infcl.functional.contrastive import contrastive_loss, inf_cl_loss, info_nce
from paddle_infcl.functional.distillation import distillation_loss
from paddle_infcl.functional.guided import guided_inf_cl_loss
from paddle_infcl.functional.matryoshka import Matryoshka, matryoshka_loss
from paddle_infcl.functional.qwen3 import qwen3_loss
from paddle_infcl.functional.ranking import multiple_negatives_ranking_loss
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
    "matryoshka_loss",
    "multiple_negatives_ranking_loss",
    "qwen3_loss",
    "symmetric_loss",
]
