# SPDX-License-Identifier: Apache-2.0
"""Objectives in training: the guide model, its vectors from the data, a teacher's scores, a run of each."""

from __future__ import annotations

import json
import random

import numpy as np
import paddle
import pytest

from paddle_infcl.data.collator import draw_passages
from paddle_infcl.data.jsonl import load_pairs
from paddle_infcl.data.rows import DataError
from paddle_infcl.objectives import OBJECTIVES
from paddle_infcl.trainer.guide import Guide
from tests.training import losses, make_model, make_tokenizer, make_trainer, write_pairs


@pytest.fixture(scope="module")
def guide_folder(tmp_path_factory):
    """A model folder with a tokenizer, of other weights than the trained model's."""
    folder = tmp_path_factory.mktemp("guide")
    model = make_model(dropout=0.1)
    with paddle.no_grad():
        for k, parameter in enumerate(model.parameters()):
            noise = np.random.default_rng(k).standard_normal(parameter.shape).astype("float32")
            parameter.set_value(parameter + 0.05 * paddle.to_tensor(noise))
    model.save_pretrained(folder)
    make_tokenizer(folder / "vocabulary").save_pretrained(folder)
    return folder


def options(name, guide_folder):
    if name == "guided":
        return {"objective": name, "guide_model_name_or_path": str(guide_folder), "guide_margin": 0.1}
    return {"objective": name}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_accumulation_does_not_change_the_loss_of_any_objective(name, guide_folder, tmp_path):
    """One window of 12 pairs: as one micro-batch, and as three through GradCache. Without dropout they are equal."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 24, negatives=2)
    runs = []
    for size, accumulation in ((12, 1), (4, 3)):
        trainer = make_trainer(
            tmp_path, tmp_path / f"out{size}", pairs=pairs, dropout=0.0, per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation, group_size=3, **options(name, guide_folder),
        )  # fmt: skip
        trainer.train()
        runs.append(losses(trainer))
    assert len(runs[0]) == 4
    np.testing.assert_allclose(list(runs[0].values()), list(runs[1].values()), rtol=1e-4)
    negatives = [e["effective_negatives"] for e in trainer.state.log_history if "effective_negatives" in e]
    assert negatives and all(0 < n <= 12 * 5 for n in negatives)


def test_the_guide_decides_and_is_not_trained(guide_folder, tmp_path):
    """A margin of -3 lets everything through, one of 3 drops everything: the loss is 0 and nothing is learnt."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12)
    first = {}
    for margin in (-3.0, 3.0):
        trainer = make_trainer(
            tmp_path, tmp_path / f"out{margin}", pairs=pairs, objective="guided", guide_margin=margin,
            guide_model_name_or_path=str(guide_folder),
        )  # fmt: skip
        before = [p.numpy().copy() for p in trainer.guide.encoder.parameters()]
        trainer.train()
        first[margin] = losses(trainer)[1]
        for parameter, value in zip(trainer.guide.encoder.parameters(), before, strict=True):
            np.testing.assert_array_equal(parameter.numpy(), value)
            assert parameter.grad is None
        assert not {id(p) for p in trainer.guide.encoder.parameters()} & {id(p) for p in trainer.model.parameters()}
    assert first[3.0] == 0.0 and first[-3.0] > 0.1


def test_mini_batches_of_the_guide_and_its_mode(guide_folder, tmp_path):
    """Vectors don't depend on how many texts go through at once; dropout is off whatever the trained model does."""
    trainer = make_trainer(
        tmp_path, tmp_path / "out", rows=12, objective="guided", guide_model_name_or_path=str(guide_folder)
    )
    guide = trainer.guide
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(12)])
    texts = {name: paddle.to_tensor(value) for name, value in batch["guide"]["passages"].items()}
    whole = guide.vectors(texts).numpy()
    np.testing.assert_allclose(np.linalg.norm(whole, axis=1), 1.0, rtol=1e-5)
    guide.batch_size = 5
    np.testing.assert_allclose(guide.vectors(texts).numpy(), whole, atol=1e-5)
    assert guide.vectors(texts).stop_gradient


