# SPDX-License-Identifier: Apache-2.0
"""Evaluation while training: retrieval metrics, and the loss on held-out pairs."""

from __future__ import annotations

import time

import numpy as np
import paddle
from paddlenlp.trainer.trainer_utils import IntervalStrategy, has_length

from paddle_infcl import checks
from paddle_infcl.checks import ConfigError, Problem
from paddle_infcl.distributed.gather import gather_constants
from paddle_infcl.encode import encode_texts
from paddle_infcl.evaluation.retrieval import METRICS, RetrievalEvaluator
from paddle_infcl.gradcache import RandomState, window_loss

# Texts per process that are encoded between two exchanges. Gloo gives up on a process that is 30 s behind.
_ENCODE_BLOCK = 2048


class EvaluatesRetrieval:
    """The part of the trainer that evaluates."""

    def _metric_names(self) -> list[str] | None:
        """Names that evaluation will give; None: the evaluator does not say."""
        names = ["loss"] if self.eval_dataset is not None else []
        if self.evaluator is None:
            return names
        return [*METRICS, *names] if isinstance(self.evaluator, RetrievalEvaluator) else None

    def _check_evaluation(self) -> None:
        args, problems = self.args, []
        evaluates = args.evaluation_strategy != IntervalStrategy.NO
        if evaluates and self.evaluator is None and self.eval_dataset is None:
            problems.append(
                Problem("evaluation_strategy", args.evaluation_strategy.value, "needs an evaluator or an eval_dataset")
            )
        elif evaluates and (names := self._metric_names()) is not None:
            if message := checks.metric_problem(args.metric_for_best_model, names):
                problems.append(Problem("metric_for_best_model", args.metric_for_best_model, message))
        patience = self.model_args.early_stopping_patience
        if patience is not None and not (evaluates and args.load_best_model_at_end and args.metric_for_best_model):
            problems.append(
                Problem(
                    "early_stopping_patience",
                    patience,
                    "needs evaluation_strategy, load_best_model_at_end: true and metric_for_best_model",
                )
            )
        if problems:
            raise ConfigError(problems)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """The evaluator's metrics, and the loss on `eval_dataset` (default: the trainer's) where there is one.

        The loss is that of windows like those of training, so that it has as many negatives.

        Returns:
            Metrics, their names prefixed; the same on every process.

        Raises:
            ValueError: there is neither an evaluator nor an eval_dataset.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if self.evaluator is None and dataset is None:
            raise ValueError("evaluate: neither an evaluator nor an eval_dataset was given")
        begin, random_state, metrics = time.time(), RandomState(), {}
        with self._off_the_clock():
            if self.evaluator is not None and eval_dataset is None:
                metrics.update(self.evaluator(self.encode))
            if dataset is not None:
                metrics["loss"] = self._evaluate_loss(dataset)
        random_state.restore()
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        metrics[f"{metric_key_prefix}_runtime"] = round(time.time() - begin, 4)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def encode(self, texts: list[str], kind: str) -> np.ndarray:
        """Embeds texts as they are for training, every process a share of them; all get the whole result.

        Args:
            texts: n texts.
            kind: "query" or "passage": whose template and length limit count.

        Returns:
            [n, D] float32.
        """
        arguments = self.model_args
        limit = arguments.max_query_len if kind == "query" else arguments.max_passage_len
        options = {
            # PaddleNLP's default of 1 stands for "not set".
            "max_length": int(limit) if limit > 1 else None,
            "template": arguments.query_template if kind == "query" else arguments.passage_template,
            "batch_size": self.args.per_device_eval_batch_size,
        }
        ranks = self.loss_fn.ranks
        if ranks.world == 1:
            return encode_texts(self.model, self.tokenizer, texts, **options)
        parts = []
        for start in range(0, len(texts), _ENCODE_BLOCK * ranks.world):
            block = texts[start : start + _ENCODE_BLOCK * ranks.world]
            own = encode_texts(self.model, self.tokenizer, block[ranks.rank :: ranks.world], **options)
            shares = [np.arange(rank, len(block), ranks.world) for rank in range(ranks.world)]
            gathered = gather_constants(paddle.to_tensor(own), ranks, [len(share) for share in shares]).numpy()
            order = np.concatenate(shares)
            part = np.empty_like(gathered)
            part[order] = gathered
            parts.append(part)
        return np.concatenate(parts)

    def _evaluate_loss(self, dataset) -> float:
        args = self.args
        if not has_length(dataset):
            raise ValueError("eval_dataset: a stream has no end; the loss needs data with a length")
        real = {name: getattr(args, name) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
        real.update({name: value for name, value in self._real.items() if name in real})
        rows = real["per_device_train_batch_size"] * real["gradient_accumulation_steps"]
        rows = min(rows, max(1, len(dataset) // args.dataset_world_size))
        micro = min(args.per_device_eval_batch_size, rows)
        loader = self._window_loader(dataset, micro, rows // micro, shuffle=False)
        total = count = 0.0
        self.model.eval()
        for window in loader:
            step = self._run_window(window_loss, self.model, window)
            seen = self._nested_gather(paddle.to_tensor([float(step.rows)])).sum()
            total += float(self._nested_gather(step.loss.astype("float32")).mean()) * float(seen)
            count += float(seen)
        return total / count
