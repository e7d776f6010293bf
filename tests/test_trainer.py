# SPDX-License-Identifier: Apache-2.0
"""The trainer: windows, the one objective, logging, evaluation, what it takes from PaddleNLP."""

import json
import sys
import types
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddlenlp.trainer.trainer_utils import ShardingOption

from paddle_infcl import kernels
from paddle_infcl.arguments import ConfigError
from paddle_infcl.data.jsonl import load_pairs
from paddle_infcl.data.rows import DataError
from paddle_infcl.evaluation.retrieval import RetrievalEvaluator
from paddle_infcl.trainer import EmbeddingTrainer, evaluation
from tests.training import losses, make_arguments, make_model, make_tokenizer, make_trainer, write_pairs


def record_windows(trainer):
    """Makes the trainer note, for every step, the rows of each micro-batch and whether the model was training."""
    seen, step = [], trainer.training_step

    def training_step(model, inputs, step_control=0):
        seen.append([batch["query"]["input_ids"].shape[0] for batch in inputs])
        loss = step(model, inputs)
        assert all(layer.training for layer in model.sublayers(include_self=True))
        return loss

    trainer.training_step = training_step
    return seen


def test_windows_never_cross_an_epoch(tmp_path):
    """7 micro-batches and accumulation 4: windows of 4 and 3, in each epoch."""
    trainer = make_trainer(tmp_path, tmp_path / "out", rows=28, gradient_accumulation_steps=4)
    windows = record_windows(trainer)
    trainer.model.eval()
    result = trainer.train()
    assert windows == [[4] * 4, [4] * 3] * 2
    assert result.global_step == trainer.state.global_step == trainer.state.max_steps == 4
    assert [e["progress_or_epoch"] for e in trainer.state.log_history if "loss" in e] == [0.5, 1.0, 1.5, 2.0]
    # Shown to PaddleNLP's loop as a batch of 16 without accumulation, and put back.
    args = trainer.args
    assert (args.gradient_accumulation_steps, args.per_device_train_batch_size, args.max_steps) == (4, 4, -1)


@pytest.mark.parametrize("options, steps", [({"num_train_epochs": 1.5}, 6), ({"max_steps": 5}, 5), ({}, 8)])
def test_epochs_and_max_steps(tmp_path, options, steps):
    trainer = make_trainer(tmp_path, tmp_path / "out", **options)
    assert trainer.train().global_step == steps


def test_every_row_once_per_epoch_in_another_order(tmp_path):
    trainer = make_trainer(tmp_path, tmp_path / "out")
    seen, collate = [], trainer.data_collator.__class__.__call__

    class Spy(trainer.data_collator.__class__):
        def __call__(self, examples):
            seen.extend(example.query for example, _ in examples)
            return collate(self, examples)

    trainer.data_collator.__class__ = Spy
    trainer.train()
    first, second = seen[:40], seen[40:]
    assert sorted(first) == sorted(second) == sorted(trainer.train_dataset[i].query for i in range(40))
    assert first != second


def test_one_objective_with_and_without_accumulation(tmp_path):
    """12 x 1, 4 x 3 and 2 x 6 are the same batch; the temperature counts in all of them."""
    runs = {}
    for micro, accumulation, temperature in ((12, 1, 0.05), (4, 3, 0.05), (2, 6, 0.05), (12, 1, 0.5)):
        trainer = make_trainer(
            tmp_path,
            tmp_path / "out",
            dropout=0.0,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            embedding_temperature=temperature,
            max_steps=3,
        )
        trainer.train()
        runs[micro, temperature] = list(losses(trainer).values())
    np.testing.assert_allclose(runs[4, 0.05], runs[12, 0.05], rtol=2e-5)
    np.testing.assert_allclose(runs[2, 0.05], runs[12, 0.05], rtol=2e-5)
    assert abs(runs[12, 0.5][0] - runs[12, 0.05][0]) > 0.1


@pytest.mark.parametrize(
    "change",
    [{"inf_cl_loss": False, "inf_cl_backend": "auto"}, {"inf_cl_backend": "dense"}, {"recompute": True}],
    ids=["contrastive", "dense", "recompute"],
)
def test_same_losses_whatever_computes_them(tmp_path, change):
    base = {"max_steps": 4, "max_grad_norm": 1.0}
    plain = make_trainer(tmp_path, tmp_path / "out", **base)
    plain.train()
    other = make_trainer(tmp_path, tmp_path / "out", **base, **change)
    other.train()
    np.testing.assert_allclose(list(losses(other).values()), list(losses(plain).values()), rtol=1e-4)


