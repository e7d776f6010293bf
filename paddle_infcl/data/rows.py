# SPDX-License-Identifier: Apache-2.0
"""One row of training data: which field names are understood, and what makes a row unusable."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache

from paddle_infcl.data.hashing import mix, stable_id, text_id

NO_ID = -1
"""The id of a text that has none; it matches nothing, itself included."""

FORMATS = (
    "query, pos_passage, neg_passage; query, pos, neg; anchor, positive, negative (or negative_1, negative_2, ...); "
    "query, positive, negatives"
)


class DataError(ValueError):
    """Data that cannot be used. The message says what, where and what would be right.

    Attributes:
        counts: number of bad rows per reason; empty when the error is not about rows.
    """

    def __init__(self, message: str, counts: dict[str, int] | None = None):
        super().__init__(message)
        self.counts = counts or {}


class BadRow(Exception):
    """One row is refused: `reason` is what rows are counted by, `detail` is about this row."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(slots=True)
class Example:
    """A query, the passages that answer it, and passages that do not.

    Attributes:
        query: not blank.
        positives: at least one, none blank.
        negatives: any number, none blank.
        query_id: int64 >= 0; -1 where this row has none but others of the data have; None where no row has ids.
        positive_ids: one per positive, as query_id.
        negative_ids: one per negative, as query_id.
        scores: a teacher's scores of the positives and of the negatives, of `pos_scores` and `neg_scores`; None where
            the row has none, or others than one number for each text.
        guide: a guide model's vectors of the query, the positives and the negatives; None where the row has none.
        source: "file:line", for messages.
    """

    query: str
    positives: list[str]
    negatives: list[str] = field(default_factory=list)
    query_id: int | None = None
    positive_ids: list[int] | None = None
    negative_ids: list[int] | None = None
    source: str = ""
    scores: tuple[list[float], list[float]] | None = None
    guide: tuple[list[float], list[list[float]], list[list[float]]] | None = None

    @property
    def has_ids(self) -> bool:
        """Whether any id was given."""
        return self.query_id is not None or self.positive_ids is not None or self.negative_ids is not None

    def fill_ids(self) -> None:
        """Writes -1 wherever an id is missing."""
        if self.query_id is None:
            self.query_id = NO_ID
        if self.positive_ids is None:
            self.positive_ids = [NO_ID] * len(self.positives)
        if self.negative_ids is None:
            self.negative_ids = [NO_ID] * len(self.negatives)

    def keys(self) -> list[int]:
        """What makes two rows duplicates: 64-bit numbers of the query, of every positive, and of their ids.

        Two rows that share one of them are false negatives of each other. All positives count, not just the drawn
        one: a passage that answers this query is no negative for it, whether it was drawn or not.
        """
        keys = {mix(1, text_id(self.query))}
        keys.update(mix(2, text_id(text)) for text in self.positives)
        if self.query_id is not None and self.query_id >= 0:
            keys.add(mix(3, self.query_id))
        keys.update(mix(4, i) for i in self.positive_ids or () if i >= 0)
        return list(keys)

    def allowed_negatives(self) -> list[int]:
        """Indices of the negatives that are not also a positive of this row, by text or by id."""
        positives = {text.strip() for text in self.positives}
        ids = {i for i in self.positive_ids or () if i >= 0}
        return [
            k
            for k, text in enumerate(self.negatives)
            if text.strip() not in positives and not (self.negative_ids and self.negative_ids[k] in ids)
        ]


