# SPDX-License-Identifier: Apache-2.0
"""What unknown false negatives cost, and what helps: plain, ids, margin and guide on the Gene Ontology set.

    python scripts/get_minilm.py
    python scripts/make_gene_ontology.py --fewest_synonyms 6 --terms 800 --eval_queries 100000
    OMP_NUM_THREADS=1 python benchmarks/duplicates.py

From a term's definition to its synonyms, with labels as they usually are: two synonyms of a term are labelled, four
and more are not, and hard negatives are mined. For every labelled pair two of the eight synonyms that the whole model
finds nearest to the definition, labelled ones of the term apart: three in ten are its unlabelled synonyms. `plain`
takes them for negatives; `in-batch` has no hard negatives at all; `ids` knows the term of every text, and so never
draws the false ones; `margin` and `guide` must find them by similarity. The first layer of the model is trained; the
guide is all of it, its vectors made once. Held-out terms are asked for all of their synonyms. Every run is a process
of `paddle-infcl train`; results that are there already are not computed again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
VARIANTS = {
    "plain": {},
    "in-batch": {"group_size": 1},
    "ids": {},
    "margin": {},
    "guide": {
        "objective": "guided", "guide_from_data": True, "guide_contrast_anchors": False,
        "guide_contrast_positives": False,
    },
}  # fmt: skip
METRICS = ("recall@10", "mrr@10", "ndcg@10")
LABELLED, NEAREST, NEGATIVES = 2, 8, 2


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def terms_of(pairs: list[dict]) -> dict[str, list[str]]:
    """Synonyms by definition."""
    terms: dict[str, list[str]] = {}
    for pair in pairs:
        terms.setdefault(pair["positive"], []).append(pair["query"])
    return terms


def mined_rows(terms: dict[str, list[str]], vectors: dict[str, np.ndarray]) -> list[dict]:
    """Two rows per term, each with hard negatives as a miner takes them that knows the labelled synonyms only.

    Args:
        terms: synonyms by definition.
        vectors: of all texts, of length 1.
    """
    of_term = {name: number for number, names in enumerate(terms.values()) for name in names}
    names = sorted(of_term)
    similarity = np.stack([vectors[d] for d in terms]) @ np.stack([vectors[name] for name in names]).T
    rows = []
    for number, (definition, synonyms) in enumerate(terms.items()):
        draw = random.Random(number)
        labelled = draw.sample(synonyms, LABELLED)
        nearest = [names[k] for k in np.argsort(-similarity[number])[: NEAREST + LABELLED]]
        nearest = [name for name in nearest if name not in labelled][:NEAREST]
        for name in labelled:
            mined = draw.sample(nearest, NEGATIVES)
            rows.append({
                "query": definition, "positive": name, "negatives": mined,
                "positive_id": number, "negative_ids": [of_term[text] for text in mined],
            })  # fmt: skip
    return rows


def prepare(args) -> Path:
    """The shorter model, training rows for every variant, and the held-out task, where they are not there yet."""
    folder = args.output / "data"
    if (folder / "counts.json").exists():
        return folder
    from paddle_infcl.encode import encode_texts
    from paddle_infcl.modeling import encoder_from_pretrained

    folder.mkdir(parents=True, exist_ok=True)
    encoder, tokenizer = encoder_from_pretrained(str(args.model), num_hidden_layers=args.layers)
    encoder.save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")
    guide, tokenizer = encoder_from_pretrained(str(args.model))
    terms = terms_of(read(args.data / "train.jsonl"))
    vectors: dict[str, np.ndarray] = {}
    for texts, length in ((list(terms), args.max_query_len), (sorted({n for t in terms.values() for n in t}), 32)):
        found = encode_texts(guide, tokenizer, texts, max_length=length)
        found /= np.linalg.norm(found, axis=1, keepdims=True)
        vectors |= dict(zip(texts, found, strict=True))
    rows = mined_rows(terms, vectors)
    write(folder / "ids.jsonl", rows)
    plain = [{k: row[k] for k in ("query", "positive", "negatives")} for row in rows]
    write(folder / "plain.jsonl", plain)
    seen = {text: [round(float(x), 5) for x in vector] for text, vector in vectors.items()}
    for row in plain:
        row["query_guide"], row["pos_guide"] = seen[row["query"]], [seen[row["positive"]]]
        row["neg_guide"] = [seen[text] for text in row["negatives"]]
    write(folder / "guide.jsonl", plain)
    held_out = terms_of(read(args.data / "eval" / "pairs.jsonl"))
    asked = dict(random.Random(0).sample(sorted(held_out.items()), min(args.eval_terms, len(held_out))))
    corpus = {name: f"p{k}" for k, name in enumerate(sorted({n for names in asked.values() for n in names}))}
    write(folder / "queries.jsonl", [{"_id": f"q{k}", "text": text} for k, text in enumerate(asked)])
    write(folder / "corpus.jsonl", [{"_id": name, "text": text} for text, name in corpus.items()])
    lines = [f"q{k}\t{corpus[n]}\t1\n" for k, names in enumerate(asked.values()) for n in names]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), encoding="utf-8")
    false = sum(k == row["positive_id"] for row in rows for k in row["negative_ids"])
    counts = {
        "rows": len(rows), "terms": len(terms), "false hard negatives": false / (NEGATIVES * len(rows)),
        "held-out terms": len(asked), "synonyms to search": len(corpus),
    }  # fmt: skip
    (folder / "counts.json").write_text(json.dumps(counts))
    return folder


def dropped_by_guide(folder: Path, margin: float) -> tuple[float, float]:
    """The shares of the rows' own hard negatives that the guide drops: of the false ones, and of the others."""
    dropped: dict[bool, list[bool]] = {True: [], False: []}
    for row, seen in zip(read(folder / "ids.jsonl"), read(folder / "guide.jsonl"), strict=True):
        query = np.array(seen["query_guide"])
        threshold = query @ np.array(seen["pos_guide"][0]) - margin
        for number, vector in zip(row["negative_ids"], seen["neg_guide"], strict=True):
            dropped[number == row["positive_id"]].append(bool(query @ np.array(vector) > threshold))
    return statistics.mean(dropped[True]), statistics.mean(dropped[False])


