# SPDX-License-Identifier: Apache-2.0
"""One process of a distributed training run: `python tests/trainer_process.py FOLDER JSON_OPTIONS`.

The first process writes the losses, evaluations and final parameters of each run to FOLDER/<name>.npz.
"""

import json
import sys
from pathlib import Path

import numpy as np


class CountsReductions:
    """Counts the forward passes whose backward passes reduce gradients, while it is entered."""

    def __enter__(self):
        import paddle

        self.count, self._forward = 0, paddle.DataParallel.forward

        def forward(layer, *args, **kwargs):
            self.count += layer.grad_need_sync and paddle.is_grad_enabled()
            return self._forward(layer, *args, **kwargs)

        paddle.DataParallel.forward = forward
        return self

    def __exit__(self, *error):
        import paddle

        paddle.DataParallel.forward = self._forward


def main(folder: Path, runs: dict) -> None:
    from paddlenlp.utils.log import logger

    from paddle_infcl.evaluation.retrieval import RetrievalEvaluator
    from tests.training import losses, make_trainer

    logger.set_level("WARNING")
    for name, options in runs.items():
        options = dict(options)
        resume = options.pop("resume", None)
        pairs = folder / options.pop("pairs")
        evaluator = RetrievalEvaluator.from_pairs(str(folder / "dev.jsonl"))
        trainer = make_trainer(folder, folder / name, pairs=pairs, evaluator=evaluator, **options)
        with CountsReductions() as reductions:
            trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
        metrics = trainer.evaluate()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        if trainer.args.process_index == 0:
            found = {f"parameter/{n}": p.numpy() for n, p in trainer.model.named_parameters()}
            np.savez(
                folder / f"{name}.npz",
                losses=np.array(list(losses(trainer).values())),
                temperature=[entry["temperature"] for entry in logged],
                negatives=[entry["effective_negatives"] for entry in logged],
                reductions=reductions.count,
                metric=metrics["eval_mrr@10"],
                **found,
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    from paddle_infcl.distributed.watch import end_process

    end_process(0)
