# SPDX-License-Identifier: Apache-2.0
"""Forward passes in NumPy, fp64, from weights as PyTorch's transformers names them. Only the tests use them.

Written from the published architectures (BERT: post-norm encoder with learned positions; Qwen2: pre-norm decoder with
RMSNorm, rotary positions, grouped keys and a gated MLP), one text at a time, so there is no padding to get wrong.
"""

from __future__ import annotations

import math

import numpy as np

_erf = np.vectorize(math.erf)


def _softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def bert_hidden(weights, ids, *, layers, heads, eps, first_position=0, task_id=None):
    """Hidden states [L, H] of one text. `first_position`: RoBERTa's positions begin after the padding id."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    count = len(ids)
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][first_position : first_position + count]
    x = x + w["embeddings.token_type_embeddings.weight"][0]
    if task_id is not None:
        x = x + w["embeddings.task_type_embeddings.weight"][task_id]
    x = norm(x, "embeddings.LayerNorm")
    for i in range(layers):
        at = f"encoder.layer.{i}"
        q, k, v = (
            linear(x, f"{at}.attention.self.{part}").reshape(count, heads, -1).transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )
        mixed = _softmax(q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])) @ v
        mixed = linear(mixed.transpose(1, 0, 2).reshape(count, -1), f"{at}.attention.output.dense")
        x = norm(x + mixed, f"{at}.attention.output.LayerNorm")
        inner = linear(x, f"{at}.intermediate.dense")
        inner = inner * 0.5 * (1 + _erf(inner / math.sqrt(2)))
        x = norm(x + linear(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    return x


def qwen2_hidden(weights, ids, *, layers, heads, kv_heads, eps, theta):
    """Hidden states [L, H] of one text."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def rotate(x):  # [heads, L, d]: the first half of a head turns against the second
        half = x.shape[-1] // 2
        angle = np.arange(x.shape[1])[:, None] / theta ** (np.arange(half) / half)
        cos, sin, a, b = np.cos(angle), np.sin(angle), x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    count = len(ids)
    x = w["embed_tokens.weight"][ids]
    for i in range(layers):
        at = f"layers.{i}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            (y @ w[f"{at}.self_attn.{p}_proj.weight"].T + w[f"{at}.self_attn.{p}_proj.bias"])
            .reshape(count, n, -1)
            .transpose(1, 0, 2)
            for p, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(t, heads // kv_heads, 0) for t in (k, v))
        scores = q @ k.transpose(0, 2, 1) / math.sqrt(q.shape[-1])
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        mixed = (_softmax(scores) @ v).transpose(1, 0, 2).reshape(count, -1)
        x = x + mixed @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        up = y @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "norm")


def embedding(hidden, pooling="mean", normalize=True):
    """[L, H] -> [H]."""
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector
