# SPDX-License-Identifier: Apache-2.0
"""What the textbook loss does to the gradient of a trained model in bf16: NumPy, on any machine, seconds.

    python benchmarks/bf16_gradients.py

B = N = 2048 unit vectors of D = 512, T = .02. Products accumulate in float32; logits, log-probabilities and the
gradient of the logits are rounded to bf16, as a bf16 cross-entropy does. Prints |dq - float64| / |float64| for own
cosines .12, .5 and .9. `tests/gpu/check_contrastive.py` prints the errors of the kernels for the same cases.
"""

from __future__ import annotations

import numpy as np

B, D, SCALE = 2048, 512, 50.0


def bf16(x: np.ndarray) -> np.ndarray:
    """x rounded to the nearest bf16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, "float32").view("uint32")
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view("float32")


def inputs(cosine: float) -> tuple[np.ndarray, np.ndarray]:
    """bf16 queries and passages whose own pairs have this cosine."""
    rng = np.random.default_rng(0)
    q, noise = (rng.standard_normal((B, D)) for _ in range(2))
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    noise -= (noise * q).sum(1, keepdims=True) * q
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return bf16(q), bf16(cosine * q + np.sqrt(1 - cosine**2) * noise)


def exact(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """dq in float64, the own coefficient as a sum over the others."""
    q, p = q.astype("float64"), p.astype("float64")
    z = SCALE * q @ p.T
    own = z.diagonal().copy()
    np.fill_diagonal(z, -np.inf)
    lse = np.logaddexp(np.logaddexp.reduce(z, axis=1), own)
    g = np.exp(z - lse[:, None])
    np.fill_diagonal(g, -g.sum(axis=1))
    return SCALE / B * g @ p


def textbook(q: np.ndarray, p: np.ndarray) -> np.ndarray:
    """dq of a cross-entropy over bf16 logits."""
    z = bf16(SCALE * bf16(q @ p.T)).astype("float64")
    log_p = bf16(z - np.logaddexp.reduce(z, axis=1)[:, None])
    g = bf16((np.exp(log_p) - np.eye(B)) / B)
    return bf16(bf16(SCALE * g) @ p)


def main() -> None:
    for cosine in (0.12, 0.5, 0.9):
        q, p = inputs(cosine)
        want = exact(q, p)
        error = np.linalg.norm(textbook(q, p) - want) / np.linalg.norm(want)
        print(f"own cosine {cosine}: relative error of dq {error:.2g}", flush=True)


if __name__ == "__main__":
    main()