# Names that belong together, per role. A row that takes its names from two lines is refused.
_STYLES = (
    {"query": ("query",), "positive": ("pos_passage",), "negative": ("neg_passage",)},
    {"query": ("query",), "positive": ("pos",), "negative": ("neg",)},
    {"query": ("query", "anchor"), "positive": ("positive", "positives"), "negative": ("negative", "negatives")},
)
_NUMBERED = re.compile(r"negative_(\d+)")
_OTHER_NUMBERED = re.compile(
    r"(?:hard_)?(?P<sign>pos|neg)(?:itive|ative|_passage)?s?(?:_?(?P<number>\d+))|hard_(?P<hard>neg)(?:ative)?s?"
)
_IDS = {
    "query": ("query_id", "anchor_id"),
    "positive": ("pos_id", "pos_ids", "pos_passage_id", "pos_passage_ids", "positive_id", "positive_ids"),
    "negative": ("neg_id", "neg_ids", "neg_passage_id", "neg_passage_ids", "negative_id", "negative_ids"),
}
SCORES = ("pos_scores", "neg_scores")
GUIDE = ("query_guide", "pos_guide", "neg_guide")
_NAMES = {role: tuple(dict.fromkeys(name for style in _STYLES for name in style[role])) for role in _IDS}
_KNOWN = frozenset([*GUIDE, *(name for table in (_NAMES, _IDS) for names in table.values() for name in names)])
_FOREIGN = {"positive_passages": "pos_passage", "negative_passages": "neg_passage"}


@dataclass(frozen=True)
class Layout:
    """Which field of a row plays which role; the same for all rows with the same field names."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    ids: dict[str, str]
    ignored: tuple[str, ...]


def _edits(a: str, b: str) -> int:
    """Optimal string alignment distance: insertions, deletions, substitutions and swaps of neighbours."""
    before, row = [], list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                cost = min(cost, older[j - 2] + 1)
            row.append(cost)
    return row[-1]


def _meant(name: str) -> str | None:
    """The known field name that an unknown one looks like, or None."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")
    if plain in _FOREIGN:
        return _FOREIGN[plain]
    if plain in _KNOWN or _NUMBERED.fullmatch(plain):
        return plain
    if match := _OTHER_NUMBERED.fullmatch(plain):
        if match["hard"]:
            return "negatives"
        return "positive` as a list, `[...]" if match["sign"] == "pos" else f"negative_{match['number']}"
    for known in sorted(_KNOWN):
        # Short names are one letter away from ordinary words: `pos` and `post`.
        allowed = 0 if len(known) < 5 else 1 if len(known) < 9 else 2
        if _edits(plain, known) <= allowed:
            return known
    return None


@lru_cache(maxsize=4096)
def layout_of(names: tuple[str, ...]) -> Layout:
    """Finds the roles of a row's fields.

    Args:
        names: the row's field names.

    Raises:
        BadRow: names of several styles, no query or no positive field, or a name that looks like a typing error.
    """
    numbered = sorted((name for name in names if _NUMBERED.fullmatch(name)), key=lambda name: int(name[9:]))
    found = {role: [name for name in _NAMES[role] if name in names] for role in _NAMES}
    ids = {role: [name for name in _IDS[role] if name in names] for role in _IDS}
    used = {name for group in (*found.values(), *ids.values(), numbered) for name in group}
    ignored = tuple(name for name in names if name not in used and name not in GUIDE)
    for name in ignored:
        if meant := _meant(name):
            raise BadRow("unknown field that looks like a known one", f"`{name}`; `{meant}` is meant?")
    for role in ("query", "positive"):
        if not found[role]:
            raise BadRow(f"no {role}", f"the fields are {_listed(names)}; understood are {FORMATS}")
    texts = [name for group in found.values() for name in group]
    style = next(
        (
            style
            for style in _STYLES
            if all(set(found[role]) <= set(style[role]) for role in found) and (not numbered or style is _STYLES[-1])
        ),
        None,
    )
    several = [group for group in (*found.values(), *ids.values()) if len(group) > 1]
    if style is None or several or (numbered and found["negative"]):
        mixed = several[0] if several else [*texts, *numbered[:1]]
        raise BadRow("mixed naming schemes", f"{_listed(mixed)} do not go together; understood are {FORMATS}")
    return Layout(
        found["query"][0],
        found["positive"][0],
        tuple(found["negative"]) or tuple(numbered),
        {role: group[0] for role, group in ids.items() if group},
        ignored,
    )


def _listed(names) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _text(value: object, name: str, role: str) -> str:
    if not isinstance(value, str):
        raise BadRow("wrong type", f"`{name}` is {_shown(value)}; a string is right")
    if not value.strip():
        raise BadRow(
            f"blank {role}",
            f"`{name}` is {_shown(value)}"
            + ("; leave it out, or write [] or null, where there is none" if role == "negative" else ""),
        )
    return value


