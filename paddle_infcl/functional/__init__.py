# SPDX-License-Identifier: Apache-2.0
"""Losses as functions: tensors in, tensors out."""

from paddle_infcl.functional.blocks import Block, Guide, Hardness
from paddle_infcl.functional.contrastive import contrastive_loss, inf_cl_loss, info_nce

__all__ = ["Block", "Guide", "Hardness", "contrastive_loss", "inf_cl_loss", "info_nce"]