def command(*arguments: object, log: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with log.open("w", encoding="utf-8") as out:
        line = [sys.executable, "-m", "paddle_infcl", *map(str, arguments)]
        subprocess.run(line, check=True, env=environment, stdout=out, stderr=out)


def before(args, data: Path) -> dict:
    """What the shorter model finds untrained."""
    found = args.output / "before.json"
    if not found.exists():
        command(
            "evaluate", "--model", data / "start", "--queries", data / "queries.jsonl",
            "--corpus", data / "corpus.jsonl", "--qrels", data / "qrels.tsv", "--output", found,
            "--max_query_len", args.max_query_len, "--max_passage_len", 32, "--device", args.device,
            log=args.output / "before.log",
        )  # fmt: skip
    return json.loads(found.read_text())


def run(name: str, seed: int, args, data: Path) -> dict:
    """Trains one variant, or reads what an earlier run left: metrics, and the mean number of negatives per row."""
    output = args.output / f"{name}-{seed}"
    results = output / "all_results.json"
    if not results.exists():
        options = {
            "model_name_or_path": data / "start", "output_dir": output, "overwrite_output_dir": True,
            "train_files": data / f"{name if name in ('ids', 'guide') else 'plain'}.jsonl", "device": args.device,
            "max_query_len": args.max_query_len, "max_passage_len": 32, "group_size": 1 + NEGATIVES,
            "sort_by_length": True, "inf_cl_loss": True, "embedding_temperature": args.temperature,
            "per_device_train_batch_size": args.batch, "gradient_accumulation_steps": 1, "max_steps": args.steps,
            "learning_rate": 1e-4, "warmup_steps": args.steps // 10, "lr_scheduler_type": "linear", "seed": seed,
            "save_strategy": "no", "logging_steps": 5, "report_to": "none", "disable_tqdm": True,
            "eval_queries": data / "queries.jsonl", "eval_corpus": data / "corpus.jsonl",
            "eval_qrels": data / "qrels.tsv", "per_device_eval_batch_size": 32, **VARIANTS[name],
        }  # fmt: skip
        if name == "margin":
            options["false_negative_margin"] = args.margin
        if name == "guide":
            options["guide_margin"] = args.guide_margin
        output.mkdir(parents=True, exist_ok=True)
        config = output / "options.json"  # config.json will be the model's
        config.write_text(json.dumps(options, default=str, indent=2))
        command("train", config, log=output / "log.txt")
    found = json.loads(results.read_text())
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    found["negatives"] = statistics.mean(e["effective_negatives"] for e in history if "effective_negatives" in e)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/gene_ontology"))
    parser.add_argument("--model", type=Path, default=Path("data/all-MiniLM-L6-v2"))
    parser.add_argument("--output", type=Path, default=Path("output/duplicates"))
    parser.add_argument("--layers", type=int, default=1, help="how many of the model's layers are trained")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.02)
    parser.add_argument("--max_query_len", type=int, default=24)
    parser.add_argument("--eval_terms", type=int, default=300)
    parser.add_argument("--margin", type=float, default=0.1)
    parser.add_argument("--guide_margin", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    data = prepare(args)
    print((data / "counts.json").read_text())
    shares = dropped_by_guide(data, args.guide_margin)
    print("the guide drops {:.2f} of the false hard negatives and {:.2f} of the others".format(*shares))
    print("| variant | negatives per row | " + " | ".join(METRICS) + " | seeds |")
    print("|---|---|" + "---|" * (len(METRICS) + 1))
    start = before(args, data)
    start = start.get("metrics", start)
    print("| before | | " + " | ".join(f"{start[m]:.3f}" for m in METRICS) + " | |", flush=True)
    found: dict[str, list[dict]] = {name: [] for name in args.variants}
    for seed in args.seeds:
        for name in args.variants:
            found[name].append(run(name, seed, args, data))
            print(f"{name} {seed}: {found[name][-1]['eval_recall@10']:.4f}", file=sys.stderr, flush=True)
    for name, runs in found.items():
        cells = [f"{statistics.mean(r['negatives'] for r in runs):.1f}"]
        for metric in METRICS:
            values = [result[f"eval_{metric}"] for result in runs]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            cells.append(f"{statistics.mean(values):.3f} ± {spread:.3f}")
        print(f"| {name} | " + " | ".join(cells) + f" | {len(runs)} |")


if __name__ == "__main__":
    main()
