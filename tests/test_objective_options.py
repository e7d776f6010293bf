# SPDX-License-Identifier: Apache-2.0
"""Options of objectives: refused before anything loads when they can't work together."""

from __future__ import annotations

import json

import pytest

from paddle_infcl import objective_options, objectives
from paddle_infcl.arguments import ConfigError, EmbeddingArgument, parse_config
from paddle_infcl.functional import distillation, guided, ranking
from paddle_infcl.pooling import POOLINGS

DATA_GUIDE = {"objective": "guided", "guide_from_data": True}


@pytest.fixture
def minimal(tmp_path):
    """Options that work."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 8}))
    data = tmp_path / "train.jsonl"
    data.write_text('{"query": "a", "pos": ["b"]}\n')
    return {
        "model_name_or_path": str(tmp_path / "model"), "train_files": [str(data)], "device": "cpu",
        "output_dir": str(tmp_path / "out"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "wrong", "message"),
    [
        ({"objective": "triplet"}, "objective", "must be one of infonce, guided"),
        ({"objective": "guided"}, "guide_model_name_or_path", "is needed for objective: guided"),
        (
            {"objective": "guided", "guide_model_name_or_path": "bert", "guide_from_data": True},
            "guide_from_data",
            "take one of the two",
        ),
        ({"objective": "guided", "guide_model_name_or_path": "./no"}, "guide_model_name_or_path", "no such folder"),
        ({"guide_margin": 0.1}, "guide_margin", "has no effect without objective: guided"),
        ({**DATA_GUIDE, "guide_margin_strategy": "both"}, "guide_margin_strategy", "absolute, relative"),
        ({**DATA_GUIDE, "guide_query_template": "q"}, "guide_query_template", "{text}"),
        ({"objective": "ranking", "ranking_directions": ["up"]}, "ranking_directions", "each once"),
        ({"objective": "ranking", "ranking_directions": ["doc_to_doc"]}, "ranking_directions", "lacks query_to_doc"),
        (
            {"objective": "ranking", "ranking_partition": "per_direction",
             "ranking_directions": ["query_to_doc", "doc_to_doc"]},
            "ranking_partition",
            "hold no positive",
        ),
        ({"objective": "ranking", "hardness_mode": "hard"}, "hardness_mode", "must be one of hard_negatives"),
        ({"hardness_mode": "hard_negatives"}, "hardness_mode", "has no effect without objective: ranking"),
        ({"qwen3_doc_to_doc": False}, "qwen3_doc_to_doc", "has no effect without objective: qwen3"),
        ({"objective": "symmetric", "false_negative_margin": 0.1}, "false_negative_margin", "infonce and qwen3"),
        (
            {"false_negative_keep_own_negatives": True},
            "false_negative_keep_own_negatives",
            "without false_negative_margin",
        ),
        (
            {**DATA_GUIDE, "false_negative_keep_own_negatives": True},
            "false_negative_keep_own_negatives",
            "guide_keep_own_negatives",
        ),
        (
            {"objective": "ranking", "false_negative_keep_own_negatives": True},
            "false_negative_keep_own_negatives",
            "infonce and qwen3",
        ),
        ({"tau_plus": 1.0}, "tau_plus", "less than 1"),
        ({"label_smoothing": -0.1}, "label_smoothing", "less than 1"),
        ({"distillation": "mse"}, "distillation", "must be one of kl, margin_mse"),
        ({"distillation_weight": 2.0}, "distillation_weight", "has no effect without distillation"),
        ({"distillation": "kl", "contrastive_weight": -1}, "contrastive_weight", "must be 0 or more"),
    ],
)  # fmt: skip
def test_what_can_not_work_is_refused(minimal, options, wrong, message):
    with pytest.raises(ConfigError) as error:
        parse_config({**minimal, **options})
    assert [p.option for p in error.value.problems] == [wrong], str(error.value)
    assert message in error.value.problems[0].message


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "guided", "guide_from_data": True, "guide_margin": 0.1},
        {"objective": "ranking", "ranking_directions": ["query_to_doc", "doc_to_doc"], "label_smoothing": 0.1},
        {"objective": "symmetric", "tau_plus": 0.1},
        {"objective": "qwen3", "false_negative_keep_own_negatives": True},
        {"objective": "qwen3", "false_negative_margin": 0.1, "qwen3_doc_to_doc": False},
        {"distillation": "kl", "contrastive_weight": 0},
    ],
)
def test_what_works_is_built(minimal, options):
    config = parse_config({**minimal, **options})
    loss = objectives.build_objective(config.embedding)
    assert type(loss).__name__ == "ObjectiveLoss"


def test_choices_agree_with_those_who_use_them():
    assert objective_options.OBJECTIVES == objectives.OBJECTIVES
    assert objective_options.MARGIN_STRATEGIES == guided.MARGIN_STRATEGIES
    assert objective_options.DIRECTIONS == ranking.DIRECTIONS
    assert objective_options.PARTITIONS == ranking.PARTITIONS
    assert set(objective_options.HARDNESS_MODES) == set(ranking.HARDNESS_MODES)
    assert objective_options.DISTILLATIONS == distillation.DISTILLATIONS
    assert objective_options.POOLINGS == POOLINGS


def test_from_python_a_guide_may_come_later():
    assert EmbeddingArgument.of(EmbeddingArgument(objective="guided")).objective == "guided"
