# SPDX-License-Identifier: Apache-2.0
"""The same training run twice: Triton's loss in bf16 on a GPU, and the dense loss in float32 on the CPU.

    python tests/gpu/train_curves.py run --device cpu --data data/code_search/train.jsonl \
        --vocabulary data/all-MiniLM-L6-v2/vocab.txt --output cpu.json
    python tests/gpu/train_curves.py run --device gpu:0 ... --output gpu.json
    python tests/gpu/train_curves.py plot cpu.json gpu.json --output curves.png

A small encoder (2 layers, width 128, 32 tokens, float32, no dropout) learns code search from scratch with PaddleNLP's
Trainer, GradCache over 4 micro-batches of 32 pairs, for 100 steps. On the GPU the representations are cast to bf16 and
the loss is the Triton kernels'. `plot` draws both curves and prints the largest gap.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]


def run(args) -> None:
    import paddle
    from paddlenlp.transformers import BertConfig, BertModel, BertTokenizer
    from paddlenlp.trl import SFTConfig

    from paddle_infcl.arguments import EmbeddingArgument
    from paddle_infcl.data.jsonl import load_pairs
    from paddle_infcl.losses import InfCLLoss
    from paddle_infcl.modeling import SentenceEncoder
    from paddle_infcl.trainer import EmbeddingTrainer

    kind = args.device.split(":")[0]
    if kind not in ("cpu", "gpu"):
        from paddle_infcl_ops import driver

        driver.device_types.add(kind)
    paddle.set_device("cpu")
    paddle.seed(0)
    # The weights are drawn on the CPU for both runs: devices have generators of their own.
    config = BertConfig(
        vocab_size=30522,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    weights = {name: value.numpy() for name, value in BertModel(config).state_dict().items()}
    paddle.set_device(args.device)
    backbone = BertModel(config)
    backbone.set_state_dict({name: paddle.to_tensor(value) for name, value in weights.items()})

    class InBfloat16(InfCLLoss):
        """The loss of representations rounded to bf16."""

        def forward(self, q, p, *targets, **options):
            return super().forward(q.astype("bfloat16"), p.astype("bfloat16"), *targets, **options)

    with tempfile.TemporaryDirectory() as folder:
        trainer = EmbeddingTrainer(
            model=SentenceEncoder(backbone, pooling="mean"),
            model_args=EmbeddingArgument(
                max_query_len=32, max_passage_len=32, group_size=1, embedding_temperature=0.05, inf_cl_loss=True
            ),
            args=SFTConfig(
                output_dir=folder,
                per_device_train_batch_size=32,
                gradient_accumulation_steps=4,
                max_steps=args.steps,
                learning_rate=1e-3,
                warmup_steps=10,
                logging_steps=1,
                save_strategy="no",
                device=kind,
                disable_tqdm=True,
                report_to="none",
                skip_memory_metrics=True,
            ),
            train_dataset=load_pairs(args.data),
            tokenizer=BertTokenizer(args.vocabulary),
        )
        trainer.loss_fn = InfCLLoss(0.05, backend="dense") if kind == "cpu" else InBfloat16(0.05, backend="triton")
        begin = time.time()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry and "learning_rate" in entry]
    result = {
        "device": args.device,
        "backend": trainer.loss_fn.backend,
        "paddle": paddle.__version__,
        "steps": args.steps,
        "seconds": round(time.time() - begin, 1),
        "losses": losses,
    }
    Path(args.output).write_text(json.dumps(result))
    print(f"{args.device}: {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps, {result['seconds']} s")


def plot(args) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = [json.loads(Path(path).read_text()) for path in args.runs]
    gaps = [abs(a - b) for a, b in zip(runs[0]["losses"], runs[1]["losses"], strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for one, style in zip(runs, ("-", "--"), strict=True):
        axes.plot(range(1, len(one["losses"]) + 1), one["losses"], style, label=f"{one['backend']}, {one['device']}")
    axes.set(xlabel="optimizer step", ylabel="loss", title=f"largest gap {gaps[worst]:.2g} at step {worst + 1}")
    axes.legend(frameon=False)
    figure.savefig(args.output, dpi=150)
    print(f"largest gap {gaps[worst]:.3g} at step {worst + 1} of {len(gaps)}; {args.output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("run")
    command.add_argument("--device", required=True)
    command.add_argument("--data", required=True)
    command.add_argument("--vocabulary", required=True)
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--output", required=True)
    command = commands.add_parser("plot")
    command.add_argument("runs", nargs=2)
    command.add_argument("--output", default="curves.png")
    args = parser.parse_args()
    (run if args.command == "run" else plot)(args)


if __name__ == "__main__":
    main()
