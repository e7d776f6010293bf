# SPDX-License-Identifier: Apache-2.0
"""Losses over lists of blocks in float64 NumPy, whole matrices at a time, for sizes that a GPU is checked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Spec:
    """A block: its tensors by name, and what its rules come to, entry by entry.

    Attributes:
        left, right: names of arrays.
        own: [B] int64, or None.
        dropped: [B, N] bool; the own entries may be marked.
        harder: [B, N] bool, entries with a hardness bonus; likewise.
        strength: of the bonus.
        fields: the same rules as the operators take them, NumPy arrays or objects of them.
    """

    left: str
    right: str
    own: np.ndarray | None = None
    dropped: np.ndarray | None = None
    harder: np.ndarray | None = None
    strength: float = 0.0
    fields: dict = field(default_factory=dict)


def exact(arrays: dict, groups: list[list[Spec]], scale: float, weights: np.ndarray, tau: float | None = None) -> dict:
    """Loss, a gradient per array and that of the scale; 1 - P_own as a sum over the others.

    Args:
        arrays: float64, by name.
        groups: one softmax each.
        scale: 1/T.
        weights: [B].
        tau: the debiased loss with this tau_plus.
    """
    grads, loss, dscale = {name: np.zeros_like(x) for name, x in arrays.items()}, 0.0, 0.0
    rows = np.arange(len(weights))
    for group in groups:
        similarities = [arrays[b.left] @ arrays[b.right].T for b in group]
        others, own = [], np.full(len(rows), -np.inf)
        for b, s in zip(group, similarities, strict=True):
            z = scale * s if b.harder is None else (scale + b.strength * b.harder) * s
            if b.dropped is not None:
                z[b.dropped] = -np.inf
            if b.own is not None:
                own = np.maximum(own, scale * s[rows, b.own])
                z[rows, b.own] = -np.inf
            others.append(z)
        top = np.maximum(np.max([z.max(axis=1) for z in others], axis=0), -1e300)
        with np.errstate(divide="ignore"):
            lse = top + np.log(sum(np.exp(z - top[:, None]).sum(axis=1) for z in others))
        if tau is None:
            losses = np.logaddexp(0, lse - own)
            up = down = np.exp(lse - np.logaddexp(lse, own))  # by lse_others; by the own logit, negated
        else:
            count = sum((z > -np.inf).sum(axis=1) for z in others)
            share = np.exp(lse - own)
            whole, floor = (share - count * tau) / (1 - tau), count * np.exp(-scale - own)
            floored = whole <= floor
            negatives = np.where(floored, floor, whole)
            losses = np.log1p(negatives)
            up = np.where(floored, 0, share / (1 - tau)) / (1 + negatives)
            down = np.where(floored, negatives, share / (1 - tau)) / (1 + negatives)
            dscale -= (weights * floored * negatives / (1 + negatives)).sum() / len(groups)
        w = weights / len(groups)
        loss += (w * losses).sum()
        for b, s, z in zip(group, similarities, others, strict=True):
            g = np.exp(z - lse[:, None]) * (w * up)[:, None]
            if b.own is not None:
                g[rows, b.own] = -w * down
            dscale += (g * s).sum()
            grads[b.left] += scale * g @ arrays[b.right]
            grads[b.right] += scale * g.T @ arrays[b.left]
    return {"loss": loss, "dscale": dscale, **{f"d{name}": x for name, x in grads.items()}}


def textbook(arrays: dict, groups: list[list[Spec]], scale: float, weights: np.ndarray, rounded: Callable) -> dict:
    """The gradients of a cross-entropy over stored logits of a narrow type.

    Args:
        rounded: to that type; logits, log-probabilities and gradients of logits go through it, products do not.
    """
    grads = {name: np.zeros_like(x) for name, x in arrays.items()}
    rows, w = np.arange(len(weights)), weights / len(groups)
    for group in groups:
        logits = []
        for b in group:
            s = arrays[b.left] @ arrays[b.right].T
            z = rounded((scale if b.harder is None else scale + b.strength * b.harder) * rounded(s))
            own = None if b.own is None else rounded(scale * rounded(s[rows, b.own]))
            if b.dropped is not None:
                z[b.dropped] = -np.inf
            if own is not None:
                z[rows, b.own] = own
            logits.append(z)
        lse = np.logaddexp.reduce([np.logaddexp.reduce(z, axis=1) for z in logits], axis=0)
        for b, z in zip(group, logits, strict=True):
            g = np.exp(rounded(z - lse[:, None]))
            if b.own is not None:
                g[rows, b.own] -= 1
            g = rounded(g * w[:, None])
            grads[b.left] += scale * g @ arrays[b.right]
            grads[b.right] += scale * g.T @ arrays[b.left]
    return {f"d{name}": rounded(x) for name, x in grads.items()}
