# SPDX-License-Identifier: Apache-2.0
"""Windows of collated micro-batches, in the sampler's order."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import paddle

from paddle_infcl.data.hashing import row_seed
from paddle_infcl.data.sampler import WindowSampler


def to_tensors(batch: Any) -> Any:
    """The batch with every NumPy array as a Paddle tensor on the current device."""
    if isinstance(batch, dict):
        return {name: to_tensors(value) for name, value in batch.items()}
    return paddle.to_tensor(batch) if isinstance(batch, np.ndarray) else batch


class _SeededRows:
    """Rows with the seed of their choices in one epoch, as the collator takes them."""

    def __init__(self, dataset: Any, seed: int, epoch: int):
        self.dataset, self.seed, self.epoch = dataset, seed, epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.dataset[row], row_seed(self.seed, self.epoch, row)


_ERROR = "an error in a worker"


class _InWorker:
    """Collates rows by their numbers in a worker. Errors come back as a batch: Paddle makes a SystemError of them."""

    def __init__(self, rows: _SeededRows, collator: Callable):
        self.rows, self.collator = rows, collator

    def __call__(self, numbers: list[int]) -> Any:
        try:
            return self.collator([self.rows[number] for number in numbers])
        except Exception as error:
            where = traceback.format_exc()
            try:
                pickled = pickle.dumps(error)
                pickle.loads(pickled)
            except Exception:  # its class takes other arguments, or can't be found by name
                pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
            # Paddle carries texts and bytes beside tensors, but not alone.
            return {_ERROR: pickled, "where": where, "tensor": np.zeros(1)}


def _without_error(batch: Any) -> Any:
    """A worker's batch. Raises the worker's error, if it is one."""
    if isinstance(batch, dict) and _ERROR in batch:
        raise pickle.loads(batch[_ERROR]) from RuntimeError(f"in a worker:\n{batch['where']}")
    return batch


class WindowLoader:
    """Iterates over one epoch: every item is a window, a list of micro-batches as Paddle int64 tensors.

    Nothing is read before its window is asked for. A rank without rows in a window gets the empty list.

    Args:
        dataset: map-style, of `Example`s.
        sampler: says which rows, in which order.
        collator: makes a micro-batch from [(example, seed), ...], e.g. `PairCollator`.
        num_workers: processes that read and tokenise ahead (`paddle.io.DataLoader`); 0 does it in this one. The order
            and the draws are the same.
    """

    def __init__(self, dataset: Any, sampler: WindowSampler, collator: Callable, *, num_workers: int = 0):
        self.dataset, self.sampler, self.collator = dataset, sampler, collator
        self.num_workers = num_workers
        self._skip = 0

    def __len__(self) -> int:
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch, from 0, that is iterated next."""
        self.sampler.set_epoch(epoch)

    def skip(self, windows: int) -> None:
        """Makes the next epoch begin with `windows` items that are None: nothing is read or tokenised for them."""
        self._skip = windows

    def __iter__(self) -> Iterator[list[dict] | None]:
        skipped, self._skip = self._skip, 0
        if skipped:
            self.sampler.start_window = skipped
        windows = iter(self.sampler)
        rows = _SeededRows(self.dataset, self.sampler.seed, self.sampler.epoch)
        return chain([None] * skipped, self._ahead(windows, rows) if self.num_workers else self._here(windows, rows))

    def _here(self, windows: Iterator, rows: _SeededRows) -> Iterator[list[dict]]:
        for window in windows:
            yield [to_tensors(self.collator([rows[row] for row in micro])) for micro in window]

    def _ahead(self, windows: Iterator, rows: _SeededRows) -> Iterator[list[dict]]:
        windows = list(windows)
        micro_batches = [micro for window in windows for micro in window]
        loader = paddle.io.DataLoader(
            range(len(rows)),
            batch_sampler=micro_batches,
            collate_fn=_InWorker(rows, self.collator),
            num_workers=self.num_workers,
            return_list=True,
        )
        stream = iter(loader)
        for window in windows:
            yield [_without_error(next(stream)) for _ in window]


class MicroBatchWindows:
    """Groups the micro-batches of any loader into windows, such as those of PaddleNLP's endless embedding data.

    Args:
        micro_batches: yields micro-batches; may be endless.
        accumulation: micro-batches per window. What is left at the end is a smaller window.
    """

    def __init__(self, micro_batches: Iterable, accumulation: int):
        if accumulation < 1:
            raise ValueError(f"accumulation is {accumulation}; at least 1")
        self.micro_batches, self.accumulation = micro_batches, accumulation
        self._skip = 0

    def __len__(self) -> int:
        return -(-len(self.micro_batches) // self.accumulation)

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to whatever of the loader, its data set or its batch sampler takes it."""
        for part in (
            self.micro_batches,
            *(getattr(self.micro_batches, n, None) for n in ("dataset", "batch_sampler")),
        ):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def skip(self, windows: int) -> None:
        """Makes the next epoch begin with `windows` items that are None. They are read: a stream cannot jump."""
        self._skip = windows

    def __iter__(self) -> Iterator[list | None]:
        skipped, self._skip = self._skip, 0
        window = []
        for micro_batch in self.micro_batches:
            window.append(micro_batch)
            if len(window) == self.accumulation:
                yield None if skipped > 0 else window
                skipped, window = skipped - 1, []
        if window:
            yield None if skipped > 0 else window
