# SPDX-License-Identifier: Apache-2.0
"""Training pairs in JSONL files, read without keeping the texts in memory.

Every row is checked once, when the files are opened; what stays in memory is where each row lies: offset, length,
line number and number of characters, 20 bytes a row. A row is read from its file when it is asked for, so 10 million
rows cost 200 MB however long their texts are. `no_duplicates` adds 8 bytes per text and id.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from glob import escape, glob

import numpy as np

from paddle_infcl.data.rows import GUIDE, SCORES, BadRow, DataError, Example, parse_row
from paddle_infcl.log import logger

SHOWN = 20
"""How many bad rows an error spells out; all of them are counted."""

_FILE_MARKS = (
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"(\xb5/\xfd", "zstd"),
)


def _no_repeats(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        twice = next(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
        raise BadRow("field given twice", f"`{twice}`: JSON would keep the last one only")
    return row


_strict = json.JSONDecoder(object_pairs_hook=_no_repeats)


def _decode(raw: bytes) -> object:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"byte 0x{raw[error.start]:02x} at {error.start}; save the file as UTF-8") from None
    try:
        row = _strict.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON", f"{error}; one object per line is right") from None
    if b"\\u" in raw:
        try:
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise BadRow("half a character", "an unpaired surrogate (\\ud800 .. \\udfff) is no text") from None
    return row


def _files_of(path: str, split: str) -> list[str]:
    """A file is itself; a folder holds train.jsonl, train.json, or a folder train/ with such files, as upstream."""
    if not os.path.isdir(path):
        return [path]
    single = [os.path.join(path, f"{split}.{ending}") for ending in ("json", "jsonl")]
    single = [name for name in single if os.path.isfile(name)]
    many = sorted(glob(os.path.join(escape(path), split, "*.json")))
    many += sorted(glob(os.path.join(escape(path), split, "*.jsonl")))
    if len(single) > 1 or (single and many):
        raise DataError(f"{path}: holds both {' and '.join(single + many[:1])}; name the files that are meant")
    if not single and not many:
        there = ", ".join(sorted(os.listdir(path))[:10]) or "nothing"
        raise DataError(
            f"{path}: a folder must hold {split}.json, {split}.jsonl, {split}/*.json or {split}/*.jsonl; "
            f"it holds {there}"
        )
    return single or many


class _Report:
    """Collects bad rows: all counted, the first ones spelled out."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        self.lines: list[str] = []

    def add(self, where: str, bad: BadRow) -> None:
        self.counts[bad.reason] += 1
        if len(self.lines) < SHOWN:
            self.lines.append(f"  {where}: {bad}")

    def raise_if_any(self, rows: int) -> None:
        total = sum(self.counts.values())
        if not total:
            return
        counted = "\n".join(f"  {n:,} x {reason}" for reason, n in self.counts.most_common())
        more = f"\n  ... and {total - len(self.lines):,} more" if total > len(self.lines) else ""
        raise DataError(
            f"{total:,} of {rows + total:,} rows cannot be used; nothing is left out silently, so correct them or "
            f"take them out.\n{counted}\nWhere:\n" + "\n".join(self.lines) + more,
            dict(self.counts),
        )


