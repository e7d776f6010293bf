# SPDX-License-Identifier: Apache-2.0
"""How well embeddings find the right documents: queries, a corpus, judgements, exact search."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paddle_infcl.data.jsonl import load_pairs
from paddle_infcl.evaluation.metrics import DEPTH, HIGHEST, METRICS, ranking_metrics
from paddle_infcl.evaluation.search import search
from paddle_infcl.log import logger

__all__ = ["METRICS", "Evaluation", "RetrievalEvaluator"]

Encode = Callable[[list[str], str], np.ndarray]

SHOWN = 5
"""How many names an error spells out; all are counted."""


@dataclass
class Evaluation:
    """What an evaluation found.

    Attributes:
        metrics: the mean over queries of each of METRICS.
        per_query: for each of METRICS an array [Q], in the order of the evaluator's `query_ids`.
        groups: for each group of queries its means and the number of its "queries".
    """

    metrics: dict[str, float]
    per_query: dict[str, np.ndarray]
    groups: dict[str, dict[str, float]] = field(default_factory=dict)


class RetrievalEvaluator:
    """Ranks a corpus for every query by inner product and scores the rankings.

    The corpus is encoded and searched in chunks, each dropped before the next: what is held at once is the queries'
    vectors, one chunk of vectors (65,536 x 768 in fp32: 201 MB, whatever the size of the corpus) and 12 kB of results
    per query. The texts themselves are in memory.

    Args:
        queries: texts by id, or a list, whose ids are its indices.
        corpus: the same for documents.
        qrels: for every query id the relevance (a whole number, > 0 is relevant) by document id, or just the ids of
            its relevant documents.
        name: what is evaluated, for messages.
        groups: a group by query id ("package", "language", ...): the evaluation then has means per group as well.
        corpus_chunk: documents that are encoded and searched at once.

    Raises:
        ValueError: an empty corpus, relevances that are no whole numbers or above 10,000,000, queries without a
            relevant document, judgements of unknown ids, texts that are blank: all of them in one message, counted,
            the first ones named.

    Example:
        >>> import numpy as np
        >>> from paddle_infcl import RetrievalEvaluator
        >>> vectors = {"rouge": [1.0, 0.0], "red": [0.9, 0.1], "green": [0.2, 0.8], "blue": [0.0, 1.0]}
        >>> evaluator = RetrievalEvaluator({"q": "rouge"}, {"r": "red", "g": "green", "b": "blue"}, {"q": ["r"]})
        >>> metrics = evaluator(lambda texts, kind: np.array([vectors[text] for text in texts]))
        >>> float(metrics["mrr@10"])
        1.0
    """

    def __init__(
        self,
        queries: Mapping[Hashable, str] | Sequence[str],
        corpus: Mapping[Hashable, str] | Sequence[str],
        qrels: Mapping[Hashable, Mapping[Hashable, int] | Sequence[Hashable]],
        *,
        name: str = "",
        groups: Mapping[Hashable, str] | None = None,
        corpus_chunk: int = 65536,
    ):
        queries, corpus = _by_id(queries), _by_id(corpus)
        grades = {query: _grades(judged) for query, judged in qrels.items()}
        places = {document: place for place, document in enumerate(corpus)}
        problems = {
            "the corpus is empty": [] if corpus else [""],
            "there are no queries": [] if queries else [""],
            f"relevances are no whole numbers up to {HIGHEST:,} (query, document, relevance)": [
                f"({q}, {d}, {qrels[q][d]})" for q, judged in grades.items() for d in judged if judged[d] is None
            ],
            "queries have no relevant document": [q for q in queries if not _relevant(grades.get(q, {}))],
            "queries are judged but unknown": [q for q in grades if q not in queries],
            "judged documents are not in the corpus": list(
                dict.fromkeys(d for judged in grades.values() for d in judged if d not in places)
            ),
            "queries are blank": [q for q, text in queries.items() if not text.strip()],
            "documents are blank": [d for d, text in corpus.items() if not text.strip()],
            "queries have no group": [] if groups is None else [q for q in queries if q not in groups],
        }
        _raise_problems(name, problems)
        if corpus_chunk < 1:
            raise ValueError(f"corpus_chunk is {corpus_chunk}; at least 1")
        self.name = name
        self.query_ids = list(queries)
        self.corpus_ids = list(corpus)
        self._queries = list(queries.values())
        self._corpus = list(corpus.values())
        self._relevant = [{places[d]: grade for d, grade in _relevant(grades[q]).items()} for q in self.query_ids]
        self._groups = None if groups is None else np.array([str(groups[q]) for q in self.query_ids])
        self._chunk = corpus_chunk

    def __repr__(self) -> str:
        return f"RetrievalEvaluator({self.name!r}, {len(self.query_ids)} queries, {len(self.corpus_ids)} documents)"

    def __call__(self, encode: Encode) -> dict[str, float]:
        """The mean of each of METRICS; see `evaluate`."""
        return self.evaluate(encode).metrics

    def evaluate(self, encode: Encode) -> Evaluation:
        """Encodes, searches and scores.

        Args:
            encode: gives the vectors [n, D] of a list of n texts and their kind, "query" or "passage". It is called
                once with all queries, then once for each chunk of the corpus, in the same order on every process: a
                function that shares the work among processes and gathers the result goes here.

        Raises:
            ValueError: vectors of another shape, or NaN or infinite ones.
        """
        queries = _checked(encode(list(self._queries), "query"), self._queries, "query")
        _, rankings = search(queries, self._encoded_corpus(encode, queries.shape[1]), min(DEPTH, len(self._corpus)))
        values = ranking_metrics(rankings, self._relevant)
        groups = {}
        if self._groups is not None:
            for group in sorted(set(self._groups)):
                rows = self._groups == group
                groups[group] = {m: float(v[rows].mean()) for m, v in values.items()} | {"queries": int(rows.sum())}
        return Evaluation({m: float(v.mean()) for m, v in values.items()}, values, groups)

    def _encoded_corpus(self, encode: Encode, dim: int) -> Iterator[np.ndarray]:
        for first in range(0, len(self._corpus), self._chunk):
            texts = self._corpus[first : first + self._chunk]
            yield _checked(encode(texts, "passage"), texts, "passage", dim)

    @classmethod
    def from_pairs(
        cls,
        paths,
        *,
        corpus: str | os.PathLike | None = None,
        group_field: str | None = None,
        name: str = "",
        corpus_chunk: int = 65536,
    ) -> RetrievalEvaluator:
        """From held-out training pairs: each query must find its positives among all passages of the file.

        Passages with the same text are one document, and queries with the same text one query, whose documents are
        those of all its rows. Hard negatives are documents too.

        Args:
            paths: JSONL files as `paddle_infcl.data.jsonl.load_pairs` reads them; folders hold dev.jsonl.
            corpus: a JSONL file with more documents, each with `text` and maybe `title`.
            group_field: a field of the rows to group queries by, such as "package".
            name, corpus_chunk: as for the class.

        Raises:
            DataError: rows that cannot be used.
            ValueError: rows without the group field, a corpus without a document, or as the class.
        """
        pairs = load_pairs(paths, split="dev")
        documents: dict[str, int] = {}
        relevant: dict[str, list[int]] = {}
        groups: dict[str, str] | None = None if group_field is None else {}
        fields = {} if group_field is None else _fields(pairs.files, group_field)
        for row in range(len(pairs)):
            example = pairs[row]
            found = [documents.setdefault(text, len(documents)) for text in example.positives]
            for text in example.negatives:
                documents.setdefault(text, len(documents))
            relevant.setdefault(example.query, []).extend(found)
            if groups is not None:
                groups.setdefault(example.query, fields[example.source])
        pairs.close()
        if corpus is not None:
            for text in _read_corpus(corpus, need_id=False).values():
                documents.setdefault(text, len(documents))
        return cls(
            {query: query for query in relevant},
            list(documents),
            relevant,
            name=name or _base(pairs.files[0]),
            groups=groups,
            corpus_chunk=corpus_chunk,
        )

    @classmethod
    def from_files(cls, queries, corpus, qrels, *, name: str = "", corpus_chunk: int = 65536) -> RetrievalEvaluator:
        """From files as BEIR has them.

        Queries that no judgement names are left out (BEIR keeps the queries of all splits in one file); how many is
        logged.

        Args:
            queries: JSONL with `_id` (or `id`) and `text`.
            corpus: JSONL with `_id` (or `id`), `text`, and a `title` that is put before the text.
            qrels: TSV "query-id, corpus-id, score" with a header, or TREC's "query 0 document relevance"; whole
                numbers, and what is 0 or less is not relevant.
            name, corpus_chunk: as for the class.

        Raises:
            ValueError: lines that cannot be read, a corpus without a document, ids that occur twice, or as the class.
        """
        texts, judged = _read_texts(queries), _read_qrels(qrels)
        used = {query: text for query, text in texts.items() if query in judged}
        if len(used) < len(texts):
            logger.info(
                "%s: %d of %d queries are not judged in %s", queries, len(texts) - len(used), len(texts), qrels
            )
        return cls(used, _read_corpus(corpus), judged, name=name or _base(qrels), corpus_chunk=corpus_chunk)


def _by_id(texts) -> Mapping:
    return texts if isinstance(texts, Mapping) else dict(enumerate(texts))


def _grades(judged) -> dict:
    if not isinstance(judged, Mapping):
        return dict.fromkeys(judged, 1)
    return {document: _grade(relevance) for document, relevance in judged.items()}


def _grade(relevance) -> int | None:
    """A relevance as an int; None for what is no whole number, or too high for the metrics."""
    try:
        grade = int(relevance)
    except (TypeError, ValueError, OverflowError):
        return None
    return grade if grade <= HIGHEST and (isinstance(relevance, str) or grade == relevance) else None


def _relevant(grades: Mapping) -> dict:
    # One that is None is a problem by itself; its query may well have a relevant document.
    return {document: grade for document, grade in grades.items() if grade is None or grade > 0}


def _raise_problems(name: str, problems: Mapping[str, list]) -> None:
    lines = []
    for what, which in problems.items():
        if which == [""]:
            lines.append(f"  {what}")
        elif which:
            more = ", ..." if len(which) > SHOWN else ""
            lines.append(f"  {len(which):,} {what}: {', '.join(str(i)[:60] for i in which[:SHOWN])}{more}")
    if lines:
        raise ValueError(f"cannot evaluate{f' {name}' if name else ''}:\n" + "\n".join(lines))


def _checked(vectors, texts: Sequence[str], kind: str, dim: int | None = None) -> np.ndarray:
    vectors = np.ascontiguousarray(vectors, dtype=np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or (dim or vectors.shape[1]) != vectors.shape[1]:
        wanted = f"[{len(texts)}, {dim or 'D'}]"
        raise ValueError(f"encode gave an array of shape {list(vectors.shape)} for {kind} texts; {wanted} is right")
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad):,} of {len(texts):,} {kind} vectors are NaN or infinite, the first for {texts[bad[0]][:60]!r}"
        )
    return vectors


def _base(path) -> str:
    return os.path.splitext(os.path.basename(os.fspath(path)))[0]


def _bad_lines(path, bad: list[tuple[int, str]]) -> None:
    if bad:
        shown = "\n".join(f"  {path}:{number}: {why}" for number, why in bad[:SHOWN])
        more = f"\n  ... and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
        raise ValueError(f"{len(bad):,} lines of {path} cannot be used:\n{shown}{more}")


class _NotText(ValueError):
    """A line that is not UTF-8."""


def _decoded(line: bytes, number: int) -> str:
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _NotText(f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start}; save the file as UTF-8") from None


def _rows(path) -> Iterator[tuple[int, dict | str]]:
    """(line number, the object or a string that says what is wrong) of a JSONL file; empty lines are passed over."""
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    row = json.loads(_decoded(line, number))
                except ValueError as error:
                    row = str(error) if isinstance(error, _NotText) else f"not JSON: {error}"
                else:
                    row = row if isinstance(row, dict) else "not a JSON object"
                yield number, row


def _fields(files: Sequence[str], name: str) -> dict[str, str]:
    """The value of a field by "file:line"."""
    values = {}
    for file in files:
        rows = list(_rows(file))
        _bad_lines(file, [(number, f"no field `{name}`") for number, row in rows if row.get(name) is None])
        values |= {f"{file}:{number}": str(row[name]) for number, row in rows}
    return values


def _read_texts(path, need_id: bool = True) -> dict[str, str]:
    texts: dict[str, str] = {}
    bad = []
    for number, row in _rows(path):
        if isinstance(row, str):
            bad.append((number, row))
            continue
        key = row.get("_id", row.get("id")) if need_id else number
        if key is None or not isinstance(row.get("text"), str):
            wanted = "`_id` and a string `text` are" if need_id else "a string `text` is"
            bad.append((number, f"{wanted} needed; there are {', '.join(map(repr, row))}"))
        elif str(key) in texts:
            bad.append((number, f"the id {key!r} was there before"))
        else:
            texts[str(key)] = f"{row['title']} {row['text']}" if row.get("title") else row["text"]
    _bad_lines(path, bad)
    return texts


def _read_corpus(path, need_id: bool = True) -> dict[str, str]:
    texts = _read_texts(path, need_id)
    if not texts:
        wanted = "`_id` and `text`" if need_id else "`text`"
        raise ValueError(f"corpus {path}: no documents in it; an object with {wanted} on every line is right")
    return texts


def _read_qrels(path) -> dict[str, dict[str, int]]:
    qrels: dict[str, dict[str, int]] = {}
    bad = []
    with open(path, "rb") as stream:
        for number, raw in enumerate(stream, 1):
            try:
                line = _decoded(raw, number)
            except _NotText as error:
                bad.append((number, str(error)))
                continue
            parts = line.rstrip("\r\n").split("\t") if "\t" in line else line.split()
            if not parts or (number == 1 and parts[0].lower() in ("query-id", "query_id", "qid", "query")):
                continue
            query, *_, document, grade = parts if len(parts) in (3, 4) else ("", "", "")
            grade = _grade(grade)
            if grade is None:
                wanted = f"query, document and a whole number up to {HIGHEST:,} are needed, or TREC's four columns"
                bad.append((number, f"{wanted}; this is {line.strip()[:60]!r}"))
                continue
            if qrels.setdefault(query, {}).setdefault(document, grade) != grade:
                bad.append((number, f"{query} and {document} were judged {qrels[query][document]} before"))
    _bad_lines(path, bad)
    return qrels
