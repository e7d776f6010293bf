# SPDX-License-Identifier: Apache-2.0
"""Stable 64-bit numbers: ids from texts and strings, seeds from (seed, epoch, row).

Python's own `hash` of a string changes from process to process; these never change.
"""

from __future__ import annotations

import hashlib

_MASK = (1 << 64) - 1
ID_LIMIT = 1 << 62
"""Integer ids must lie below it; ids made by hashing lie in [2^62, 2^63), so the two never meet."""


def text_id(text: str) -> int:
    """The id of a text: equal texts have equal ids, in every process and on every machine.

    Blanks at both ends do not count. 62 bits of BLAKE2b: among 10 million texts, two share an id with a probability
    of 1e-5.

    Args:
        text: any text.

    Returns:
        An int in [2^62, 2^63).
    """
    digest = hashlib.blake2b(text.strip().encode("utf-8"), digest_size=8).digest()
    return ID_LIMIT | (int.from_bytes(digest, "little") & (ID_LIMIT - 1))


def stable_id(value: int | str) -> int:
    """The int64 of an id as it is written in a file.

    A non-negative int below 2^62 is itself, and so is a string that writes such an int without leading zeros: 7 and
    "7" are one id. Every other string is hashed.

    Args:
        value: the id.

    Returns:
        An int in [0, 2^63).

    Raises:
        ValueError: `value` is neither a string nor an int, is negative, is 2^62 or more, or is blank.
    """
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("a blank string")
        if value.isascii() and value.isdigit() and (value == "0" or value[0] != "0") and len(value) <= 18:
            return int(value)
        return text_id(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"a {type(value).__name__}")
    if not 0 <= value < ID_LIMIT:
        raise ValueError(f"{value}, outside 0 .. 2^62 - 1")
    return value


def mix(*numbers: int) -> int:
    """A 64-bit number that depends on every argument and on their order (the finaliser of SplitMix64, chained)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
        state ^= state >> 30
        state = (state * 0xBF58476D1CE4E5B9) & _MASK
        state ^= state >> 27
        state = (state * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def row_seed(seed: int, epoch: int, row: int) -> int:
    """The seed of the random choices for one row in one epoch: its positive and its negatives.

    It does not depend on the number of processes, on the order of the rows or on what was read before, so a resumed
    run draws what the uninterrupted run would have drawn.
    """
    return mix(seed, epoch, row)