def test_training_learns(tmp_path):
    trainer = make_trainer(tmp_path, tmp_path / "out", rows=96, num_train_epochs=8, dropout=0.0, learning_rate=3e-3)
    trainer.train()
    values = list(losses(trainer).values())
    assert np.mean(values[-8:]) < 0.6 * np.mean(values[:8])


def test_a_trainer_without_what_it_needs(tmp_path):
    whole = make_trainer(tmp_path, tmp_path / "out")
    parts = {"model": whole.model, "args": whole.args, "train_dataset": whole.train_dataset}
    with pytest.raises(ValueError, match="tokenizer: is needed to make batches from pairs"):
        EmbeddingTrainer(**parts)
    with pytest.raises(ValueError, match="model: is needed"):
        EmbeddingTrainer(**{**parts, "model": None})
    with pytest.raises(ValueError, match=r"model_args: is a dict: EmbeddingArgument\(\.\.\.\) is needed"):
        EmbeddingTrainer({"group_size": 2}, **parts)
    trainer = EmbeddingTrainer(**parts, data_collator=lambda rows: {"query": {}, "passage": {}})
    with pytest.raises(ValueError, match="no dict 'passages', it has query, passage: the data_collator must give"):
        trainer.train()
    for parameter in whole.model.parameters():
        parameter.stop_gradient = True
    with pytest.raises(ValueError, match="none of its parameters is trainable"):
        whole.train()


def test_a_stream_without_rows(tmp_path):
    class Nothing(paddle.io.IterableDataset):
        def __iter__(self):
            return iter(())

    trainer = make_trainer(tmp_path, tmp_path / "out", max_steps=2)
    trainer.train_dataset = Nothing()
    with pytest.raises(ValueError, match="train_dataset: epoch 0 has no rows"):
        trainer.train()


def test_what_is_logged(tmp_path, caplog):
    rows = [{"query": f"bal {w}", "pos_passage": "dem fal", "pos_id": 7} for w in ("bet", "bil", "bom", "bun")] * 3
    file = tmp_path / "same.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = make_trainer(tmp_path, tmp_path / "out", pairs=file, embedding_temperature=0.1, num_train_epochs=1)
    trainer.train()
    (entry,) = (e for e in trainer.state.log_history if "loss" in e)
    assert entry["temperature"] == 0.1 and entry["learning_rate"] >= 0 and entry["pairs_per_second"] > 0
    # All passages are one document: nobody competes with anybody.
    assert entry["effective_negatives"] == 0 and entry["loss"] == 0
    assert "step 1: its rows have nothing to contrast with" in caplog.text
    trainer = make_trainer(tmp_path, tmp_path / "out", rows=12, num_train_epochs=1)
    trainer.train()
    assert trainer.state.log_history[0]["effective_negatives"] == 11


def test_hard_negatives_count_and_change_the_loss(tmp_path):
    found = {}
    for group_size in (1, 3):
        pairs = write_pairs(tmp_path / "hard.jsonl", 12, negatives=2)
        trainer = make_trainer(
            tmp_path, tmp_path / "out", pairs=pairs, group_size=group_size, num_train_epochs=1, dropout=0.0
        )
        trainer.train()
        found[group_size] = trainer.state.log_history[0]
    assert found[1]["effective_negatives"] == 11 and found[3]["effective_negatives"] == 35
    assert found[3]["loss"] > found[1]["loss"]


def test_one_hard_negative_matters(tmp_path):
    """Another text in the place of one row's negative changes the loss, and for the other rows as well."""
    first = write_pairs(tmp_path / "a.jsonl", 4, negatives=1)
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    rows[2]["neg_passage"] = [rows[2]["query"]]
    second = tmp_path / "b.jsonl"
    second.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = make_trainer(tmp_path, tmp_path / "out", pairs=first, group_size=2)
    per_row, function = [], trainer.loss_fn.forward

    def loss(q, p, own, **targets):
        per_row.append([float(function(q[i : i + 1], p, own[i : i + 1])) for i in range(4)])
        return function(q, p, own, **targets)

    trainer.loss_fn.forward = loss
    values = [trainer.evaluate(load_pairs(file))["eval_loss"] for file in (first, second)]
    assert abs(values[1] - values[0]) > 1e-3
    assert all(abs(a - b) > 1e-9 for a, b in zip(*per_row, strict=True))


