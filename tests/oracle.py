# SPDX-License-Identifier: Apache-2.0
"""The losses in float64 NumPy, written from their definitions, sharing nothing with the package.

A block is a dict: `left` and `right` are names into `arrays`; the other keys are those of `functional.Block`.
Logits are stored, masks are boolean matrices, masks and gradients follow the definitions entry by entry. Only where
float64 itself would run out of digits (a positive that leads by hundreds) are 1 - P and lse - own written as sums over
the other entries.
"""

from __future__ import annotations

import numpy as np


def kept(block: dict, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """[B, N] bool: which entries a row competes against, its own among them."""
    B, N = left.shape[0], right.shape[0]
    entries = np.ones((B, N), bool)
    similarity = left @ right.T
    for i in range(B):
        for j in range(N):
            if block.get("owner") is not None and block.get("owner_rule") is not None:
                owner, row = block["owner"][j], block.get("row_offset", 0) + i
                if block["owner_rule"] == "only" and owner >= 0 and owner != row:
                    entries[i, j] = False
                if block["owner_rule"] == "exclude" and owner == row:
                    entries[i, j] = False
            if block.get("row_ids") is not None:
                a = np.atleast_1d(block["row_ids"][i])
                b = np.atleast_1d(block["column_ids"][j])
                if np.any((a == b) & (a >= 0)):
                    entries[i, j] = False
            if block.get("limit") is not None and similarity[i, j] > block["limit"][i] + block.get("slack", 0.0):
                entries[i, j] = False
            guide = block.get("guide")
            if guide is not None and guide["left"][i] @ guide["right"][j] > guide["threshold"][i] + 1e-6:
                own_negative = block.get("owner") is not None and block["owner"][j] == block.get("row_offset", 0) + i
                if not (guide.get("keep_own") and own_negative):
                    entries[i, j] = False
    if block.get("own") is not None:
        for i, j in enumerate(block["own"]):
            if j >= 0:
                entries[i, j] = True
    if block.get("self_column") is not None:
        for i, j in enumerate(block["self_column"]):
            if j >= 0:
                entries[i, j] = False
    return entries


def _bonus(block: dict, similarity: np.ndarray) -> np.ndarray:
    hardness = block.get("hardness")
    if hardness is None:
        return np.zeros_like(similarity)
    B, N = similarity.shape
    chosen = np.ones((B, N), bool)
    rows = block.get("row_offset", 0) + np.arange(B)
    if hardness["columns"] == "own":
        chosen = block["owner"][None, :] == rows[:, None]
    elif hardness["columns"] == "others":
        chosen = block["owner"][None, :] != rows[:, None]
    if block.get("own") is not None:
        for i, j in enumerate(block["own"]):
            if j >= 0:
                chosen[i, j] = False
    return hardness["strength"] * similarity * chosen


def info_nce(arrays: dict, groups: list, temperature: float, row_weights=None) -> dict:
    """Loss, its gradient for every array, and for the temperature.

    Returns:
        dict with `loss`, `grads` (name -> array), `dtemperature`, `rows` [groups, B] (unweighted losses).
    """
    arrays = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    scale = 1.0 / temperature
    B = arrays[groups[0][0]["left"]].shape[0]
    w = np.full(B, 1.0 / B) if row_weights is None else np.broadcast_to(np.asarray(row_weights, np.float64), (B,))
    grads = {k: np.zeros_like(v) for k, v in arrays.items()}
    dscale, rows = 0.0, []
    for group in groups:
        similarities, logits, owns = [], [], np.full(B, np.nan)
        for block in group:
            left, right = arrays[block["left"]], arrays[block["right"]]
            s = left @ right.T
            z = np.where(kept(block, left, right), scale * s + _bonus(block, s), -np.inf)
            similarities.append(s)
            logits.append(z)
            if block.get("own") is not None:
                for i, j in enumerate(block["own"]):
                    if j >= 0:
                        owns[i] = z[i, j]
        z = np.concatenate(logits, axis=1)
        top = z.max(axis=1, keepdims=True)
        lse = (top + np.log(np.exp(z - top).sum(axis=1, keepdims=True)))[:, 0]
        others = z.copy()
        offset = 0
        for block, zb in zip(group, logits, strict=True):
            if block.get("own") is not None:
                for i, j in enumerate(block["own"]):
                    if j >= 0:
                        others[i, offset + j] = -np.inf
            offset += zb.shape[1]
        lse_others = np.logaddexp.reduce(others, axis=1)
        rows.append(np.logaddexp(0.0, lse_others - owns))
        p_others = np.exp(others - lse[:, None]).sum(axis=1)
        for block, s, zb in zip(group, similarities, logits, strict=True):
            g = np.exp(zb - lse[:, None])
            if block.get("own") is not None:
                for i, j in enumerate(block["own"]):
                    if j >= 0:
                        g[i, j] = -p_others[i]
            g = g * (w / len(groups))[:, None]
            dscale += float((g * s).sum())
            left, right = arrays[block["left"]], arrays[block["right"]]
            grads[block["left"]] += scale * g @ right
            grads[block["right"]] += scale * g.T @ left
    loss = float(sum((w * r).sum() for r in rows) / len(groups))
    return {"loss": loss, "grads": grads, "dtemperature": -dscale / temperature**2, "rows": np.stack(rows)}


def plain(q, p, temperature, own=None, q_ids=None, p_ids=None, margin=None, row_weights=None) -> dict:
    """InfoNCE of q [B,D] against p [N,D]: the one-block case of `info_nce`."""
    q, p = np.asarray(q, np.float64), np.asarray(p, np.float64)
    own = np.arange(len(q)) * (len(p) // len(q)) if own is None else np.asarray(own)
    block = {"left": "q", "right": "p", "own": own, "row_ids": q_ids, "column_ids": p_ids}
    if margin is not None:
        block["limit"], block["slack"] = (q * p[own]).sum(1) + margin, 1e-6
    return info_nce({"q": q, "p": p}, [[block]], temperature, row_weights)
