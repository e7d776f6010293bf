# SPDX-License-Identifier: Apache-2.0
"""PaddleNLP's EmbeddingTrainer, with windows in place of micro-batches.

To PaddleNLP's loop a batch is a whole window (the micro-batches of one optimizer step), and there is nothing to
accumulate: its counts of steps, epochs and samples are then right, and a window never crosses an epoch. A training
step runs GradCache over its window. The objective is `objectives.build_objective`'s, with and without accumulation.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paddle
import paddle.distributed as dist
from paddlenlp.trainer import EarlyStoppingCallback, Trainer
from paddlenlp.trainer.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from paddlenlp.trainer.trainer_callback import ProgressCallback, TrainerState
from paddlenlp.trainer.trainer_utils import IntervalStrategy, ShardingOption, TrainOutput, has_length
from paddlenlp.trl import EmbeddingTrainer as UpstreamTrainer

from paddle_infcl import checks
from paddle_infcl.arguments import EmbeddingArgument
from paddle_infcl.checks import ConfigError
from paddle_infcl.data.collator import PairCollator
from paddle_infcl.data.jsonl import PairDataset
from paddle_infcl.data.loader import MicroBatchWindows, WindowLoader
from paddle_infcl.data.sampler import WindowSampler
from paddle_infcl.distributed.watch import ending_together
from paddle_infcl.gradcache import Step, window_step
from paddle_infcl.log import logger, warn_once
from paddle_infcl.modeling import SentenceEncoder
from paddle_infcl.objectives import build_objective
from paddle_infcl.trainer import resume
from paddle_infcl.trainer.callbacks import PairProgress
from paddle_infcl.trainer.evaluation import EvaluatesRetrieval
from paddle_infcl.trainer.guide import Guide, window_extras
from paddle_infcl.trainer.inputs import WithoutSeeds, first_row, pair_collator
from paddle_infcl.trainer.windows import TrainingWindows


@contextlib.contextmanager
def swapped(target: Any, values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Gives attributes other values for a while. Yields the values they had."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield before
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError that names no file (a full disk) this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class EmbeddingTrainer(EvaluatesRetrieval, UpstreamTrainer):
    """Trains an encoder with a contrastive loss over whole windows.

    It takes what PaddleNLP's EmbeddingTrainer takes, and its models, data and collators as well. A model is called as
    `model(query=..., passages=..., return_encode=True)` and gives representations [b, D] and [n, D].

    Args:
        model_args: `EmbeddingArgument`, or PaddleNLP's; None: the defaults.
        evaluator: called at every evaluation with `encode(texts, kind)` ([n, D] float32; kind is "query" or
            "passage"), gives metrics by name. `RetrievalEvaluator` is one.
        guide: the guided objective's second model; None: the one that `model_args` names, if any.
        **kwargs: PaddleNLP's Trainer's. With a `PairDataset` and no `data_collator`, `model_args` and the tokenizer
            make one.

    Raises:
        ConfigError: options that can't work with this trainer, all of them.
    """

    def __init__(self, model_args=None, *, evaluator: Callable | None = None, guide: Guide | None = None, **kwargs):
        if kwargs.get("model") is None and kwargs.get("model_init") is None:
            raise ValueError("model: is needed, such as SentenceEncoder.from_pretrained(...)")
        arguments = EmbeddingArgument() if model_args is None else EmbeddingArgument.of(model_args)
        if kwargs.get("args") is not None and (problems := checks.unsupported_problems(kwargs["args"])):
            raise ConfigError(problems)
        self.guide = Guide.from_arguments(arguments) if guide is None else guide
        if kwargs.get("data_collator") is None and isinstance(kwargs.get("train_dataset"), PairDataset):
            kwargs["data_collator"] = pair_collator(kwargs.get("tokenizer"), arguments, guide=self.guide)
        # PaddleNLP's EmbeddingTrainer builds its own losses, which need a package that is not on PyPI.
        Trainer.__init__(self, **kwargs)
        self.model_args = arguments
        self.embedding_negatives_cross_device = arguments.embedding_negatives_cross_device
        self.loss_fn = build_objective(arguments)
        self.evaluator = evaluator
        self._windows: TrainingWindows | None = None
        self._real: dict[str, Any] = {}
        self._spare: dict | None = None
        self._negatives: float | None = None
        self._pairs, self._since = 0, time.time()
        self._bar = None
        if not self.args.disable_tqdm:
            self.remove_callback(ProgressCallback)
            self._bar = PairProgress()
            self.add_callback(self._bar)
        if arguments.early_stopping_patience is not None:
            patience, threshold = arguments.early_stopping_patience, arguments.early_stopping_threshold
            self.add_callback(EarlyStoppingCallback(patience, threshold))

    # Data.

    def get_train_dataloader(self) -> TrainingWindows:
        """The windows of the run: from any map-style dataset, or from whatever PaddleNLP makes of a stream."""
        if self._windows is not None:
            return self._windows
        args, dataset = self.args, self.train_dataset
        if dataset is None:
            raise ValueError("train_dataset: training needs one")
        micro_batch_size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if isinstance(dataset, paddle.io.IterableDataset) or not has_length(dataset):
            loader = MicroBatchWindows(super().get_train_dataloader(), accumulation)
        else:
            loader = self._window_loader(
                dataset,
                micro_batch_size,
                accumulation,
                drop_last=args.dataloader_drop_last,
                no_duplicates=self.model_args.no_duplicates,
                sort_by_length=self.model_args.sort_by_length,
            )
        world = args.dataset_world_size
        batch = micro_batch_size * accumulation * world
        return TrainingWindows(loader, global_batch=batch, seed=args.seed, world=world)

    def _window_loader(self, dataset, micro_batch_size, accumulation, **options) -> WindowLoader:
        args, collator = self.args, self.data_collator
        sampler = WindowSampler(
            dataset,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            seed=args.seed,
            world=args.dataset_world_size,
            rank=args.dataset_rank,
            **options,
        )
        if not isinstance(collator, PairCollator):
            collator = WithoutSeeds(collator)  # only ours makes its draws from seeds
        return WindowLoader(dataset, sampler, collator, num_workers=args.dataloader_num_workers)

    # The run.

    def train(self, resume_from_checkpoint=None, ignore_keys_for_eval=None) -> TrainOutput:
        """Trains. Arguments as PaddleNLP's; `resume_from_checkpoint=True` takes the last complete checkpoint.

        A resumed run takes the steps that the interrupted one would have taken: the same rows, dropout masks, learning
        rates and losses.

        Raises:
            ConfigError: evaluation or early stopping that can't work.
            ValueError: a checkpoint that is incomplete or was trained on other data.
            DataError: fewer rows than one batch.
        """
        self._check_evaluation()
        if all(p.stop_gradient for p in [*self.model.parameters(), *self.loss_fn.parameters()]):
            raise ValueError("model: none of its parameters is trainable (stop_gradient is True in all of them)")
        args = self.args
        weights_only = args.ignore_load_lr_and_optim
        checkpoint = resume.find_checkpoint(resume_from_checkpoint, args.output_dir, weights_only=weights_only)
        if checkpoint is not None:
            resume.check_loss(checkpoint, self.loss_fn, weights_only=weights_only)
        windows, step = self.get_train_dataloader(), 0
        if windows.endless and args.max_steps <= 0:
            raise ValueError("max_steps: the data has no length, so the number of steps must be given")
        if checkpoint is not None and not weights_only:
            step = resume.global_step(checkpoint)
            resume.warn_without_random_state(checkpoint, args.world_size)
            position = resume.load_position(checkpoint)
            for note in windows.resume(position, step, skip_data=not args.ignore_data_skip):
                logger.warning("%s", note)
        max_steps = args.max_steps if args.max_steps > 0 else windows.steps_in(args.num_train_epochs, done=step)
        if self._bar is not None:
            self._bar.expect(windows.rows_until(max_steps), windows.rows_until(step), args.dataset_world_size)
        self._windows = windows
        try:
            with ending_together(), swapped(args, self._shown(max_steps)) as self._real:
                return super().train(checkpoint, ignore_keys_for_eval)
        finally:
            self._windows, self._real, self.is_in_train = None, {}, False
            if self._bar is not None:
                self._bar.close()

    def _shown(self, max_steps: int) -> dict[str, Any]:
        """What PaddleNLP's loop gets to see of the arguments: a window is a batch, without accumulation."""
        args = self.args
        shown = {
            "per_device_train_batch_size": args.per_device_train_batch_size * args.gradient_accumulation_steps,
            "gradient_accumulation_steps": 1,
            "max_steps": max_steps,
        }
        if args.ddp_find_unused_parameters is None and isinstance(self.model, SentenceEncoder):
            # Every parameter takes part; the search costs time and can't stand recompute.
            shown["ddp_find_unused_parameters"] = False
        return shown

    def _inner_training_loop(
        self, args, model, dataloader, length, max_steps, epochs, steps_per_epoch, samples, checkpoint, ignore_keys
    ):
        if checkpoint is not None and not args.ignore_load_lr_and_optim:
            state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
            if state.global_step >= max_steps:
                self.state = state
                logger.warning(
                    "%s has all %s steps of this run: nothing is left to train. overwrite_output_dir: true starts "
                    "again, more num_train_epochs or max_steps go on",
                    checkpoint,
                    max_steps,
                )
                return TrainOutput(state.global_step, 0.0, {})
        samples = dataloader.rows_until(max_steps)
        # More steps per epoch than there can be: the loop then throws away as many items as steps were taken, from the
        # first epoch on, and those are ours to give (see `windows`).
        steps_per_epoch = max_steps + 1
        self._since = time.time()
        result = super()._inner_training_loop(
            args, model, dataloader, length, max_steps, epochs, steps_per_epoch, samples, checkpoint, ignore_keys
        )
        if args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            resume.load_loss(self.state.best_model_checkpoint, self.loss_fn)
        return result

    def training_step(self, model, inputs, step_control: int = 0) -> paddle.Tensor:
        """Adds the gradient of a window (a list of micro-batches; a single one counts as a window).

        Returns:
            The window's loss, 0-d float32, without a graph.
        """
        model.train()
        step = self._run_window(
            window_step,
            model,
            inputs,
            measure=self._is_logged_next(),
            scale=self.scaler.scale if self.do_grad_scaling else None,
            no_sync=getattr(model, "no_sync", contextlib.nullcontext),
            on_rows=self._bar.add if self._bar is not None else None,
            offload=self.model_args.offload_features,
        )
        self._average_loss_gradients()
        self._pairs += step.rows
        if self._windows is not None:
            self._windows.add_rows(step.rows)
        return step.loss.astype("float32")

    def _run_window(self, run: Callable[..., Step], model, inputs, *, measure: bool = False, **options) -> Step:
        """`window_step` or `window_loss` on a window, which may be empty on this process."""
        window = list(inputs) if isinstance(inputs, list | tuple) else [inputs]
        window = [self._prepare_inputs(batch) for batch in window]
        empty = not window
        if empty:
            # The other processes wait for this one in the loss and in the gradients' reduction: it takes part with one
            # row of an earlier window, of which nothing is left.
            if self._spare is None:
                raise ValueError("the first window of this process has no rows: use more data or fewer processes")
            window = [self._spare]
        elif self._spare is None:
            self._spare = first_row(window[0])

        def forward(batch):
            reps = model(query=batch["query"], passages=batch["passages"], return_encode=True)
            return tuple(r[:0] for r in reps) if empty else reps

        def loss(q, p, **targets):
            targets |= window_extras(window, getattr(self.loss_fn, "wanted", ()), self.guide, empty=empty)
            if measure:
                self._negatives = self.loss_fn.effective_negatives(q.detach(), p.detach(), **targets)
                if self._negatives == 0 and not empty:
                    warn_once(
                        "no-negatives",
                        f"step {self.state.global_step + 1}: its rows have nothing to contrast with, so their loss is "
                        "0. Look at the size of the batch, at hard negatives, and at what drops candidates",
                    )
            return self.loss_fn(q, p, **targets)

        return run(forward, window, loss, autocast=self.autocast_smart_context_manager, **options)

    @paddle.no_grad()
    def _average_loss_gradients(self) -> None:
        """The mean over processes for the loss's own parameters, which no data-parallel wrapper sees."""
        ranks = self.loss_fn.ranks
        if ShardingOption.SHARD_GRAD_OP in self.args.sharding:
            return  # stage 2's hooks are on everything that the optimizer has
        for parameter in self.loss_fn.parameters() if ranks.world > 1 else ():
            gradient = parameter.grad
            for group in ranks.groups:
                dist.all_reduce(gradient, group=group)
            gradient.scale_(1.0 / ranks.world)

    def create_optimizer(self, lr_scheduler=None):
        """PaddleNLP's optimizer; it also gets the loss's parameters, without weight decay."""
        extra = [p for p in self.loss_fn.parameters() if not p.stop_gradient]
        if self.optimizer is not None or not extra:
            return super().create_optimizer(lr_scheduler)
        plain = list(self.optimizer_grouped_parameters or self.model.parameters())
        if plain and isinstance(plain[0], dict):
            self.optimizer_grouped_parameters = [*plain, {"params": extra, "weight_decay": 0.0}]
            return super().create_optimizer(lr_scheduler)
        if self.optimizer_grouped_parameters is None:
            named = [(name, p.name) for name, p in self.model.named_parameters()]
            decayed = {p for name, p in named if not any(part in name for part in ("bias", "norm"))}
        else:
            decayed = {p.name for p in plain}
        self.optimizer_grouped_parameters = [*plain, *extra]
        optimizer = super().create_optimizer(lr_scheduler)
        optimizer._apply_decay_param_fun = decayed.__contains__
        return optimizer

    # Logging.

    def _is_logged_next(self) -> bool:
        """Whether the step at hand will be logged."""
        args, step = self.args, self.state.global_step + 1
        if args.logging_strategy == IntervalStrategy.EPOCH:
            return self._windows is not None and self._windows.ends_epoch
        steps = args.logging_strategy == IntervalStrategy.STEPS
        return (steps and step % args.logging_steps == 0) or (step == 1 and args.logging_first_step)

    def log(self, logs: dict[str, float], **kwargs) -> None:
        """PaddleNLP's log, with what the loss has to say; `state.log_history` keeps all of it."""
        if "loss" in logs and "learning_rate" in logs:
            logs["temperature"] = self.loss_fn.temperature
            if self._negatives is not None:
                logs["effective_negatives"] = self._negatives
            pairs = float(self._nested_gather(paddle.to_tensor([float(self._pairs)])).sum())
            logs["pairs_per_second"] = round(pairs / max(time.time() - self._since, 1e-9), 2)
            self._pairs, self._since = 0, time.time()
        history = self.state.log_history
        super().log(logs, **kwargs)
        self.state.log_history = [*history, {"step": self.state.global_step, **logs}]

    def _maybe_log_save_evaluate(self, tr_loss, model, epoch, ignore_keys_for_eval, **kwargs):
        if self._windows is not None and self._windows.progress is not None:
            self.state.epoch = self._windows.progress
        super()._maybe_log_save_evaluate(tr_loss, model, epoch, ignore_keys_for_eval, **kwargs)

    @contextlib.contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Time that does not count for pairs_per_second."""
        begin = time.time()
        yield
        self._since += time.time() - begin

    # Checkpoints.

    def _save(self, output_dir=None, state_dict=None, merge_tensor_parallel=False):
        output_dir = output_dir or self.args.output_dir
        with swapped(self.args, self._real):
            if isinstance(self.model, SentenceEncoder):
                os.makedirs(output_dir, exist_ok=True)
                if self.args.should_save:
                    if self.tokenizer is not None:
                        self.tokenizer.save_pretrained(output_dir)
                    paddle.save(self.args, os.path.join(output_dir, TRAINING_ARGS_NAME))
                self.model.save_pretrained(
                    output_dir,
                    merge_tensor_parallel=merge_tensor_parallel and self.args.use_hybrid_parallel,
                    variant=self.args.weight_name_suffix,
                    is_main_process=self.args.should_save,
                    max_shard_size="1024GB",
                )
            else:
                super()._save(output_dir, state_dict, merge_tensor_parallel)
        if self.args.should_save:
            resume.save_loss(output_dir, self.loss_fn)

    def _save_checkpoint(self, model, metrics=None):
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with self._off_the_clock(), naming(folder):
            resume.find_best(self.state, self.args.output_dir)
            super()._save_checkpoint(model, metrics)
            if self._windows is None:
                return
            rows = self._nested_gather(paddle.to_tensor([self._windows.rows_here], dtype="int64")).sum()
            if self.args.should_save:
                names = resume.parameter_names(self.model, self.loss_fn)
                resume.save(str(folder), names, self._windows.position(int(rows)))
            if self.args.should_save and self.args.local_rank == -1:
                # PaddleNLP rotates where local_rank is 0, which a single process that nobody launched never has.
                self._rotate_checkpoints(use_mtime=True, output_dir=self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint=None):
        if resume_from_checkpoint is None:
            return super()._load_from_checkpoint(resume_from_checkpoint)
        with resume.loading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint)
            resume.load_loss(resume_from_checkpoint, self.loss_fn)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        names = resume.parameter_names(self.model, self.loss_fn)
        with resume.optimizer_names(self.optimizer, checkpoint, names):
            super()._load_optimizer_and_scheduler(checkpoint)
