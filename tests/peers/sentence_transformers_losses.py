# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of sentence-transformers for vectors that are given: run by its own interpreter.

    python sentence_transformers_losses.py cases.npz results.npz

cases.npz holds `options`, a JSON list with one dict per case, and per case k the columns `k_0`, `k_1`, ... and, for
the guided loss, the guide's `k_guide_0`, ... results.npz gets `k_loss` and the columns' gradients `k_grad_0`, ...
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import CachedGISTEmbedLoss, CachedMultipleNegativesRankingLoss
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


class Given(torch.nn.Module):
    """An encoder whose embedding of a text is one of its features."""

    def __init__(self, feature: str):
        super().__init__()
        self.feature = feature
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
        self.max_seq_length = 8

    def forward(self, features):
        return {**features, "sentence_embedding": features[self.feature]}


def encoder(feature: str) -> torch.nn.Module:
    return SentenceTransformer(modules=[Given(feature)], device="cpu")


def run(kind, options, columns, guides):
    columns = [torch.tensor(c, requires_grad=True) for c in columns]
    if kind == "guided":
        loss = CachedGISTEmbedLoss(encoder("vector"), encoder("guide"), **options)
        features = [
            {"vector": c, "guide": torch.tensor(g), "input_ids": torch.zeros(len(c), 1, dtype=torch.long)}
            for c, g in zip(columns, guides, strict=True)
        ]
    else:
        directions = tuple(options.pop("directions"))
        loss = CachedMultipleNegativesRankingLoss(encoder("vector"), directions=directions, **options)
        features = [{"vector": c, "input_ids": torch.zeros(len(c), 1, dtype=torch.long)} for c in columns]
    value = loss(features, None)
    value.backward()
    return value.item(), [c.grad.numpy() for c in columns]


def main(cases_file: str, results_file: str) -> None:
    cases = np.load(cases_file)
    results = {}
    for k, case in enumerate(json.loads(str(cases["options"]))):
        names = [f"{k}_{c}" for c in range(case["columns"])]
        guides = [cases[f"{k}_guide_{c}"] for c in range(case["columns"])] if case["kind"] == "guided" else None
        loss, gradients = run(case["kind"], case["options"], [cases[n] for n in names], guides)
        results[f"{k}_loss"] = loss
        results |= {f"{k}_grad_{c}": g for c, g in enumerate(gradients)}
    np.savez(results_file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
