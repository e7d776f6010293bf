# SPDX-License-Identifier: Apache-2.0
"""The code-search set: docstrings and the functions they describe, from Python packages.

The method of CodeSearchNet on whatever packages are there: the query is the first paragraph of a function's docstring,
the passage is the function's source without the docstring. Split by package, so that nothing of a held-out package
is trained on. The same versions of the same packages give the same files.
"""

from __future__ import annotations

import argparse
import ast
import csv
import importlib.metadata
import os
import re
import sys
import textwrap
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from paddle_infcl.data.retrieval_set import write_counts, write_jsonl, write_retrieval_set
from paddle_infcl.data.rows import DataError
from paddle_infcl.log import logger

HELD_OUT = ("scipy", "networkx", "sklearn", "matplotlib")
OURS = ("paddle_infcl", "paddle_infcl_ops")
MIN_WORDS, MAX_WORDS, MIN_LINES = 4, 64, 3

_SKIPPED_PARTS = re.compile(
    r"tests?|testing|_?vendor(ed)?|_?third_?party|_?externals?|_?extern|site-packages|conftest\.py|test_.*\.py|.*_test\.py"
)


@dataclass(frozen=True)
class Pair:
    """A docstring's first paragraph and the function that it describes."""

    query: str
    positive: str
    package: str


