# SPDX-License-Identifier: Apache-2.0
"""What a run shows while it runs: pairs, not micro-batches."""

from __future__ import annotations

from paddlenlp.trainer.trainer_callback import ProgressCallback
from tqdm import tqdm

from paddle_infcl.log import logger

# Shown in the line of a log, in this order; everything that was logged is in trainer_state.json.
_SHOWN = ("loss", "learning_rate", "temperature", "effective_negatives", "pairs_per_second")


class PairProgress(ProgressCallback):
    """A bar over the pairs of the whole run that moves with every micro-batch, and one line per log."""

    def __init__(self):
        super().__init__()
        self.pairs, self.done, self.world = None, 0, 1

    def expect(self, pairs: int | None, done: int, world: int) -> None:
        """Sets what the next run's bar counts to.

        Args:
            pairs: of the whole run, over all processes.
            done: of these, before this run resumed.
            world: number of processes; each does about as many pairs as this one.
        """
        self.pairs, self.done, self.world = pairs, done, world

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # Only on a terminal: in a file, the lines of the log tell it all.
            how = {"unit": "pair", "unit_scale": True, "desc": "train", "disable": None}
            self.training_bar = tqdm(total=self.pairs, initial=self.done, **how)

    def add(self, rows: int) -> None:
        """Moves the bar by the rows of a micro-batch of this process."""
        if self.training_bar is not None:
            self.training_bar.update(rows * self.world)

    def on_step_end(self, args, state, control, **kwargs):
        if self.training_bar is not None:
            self.training_bar.set_postfix_str(f"step {state.global_step}/{state.max_steps}")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not isinstance(logs, dict):
            return
        logs.pop("total_flos", None)
        names = [n for n in _SHOWN if n in logs] + [n for n in logs if n.startswith(("eval_", "train_"))]
        shown = ", ".join(f"{n} {logs[n]:.4g}" if isinstance(logs[n], float) else f"{n} {logs[n]}" for n in names)
        with tqdm.external_write_mode():
            logger.info("step %s/%s: %s", state.global_step, state.max_steps, shown)
        if (dumper := kwargs.get("metrics_dumper")) is not None:
            dumper.append(logs)

    def on_train_end(self, args, state, control, **kwargs):
        if (dumper := kwargs.get("metrics_dumper")) is not None:
            dumper.close()
        self.close()

    def close(self) -> None:
        """Takes the bar away."""
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None
