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
        dict with `loss`, `grads` (name -> array), `dtemperature`, `rows` [groups, B] (unweighted losses), and
        `magnitudes` (name -> the largest sum of the absolute terms of a gradient's entry: rounding errors are
        relative to it, not to what is left when the terms cancel).
    """
    arrays = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    scale = 1.0 / temperature
    B = arrays[groups[0][0]["left"]].shape[0]
    w = np.full(B, 1.0 / B) if row_weights is None else np.broadcast_to(np.asarray(row_weights, np.float64), (B,))
    grads = {k: np.zeros_like(v) for k, v in arrays.items()}
    sums = {k: np.zeros_like(v) for k, v in arrays.items()}
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
            sums[block["left"]] += scale * np.abs(g) @ np.abs(right)
            sums[block["right"]] += scale * np.abs(g).T @ np.abs(left)
    loss = float(sum((w * r).sum() for r in rows) / len(groups))
    return {
        "loss": loss,
        "grads": grads,
        "dtemperature": -dscale / temperature**2,
        "rows": np.stack(rows),
        "magnitudes": {k: v.max(initial=0.0) for k, v in sums.items()},
    }


def plain(q, p, temperature, own=None, q_ids=None, p_ids=None, margin=None, row_weights=None) -> dict:
    """InfoNCE of q [B,D] against p [N,D]: the one-block case of `info_nce`."""
    q, p = np.asarray(q, np.float64), np.asarray(p, np.float64)
    own = np.arange(len(q)) * (len(p) // len(q)) if own is None else np.asarray(own)
    block = {"left": "q", "right": "p", "own": own, "row_ids": q_ids, "column_ids": p_ids}
    if margin is not None:
        block["limit"], block["slack"] = (q * p[own]).sum(1) + margin, 1e-6
    return info_nce({"q": q, "p": p}, [[block]], temperature, row_weights)


# The published objectives, entry by entry from their definitions: values only, gradients by differences.


def cosines(a, b) -> np.ndarray:
    """[len(a), len(b)]; a zero vector has similarity 0."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    na, nb = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
    return (a / np.where(na > 0, na, 1)[:, None]) @ (b / np.where(nb > 0, nb, 1)[:, None]).T


def _lse(logits) -> float:
    top = max(logits)
    return top + np.log(sum(np.exp(x - top) for x in logits))


def guided_rows(columns, guides, temperature, *, strategy="absolute", margin=0.0, anchors=True, positives=True,
                published_diagonals=False, keep_own_negatives=False) -> np.ndarray:  # fmt: skip
    """[B] losses of CachedGISTEmbedLoss in one process; columns and guides: [anchor, positive, *negatives]."""
    B = len(columns[0])
    s = [cosines(columns[0], c) for c in columns[1:]]
    g = [cosines(guides[0], c) for c in guides[1:]]
    aa, pp = cosines(columns[0], columns[0]), cosines(columns[1], columns[1])
    gaa, gpp = cosines(guides[0], guides[0]), cosines(guides[1], guides[1])
    losses = []
    for i in range(B):
        t = g[0][i, i]
        theta = (t - margin if strategy == "absolute" else t - abs(t) * margin) + 1e-12
        logits = []
        for k in range(len(s)):
            for j in range(B):
                keep = g[k][i, j] <= theta or (k == 0 and j == i) or (k > 0 and j == i and keep_own_negatives)
                if keep:
                    logits.append(s[k][i, j])
        for wanted, similarity, seen in ((anchors, aa, gaa), (positives, pp, gpp)):
            for j in range(B):
                if wanted and seen[i, j] <= theta and (published_diagonals or j != i):
                    logits.append(similarity[i, j])
        losses.append(_lse([x / temperature for x in logits]) - s[0][i, i] / temperature)
    return np.array(losses)


def ranking_rows(columns, temperature, *, directions=("query_to_doc",), partition="joint", hardness_mode=None,
                 strength=0.0, bonus_from=None) -> np.ndarray:  # fmt: skip
    """[B] losses of CachedMultipleNegativesRankingLoss in one process.

    bonus_from: the columns whose similarities give the (constant) hardness bonus; None: the columns.
    """
    B = len(columns[0])
    bonus_from = columns if bonus_from is None else bonus_from
    scale, q, p, docs = 1.0 / temperature, columns[0], columns[1], columns[1:]
    s = [cosines(q, d) for d in docs]
    frozen = [cosines(bonus_from[0], d) for d in bonus_from[1:]]
    qq, pq, pd = cosines(q, q), cosines(p, q), [cosines(p, d) for d in docs]
    losses = []
    for i in range(B):
        parts = {d: [] for d in directions}
        for k in range(len(docs)):
            for j in range(B):
                own = k == 0 and j == i
                chosen = {
                    None: False,
                    "hard_negatives": k > 0 and j == i,
                    "in_batch_negatives": j != i,
                    "all_negatives": not own,
                }[hardness_mode]
                if "query_to_doc" in parts:
                    parts["query_to_doc"].append(scale * s[k][i, j] + strength * chosen * frozen[k][i, j])
                if "doc_to_doc" in parts and j != i:
                    parts["doc_to_doc"].append(scale * pd[k][i, j])
        for j in range(B):
            if "query_to_query" in parts and j != i:
                parts["query_to_query"].append(scale * qq[i, j])
            if "doc_to_query" in parts:
                parts["doc_to_query"].append(scale * pq[i, j])
        own = scale * s[0][i, i]
        if partition == "joint":
            losses.append(_lse([x for part in parts.values() for x in part]) - own)
        else:
            losses.append(np.mean([_lse(part) - own for part in parts.values()]))
    return np.array(losses)


