# SPDX-License-Identifier: Apache-2.0
"""The order of the rows: epochs, windows (one optimizer step each), micro-batches, the shares of the ranks.

An epoch is a permutation of its rows, cut into global windows of S = micro_batch_size x accumulation x world rows.
Windows do not depend on how S is made up, so W ranks see what one rank with the same S sees. A window never crosses
an epoch: the last one is smaller, unless `drop_last` leaves it out.

A window of n rows goes to W ranks in shares of floor(n / W) or ceil(n / W) rows. Each share is cut into
ceil(ceil(n / W) / micro_batch_size) micro-batches as even as possible, none empty: every rank has the same number of
them, except where a rank has fewer rows than that (micro_batch_size 1, or fewer rows than ranks). A rank without rows
gets the empty window [], so the number of windows is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from paddle_infcl.data.jsonl import keys_of
from paddle_infcl.data.rows import DataError
from paddle_infcl.log import warn_once


def spread_duplicates(rows: np.ndarray, keys: np.ndarray, starts: np.ndarray, size: int) -> tuple:
    """Orders rows into windows so that no two rows of a window share a key.

    Each row, in the given order, goes to the first window that has room and lies behind every window in which one of
    its keys was used last. Rows without duplicates fill windows in order; a duplicate is put off by as few windows
    as its keys demand. One pass; finding the next window with room is a union-find. No row is lost. A key with more
    rows than the epoch has windows leads to extra, smaller windows at the end.

    Args:
        rows: [n] int64, the rows in their shuffled order.
        keys: [total] int64, keys of all rows of the data set.
        starts: [rows + 1] int64: row i has keys[starts[i]:starts[i + 1]].
        size: rows of a full window.

    Returns:
        ([n] int64 the rows in their new order, [windows + 1] int64 where each window starts and the last one ends).
    """
    _, dense, counts = np.unique(keys, return_inverse=True, return_counts=True)
    # A key that only one row of the data has can still come up twice: a weighted epoch may repeat the row.
    every = len(np.unique(rows)) < len(rows)
    repeated = np.arange(len(keys)) if every else np.flatnonzero(counts[dense] > 1)
    own_starts = memoryview(np.searchsorted(repeated, starts))
    values, own_keys = np.unique(dense[repeated], return_inverse=True)
    own_keys = memoryview(own_keys.astype(np.int64))
    allowed = [0] * len(values)
    filled: list[int] = [0]
    room = [0]  # room[w] == w: window w has room; else the next one to look at
    assigned = np.empty(len(rows), dtype=np.int64)
    for place, row in enumerate(rows.tolist()):
        own = own_keys[own_starts[row] : own_starts[row + 1]]
        window = max([allowed[key] for key in own], default=0)
        while len(room) <= window:
            room.append(len(room))
            filled.append(0)
        root = window
        while room[root] != root:
            root = room[root]
        while room[window] != root:
            room[window], window = root, room[window]
        filled[root] += 1
        if filled[root] == size:
            room[root] = root + 1
            if len(room) == root + 1:
                room.append(root + 1)
                filled.append(0)
        for key in own:
            allowed[key] = root + 1
        assigned[place] = root
    order = rows[np.argsort(assigned, kind="stable")]
    return order, np.concatenate([[0], np.cumsum(np.bincount(assigned))]).astype(np.int64)


class WindowSampler:
    """Yields the windows of one rank: each is a list of micro-batches, each a list of row numbers.

    Args:
        dataset: has a length; with weights, `epoch_rows(seed, epoch)` and `rows_per_epoch`, as `PairDataset`.
        micro_batch_size: rows that go through the model at once, per rank.
        accumulation: micro-batches per window, per rank.
        seed: seed of the run, from 0.
        world: number of ranks W, tensor-parallel copies not counted.
        rank: this rank.
        shuffle: a new order in every epoch; otherwise the order of the data.
        drop_last: leave out the windows at the end of an epoch that are not full.
        no_duplicates: no two rows of a global window share a query, a positive, or an id of these; see
            `spread_duplicates` and `Example.keys`. The number of windows may then differ between epochs.
        sort_by_length: form the micro-batches of a window from rows of like length, the longest first. Less padding,
            the same rows, the same loss. Ranks work on like lengths at the same time.
        lengths: [rows] for `sort_by_length`; default: the data set's own, in characters.

    Attributes:
        start_window: windows that the next iteration skips, without reading; it is 0 again once that iteration has
            begun.
        start_row: the same in rows, for going on with another number of ranks or another window: rows of the epoch
            that were consumed, over all ranks.
        start_row_window: with `start_row` and `no_duplicates`, the global window (rows) of the run that consumed
            them; None: the same as this one's.

    Raises:
        ValueError: an option is wrong.
        DataError: an epoch has fewer rows than one global window. A contrastive batch is part of the objective: it
            would silently never have the size that was asked for, so this is an error with and without `drop_last`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        micro_batch_size: int,
        accumulation: int,
        seed: int,
        world: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        no_duplicates: bool = False,
        sort_by_length: bool = False,
        lengths: Sequence[int] | None = None,
    ):
        for name, value, least in (
            ("micro_batch_size", micro_batch_size, 1),
            ("accumulation", accumulation, 1),
            ("world", world, 1),
            ("seed", seed, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; at least {least}")
        if not 0 <= rank < world:
            raise ValueError(f"rank is {rank}; from 0 to {world - 1} in a world of {world}")
        self.dataset = dataset
        self.micro_batch_size, self.accumulation = micro_batch_size, accumulation
        self.seed, self.world, self.rank = seed, world, rank
        self.shuffle, self.drop_last, self.no_duplicates = shuffle, drop_last, no_duplicates
        self.epoch = 0
        self.start_window = 0
        self.start_row = 0
        self.start_row_window: int | None = None
        self._plans: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._keys: tuple[np.ndarray, np.ndarray] | None = None

        self.rows_per_epoch: int = getattr(dataset, "rows_per_epoch", len(dataset))
        if self.rows_per_epoch < self.window_size:
            raise DataError(
                f"the data has {self.rows_per_epoch:,} rows per epoch and one global batch takes {self.window_size:,} "
                f"({micro_batch_size:,} per device x {accumulation:,} accumulation steps x {world:,} devices): no "
                f"full batch can be formed. Use more data or a global batch of at most {self.rows_per_epoch:,}"
            )
        self._lengths = None
        if sort_by_length:
            lengths = getattr(dataset, "lengths", None) if lengths is None else lengths
            if lengths is None or len(lengths) != len(dataset):
                raise ValueError(
                    f"sort_by_length needs one length per row: {len(dataset):,} rows, "
                    f"{'no' if lengths is None else f'{len(lengths):,}'} lengths"
                )
            self._lengths = np.asarray(lengths)

    @property
    def window_size(self) -> int:
        """S, the rows of a full global window."""
        return self.micro_batch_size * self.accumulation * self.world

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, from 0, that is iterated next."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Windows of the current epoch, the same on every rank, whatever is skipped."""
        return self.windows_in(self.epoch)

    def windows_in(self, epoch: int) -> int:
        """Windows of an epoch."""
        if not self.no_duplicates:
            full, rest = divmod(self.rows_per_epoch, self.window_size)
            return full + bool(rest and not self.drop_last)
        return len(self._plan(epoch, self.window_size)[1]) - 1

    def rows_before(self, window: int) -> int:
        """Rows, over all ranks, in the first `window` windows of the current epoch: what to store as `start_row`."""
        return int(self._plan(self.epoch, self.window_size)[1][window])

    def __iter__(self) -> Iterator[list[list[int]]]:
        order, bounds = self._plan(self.epoch, self.window_size)
        if self.start_window and self.start_row:
            raise ValueError(f"start_window ({self.start_window}) and start_row ({self.start_row}) exclude each other")
        if self.start_row:
            order, bounds = self._rest(order)
        elif self.start_window > len(bounds) - 1:
            raise ValueError(f"start_window is {self.start_window}, and epoch {self.epoch} has {len(bounds) - 1}")
        first, self.start_window, self.start_row, self.start_row_window = self.start_window, 0, 0, None
        return (self._share(order[bounds[w] : bounds[w + 1]]) for w in range(first, len(bounds) - 1))

    def _rest(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The windows that are left after `start_row` rows. At the end of a window these are the planned ones."""
        if self.no_duplicates and self.start_row_window:
            order, _ = self._plan(self.epoch, self.start_row_window)
        if self.start_row > len(order):
            raise ValueError(f"start_row is {self.start_row:,}, and epoch {self.epoch} has {len(order):,} rows")
        return self._cut(order[self.start_row :], self.window_size)

    def _plan(self, epoch: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of an epoch in order, and where its windows of `size` rows begin and end."""
        if (epoch, size) not in self._plans:
            if hasattr(self.dataset, "epoch_rows"):
                rows = self.dataset.epoch_rows(self.seed, epoch)
            else:
                rows = np.arange(len(self.dataset), dtype=np.int64)
            if self.shuffle:
                rows = np.random.default_rng([self.seed, epoch]).permutation(rows)
            # One epoch at a time is needed, and for a moment the same with another window.
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] == epoch}
            self._plans[epoch, size] = self._cut(rows, size)
        return self._plans[epoch, size]

    def _cut(self, rows: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        if self.no_duplicates:
            if self._keys is None:
                row_keys = getattr(self.dataset, "row_keys", None)
                self._keys = row_keys() if row_keys else keys_of(self.dataset)
            order, bounds = spread_duplicates(rows, *self._keys, size)
            self._warn_about_extra_windows(len(rows), size, len(bounds) - 1)
        else:
            order, bounds = rows, np.append(np.arange(0, len(rows), size, dtype=np.int64), len(rows))
        if self.drop_last:
            full = np.flatnonzero(np.diff(bounds) == size)
            if not len(full) and size == self.window_size and len(rows) == self.rows_per_epoch:
                raise DataError(
                    f"no_duplicates with drop_last leaves no full batch of {size:,} from {len(rows):,} rows; "
                    "turn one of them off or make the batch smaller"
                )
            order = np.concatenate([order[:0], *(order[bounds[w] : bounds[w + 1]] for w in full)])
            bounds = np.arange(len(full) + 1, dtype=np.int64) * size
        return order, bounds

    def _warn_about_extra_windows(self, rows: int, size: int, windows: int) -> None:
        needed = -(-rows // size)
        if windows > needed:
            end = "left out by drop_last" if self.drop_last else "smaller windows at the end of the epoch"
            warn_once(
                "extra windows",
                f"no_duplicates: some query or passage comes up so often that {rows:,} rows need {windows:,} windows "
                f"of {size:,} instead of {needed:,}: the rest are {end}. Merge the rows of a query into one with "
                "several positives, or make the batch smaller",
            )

    def _share(self, rows: np.ndarray) -> list[list[int]]:
        """This rank's micro-batches of a global window."""
        if self._lengths is not None:
            rows = rows[np.argsort(-self._lengths[rows], kind="stable")]
        ranks = np.arange(self.world)
        per_rank = len(rows) // self.world + (ranks < len(rows) % self.world)
        steps = -(-int(per_rank[0]) // self.micro_batch_size)
        # [steps, W] sizes; dealt step by step, so that ranks work on neighbouring rows at the same time.
        sizes = per_rank // steps + (np.arange(steps)[:, None] < per_rank % steps)
        ends = np.cumsum(sizes).reshape(sizes.shape)[:, self.rank]
        own = sizes[:, self.rank]
        return [rows[end - n : end].tolist() for end, n in zip(ends, own, strict=True) if n]