def test_its_own_tokenizer_template_and_limit(guide_folder, tmp_path):
    trainer = make_trainer(
        tmp_path, tmp_path / "out", rows=12, objective="guided", guide_model_name_or_path=str(guide_folder),
        guide_max_len=4, guide_query_template="bal {text}",
    )  # fmt: skip
    batch = trainer.data_collator([trainer.train_dataset[k] for k in range(3)])
    ours, guides = batch["query"]["input_ids"], batch["guide"]["query"]["input_ids"]
    assert guides.shape[1] == 4 and ours.shape[1] > 4
    assert (guides[:, 1] == trainer.guide.tokenizer.convert_tokens_to_ids("bal")).all()


def with_fields(path, rows, make):
    """The rows of a file with more fields."""
    out = path.with_name("more.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    out.write_text("".join(json.dumps({**row, **make(row)}) + "\n" for row in lines[:rows]))
    return out


def test_vectors_from_the_data_are_the_guide(guide_folder, tmp_path):
    """What the guide says of the texts, written into the data: the same training."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12, negatives=1)
    asked = {"pairs": pairs, "dropout": 0.0, "group_size": 2, "objective": "guided", "guide_margin": 0.05}
    live = make_trainer(tmp_path, tmp_path / "a", guide_model_name_or_path=str(guide_folder), **asked)

    def vectors(row):
        texts = [row["query"], *row["pos_passage"], *row["neg_passage"]]
        of_text = live.guide.tokenizers(live.model_args)[1]
        ids = {k: paddle.to_tensor(v) for k, v in of_text(texts).items()}
        v = live.guide.vectors(ids).numpy().tolist()
        return {"query_guide": v[0], "pos_guide": v[1:2], "neg_guide": v[2:]}

    asked["pairs"] = with_fields(pairs, 12, vectors)
    ready = make_trainer(tmp_path, tmp_path / "b", guide_from_data=True, **asked)
    assert ready.guide is None
    live.train()
    ready.train()
    np.testing.assert_allclose(list(losses(ready).values()), list(losses(live).values()), rtol=1e-4)


@pytest.mark.parametrize("kind", ["kl", "margin_mse"])
def test_a_teacher_is_learnt_from(kind, tmp_path):
    """Rows with one and two negatives; only the teacher's term: it falls."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12, negatives=2)
    rng = np.random.default_rng(0)

    def scores(row):
        return {"pos_scores": [0.9], "neg_scores": rng.random(len(row["neg_passage"])).round(2).tolist()}

    trainer = make_trainer(
        tmp_path, tmp_path / "out", pairs=with_fields(pairs, 12, scores), dropout=0.0, distillation=kind,
        contrastive_weight=0.0, group_size=3, embedding_temperature=0.3, num_train_epochs=20, learning_rate=5e-3,
    )  # fmt: skip
    trainer.train()
    seen = list(losses(trainer).values())
    assert seen[-1] < 0.5 * seen[0]


def test_scores_are_those_of_the_drawn_passages(tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 6, negatives=4)

    def of(text):
        return float(sum(text.encode()))

    def by_letters(row):
        return {"pos_scores": [100.0], "neg_scores": [of(text) for text in row["neg_passage"]]}

    data = with_fields(pairs, 6, by_letters)
    trainer = make_trainer(tmp_path, tmp_path / "out", pairs=data, distillation="kl", group_size=3)
    dataset = load_pairs(data)
    for seed in range(4):
        batch = trainer.data_collator([(dataset[k], seed) for k in range(6)])
        assert batch["teacher_scores"].shape == (6, 3) and (batch["teacher_scores"][:, 0] == 100.0).all()
        for k in range(6):
            _, negatives = draw_passages(dataset[k], random.Random(seed), 3, "none")
            wanted = [of(dataset[k].negatives[n]) for n in negatives]
            assert batch["teacher_scores"][k, 1:].tolist() == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pos_scores": [1.0], "neg_scores": [0.5]}, "`pos_scores`, `neg_scores` with one entry per text"),
        ({"pos_scores": ["high"], "neg_scores": [1, 2]}, "`pos_scores`, `neg_scores` with one entry per text"),
        ({}, "`pos_scores`, `neg_scores` with one entry per text"),
        (
            {"query_guide": [1.0], "pos_guide": [[1.0]], "neg_guide": [[1.0]]},
            "must be a list of 2 vectors",
        ),
        ({"query_guide": [1.0], "pos_guide": [[1.0, 2.0]], "neg_guide": [[1.0]] * 2}, "one width, more than 0"),
        ({"pos_guide": [[1.0]], "neg_guide": [[1.0]] * 2}, "one width, more than 0"),
    ],
)
def test_wrong_fields_are_refused_with_their_line(fields, message, tmp_path):
    data = with_fields(write_pairs(tmp_path / "pairs.jsonl", 3, negatives=2), 3, lambda row: fields)
    needs = ["scores"] if "scores" in message else []
    with pytest.raises(DataError, match=message) as error:
        load_pairs(data, needs=needs)
    assert "more.jsonl:1" in str(error.value)
    if needs:
        load_pairs(data)  # nobody asked
    else:
        with pytest.raises(DataError, match="`query_guide`, `pos_guide`"):
            load_pairs(tmp_path / "pairs.jsonl", needs=["guide"])