@pytest.mark.parametrize("broken", ["missing", "broken"])
def test_training_goes_on_without_the_kernels(tmp_path, monkeypatch, caplog, broken):
    module = None
    if broken == "broken":
        module = types.ModuleType("paddle_infcl_ops")
        module.__getattr__ = lambda name: (_ for _ in ()).throw(OSError("libcuda.so.1 is gone"))
    kernels.load_ops.cache_clear()
    monkeypatch.setitem(sys.modules, "paddle_infcl_ops", module)
    try:
        trainer = make_trainer(tmp_path, tmp_path / "out", inf_cl_backend="auto", max_steps=2)
        trainer.train()
    finally:
        kernels.load_ops.cache_clear()
    assert len(losses(trainer)) == 2
    cause = "libcuda.so.1 is gone" if broken == "broken" else "paddle_infcl_ops"
    assert caplog.text.count("the Triton kernels are not used") == 1 and cause in caplog.text


def test_the_bar_counts_pairs(tmp_path, monkeypatch):
    from paddle_infcl.trainer import callbacks

    bars = []

    class Bar:
        external_write_mode = staticmethod(callbacks.tqdm.external_write_mode)

        def __init__(self, total=None, initial=0, **options):
            self.total, self.updates, self.closed = total, [], False
            bars.append(self)

        def update(self, n):
            self.updates.append(n)

        def set_postfix_str(self, text):
            self.text = text

        def close(self):
            self.closed = True

    monkeypatch.setattr(callbacks, "tqdm", Bar)
    trainer = make_trainer(tmp_path, tmp_path / "out", disable_tqdm=False, num_train_epochs=1)
    trainer.train()
    (bar,) = bars
    assert bar.total == 40 and bar.updates == [4] * 10 and bar.closed and bar.text == "step 4/4"


def test_learnable_temperature(tmp_path):
    """It moves, does not decay, and a checkpoint keeps it."""
    options = {"learnable_temperature": True, "embedding_temperature": 1.0, "weight_decay": 0.5, "max_steps": 3}
    trainer = make_trainer(tmp_path, tmp_path / "out", save_strategy="steps", save_steps=3, **options)
    (parameter,) = trainer.loss_fn.parameters()
    trainer.train()
    assert trainer.loss_fn.temperature < 1.0  # similarities below 1 want a smaller T
    assert not trainer.optimizer._apply_decay_param_fun(parameter.name)
    names = {p.name for n, p in trainer.model.named_parameters() if "bias" not in n and "norm" not in n}
    assert all(map(trainer.optimizer._apply_decay_param_fun, names))
    temperatures = [e["temperature"] for e in trainer.state.log_history if "loss" in e]
    assert temperatures[0] != temperatures[-1] == trainer.loss_fn.temperature
    again = make_trainer(tmp_path, tmp_path / "out", **options)
    again._load_from_checkpoint(str(tmp_path / "out" / "checkpoint-3"))
    assert again.loss_fn.temperature == trainer.loss_fn.temperature


@pytest.mark.parametrize("grouped", ["flat", "groups"])
def test_learnable_temperature_beside_given_parameters(tmp_path, grouped):
    trainer = make_trainer(tmp_path, tmp_path / "out", learnable_temperature=True, max_steps=1)
    parameters = [p for p in trainer.model.parameters() if not p.stop_gradient]
    trainer.set_optimizer_grouped_parameters(parameters if grouped == "flat" else [{"params": parameters}])
    before = trainer.loss_fn.temperature
    trainer.train()
    assert trainer.loss_fn.temperature != before


def test_broken_representations_stop_the_run(tmp_path):
    trainer = make_trainer(tmp_path, tmp_path / "out")
    embeddings = trainer.model.backbone.embeddings.word_embeddings.weight
    embeddings.set_value(paddle.full_like(embeddings, float("nan")))
    with pytest.raises(ValueError, match="micro-batch 0 of 3: NaN or inf in the query representations"):
        trainer.train()
    assert trainer.args.gradient_accumulation_steps == 3


@pytest.mark.parametrize("rows", [1, 11])
def test_fewer_rows_than_a_batch(tmp_path, rows):
    trainer = make_trainer(tmp_path, tmp_path / "out", rows=rows)
    with pytest.raises(DataError, match=rf"{rows} rows per epoch and one global batch takes 12"):
        trainer.train()