class PairDataset:
    """Map-style dataset of `Example`s over JSONL files. Made by `load_pairs`.

    Attributes:
        files: the files, in order.
        has_ids: whether any row has an id; then every example has ids, -1 where none was given.
        lengths: [rows] int32, characters of the query and of the row's longest passage.
        rows_per_epoch: number of rows in an epoch, after weighting.
    """

    def __init__(self, files, sources, arrays, weights, has_ids):
        self.files: list[str] = files
        self.has_ids: bool = has_ids
        self._file_start, self._offset, self._size, self._line, self.lengths = arrays
        # (first row, row after the last, weight) of every path that was given.
        self._sources = [(lo, hi, w) for (lo, hi), w in zip(sources, weights, strict=True)]
        self._stats = [os.stat(name) for name in files]
        self._handles: dict[int, int] = {}
        self._keys: tuple[np.ndarray, np.ndarray] | None = None
        self.rows_per_epoch = sum(round((hi - lo) * w) for lo, hi, w in self._sources)

    def __len__(self) -> int:
        return len(self._offset)

    def source(self, index: int) -> str:
        """ "file:line" of a row."""
        return f"{self.files[self._file_of(index)]}:{self._line[index]}"

    def _file_of(self, index: int) -> int:
        return int(np.searchsorted(self._file_start, index, side="right")) - 1

    def __getitem__(self, index: int) -> Example:
        index = int(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        number = self._file_of(index)
        raw = os.pread(self._handle(number), int(self._size[index]), int(self._offset[index]))
        try:
            example, _ = parse_row(_decode(raw))
        except BadRow as bad:
            raise DataError(f"{self.source(index)}: changed after it was checked: {bad}") from None
        example.source = self.source(index)
        if self.has_ids:
            example.fill_ids()
        return example

    def _handle(self, number: int) -> int:
        if number not in self._handles:
            name = self.files[number]
            handle = os.open(name, os.O_RDONLY)
            now, then = os.fstat(handle), self._stats[number]
            if (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
                os.close(handle)
                raise DataError(f"{name}: changed after it was checked; load it again")
            self._handles[number] = handle
        return self._handles[number]

    def close(self) -> None:
        """Closes the files; they are opened again when a row is asked for."""
        while self._handles:
            os.close(self._handles.popitem()[1])

    def __del__(self):
        if hasattr(self, "_handles"):
            self.close()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_handles": {}}

    def epoch_rows(self, seed: int, epoch: int) -> np.ndarray:
        """The rows of an epoch, before shuffling.

        A path of weight w gives round(w x its rows): every row floor(w) times, and the rest drawn without
        replacement, anew in each epoch.

        Args:
            seed: seed of the run.
            epoch: number of the epoch, from 0.

        Returns:
            [rows_per_epoch] int64.
        """
        parts = []
        for number, (lo, hi, weight) in enumerate(self._sources):
            copies, rest = divmod(round((hi - lo) * weight), hi - lo)
            rows = np.arange(lo, hi, dtype=np.int64)
            parts.extend([rows] * copies)
            if rest:
                rng = np.random.default_rng([seed, epoch, number])
                parts.append(np.sort(rng.choice(rows, rest, replace=False)))
        return np.concatenate(parts)

    def row_keys(self) -> tuple[np.ndarray, np.ndarray]:
        """`Example.keys` of all rows, read on the first call and kept.

        Returns:
            (keys [total] int64, starts [rows + 1] int64): row i has keys[starts[i]:starts[i + 1]].
        """
        if self._keys is None:
            self._keys = keys_of(self)
        return self._keys


def keys_of(dataset: Sequence[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Collects `Example.keys` of every example of a dataset; see `PairDataset.row_keys`."""
    flat, starts = array("Q"), array("q", [0])
    for index in range(len(dataset)):
        flat.extend(dataset[index].keys())
        starts.append(len(flat))
    return np.frombuffer(flat, dtype=np.uint64).view(np.int64), np.frombuffer(starts, dtype=np.int64)


def _checked_weights(weights: Sequence[float] | None, paths: list[str]) -> list[float]:
    if weights is None:
        return [1.0] * len(paths)
    if len(weights) != len(paths):
        raise DataError(f"{len(weights)} weights for {len(paths)} paths; one for each path is right")
    for path, weight in zip(paths, weights, strict=True):
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight > 0):
            raise DataError(f"weight {weight!r} of {path}; a number above 0 is right")
    return [float(weight) for weight in weights]


def load_pairs(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    weights: Sequence[float] | None = None,
    split: str = "train",
    needs: Collection[str] = (),
) -> PairDataset:
    """Opens JSONL files of training pairs and checks every row.

    Args:
        paths: a .jsonl or .json file (one JSON object per line in both), a folder with train.json, train.jsonl,
            train/*.json or train/*.jsonl, or a list of these.
        weights: one per path: how many times its rows come up in an epoch. 2 is twice, 0.5 a new half in each epoch.
        split: the name that is looked for in folders.
        needs: of "scores" (a teacher's) and "guide" (its vectors), what every row must have.

    Returns:
        The dataset.

    Raises:
        DataError: missing files, wrong weights, or rows that cannot be used: all are counted by reason, the first
            ones listed with file and line.

    Example:
        >>> import json, tempfile
        >>> from paddle_infcl.data.jsonl import load_pairs
        >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl", delete=False) as f:
        ...     _ = f.write(json.dumps({"query": "a", "pos": "b", "neg": None}))
        >>> load_pairs(f.name)[0].positives
        ['b']
    """
    paths = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not paths:
        raise DataError("no data: not one path was given")
    weights = _checked_weights(weights, paths)
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        raise DataError(f"no such file or folder: {', '.join(missing)}")
    groups = [_files_of(path, split) for path in paths]
    files = [name for group in groups for name in group]
    twice = [name for name, n in Counter(os.path.realpath(name) for name in files).items() if n > 1]
    if twice:
        raise DataError(f"given twice: {', '.join(twice)}; a weight of 2 does that")

    reader = _Reader(needs)
    sources = []
    for group in groups:
        first = len(reader.offset)
        for name in group:
            reader.read(name)
        sources.append((first, len(reader.offset)))
    reader.report.raise_if_any(len(reader.offset))
    reader.tell()
    dataset = PairDataset(files, sources, reader.arrays(), weights, reader.has_ids)
    for path, (lo, hi), weight in zip(paths, sources, weights, strict=True):
        if round((hi - lo) * weight) == 0:
            raise DataError(f"{path}: weight {weight} of {hi - lo} rows leaves none; {1 / (hi - lo):.3g} gives one")
        logger.info(f"{path}: {hi - lo:,} rows" + (f", weight {weight:g}" if weight != 1 else ""))
    return dataset


# What may be asked of every row, and the fields that hold it.
_NEEDS = {"scores": SCORES, "guide": GUIDE}


class _Reader:
    """Reads files once, checks their rows and notes where they lie."""

    def __init__(self, needs: Collection[str]):
        self.report, self.needs = _Report(), needs
        self.offset, self.size, self.line, self.length = array("q"), array("i"), array("i"), array("i")
        self.file_start: list[int] = []
        self.has_ids = False
        self.ignored: set[str] = set()
        self.contradictions: list[str] = []
        self.contradicting = 0

    def read(self, name: str) -> None:
        self.file_start.append(len(self.offset))
        with open(name, "rb") as stream:
            head = stream.read(4096)
            for mark, what in _FILE_MARKS:
                if head.startswith(mark):
                    self.report.add(name, BadRow("not UTF-8 text", f"this looks like {what}; UTF-8 text is right"))
                    return
            if head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
                bad = BadRow("a JSON array", "one object per line is right (jq -c '.[]' old.json > new.jsonl)")
                self.report.add(name, bad)
                return
            stream.seek(0)
            position, seen = 0, False
            for number, raw in enumerate(stream, 1):
                start, position = position, position + len(raw)
                if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                    start, raw = 3, raw[3:]
                if raw.strip():
                    seen = True
                    self._row(f"{name}:{number}", number, start, raw)
            if not seen:
                self.report.add(name, BadRow("empty file", "at least one row is right"))

    def _row(self, where: str, number: int, start: int, raw: bytes) -> None:
        try:
            example, layout = parse_row(_decode(raw))
            for need, fields in _NEEDS.items():
                if need in self.needs and getattr(example, need) is None:
                    raise BadRow(f"no {need}", f"`{'`, `'.join(fields)}` with one entry per text are needed")
        except BadRow as bad:
            self.report.add(where, bad)
            return
        self.offset.append(start)
        self.size.append(len(raw))
        self.line.append(number)
        self.length.append(len(example.query) + max(map(len, example.positives + example.negatives)))
        self.has_ids = self.has_ids or example.has_ids
        self.ignored.update(layout.ignored)
        if example.negatives and len(example.allowed_negatives()) < len(example.negatives):
            self.contradicting += 1
            if len(self.contradictions) < 3:
                self.contradictions.append(where)

    def tell(self) -> None:
        """Says what was read but is not used."""
        if "scores" in self.needs:
            self.ignored -= set(SCORES)
        if self.ignored:
            logger.info(f"fields that are not used: {', '.join(sorted(self.ignored)[:20])}")
        if self.contradicting:
            logger.warning(
                f"{self.contradicting:,} rows name one of their positives as a negative as well "
                f"({', '.join(self.contradictions)} ...); it is never drawn as a negative"
            )

    def arrays(self) -> tuple[np.ndarray, ...]:
        return (
            np.array(self.file_start, dtype=np.int64),
            np.frombuffer(self.offset, dtype=np.int64),
            np.frombuffer(self.size, dtype=np.int32),
            np.frombuffer(self.line, dtype=np.int32),
            np.frombuffer(self.length, dtype=np.int32),
        )