@pytest.mark.parametrize("option", [{"distillation": "kl"}, {"objective": "guided", "guide_from_data": True}])
def test_missing_fields_are_named(option, tmp_path):
    trainer = make_trainer(tmp_path, tmp_path / "out", rows=12, **option)
    with pytest.raises(DataError, match=r"pairs12.jsonl:1 has no (pos_scores|query_guide)"):
        trainer.data_collator([trainer.train_dataset[0]])


def test_a_window_can_be_used_twice(guide_folder, tmp_path):
    """Neither the model, nor the guide, nor the loss changes what it gets: the same window gives the same again."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12, negatives=2)
    data = with_fields(pairs, 12, lambda row: {"pos_scores": [0.9], "neg_scores": [0.5] * len(row["neg_passage"])})
    for option in ({"distillation": "kl"}, options("guided", guide_folder)):
        trainer = make_trainer(tmp_path, tmp_path / "out", pairs=data, dropout=0.0, group_size=3, **option)
        (window,) = list(trainer.get_train_dataloader())
        copies = {id(t): t.numpy().copy() for batch in window for t in tensors(batch)}
        found = []
        for _ in range(2):
            loss = trainer.training_step(trainer.model, window)
            found.append(
                (float(loss), [p.grad.numpy().copy() for p in trainer.model.parameters() if p.grad is not None])
            )
            trainer.model.clear_gradients()
        assert found[0][0] == found[1][0] and len(found[0][1]) > 10
        for a, b in zip(found[0][1], found[1][1], strict=True):
            np.testing.assert_array_equal(a, b)
        now = {id(t): t.numpy() for batch in window for t in tensors(batch)}
        assert now.keys() == copies.keys() and all((now[k] == copies[k]).all() for k in now)


def tensors(value):
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return [value]


def test_a_collator_that_knows_no_guide(guide_folder, tmp_path):
    trainer = make_trainer(
        tmp_path, tmp_path / "out", rows=12, objective="guided", guide_model_name_or_path=str(guide_folder)
    )
    trainer.data_collator.guide = None
    with pytest.raises(ValueError, match="no 'guide', which the objective needs"):
        trainer.train()


def test_the_options_name_a_guide_only_when_it_is_asked_for(guide_folder):
    from paddle_infcl.arguments import EmbeddingArgument

    assert Guide.from_arguments(EmbeddingArgument(guide_model_name_or_path=str(guide_folder))) is None
    guide = Guide.from_arguments(
        EmbeddingArgument(objective="guided", guide_model_name_or_path=str(guide_folder), guide_pooling="cls")
    )
    assert guide.encoder.pooling == "cls" and not guide.encoder.training


@pytest.mark.parametrize("kind", ["guided", "distilled"])
def test_a_process_without_rows_takes_part(kind, guide_folder, tmp_path):
    """Its window is empty: the loss is 0, with a graph, and the guide's and the teacher's parts have no rows."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 12, negatives=1)
    if kind == "guided":
        asked = options(kind, guide_folder)
    else:
        pairs = with_fields(pairs, 12, lambda row: {"pos_scores": [1.0], "neg_scores": [0.0]})
        asked = {"distillation": "kl"}
    trainer = make_trainer(tmp_path, tmp_path / "out", pairs=pairs, **asked)
    window = [trainer.data_collator([trainer.train_dataset[k] for k in range(4)])]
    assert float(trainer.training_step(trainer.model, window)) > 0
    trainer.model.clear_gradients()
    assert float(trainer.training_step(trainer.model, [])) == 0.0
    assert all(p.grad is None or not p.grad.numpy().any() for p in trainer.model.parameters())
