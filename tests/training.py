# SPDX-License-Identifier: Apache-2.0
"""Small runs for the trainer's tests: data, tokenizer, model, trainer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import paddle

from tests.tiny_models import write_bert_vocabulary

WORDS = [a + b + c for a in "bdfgk" for b in "aeiou" for c in "lmnrt"]


def write_pairs(path, rows: int, *, negatives: int = 0, seed: int = 0) -> Path:
    """Queries of three words; the passage repeats two of them among others; learnable by words in common."""
    rng = np.random.default_rng(seed)
    with open(path, "w", encoding="utf-8") as stream:
        for _ in range(rows):
            query = list(rng.choice(WORDS, 3, replace=False))
            others = list(rng.choice(WORDS, 4))
            row = {"query": " ".join(query), "pos_passage": [" ".join([*query[:2], *others])]}
            if negatives:
                row["neg_passage"] = [" ".join(rng.choice(WORDS, 5)) for _ in range(negatives)]
            stream.write(json.dumps(row) + "\n")
    return Path(path)


def make_tokenizer(folder):
    from paddle_infcl.modeling import load_tokenizer

    # Once: processes of one run share the folder.
    return load_tokenizer(folder if folder.exists() else write_bert_vocabulary(folder, WORDS))


def make_model(dropout: float = 0.1, **options):
    from paddlenlp.transformers import BertConfig, BertModel

    from paddle_infcl.modeling import SentenceEncoder

    paddle.seed(0)
    config = BertConfig(
        vocab_size=5 + 36 + 36 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.1,
    )
    return SentenceEncoder(BertModel(config), pooling="mean", **options)


def make_arguments(output_dir, **options):
    from paddlenlp.trl import SFTConfig

    values = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "learning_rate": 1e-3,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "device": "cpu",
        "disable_tqdm": True,
        "report_to": "none",
        "seed": 11,
    }
    return SFTConfig(**{**values, **options})


def make_trainer(folder, output_dir, *, rows: int = 40, dropout: float = 0.1, pairs=None, **options):
    """A trainer of a tiny BERT on `rows` pairs.

    Options of EmbeddingArgument go there; evaluator, eval_dataset and callbacks to the trainer; all others to the
    training arguments.
    """
    import dataclasses

    from paddle_infcl.arguments import EmbeddingArgument
    from paddle_infcl.data.jsonl import load_pairs
    from paddle_infcl.trainer import EmbeddingTrainer

    ours = {f.name for f in dataclasses.fields(EmbeddingArgument)}
    embedding = {"max_query_len": 16, "max_passage_len": 16, "inf_cl_loss": True, "inf_cl_backend": "paddle"}
    embedding.update({name: options.pop(name) for name in list(options) if name in ours})
    kwargs = {name: options.pop(name) for name in ("evaluator", "eval_dataset", "callbacks") if name in options}
    model = options.pop("model", None) or make_model(dropout)
    data = folder / f"pairs{rows}.jsonl" if pairs is None else pairs
    if not data.exists():
        write_pairs(data, rows)
    return EmbeddingTrainer(
        model=model,
        model_args=EmbeddingArgument(**embedding),
        args=make_arguments(output_dir, **options),
        train_dataset=load_pairs(data),
        tokenizer=make_tokenizer(folder / "tokenizer"),
        **kwargs,
    )


def losses(trainer) -> dict[int, float]:
    """The logged loss of every step."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