def functions_of(source: str, package: str) -> Iterator[Pair]:
    """The pairs in one module.

    Args:
        source: the module's text.
        package: what the pairs are labelled with.

    Yields:
        One pair for every function or method with a docstring whose first paragraph has 4 to 64 words, all ASCII, and
        with at least 3 lines besides the docstring; in the order of the source.

    Raises:
        SyntaxError, ValueError: the source cannot be parsed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    lines = re.split(r"\r\n|\r|\n", source)  # as Python counts lines; splitlines() also splits at form feeds
    for node in sorted(_functions_in(tree), key=lambda node: node.lineno):
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        query = " ".join(re.split(r"\n\s*\n", docstring.strip(), maxsplit=1)[0].split())
        if not query.isascii() or not MIN_WORDS <= len(query.split()) <= MAX_WORDS:
            continue
        first, last = node.body[0].lineno, node.body[0].end_lineno
        kept = [*lines[node.lineno - 1 : first - 1], *lines[last : node.end_lineno]]
        # A docstring that shares a line with code would take that code with it.
        alone = lines[first - 1][: node.body[0].col_offset].isspace() and (
            len(node.body) == 1 or node.body[1].lineno > last
        )
        kept = [line.rstrip() for line in kept if line.strip()]
        if alone and len(kept) >= MIN_LINES:
            yield Pair(query, textwrap.dedent("\n".join(kept)), package)


def _functions_in(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All function definitions. Visits statements only: `ast.walk` would take most of the time in expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting.extend(getattr(node, part, ()))


def _is_wanted(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return path.endswith(".py") and not any(_SKIPPED_PARTS.fullmatch(part.lower()) for part in parts)


def _package_of(path: str) -> str:
    """The name under which a file of a wheel or an installation is imported."""
    return PurePosixPath(path).parts[0].removesuffix(".py")


@dataclass
class Sources:
    """Python files by package, and which version of what they come from."""

    files: dict[str, dict[str, Callable[[], bytes]]]
    versions: dict[str, str]

    def add(self, path: str, read: Callable[[], bytes], version: str) -> None:
        """Adds a file, unless it is skipped. `read` gives its bytes."""
        name = _package_of(path)
        if _is_wanted(path) and name.isidentifier() and name not in OURS and not name.startswith("__editable__"):
            self.files.setdefault(name, {})[path] = read
            self.versions.setdefault(name, version)


def installed_sources() -> Sources:
    """The packages of this environment, as their distributions list them."""
    sources = Sources({}, {})
    unlisted = []
    for dist in importlib.metadata.distributions():
        # `dist.files` asks the file system about every file; the list itself has all that is needed.
        record, version = dist.read_text("RECORD"), f"{dist.metadata['Name']} {dist.version}"
        if record is None:
            unlisted.append(version)
        for path, *_ in csv.reader((record or "").splitlines()):
            if not path.startswith(("..", "/")):
                sources.add(path, Path(dist.locate_file(path)).read_bytes, version)
    if unlisted:
        logger.info(f"installed without a list of files, not used: {', '.join(sorted(unlisted))}")
    return sources


def wheel_sources(wheels: Sequence[str]) -> Sources:
    """The packages in wheel files.

    Raises:
        DataError: a file is not there or is no wheel.
    """
    sources = Sources({}, {})
    for wheel in wheels:
        name = os.path.basename(wheel)
        if not os.path.isfile(wheel) or not zipfile.is_zipfile(wheel) or name.count("-") < 4:
            raise DataError(f"{wheel}: not a wheel; get one with pip download --no-deps --only-binary=:all: NAME")
        archive = zipfile.ZipFile(wheel)
        for path in archive.namelist():
            # .data/purelib and platlib are unpacked next to the rest.
            inside = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", path)
            sources.add(inside, lambda a=archive, p=path: a.read(p), " ".join(name.split("-")[:2]))
    return sources


def extract(sources: Sources) -> tuple[list[Pair], int]:
    """All pairs of all packages, those dropped whose query or passage occurs more than once.

    Args:
        sources: what to read.

    Returns:
        The pairs, ordered by package, file and place in it; and how many files could not be read as Python.
    """
    pairs: list[Pair] = []
    unreadable = 0
    for package in sorted(sources.files):
        for path in sorted(sources.files[package]):
            try:
                pairs.extend(functions_of(sources.files[package][path]().decode("utf-8"), package))
            except (SyntaxError, ValueError, RecursionError, OSError):
                unreadable += 1
    queries, passages = Counter(pair.query for pair in pairs), Counter(pair.positive for pair in pairs)
    return [pair for pair in pairs if queries[pair.query] == 1 and passages[pair.positive] == 1], unreadable


def make(
    output_dir: str,
    *,
    wheels: Sequence[str] = (),
    installed: bool = True,
    held_out: Sequence[str] = HELD_OUT,
    eval_queries: int = 1000,
    eval_corpus: int = 3000,
    seed: int = 0,
) -> dict:
    """Makes the set: `train.jsonl`, the folder `eval` (see `write_retrieval_set`) and `counts.json`.

    Args:
        output_dir: made if need be.
        wheels: wheel files to read; a package in one of them is not taken from this environment.
        installed: whether to read the packages of this environment.
        held_out: packages, by import name, that only go into `eval`.
        eval_queries, eval_corpus: sizes of the evaluation.
        seed: of the choice of queries and corpus.

    Returns:
        The counts that were written.

    Raises:
        DataError: no training pairs, none of the held-out packages there, or fewer of their pairs than queries.
    """
    sources = wheel_sources(wheels)
    if installed:
        here = installed_sources()
        for name in here.files.keys() - sources.files.keys():
            sources.files[name], sources.versions[name] = here.files[name], here.versions[name]
    pairs, unreadable = extract(sources)
    rows = [{"query": pair.query, "positive": pair.positive, "package": pair.package} for pair in pairs]
    train = [row for row in rows if row["package"] not in held_out]
    test = [row for row in rows if row["package"] in held_out]
    if not train or len(test) < eval_queries:
        raise DataError(
            f"{len(train):,} pairs to train on and {len(test):,} pairs of {', '.join(held_out) or 'no package'} for "
            f"{eval_queries:,} queries: not enough. Hold out other packages, ask for fewer queries, or add wheels. "
            f"There are {', '.join(sorted(sources.files)) or 'no packages'}"
        )
    absent = sorted(set(held_out) - sources.files.keys())
    if absent:
        logger.warning(f"held-out packages that are not here: {', '.join(absent)}")
    os.makedirs(output_dir, exist_ok=True)
    write_jsonl(os.path.join(output_dir, "train.jsonl"), train)
    sizes = write_retrieval_set(os.path.join(output_dir, "eval"), test, eval_queries, eval_corpus, seed)
    number = Counter(row["package"] for row in rows)
    counts = {
        "train": len(train),
        "held_out": len(test),
        "eval": sizes,
        "packages": {
            name: {
                "pairs": number[name],
                "split": "held out" if name in held_out else "train",
                "from": sources.versions[name],
            }
            for name in sorted(number, key=lambda name: (-number[name], name))
        },
        "files_not_parsed": unreadable,
        "seed": seed,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    write_counts(output_dir, counts)
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of scripts/make_code_search.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="data/code_search")
    parser.add_argument("--wheels", nargs="*", default=[], help="wheel files to read as well")
    parser.add_argument("--only_wheels", action="store_true", help="leave out the packages of this environment")
    parser.add_argument(
        "--held_out", nargs="*", default=list(HELD_OUT), help="packages for evaluation, by import name"
    )
    parser.add_argument("--eval_queries", type=int, default=1000)
    parser.add_argument("--eval_corpus", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        counts = make(
            args.output_dir,
            wheels=args.wheels,
            installed=not args.only_wheels,
            held_out=args.held_out,
            eval_queries=args.eval_queries,
            eval_corpus=args.eval_corpus,
            seed=args.seed,
        )
    except DataError as error:
        parser.exit(2, f"{error}\n")
    print(f"{'package':<28}{'pairs':>8}  split")
    for name, entry in counts["packages"].items():
        print(f"{name:<28}{entry['pairs']:>8,}  {entry['split']}")
    print(
        f"{counts['train']:,} pairs to train on, {counts['held_out']:,} held out; "
        f"{counts['eval']['queries']:,} queries against {counts['eval']['corpus']:,} functions: {args.output_dir}"
    )
