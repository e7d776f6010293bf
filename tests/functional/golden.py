# SPDX-License-Identifier: Apache-2.0
"""The vectors of the golden table: B = 5, columns anchor, positive, negative, for the student and the guide."""

from __future__ import annotations

import numpy as np


def vectors(c: float, s: float, width: int, rows: int = 5) -> np.ndarray:
    """F[i, j] = sin((i+1)(j+2)s) + 0.1 c cos((i+2)(j+1))."""
    i, j = np.arange(rows)[:, None], np.arange(width)[None, :]
    return np.sin((i + 1) * (j + 2) * s) + 0.1 * c * np.cos((i + 2) * (j + 1))


def student() -> list[np.ndarray]:
    a, p, n = (vectors(c, 0.70 + 0.05 * c, 4) for c in range(3))
    return [a, 0.8 * a + 0.4 * p, n]


def guide() -> list[np.ndarray]:
    a, p, n = (vectors(c, 0.31 + 0.02 * c, 3) for c in range(3))
    return [a, 0.9 * a + 0.3 * p, n]
