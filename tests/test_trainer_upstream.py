# SPDX-License-Identifier: Apache-2.0
"""PaddleNLP's own flow with our trainer in place of theirs: its data, collator, model and arguments."""

import dataclasses
import json

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import inf_cl_loss
from tests.training import WORDS, losses, make_arguments, make_tokenizer


@dataclasses.dataclass
class UpstreamEmbeddingArgument:
    """The fields of llm/utils/argument.py, with its defaults, which no trainer may read as lengths."""

    max_query_len: int = 1
    max_passage_len: int = 1.0
    group_size: int = 8
    query_template: str = "{text}"
    passage_template: str = "{text}"
    embedding_temperature: float = 0.02
    embedding_negatives_cross_device: bool = True
    embedding_matryoshka_dims: list = None
    loss_type: str = "contrastive"
    inf_cl_head_dim: int = 64


@pytest.fixture
def parts(tmp_path):
    return make_parts(tmp_path)


def make_parts(tmp_path):
    """What PaddleNLP's run_embedding.py builds, in its order, at a small size."""
    from paddlenlp.data import DataCollatorForEmbedding
    from paddlenlp.datasets import EmbeddingIterableDataset, load_dataset
    from paddlenlp.transformers import Qwen2Config, Qwen2SentenceEmbedding

    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 4)) for _ in range(96)]
    rows = [
        {"query": texts[3 * i], "pos_passage": [texts[3 * i + 1]], "neg_passage": [texts[3 * i + 2]]}
        for i in range(32)
    ]
    (tmp_path / "train.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    tokenizer.eos_token = "[SEP]"  # its dataset appends it where the template has no suffix
    paddle.seed(0)
    config = Qwen2Config(
        vocab_size=5 + 36 + 36 + len(WORDS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    config.embedding_negatives_cross_device = True
    model = Qwen2SentenceEmbedding(config)
    data = load_dataset("json", data_files=str(tmp_path / "train.json"), lazy=False)[0]
    lengths = {"max_query_len": 12, "max_passage_len": 12}
    train = EmbeddingIterableDataset(data, tokenizer, group_size=2, **lengths)
    collator = DataCollatorForEmbedding(
        tokenizer=tokenizer, padding=True, return_tensors="np", return_attention_mask=True, **lengths
    )
    return tmp_path, model, tokenizer, train, collator


def make_trainer(parts, *, loss_type="contrastive", **options):
    from paddle_infcl import EmbeddingTrainer  # the one changed import

    folder, model, tokenizer, train, collator = parts
    values = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, **options}
    trainer = EmbeddingTrainer(
        model=model,
        model_args=UpstreamEmbeddingArgument(embedding_temperature=0.05, loss_type=loss_type),
        args=make_arguments(folder / "out", **values),
        train_dataset=train,
        eval_dataset=None,
        tokenizer=tokenizer,
        compute_metrics=lambda prediction: {},
        data_collator=collator,
    )
    trainable_parameters = [p for p in model.parameters() if not p.stop_gradient]
    trainer.set_optimizer_grouped_parameters(trainable_parameters)
    return trainer


@pytest.mark.parametrize("loss_type", ["contrastive", "inf_cl"])
def test_paddlenlps_script_with_one_changed_import(parts, loss_type):
    folder, model, _, train, collator = parts
    examples = list(train.iter_one_epoch())
    batch = collator(examples[:8])
    model.eval()
    with paddle.no_grad():
        q, p = model(**batch, return_encode=True)
        want = float(inf_cl_loss(q, p, temperature=0.05, backend="dense"))
    trainer = make_trainer(parts, loss_type=loss_type)
    result = trainer.train(resume_from_checkpoint=None)
    assert result.global_step == 4
    # The first window is the first 8 rows, each with its positive and its hard negative, at the temperature asked for.
    assert losses(trainer)[1] == pytest.approx(want, rel=1e-4)
    assert trainer.state.log_history[0]["effective_negatives"] == 15
    trainer.save_model(merge_tensor_parallel=False)
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    assert (folder / "out" / "model_state.pdparams").is_file() and (folder / "out" / "trainer_state.json").is_file()


def test_one_micro_batch_has_the_same_objective(tmp_path):
    """With accumulation 1 PaddleNLP leaves out the temperature and the loss that was asked for."""
    found = []
    for micro, accumulation in ((4, 2), (8, 1)):
        options = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
        trainer = make_trainer(make_parts(tmp_path), **options)
        trainer.train()
        found.append(list(losses(trainer).values()))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4)


def test_a_stream_resumes(tmp_path):
    """A stream can't jump: its rows are read again, and the steps are those of the uninterrupted run."""
    whole = make_trainer(make_parts(tmp_path), max_steps=6, save_strategy="steps", save_steps=3)
    whole.train()
    checkpoint = str(tmp_path / "out" / "checkpoint-3")
    resumed = make_trainer(make_parts(tmp_path), max_steps=6)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert losses(resumed) == losses(whole)
    other = make_trainer(make_parts(tmp_path), max_steps=6, gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match="the data is a stream"):
        other.train(resume_from_checkpoint=checkpoint)


def test_unified_checkpoints_of_paddlenlps_models(tmp_path):
    options = {"unified_checkpoint": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = make_trainer(make_parts(tmp_path), **options)
    trainer.train()
    again = make_trainer(make_parts(tmp_path), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    np.testing.assert_allclose(list(losses(again).values()), list(losses(trainer).values()), rtol=1e-6)


def test_streams_need_max_steps(parts):
    with pytest.raises(ValueError, match="max_steps"):
        make_trainer(parts, max_steps=-1).train()
