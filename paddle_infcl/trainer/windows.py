# SPDX-License-Identifier: Apache-2.0
"""The windows of a whole run, as PaddleNLP's training loop can take them, and where a checkpoint left off.

The loop iterates over its loader once per epoch and, after a resume, throws away as many items as steps were taken.
Here it gets `None` for those, at no cost, and then the window that comes next: a position is an epoch and a window in
it, kept with the checkpoint, so that nothing depends on how many windows other epochs had. Since the loop restores the
random generators when it has thrown away the last item, they are restored at the end of an epoch as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Position:
    """Where a run is in its data.

    Attributes:
        epoch: from 0.
        windows: windows of this epoch that were trained; None when windows of another size came before them.
        rows: rows of this epoch that were trained, over all processes.
        global_batch: rows of a full window, over all processes.
        seed: of the order of the rows.
        rows_per_epoch: rows of the data; None for a stream.
        no_duplicates: the sampler's option, which orders the rows as well; None where nobody wrote it down.
    """

    epoch: int = 0
    windows: int | None = 0
    rows: int = 0
    global_batch: int = 0
    seed: int = 0
    rows_per_epoch: int | None = None
    no_duplicates: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class TrainingWindows:
    """Iterates over the windows of one epoch after another.

    Args:
        loader: `WindowLoader` or `MicroBatchWindows`: `set_epoch`, `skip`, iteration; a length unless it is endless.
        global_batch: rows of a full window, over all processes.
        seed: of the order of the rows.
        world: number of processes that share the data.
    """

    def __init__(self, loader: Any, *, global_batch: int, seed: int, world: int = 1):
        self.loader, self.world = loader, world
        self._sampler = getattr(loader, "sampler", None)
        rows, apart = (getattr(self._sampler, name, None) for name in ("rows_per_epoch", "no_duplicates"))
        self._now = Position(global_batch=global_batch, seed=seed, rows_per_epoch=rows, no_duplicates=apart)
        self._placeholders = 0
        self._begun = False
        self._rows_before_resume = 0
        self._rows_here = 0
        self._other_batch: int | None = None

    def windows_in(self, epoch: int) -> int:
        """Windows of an epoch. TypeError: the data is endless."""
        if self._sampler is not None:
            return self._sampler.windows_in(epoch)
        try:
            return len(self.loader)
        except (TypeError, ValueError, RuntimeError) as error:  # Paddle's DataLoader has its own opinion
            raise TypeError("the data has no length") from error

    @property
    def endless(self) -> bool:
        """Whether the data has no length, and epochs don't exist."""
        try:
            self.windows_in(0)
        except TypeError:
            return True
        return False

    def __len__(self) -> int:
        return self.windows_in(self._now.epoch)

    def steps_in(self, epochs: float, *, done: int = 0) -> int:
        """Optimizer steps of a run over so many epochs, fractions rounded down, at least 1.

        Args:
            epochs: how many.
            done: steps before `resume`d position.
        """
        whole = int(epochs)
        part = int((epochs - whole) * self.windows_in(whole)) if epochs > whole else 0
        if self._now.windows is None:
            # After a change of the batch: the rest of the epoch in windows of the new size.
            left = max(0, (self._now.rows_per_epoch or 0) - self._now.rows)
            rest = -(-left // self._now.global_batch)
            later = sum(self.windows_in(epoch) for epoch in range(self._now.epoch + 1, whole)) + part
            return max(1, done + (rest + later if self._now.epoch < whole else rest))
        return max(1, sum(self.windows_in(epoch) for epoch in range(whole)) + part)

    def rows_until(self, steps: int) -> int:
        """Rows of the first so many steps of a run, over all processes; an estimate with `no_duplicates`."""
        batch, rows = self._now.global_batch, self._now.rows_per_epoch
        if rows is None or self.endless:
            return steps * batch
        epochs, windows = divmod(steps, self.windows_in(0))
        full = min(rows, self.windows_in(0) * batch)
        return epochs * full + min(windows * batch, full)

    def resume(self, saved: Position | None, global_step: int, *, skip_data: bool = True) -> list[str]:
        """Makes the next iteration go on where a checkpoint left off.

        Args:
            saved: the checkpoint's position; None: it has none, and `global_step` steps of this size were taken.
            global_step: its steps: so many items of the next iteration are None.
            skip_data: False begins the checkpoint's epoch again, and gives no None.

        Returns:
            What the user should know.

        Raises:
            ValueError: the checkpoint was trained on other data or in another order, or a stream with another batch.
        """
        now, notes = self._now, []
        if saved is None:
            epoch, window = 0, global_step
            while not self.endless and window >= self.windows_in(epoch):
                window -= self.windows_in(epoch)
                epoch += 1
            saved = Position(epoch, window, 0, now.global_batch, now.seed, now.rows_per_epoch, now.no_duplicates)
        if not skip_data:
            now.epoch = saved.epoch
            return ["ignore_data_skip: the epoch of the checkpoint begins again"]
        apart = now.no_duplicates if saved.no_duplicates is None else saved.no_duplicates
        for name, old, new in (
            ("seed", saved.seed, now.seed),
            ("number of training rows", saved.rows_per_epoch, now.rows_per_epoch),
            ("no_duplicates", apart, now.no_duplicates),
        ):
            if old != new:
                was, now_is = (str(v).lower() if isinstance(v, bool) else v for v in (old, new))
                raise ValueError(
                    f"the checkpoint can't be continued: its {name} was {was}, here it is {now_is}, so the rows come "
                    "in another order. Use the same data, seed and no_duplicates, or ignore_data_skip: true to begin "
                    "its epoch again"
                )
        self._placeholders = global_step
        now.epoch, now.windows, now.rows = saved.epoch, saved.windows, saved.rows
        self._rows_before_resume = saved.rows
        if saved.windows is None or saved.global_batch != now.global_batch:
            if now.rows_per_epoch is None:
                raise ValueError(
                    f"the checkpoint can't be continued: its batch had {saved.global_batch} rows, here it has "
                    f"{now.global_batch}, and the data is a stream. Use the same batch, or ignore_data_skip: true"
                )
            if saved.global_batch != now.global_batch:
                notes.append(
                    f"the batch was {saved.global_batch} and is {now.global_batch} from here on: the epoch goes on "
                    f"after the {saved.rows} rows that were trained"
                )
            now.windows, self._other_batch = None, saved.global_batch
        if not self.endless and self._epoch_is_done():
            self._next_epoch()
        return notes

    def _epoch_is_done(self) -> bool:
        now = self._now
        if now.windows is None:
            return now.rows >= (now.rows_per_epoch or 0)
        return now.windows >= self.windows_in(now.epoch)

    def _next_epoch(self) -> None:
        now = self._now
        now.epoch, now.windows, now.rows = now.epoch + 1, 0, 0
        self._rows_before_resume, self._other_batch = 0, None

    def __iter__(self) -> Iterator[list | None]:
        if self._begun:
            self._next_epoch()
        self._begun = True
        self._rows_here = 0
        now, placeholders, self._placeholders = self._now, self._placeholders, 0
        self.loader.set_epoch(now.epoch)
        if now.windows is None:
            self._sampler.start_row, self._sampler.start_row_window = now.rows, self._other_batch
        elif placeholders:
            self.loader.skip(now.windows)
            placeholders -= now.windows
        for _ in range(placeholders):
            yield None
        empty = now.windows == 0 and not placeholders
        for window in self.loader:
            empty = False
            if window is not None and now.windows is not None:
                now.windows += 1
            yield window
        if empty:
            raise ValueError(f"train_dataset: epoch {now.epoch} has no rows, counted from 0")

    def add_rows(self, rows: int) -> None:
        """Counts the rows of a window that this process trained."""
        self._rows_here += rows

    @property
    def rows_here(self) -> int:
        """Rows of this epoch that this process trained since it began or resumed it."""
        return self._rows_here

    def position(self, rows_everywhere: int | None = None) -> Position:
        """Where the run is now.

        Args:
            rows_everywhere: `rows_here`, summed over all processes; None: there is one process.
        """
        rows = self._rows_before_resume + (self._rows_here if rows_everywhere is None else rows_everywhere)
        return Position(**{**self._now.as_dict(), "rows": rows})

    @property
    def progress(self) -> float | None:
        """Epochs trained so far, with fractions; None for endless data."""
        if self.endless:
            return None
        now = self._now
        if now.windows is None:
            rows = self._rows_before_resume + self._rows_here * self.world
            return now.epoch + min(1.0, rows / max(1, now.rows_per_epoch or 1))
        return now.epoch + now.windows / max(1, self.windows_in(now.epoch))

    @property
    def ends_epoch(self) -> bool:
        """Whether the window given out last was the last of its epoch."""
        return not self.endless and self._now.windows is not None and self._epoch_is_done()
