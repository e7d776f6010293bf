# SPDX-License-Identifier: Apache-2.0
"""PaddleNLP's EmbeddingTrainer, with windows in place of micro-batches."""

from paddle_infcl.trainer.embedding import EmbeddingTrainer

__all__ = ["EmbeddingTrainer"]