def qwen3_rows(columns, temperature, margin=0.1, qq=True, dd=True, keep_own_negatives=False) -> np.ndarray:
    """[B] losses of Qwen3-Embedding: own hard negatives, other positives, other queries, positives by positives."""
    B = len(columns[0])
    s, ss, pp = cosines(columns[0], columns[1]), cosines(columns[0], columns[0]), cosines(columns[1], columns[1])
    own_negatives = [cosines(columns[0], n) for n in columns[2:]]
    losses = []
    for i in range(B):
        limit = np.inf if margin is None else s[i, i] + margin + 1e-12
        own = [n[i, i] for n in own_negatives]
        others = [s[i, j] for j in range(B) if j != i]
        others += [ss[i, j] for j in range(B) if j != i and qq] + [pp[i, j] for j in range(B) if j != i and dd]
        kept = [x for x in own if keep_own_negatives or x <= limit] + [x for x in others if x <= limit]
        losses.append(_lse([x / temperature for x in [s[i, i], *kept]]))
        losses[-1] -= s[i, i] / temperature
    return np.array(losses)


def debiased_rows(q, p, temperature, tau, dropped=None) -> np.ndarray:
    """[B] debiased contrastive losses of dot products, own column i; dropped [B, N] bool."""
    z = np.asarray(q) @ np.asarray(p).T / temperature
    losses = []
    for i in range(len(z)):
        others = [z[i, j] for j in range(z.shape[1]) if j != i and not (dropped is not None and dropped[i, j])]
        t, n, own = np.broadcast_to(tau, len(z))[i], len(others), np.exp(z[i, i])
        ng = 0.0
        if n:
            ng = max((sum(np.exp(others)) - n * t * own) / (1 - t), n * np.exp(-1 / temperature))
        losses.append(np.log1p(ng / own))
    return np.array(losses)


def smoothed_rows(q, p, temperature, e, dropped=None) -> np.ndarray:
    """[B] cross-entropies with smoothed labels over the candidates that are not dropped, own column i."""
    z = np.asarray(q) @ np.asarray(p).T / temperature
    losses = []
    for i in range(len(z)):
        kept = [j for j in range(z.shape[1]) if j == i or not (dropped is not None and dropped[i, j])]
        log_p = {j: z[i, j] - _lse([z[i, k] for k in kept]) for j in kept}
        losses.append(-sum(((1 - e) * (j == i) + e / len(kept)) * log_p[j] for j in kept))
    return np.array(losses)


def own_above_mean(arrays: dict, groups: list, temperature: float) -> dict:
    """What label smoothing adds, per unit of it: the mean of own_i - mean_j z_ij over candidates, bonuses apart.

    Returns:
        `loss`, `grads`, `dtemperature` and `magnitudes`, as from `info_nce`.
    """
    arrays = {k: np.asarray(v, np.float64) for k, v in arrays.items()}
    grads = {k: np.zeros_like(v) for k, v in arrays.items()}
    sums = {k: np.zeros_like(v) for k, v in arrays.items()}
    loss = 0.0
    for group in groups:
        entries = [kept(b, arrays[b["left"]], arrays[b["right"]]) for b in group]
        counts = sum(k.sum(axis=1) for k in entries)
        for block, k in zip(group, entries, strict=True):
            left, right = arrays[block["left"]], arrays[block["right"]]
            own, share = np.zeros(k.shape), k / counts[:, None]
            for i, j in enumerate([] if block.get("own") is None else block["own"]):
                if j >= 0:
                    own[i, j] = 1.0
            g, terms = (x / (temperature * len(left) * len(groups)) for x in (own - share, own + share))
            loss += float((g * (left @ right.T)).sum())
            grads[block["left"]] += g @ right
            grads[block["right"]] += g.T @ left
            sums[block["left"]] += terms @ np.abs(right)
            sums[block["right"]] += terms.T @ np.abs(left)
    magnitudes = {k: v.max(initial=0.0) for k, v in sums.items()}
    return {"loss": loss, "grads": grads, "dtemperature": -loss / temperature, "magnitudes": magnitudes}


def numeric_gradients(value, arrays, step: float = 1e-5) -> list[np.ndarray]:
    """Gradients of value(arrays) by central differences of fourth order."""
    arrays = [np.array(a, np.float64) for a in arrays]
    grads = [np.zeros_like(a) for a in arrays]
    for array, grad in zip(arrays, grads, strict=True):
        for index in np.ndindex(*array.shape):
            kept, samples = array[index], []
            for k in (-2, -1, 1, 2):
                array[index] = kept + k * step
                samples.append(value(arrays))
            array[index] = kept
            grad[index] = (samples[0] - 8 * samples[1] + 8 * samples[2] - samples[3]) / (12 * step)
    return grads
