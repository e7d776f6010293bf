# SPDX-License-Identifier: Apache-2.0
"""Every rule that drops or changes entries, and the objectives that are made of them, for `check_contrastive.py`.

Thresholds are placed in gaps of the similarities, so that rounding decides nothing.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from tests.gpu.reference import Spec


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def pairs(B: int, N: int, D: int, cosine: float, seed: int = 0):
    """Unit queries, unit passages whose own pairs have this cosine, and the own columns."""
    g = np.random.default_rng(seed)
    q, p = unit(g.standard_normal((B, D))), unit(g.standard_normal((N, D)))
    own = g.permutation(N)[:B]
    away = p[own] - (p[own] * q).sum(1, keepdims=True) * q
    p[own] = cosine * q + np.sqrt(1 - cosine**2) * unit(away)
    return q, p, own


def gaps(s: np.ndarray) -> np.ndarray:
    """[B] for every row a number in the widest gap near its 90th percentile."""
    ordered = np.sort(s, axis=1)
    k, reach = int(0.9 * s.shape[1]), max(2, min(40, s.shape[1] // 12))
    part = ordered[:, k - reach : k + reach]
    at = np.diff(part, axis=1).argmax(1)
    rows = np.arange(len(s))
    return (part[rows, at] + part[rows, at + 1]) / 2


class Cases:
    """Blocks of queries q against passages p, with guide vectors gq and gp.

    Args:
        arrays: "q" [B, D], "p" [N, D], "gq", "gp" as the device holds them, float64.
        own: [B].
    """

    def __init__(self, arrays: dict, own: np.ndarray):
        self.arrays, self.own, self.g = arrays, own, np.random.default_rng(5)
        self.B, self.N = len(arrays["q"]), len(arrays["p"])
        self.s, self.seen = arrays["q"] @ arrays["p"].T, arrays["gq"] @ arrays["gp"].T
        self.mine = self.g.integers(-1, self.B, self.N)  # the row to which a passage belongs
        self.is_mine = self.mine[None] == np.arange(self.B)[:, None]

    def one(self, dropped=None, **fields) -> list[list[Spec]]:
        return [[Spec("q", "p", self.own, dropped, fields=fields)]]

    def ids(self):
        row, column = self.g.integers(-1, 300, (self.B, 2)), self.g.integers(-1, 300, (self.N, 2))
        same = ((row[:, None, :] == column[None, :, :]) & (row >= 0)[:, None, :]).any(-1)
        return self.one(same, row_ids=row, column_ids=column)

    def self_column(self):
        itself = (self.own + 1) % self.N
        return self.one(np.arange(self.N)[None] == itself[:, None], self_column=itself)

    def only_own_negatives(self):
        return self.one((self.mine >= 0)[None] & ~self.is_mine, owner=self.mine, owner_rule="only")

    def without_own_documents(self):
        return self.one(self.is_mine, owner=self.mine, owner_rule="exclude")

    def limit(self):
        limit = gaps(self.s)
        return self.one(self.s > limit[:, None], limit=limit)

    def guide(self, keep_own: bool = False):
        threshold = gaps(self.seen)
        above = self.seen > threshold[:, None]
        guide = SimpleNamespace(left="gq", right="gp", threshold=threshold, keep_own=keep_own)
        return self.one(above & ~self.is_mine if keep_own else above, guide=guide, owner=self.mine)

    def guide_that_keeps_own(self):
        return self.guide(keep_own=True)

    def hardness(self, columns: str, harder: np.ndarray):
        groups = self.one(owner=self.mine, hardness=SimpleNamespace(strength=5.0, columns=columns))
        groups[0][0].harder, groups[0][0].strength = harder, 5.0
        return groups

    def harder_own(self):
        return self.hardness("own", self.is_mine)

    def harder_others(self):
        return self.hardness("others", ~self.is_mine)

    def harder_all(self):
        return self.hardness("all", np.ones_like(self.is_mine))

    def everything(self):
        """All rules in one block."""
        groups = [self.ids(), self.self_column(), self.limit(), self.guide_that_keeps_own(), self.harder_others()]
        specs = [group[0][0] for group in groups]
        fields = {k: v for spec in specs for k, v in spec.fields.items()}
        dropped = np.logical_or.reduce([spec.dropped for spec in specs if spec.dropped is not None])
        return [[Spec("q", "p", self.own, dropped, specs[-1].harder, 5.0, fields)]]

    def _square(self, left: str, right: str, *, itself: bool, limit=None, threshold=None) -> Spec:
        """Queries or own positives ("o") against each other."""
        fields, dropped = {}, np.eye(self.B, dtype=bool) if itself else np.zeros((self.B, self.B), bool)
        if itself:
            fields["self_column"] = np.arange(self.B)
        if limit is not None:
            fields["limit"] = limit
            dropped |= self.arrays[left] @ self.arrays[right].T > limit[:, None]
        if threshold is not None:
            names = {"q": "gq", "o": "go"}
            fields["guide"] = SimpleNamespace(
                left=names[left], right=names[right], threshold=threshold, keep_own=False
            )
            dropped |= self.arrays[names[left]] @ self.arrays[names[right]].T > threshold[:, None]
        return Spec(left, right, None, dropped, fields=fields)

    def four_directions(self):
        directions = [("q", "q", True), ("o", "q", False), ("o", "o", True)]
        return [self.one()[0] + [self._square(a, b, itself=same) for a, b, same in directions]]

    def qwen3(self):
        a = self.arrays
        limit = gaps(np.concatenate([self.s, a["q"] @ a["q"].T, a["o"] @ a["o"].T], axis=1))
        groups = self.one(self.s > limit[:, None], limit=limit)
        return [groups[0] + [self._square(n, n, itself=True, limit=limit) for n in "qo"]]

    def guided(self):
        a = self.arrays
        threshold = gaps(np.concatenate([self.seen, a["gq"] @ a["gq"].T, a["go"] @ a["go"].T], axis=1))
        guide = SimpleNamespace(left="gq", right="gp", threshold=threshold, keep_own=False)
        groups = self.one(self.seen > threshold[:, None], guide=guide)
        return [groups[0] + [self._square(n, n, itself=True, threshold=threshold) for n in "qo"]]

    def symmetric(self):
        itself = np.arange(self.B)
        return [[Spec("q", "o", itself)], [Spec("o", "q", itself)]]


CASES = (
    "ids", "self_column", "only_own_negatives", "without_own_documents", "limit", "guide", "guide_that_keeps_own",
    "harder_own", "harder_others", "harder_all", "everything", "four_directions", "qwen3", "guided", "symmetric",
)  # fmt: skip
