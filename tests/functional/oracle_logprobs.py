# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels in float64 NumPy, from their definitions; nothing is shared with the package."""

from __future__ import annotations

import numpy as np


def label_logprobs(z, labels, *, temperature=1.0, ignore_index=None, g=None, h=None):
    """Values and gradient of given logits.

    Args:
        z: [..., T, V]; labels: [..., T] or [..., T - 1]; g, h: gradients of log-probabilities and entropies.

    Returns:
        log-probabilities, entropies, gradient of z (None without g).
    """
    z = np.asarray(z, np.float64)
    T = labels.shape[-1]
    s = z[..., :T, :] / temperature
    skipped = np.zeros(labels.shape, bool) if ignore_index is None else labels == ignore_index
    index = np.where(skipped, 0, labels)[..., None]
    top = s.max(-1, keepdims=True, initial=-np.inf)
    top = np.where(np.isneginf(top), 0.0, top)
    own = np.take_along_axis(s, index, -1)
    others = s - top
    np.put_along_axis(others, index, -np.inf, -1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lead = np.log(np.exp(others).sum(-1, keepdims=True)) - (own - top)
        logprobs = -np.logaddexp(0.0, lead)[..., 0]
        total = np.exp(s - top).sum(-1, keepdims=True)
        logp = s - top - np.log(total)
        p = np.exp(logp)
        plogp = np.where(p > 0, p * np.where(p > 0, logp, 0.0), 0.0)
    entropies = -plogp.sum(-1)
    dz = None
    if g is not None:
        dz = np.zeros_like(z)
        h = np.zeros_like(g) if h is None else h
        g, h = g.astype(np.float64)[..., None], h.astype(np.float64)[..., None]
        d = -g * p - h * (plogp + p * entropies[..., None])
        entropy_part = np.take_along_axis(-h * (plogp + p * entropies[..., None]), index, -1)
        np.put_along_axis(d, index, entropy_part - g * np.expm1(logprobs[..., None]), -1)
        dz[..., :T, :] = np.where(skipped[..., None], 0.0, d / temperature)
    return np.where(skipped, 0.0, logprobs), np.where(skipped, 0.0, entropies), dz


def linear_label_logprobs(hidden, weight, labels, *, bias=None, temperature=1.0, ignore_index=None, g=None):
    """Values, and gradients of hidden [..., T, D], weight [V, D] and bias [V], for an incoming gradient g."""
    hidden, weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    z = hidden @ weight.T + (0.0 if bias is None else np.asarray(bias, np.float64))
    logprobs, _, dz = label_logprobs(z, labels, temperature=temperature, ignore_index=ignore_index, g=g)
    if g is None:
        return logprobs, None, None, None
    flat = dz.reshape(-1, dz.shape[-1])
    return logprobs, dz @ weight, flat.T @ hidden.reshape(-1, hidden.shape[-1]), flat.sum(0)
