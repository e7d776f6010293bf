# SPDX-License-Identifier: Apache-2.0
"""What is read and what is written must not be the same."""

from __future__ import annotations

import os


def same_path(one: str | os.PathLike, other: str | os.PathLike) -> bool:
    """Whether two paths lead to one file or folder, through links as well, whether it is there or not."""
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there yet
        return os.path.realpath(one) == os.path.realpath(other)
