# SPDX-License-Identifier: Apache-2.0
"""What known and unknown duplicates cost, and what helps: plain, ids, margin and guide on the Gene Ontology set.

    python scripts/get_minilm.py
    python scripts/make_gene_ontology.py --fewest_synonyms 4 --terms 500 --eval_queries 600 --eval_corpus 1500
    python benchmarks/duplicates.py --data data/gene_ontology --model data/all-MiniLM-L6-v2 [--seeds 1 2 3]

Many synonyms of the training terms share a definition, so that a batch holds each definition several times. `plain`
takes them for negatives of each other; `ids` drops them by the term's number; `margin` and `guide` must find them by
similarity, without ids. The first layers of the model are trained; the guide is all of it, as it was. Every run is a
process of `paddle-infcl train`; results that are there already are not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {
    "plain": {},
    "ids": {},
    "margin": {"objective": "qwen3", "qwen3_query_to_query": False, "qwen3_doc_to_doc": False},
    "guide": {"objective": "guided", "guide_contrast_anchors": False, "guide_contrast_positives": False},
}
METRICS = ("recall@10", "mrr@10", "ndcg@10")


def shorter_model(model: Path, layers: int, folder: Path) -> Path:
    """The first layers of a model as a model of its own."""
    if not (folder / "config.json").exists():
        from paddle_infcl.modeling import encoder_from_pretrained

        encoder, tokenizer = encoder_from_pretrained(str(model), num_hidden_layers=layers)
        encoder.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def without_ids(train: Path, folder: Path) -> Path:
    path = folder / "train_without_ids.jsonl"
    rows = [json.loads(line) for line in train.read_text(encoding="utf-8").splitlines()]
    lines = [json.dumps({k: row[k] for k in ("query", "positive")}) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def run(name: str, seed: int, args, start: Path, plain_rows: Path) -> dict:
    """Trains one variant, or reads what an earlier run left."""
    output = args.output / f"{name}-{seed}"
    results = output / "all_results.json"
    if not results.exists():
        options = {
            "model_name_or_path": start, "output_dir": output, "overwrite_output_dir": True, "device": args.device,
            "train_files": args.data / "train.jsonl" if name == "ids" else plain_rows, "max_query_len": 16,
            "max_passage_len": args.max_passage_len, "group_size": 1, "sort_by_length": True, "inf_cl_loss": True,
            "embedding_temperature": 0.05, "per_device_train_batch_size": 32,
            "gradient_accumulation_steps": args.batch // 32, "max_steps": args.steps, "learning_rate": 1e-4,
            "warmup_steps": 3, "lr_scheduler_type": "linear", "seed": seed, "save_strategy": "no",
            "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
            "eval_queries": args.data / "eval" / "queries.jsonl", "eval_corpus": args.data / "eval" / "corpus.jsonl",
            "eval_qrels": args.data / "eval" / "qrels.tsv", "per_device_eval_batch_size": 32, **VARIANTS[name],
        }  # fmt: skip
        if name == "margin":
            options["false_negative_margin"] = args.margin
        if name == "guide":
            options |= {"guide_model_name_or_path": args.model, "guide_margin": args.guide_margin}
        output.mkdir(parents=True, exist_ok=True)
        config = output / "options.json"  # config.json will be the model's
        config.write_text(json.dumps(options, default=str, indent=2))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "paddle_infcl", "train", str(config)]
        with open(output / "log.txt", "w", encoding="utf-8") as log:
            subprocess.run(command, check=True, env=environment, stdout=log, stderr=log)
    return json.loads(results.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/gene_ontology"))
    parser.add_argument("--model", type=Path, default=Path("data/all-MiniLM-L6-v2"))
    parser.add_argument("--output", type=Path, default=Path("output/duplicates"))
    parser.add_argument("--layers", type=int, default=3, help="how many of the model's layers are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--max_passage_len", type=int, default=32)
    parser.add_argument("--margin", type=float, default=0.1)
    parser.add_argument("--guide_margin", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    start = shorter_model(args.model, args.layers, args.output / "start")
    plain_rows = without_ids(args.data / "train.jsonl", args.output)
    print("| variant | " + " | ".join(METRICS) + " | seeds |")
    print("|---|" + "---|" * (len(METRICS) + 1))
    for name in args.variants:
        found = [run(name, seed, args, start, plain_rows) for seed in args.seeds]
        cells = []
        for metric in METRICS:
            values = [result[f"eval_{metric}"] for result in found]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {len(found)} |", flush=True)


if __name__ == "__main__":
    main()
