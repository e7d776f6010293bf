# SPDX-License-Identifier: Apache-2.0
"""Draws time and memory against the batch from recorded results.

python benchmarks/plot.py benchmarks/results/h200.json benchmarks/results/h200.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

NAMES = {
    None: "paddle_infcl (Triton)",
    "inf_cl": "inf_cl",
    "memeff": "memeff",
    "liger": "Liger",
    "cce": "CCE",
    "dense_fp32": "dense, fp32 logits",
    "dense_bf16": "dense, bf16 logits",
}


def read(path: Path) -> list[dict]:
    """The JSON lines that hold a measurement of the plain loss, B = N, D = 1024, bf16."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [
        x for x in lines
        if "ms" in x and x["B"] == x["N"] and x["D"] == 1024 and x.get("kind", "plain") == "plain"
        and x.get("dtype", "bfloat16") == "bfloat16" and "MiB" not in x["case"]
    ]  # fmt: skip


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    found = read(arguments.results)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for peer in dict.fromkeys(x.get("peer") for x in found):
        rows = sorted((x["B"], x["ms"], x.get("mib", 0)) for x in found if x.get("peer") == peer)
        style = {"marker": "o", "label": NAMES.get(peer, peer), "linewidth": 2.4 if peer is None else 1.2}
        left.plot([r[0] for r in rows], [r[1] for r in rows], **style)
        kept = [r for r in rows if r[2] > 0]
        right.plot([r[0] for r in kept], [r[2] for r in kept], **style)
    for axis, what in ((left, "loss and gradients, ms"), (right, "memory beyond the inputs, MiB")):
        axis.set(xscale="log", yscale="log", xlabel="queries = passages (D = 1024, bf16)", ylabel=what)
        axis.set_xticks(sorted({x["B"] for x in found}), [str(b) for b in sorted({x["B"] for x in found})])
        axis.minorticks_off()
        axis.grid(True, alpha=0.3)
    left.legend()
    figure.savefig(arguments.picture, dpi=120)


if __name__ == "__main__":
    main()