def test_no_data(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError):
        load_pairs(tmp_path / "empty.jsonl")
    trainer = make_trainer(tmp_path, tmp_path / "out")
    trainer.train_dataset = None
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()


def test_options_that_this_trainer_cannot_honour(tmp_path):
    with pytest.raises(ConfigError) as caught:
        EmbeddingTrainer(
            model=make_model(),
            args=make_arguments(tmp_path, count_trained_tokens=True, context_parallel_degree=2),
            tokenizer=make_tokenizer(tmp_path / "tokenizer"),
        )
    assert {p.option for p in caught.value.problems} == {"count_trained_tokens", "context_parallel_degree"}
    # GradCache's micro-batches add to gradients that these stages have given away.
    for stage in ("stage2", "stage3"):
        args = make_arguments(tmp_path)
        args.sharding = [ShardingOption(stage)]
        with pytest.raises(ConfigError, match="must keep until the last micro-batch: take stage1"):
            EmbeddingTrainer(model=make_model(), args=args, tokenizer=make_tokenizer(tmp_path / "tokenizer"))


def test_a_foreign_dataset_and_collator(tmp_path):
    """Anything with a length, and a collator that knows nothing of seeds."""
    texts = make_tokenizer(tmp_path / "tokenizer")
    rows = [load_pairs(write_pairs(tmp_path / "p.jsonl", 12))[i] for i in range(12)]

    def collate(items):
        sides = ([i.query for i in items], [i.positives[0] for i in items])
        query, passages = (texts(side, padding=True, return_attention_mask=True) for side in sides)
        keep = ("input_ids", "attention_mask")
        return {
            "query": {k: np.array(query[k]) for k in keep},
            "passages": {k: np.array(passages[k]) for k in keep},
        }

    trainer = EmbeddingTrainer(
        model=make_model(),
        args=make_arguments(tmp_path / "out", num_train_epochs=1),
        train_dataset=rows,
        data_collator=collate,
    )
    seen = record_windows(trainer)
    trainer.train()
    assert seen == [[4, 4, 4]] and trainer.state.log_history[0]["effective_negatives"] == 11


# Evaluation.


def evaluator(tmp_path):
    return RetrievalEvaluator.from_pairs(str(write_pairs(tmp_path / "dev.jsonl", 30, seed=5)))


def test_evaluation_best_checkpoint_and_history(tmp_path):
    options = {
        "evaluation_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": "mrr@10",
        "rows": 96,
        "learning_rate": 5e-3,
    }
    trainer = make_trainer(tmp_path, tmp_path / "out", evaluator=evaluator(tmp_path), **options)
    trainer.train()
    plain = make_trainer(tmp_path, tmp_path / "plain", rows=96, learning_rate=5e-3)
    plain.train()
    # Evaluating changes nothing of the training.
    assert losses(trainer) == losses(plain)
    values = {e["step"]: e["eval_mrr@10"] for e in trainer.state.log_history if "eval_mrr@10" in e}
    assert list(values) == list(range(2, 17, 2)) and len(set(values.values())) > 2
    best = max(values, key=values.get)
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best}")
    assert trainer.state.best_metric == values[best]
    # The best checkpoint's weights were loaded back, and score what was reported.
    metrics = trainer.evaluate()
    assert metrics["eval_mrr@10"] == pytest.approx(values[best], abs=1e-9)
    assert set(metrics) >= {"eval_ndcg@10", "eval_recall@1", "eval_recall@10", "eval_recall@100", "eval_map"}
    state = json.loads((tmp_path / "out" / f"checkpoint-{best}" / "trainer_state.json").read_text())
    assert [e["step"] for e in state["log_history"] if "loss" in e] == list(range(1, best + 1))


def test_early_stopping(tmp_path):
    trainer = make_trainer(
        tmp_path,
        tmp_path / "out",
        evaluator=lambda encode: {"score": 1.0},
        evaluation_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="score",
        early_stopping_patience=2,
    )
    assert trainer.train().global_step == 3


