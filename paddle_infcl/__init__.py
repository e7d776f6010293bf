# SPDX-License-Identifier: Apache-2.0
"""Contrastive training of embedding models in Paddle without the similarity matrix."""

from __future__ import annotations

import importlib
import importlib.util

__version__ = "0.1.0"

if importlib.util.find_spec("paddle") is None:
    raise ImportError(
        "paddle_infcl needs Paddle, which is not installed. Without a GPU: pip install 'paddle_infcl[cpu]' "
        "(from a checkout: pip install -e '.[cpu]'). With a CUDA GPU, take paddlepaddle-gpu >= 3.0 from Paddle's own "
        "index: pip install -e '.[gpu]' --extra-index-url https://www.paddlepaddle.org.cn/packages/stable/cu126/"
    )

# Imported on first use: `import paddle_infcl` must stay quick, and must not pull in paddlenlp.
_LAZY = {
    "EmbeddingTrainer": "paddle_infcl.trainer",
    "EmbeddingArgument": "paddle_infcl.arguments",
    "SentenceEncoder": "paddle_infcl.modeling",
    "RetrievalEvaluator": "paddle_infcl.evaluation.retrieval",
    "encode_texts": "paddle_infcl.encode",
    "build_loss": "paddle_infcl.losses",
    "contrastive_loss": "paddle_infcl.functional",
    "inf_cl_loss": "paddle_infcl.functional",
}

__all__ = ["__version__", *sorted(_LAZY)]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'paddle_infcl' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
