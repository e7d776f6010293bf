# SPDX-License-Identifier: Apache-2.0
"""What the benchmark runs: sizes and kinds of losses, the same for every implementation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TEMPERATURE = 0.02
# Matrices of similarities that a kind of loss has, where there are several.
_BLOCKS = {"blocks": 3, "blocks guide": 3, "four directions": 4, "symmetric": 2, "qwen3": 3}


@dataclass(frozen=True)
class Case:
    """One row of the benchmark.

    Attributes:
        name: how results refer to it.
        B, N, D: queries, passages, width.
        kind: "plain", "ids", "margin", "guide" (a guide of 384 dimensions), "lse" (value only), "blocks" and "blocks
            guide" (three blocks in one softmax), or an objective: "four directions", "symmetric", "qwen3",
            "hardness", "debiased".
        dtype: of the vectors.
        budget: memory_budget in bytes, None for the default.
        than: the case that this one's time is divided by, if it was run before.
    """

    name: str
    B: int
    N: int
    D: int
    kind: str = "plain"
    dtype: str = "bfloat16"
    budget: int | None = None
    than: str | None = None

    @property
    def flop(self) -> float:
        """Operations of the three products of every block, for loss and gradients; a value alone needs one of them."""
        return (2.0 if self.kind == "lse" else 6.0) * _BLOCKS.get(self.kind, 1) * self.B * self.N * self.D


_K = 1024
CASES = {
    case.name: case
    for case in (
        Case("8k", 8 * _K, 8 * _K, 1024),
        Case("32k", 32 * _K, 32 * _K, 1024),
        Case("32k x 128k", 32 * _K, 128 * _K, 1024),
        Case("128k", 128 * _K, 128 * _K, 1024),
        Case("64k, D 1536", 64 * _K, 64 * _K, 1536),
        Case("128k, D 384", 128 * _K, 128 * _K, 384),
        Case("128k, 64 MiB", 128 * _K, 128 * _K, 1024, budget=64 << 20),
        Case("32k, ids", 32 * _K, 32 * _K, 1024, kind="ids"),
        Case("32k, fp16", 32 * _K, 32 * _K, 1024, dtype="float16"),
        Case("32k, fp16, margin", 32 * _K, 32 * _K, 1024, kind="margin", dtype="float16"),
        Case("32k, margin", 32 * _K, 32 * _K, 1024, kind="margin"),
        Case("32k, guide", 32 * _K, 32 * _K, 1024, kind="guide"),
        Case("32k, blocks", 32 * _K, 32 * _K, 1024, kind="blocks", than="32k"),
        Case("32k, blocks, guide", 32 * _K, 32 * _K, 1024, kind="blocks guide", than="32k, blocks"),
        Case("16k", 16 * _K, 16 * _K, 1024),
        Case("16k, blocks", 16 * _K, 16 * _K, 1024, kind="blocks", than="16k"),
        Case("16k, blocks, guide", 16 * _K, 16 * _K, 1024, kind="blocks guide", than="16k, blocks"),
        Case("16k, four directions", 16 * _K, 16 * _K, 1024, kind="four directions", than="16k"),
        Case("8k, four directions", 8 * _K, 8 * _K, 1024, kind="four directions", than="8k"),
        Case("16k, symmetric", 16 * _K, 16 * _K, 1024, kind="symmetric", than="16k"),
        Case("16k, qwen3", 16 * _K, 16 * _K, 1024, kind="qwen3", than="16k"),
        Case("16k, hardness", 16 * _K, 16 * _K, 1024, kind="hardness", than="16k"),
        Case("16k, debiased", 16 * _K, 16 * _K, 1024, kind="debiased", than="16k"),
        Case("32k, value", 32 * _K, 32 * _K, 1024, kind="lse"),
        Case("8k, fp32", 8 * _K, 8 * _K, 1024, dtype="float32"),
        Case("1M", 1024 * _K, 1024 * _K, 1024),
    )
}


def report(row: dict, out: Path | None) -> None:
    """Prints a result as one JSON line, and appends it to a file."""
    line = json.dumps(row)
    print(line, flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(line + "\n")