def test_wrong_evaluation_fails_at_the_start(tmp_path):
    def problems(**options):
        with pytest.raises(ConfigError) as caught:
            make_trainer(tmp_path, tmp_path / "out", evaluation_strategy="steps", eval_steps=1, **options).train()
        return {p.option: p.message for p in caught.value.problems}

    found = problems(evaluator=evaluator(tmp_path), metric_for_best_model="ndcg")
    assert "there are mrr@10, ndcg@10, recall@1, recall@10, recall@100, map" in found["metric_for_best_model"]
    assert "an evaluator or an eval_dataset" in problems()["evaluation_strategy"]
    found = problems(evaluator=evaluator(tmp_path), early_stopping_patience=1)
    assert "load_best_model_at_end" in found["early_stopping_patience"]
    with pytest.raises(ValueError, match="neither an evaluator nor an eval_dataset"):
        make_trainer(tmp_path, tmp_path / "out").evaluate()


def test_evaluation_loss_is_the_training_loss(tmp_path):
    """Without dropout, before the first step: the loss on the training rows is what training reports."""
    pairs = write_pairs(tmp_path / "p.jsonl", 12)
    data = load_pairs(pairs)
    options = {"pairs": pairs, "dropout": 0.0, "num_train_epochs": 1, "eval_dataset": data}
    trainer = make_trainer(tmp_path, tmp_path / "out", per_device_eval_batch_size=6, **options)
    loss = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert loss == pytest.approx(losses(trainer)[1], rel=1e-5)
    trainer.eval_dataset = iter(())
    with pytest.raises(ValueError, match="a stream has no end"):
        trainer.evaluate()


def test_evaluation_takes_no_random_numbers_from_training(tmp_path):
    trainer = make_trainer(tmp_path, tmp_path / "out", evaluator=lambda encode: {"x": float(paddle.rand([1]))})
    paddle.seed(3)
    want = paddle.rand([4]).numpy()
    paddle.seed(3)
    trainer.evaluate()
    np.testing.assert_array_equal(paddle.rand([4]).numpy(), want)


def test_evaluation_encodes_as_training_does(tmp_path):
    kinds = []

    def metrics(encode):
        kinds.append((encode(["bal bam"], "query"), encode(["bal bam"], "passage")))
        return {"x": 0.0}

    templates = {"query_template": "get {text}", "passage_template": "{text}"}
    trainer = make_trainer(tmp_path, tmp_path / "out", evaluator=metrics, **templates)
    assert trainer.evaluate(metric_key_prefix="test")["test_x"] == 0.0
    ((query, passage),) = kinds
    assert query.shape == passage.shape == (1, 32) and np.abs(query - passage).max() > 1e-3


def test_processes_share_the_encoding(tmp_path, monkeypatch):
    """7 texts over 3 processes, 2 of each at a time: the last exchange has one text, and nothing for two of them."""
    texts = ["bal", "bam dem", "ban", "fal kul gon", "bil", "bom bun", "kul"]
    trainer = make_trainer(tmp_path, tmp_path / "out")
    want = trainer.encode(texts, "query")
    monkeypatch.setattr(evaluation, "_ENCODE_BLOCK", 2)
    shares = {rank: [] for rank in range(3)}

    def as_process(rank, exchange):
        calls = iter(range(9))
        monkeypatch.setattr(
            evaluation, "gather_constants", lambda own, ranks, sizes: exchange(own, sizes, next(calls))
        )
        trainer.loss_fn._ranks = SimpleNamespace(world=3, rank=rank)
        return trainer.encode(texts, "query")

    for rank in shares:

        def note(own, sizes, call, rank=rank):
            assert own.shape == [sizes[rank], 32]
            shares[rank].append(own)
            return paddle.zeros([sum(sizes), 32])

        as_process(rank, note)
    assert [[len(own) for own in s] for s in shares.values()] == [[2, 1], [2, 0], [2, 0]]
    for rank in shares:
        got = as_process(rank, lambda own, sizes, call: paddle.concat([s[call] for s in shares.values()]))
        np.testing.assert_allclose(got, want, atol=1e-6)


# What is saved.


def test_saved_model_and_arguments(tmp_path):
    from paddle_infcl.encode import encode_texts
    from paddle_infcl.modeling import encoder_from_pretrained

    trainer = make_trainer(tmp_path, tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.save_model()
    texts = ["bal bam ban", "kul"]
    want = encode_texts(trainer.model, trainer.tokenizer, texts, max_length=16)
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        model, tokenizer = encoder_from_pretrained(folder)
        assert model.pooling == "mean"
        np.testing.assert_allclose(encode_texts(model, tokenizer, texts, max_length=16), want, atol=1e-6)
        saved = paddle.load(str(folder / "training_args.bin"))
        assert (saved.gradient_accumulation_steps, saved.per_device_train_batch_size) == (3, 4)
