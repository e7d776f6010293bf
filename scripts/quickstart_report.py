# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of a quickstart run.

Usage: python scripts/quickstart_report.py FOLDER    (with before.json, after.json and trainer_state.json)
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

METRIC = "mrr@10"


def plot(history: list[dict], before: float, target: Path) -> None:
    """Loss and metric over steps, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses = [(row["step"], row["loss"]) for row in history if "loss" in row and "learning_rate" in row]
    scores = [(0, before)] + [(row["step"], row[f"eval_{METRIC}"]) for row in history if f"eval_{METRIC}" in row]
    figure, left = pyplot.subplots(figsize=(7, 4), layout="constrained")
    left.plot(*zip(*losses, strict=True), color="tab:blue", label="training loss")
    left.set(xlabel="optimizer step (512 pairs each)", ylabel="loss")
    right = left.twinx()
    right.plot(*zip(*scores, strict=True), color="tab:orange", marker="o", label="MRR@10, held-out packages")
    right.set_ylabel("MRR@10")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    before, after = (json.loads((folder / f"{name}.json").read_text()) for name in ("before", "after"))
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    print(f"\n{'held-out packages':<24}{'before':>9}{'after':>9}{'gain':>9}")
    for name, value in before["metrics"].items():
        now = after["metrics"][name]
        print(f"{name:<24}{value:>9.4f}{now:>9.4f}{now - value:>+9.4f}")
    for group, metrics in before.get("groups", {}).items():
        value, now = metrics[METRIC], after["groups"][group][METRIC]
        print(f"{METRIC + ', ' + group:<24}{value:>9.4f}{now:>9.4f}{now - value:>+9.4f}")
    reported = [row[f"eval_{METRIC}"] for row in history if f"eval_{METRIC}" in row]
    print(f"{METRIC} that training reported last: {reported[-1]:.4f}")
    plot(history, before["metrics"][METRIC], folder / "quickstart.png")
    print(f"plot: {folder / 'quickstart.png'}")


if __name__ == "__main__":
    main()
