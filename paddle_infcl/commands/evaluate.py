# SPDX-License-Identifier: Apache-2.0
"""`paddle-infcl evaluate`: retrieval metrics of a model, as a table and as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np

from paddle_infcl.encode import encode_texts
from paddle_infcl.evaluation.retrieval import METRICS, Evaluation, RetrievalEvaluator

_DEFAULT_GROUP = "package"


def make_evaluator(
    pairs: str | None = None,
    queries: str | None = None,
    corpus: str | None = None,
    qrels: str | None = None,
    *,
    group_field: str | None = None,
) -> RetrievalEvaluator | None:
    """The evaluator over pairs (with more passages from a corpus), or over queries, a corpus and judgements.

    Returns:
        None when there is nothing to evaluate on.

    Raises:
        ValueError: files that don't go together, or what `RetrievalEvaluator` raises.
    """
    if pairs:
        if queries or qrels:
            raise ValueError("either pairs, or queries, corpus and qrels")
        return RetrievalEvaluator.from_pairs(pairs, corpus=corpus, group_field=group_field)
    if not (queries or corpus or qrels):
        return None
    if not (queries and corpus and qrels):
        raise ValueError("queries, corpus and qrels are needed together")
    return RetrievalEvaluator.from_files(queries, corpus, qrels)


def _first_row(path: str) -> dict:
    try:
        with open(path, encoding="utf-8-sig") as stream:
            row = json.loads(stream.readline() or "{}")
    except ValueError:  # reading the file will say where and why
        return {}
    return row if isinstance(row, dict) else {}


def _groups_of(path: str, field: str) -> dict[str, str]:
    """The group of each query of a queries file, by id."""
    groups = {}
    with open(path, encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                row = json.loads(line)
                if field not in row:
                    raise ValueError(f"{path}:{number}: no field {field!r} to group by")
                groups[str(row.get("_id", row.get("id")))] = str(row[field])
    return groups


def _group_means(found: Evaluation, ids: list, groups: dict[str, str]) -> dict[str, dict[str, float]]:
    of_query = np.array([groups[str(query)] for query in ids])
    means = {}
    for group in sorted(set(of_query)):
        rows = of_query == group
        means[group] = {name: float(values[rows].mean()) for name, values in found.per_query.items()}
        means[group]["queries"] = int(rows.sum())
    return means


def table(metrics: dict[str, float], groups: dict[str, dict[str, float]]) -> str:
    """Metrics as lines of text: all queries first, then each group."""
    width = max([len("all queries"), *map(len, groups)])
    head = " " * width + "".join(f"{name:>12}" for name in METRICS)
    rows = {"all queries": metrics, **groups} if groups else {"all queries": metrics}
    lines = [f"{name:<{width}}" + "".join(f"{values[m]:>12.4f}" for m in METRICS) for name, values in rows.items()]
    return "\n".join([head, *lines])


def evaluate(options) -> int:
    """Runs the command; prints the table."""
    from paddle_infcl.commands.common import load_for_inference
    from paddle_infcl.commands.options import check_options

    check_options(
        options,
        inputs=["pairs", "queries", "corpus", "qrels"],
        limits=["max_query_len", "max_passage_len"],
        templates=["query_template", "passage_template"],
        names=["model", "group_field"],
    )
    source = options.pairs or options.queries
    if not source:
        raise ValueError("evaluate needs --pairs, or --queries, --corpus and --qrels")
    if options.output and os.path.exists(options.output) and not os.path.isfile(options.output):
        raise ValueError(f"--output {options.output}: is there and no file, so it can't be replaced")
    field = options.group_field or (_DEFAULT_GROUP if _DEFAULT_GROUP in _first_row(source) else None)
    evaluator = make_evaluator(options.pairs, options.queries, options.corpus, options.qrels, group_field=field)
    model, tokenizer = load_for_inference(options)

    def encode(texts, kind):
        template = getattr(options, f"{kind}_template")
        template = model.template(kind) if template is None else template
        limit = getattr(options, f"max_{kind}_len")
        return encode_texts(
            model,
            tokenizer,
            texts,
            max_length=limit,
            template=template,
            batch_size=options.batch_size,
            show_progress=sys.stderr.isatty(),
        )

    found = evaluator.evaluate(encode)
    groups = found.groups
    if field and options.queries:
        groups = _group_means(found, evaluator.query_ids, _groups_of(options.queries, field))
    print(table(found.metrics, groups))
    if options.output:
        content = {"model": options.model, "data": source, "metrics": found.metrics}
        if groups:
            content["groups"] = groups
        target = Path(options.output)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")  # a name that no other file has
        try:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return 0
