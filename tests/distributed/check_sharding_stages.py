# SPDX-License-Identifier: Apache-2.0
"""One process of a run with sharding stage 2 or 3: `python check_sharding_stages.py FOLDER JSON_RUNS`.

Paddle refuses these stages on a CPU by asserting what device there is; what they compute and send has nothing to do
with it. Here the CPU passes for a custom device while a model is wrapped, so that the stages run over gloo.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import paddle
from paddle.base import core

# Stage 3 cuts parameters above a million numbers; a tiny model has none. This cuts its embeddings and feed-forwards.
SEGMENT = 1024


def allow_on_cpu() -> None:
    """Makes `group_sharded_parallel` work here."""
    from paddle.distributed import sharding

    wrap = sharding.group_sharded_parallel

    def on_cpu(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            for target, name, value in (
                (core, "get_all_custom_device_type", lambda: ["cpu"]),
                (core.libpaddle, "_get_device_min_chunk_size", lambda device: 256),
                (paddle, "get_device", lambda: "cpu:0"),
                (paddle, "set_device", lambda device: None),
                (paddle.device, "get_device", lambda: "cpu"),
                (paddle, "CustomPlace", lambda device, index: paddle.CPUPlace()),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            return wrap(*args, segment_size=SEGMENT, **kwargs)

    sharding.group_sharded_parallel = on_cpu
    # Copies between devices, after which the original is cleared; and a norm's way to where NCCL sums it.
    paddle.Tensor.cpu = lambda tensor: tensor.detach().clone()
    paddle.Tensor.cuda = lambda tensor, *args, **kwargs: tensor


def train(folder: Path, runs: dict[str, dict]) -> None:
    """Trains, saves, and writes losses, temperatures and saved parameters of every run to FOLDER/<name>.npz."""
    from paddlenlp.utils.log import logger

    from paddle_infcl.evaluation.retrieval import RetrievalEvaluator
    from tests.training import losses, make_trainer

    logger.set_level("WARNING")
    for name, options in runs.items():
        options = dict(options)
        if options.pop("evaluates", False):
            options["evaluator"] = RetrievalEvaluator.from_pairs(str(folder / "dev.jsonl"))
        trainer = make_trainer(folder, folder / name, pairs=folder / "pairs.jsonl", dropout=0.0, **options)
        trainer.train()
        metric = trainer.evaluate()["eval_mrr@10"] if "evaluator" in options else 0.0
        trainer.save_model(str(folder / name), merge_tensor_parallel=False)
        logged = [entry for entry in trainer.state.log_history if "temperature" in entry]
        if trainer.args.process_index == 0:
            saved = paddle.load(str(folder / name / "model_state.pdparams"))
            np.savez(
                folder / f"{name}.npz",
                losses=list(losses(trainer).values()),
                temperature=[entry["temperature"] for entry in logged],
                metric=metric,
                **{f"parameter/{key}": value.numpy() for key, value in saved.items()},
            )


if __name__ == "__main__":
    allow_on_cpu()
    train(Path(sys.argv[1]), json.loads(sys.argv[2]))
    from paddle_infcl.distributed.watch import end_process

    end_process(0)