def _texts(value: object, name: str, role: str) -> list[str]:
    if value is None:
        return []
    if isinstance(value, list):
        return [_text(item, f"{name}[{k}]", role) for k, item in enumerate(value)]
    if isinstance(value, str):
        return [_text(value, name, role)]
    raise BadRow("wrong type", f"`{name}` is {_shown(value)}; a string or a list of strings is right")


def _ids(value: object, name: str, count: int) -> list[int] | None:
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    if len(items) != count:
        raise BadRow("ids and texts differ in number", f"`{name}` has {len(items)} for {count} texts")
    result = []
    for item in items:
        try:
            result.append(NO_ID if item is None else stable_id(item))
        except ValueError as error:
            raise BadRow("wrong id", f"`{name}` holds {error}; an int from 0 on or a string is right") from None
    return result


def parse_row(row: object) -> tuple[Example, Layout]:
    """Reads a row that was decoded from JSON.

    Args:
        row: a dict; the field names understood are in `FORMATS`.

    Returns:
        The example, without its source, and the layout that was found.

    Raises:
        BadRow: the row cannot be used.
    """
    if not isinstance(row, dict):
        raise BadRow("not a JSON object", f"{_shown(row)}; one object per line is right")
    layout = layout_of(tuple(row))
    query = _text(row[layout.query], layout.query, "query")
    positives = _texts(row[layout.positive], layout.positive, "positive")
    if not positives:
        raise BadRow("no positive", f"`{layout.positive}` is {_shown(row[layout.positive])}")
    negatives = [text for name in layout.negatives for text in _texts(row[name], name, "negative")]
    example = Example(query, positives, negatives)
    if layout.ids:
        name = layout.ids.get("query", "")
        if name and row[name] is not None:
            if isinstance(row[name], list):
                raise BadRow("wrong id", f"`{name}` is {_shown(row[name])}; an int from 0 on or a string is right")
            example.query_id = _ids(row[name], name, 1)[0]
        for role, texts in (("positive", positives), ("negative", negatives)):
            name = layout.ids.get(role, "")
            value = row.get(name)
            if role == "negative" and not texts and value == []:
                value = None
            setattr(example, f"{role}_ids", _ids(value, name, len(texts)))
    counts = (len(positives), len(negatives))
    if any(row.get(name) is not None for name in SCORES):
        # Other software's data has fields of this name: they are refused only where they are wanted.
        with contextlib.suppress(BadRow):
            example.scores = tuple(_numbers(row.get(n), n, c) for n, c in zip(SCORES, counts, strict=True))
    if any(row.get(name) is not None for name in GUIDE):
        example.guide = _guide(row, counts)
    return example, layout


def _numbers(value: object, name: str, count: int | None = None) -> list[float]:
    items = [] if value is None else value if isinstance(value, list) else [value]
    if count is not None and len(items) != count:
        raise BadRow("numbers and texts differ in number", f"`{name}` has {len(items)} for {count} texts")
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
            raise BadRow("wrong type", f"`{name}` holds {_shown(item)}; finite numbers are right")
    return [float(item) for item in items]


def _guide(row: dict, counts: tuple[int, int]) -> tuple[list[float], list[list[float]], list[list[float]]]:
    query = _numbers(row.get("query_guide"), "query_guide")
    sides = []
    for name, count in zip(GUIDE[1:], counts, strict=True):
        vectors = row.get(name) or []
        if not isinstance(vectors, list) or len(vectors) != count:
            raise BadRow("vectors and texts differ in number", f"`{name}` must be a list of {count} vectors")
        sides.append([_numbers(vector, f"{name}[{k}]") for k, vector in enumerate(vectors)])
    widths = {len(vector) for vector in [query, *sides[0], *sides[1]]}
    if len(widths) > 1 or 0 in widths:
        raise BadRow("guide vectors of different widths", f"{sorted(widths)}; one width, more than 0, is right")
    return query, sides[0], sides[1]
