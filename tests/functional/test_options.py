# SPDX-License-Identifier: Apache-2.0
"""Options that are numbers: tensors whose gradient would be lost, strings and NaN are refused by name."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import (
    Matryoshka,
    guided_inf_cl_loss,
    inf_cl_loss,
    linear_label_terms,
    linear_logprobs_of_labels,
    logprobs_of_labels,
    qwen3_loss,
    sequence_logprobs,
)
from paddle_infcl.functional.row_losses import Debiased
from paddle_infcl.losses import InfCLLoss
from paddle_infcl.objectives import GuidedObjective, InfoNCEObjective, ObjectiveLoss, Qwen3Objective


def labels():
    return paddle.zeros([2, 3], dtype="int64")


OF_LABELS = {
    "logits": lambda t, **o: logprobs_of_labels(paddle.ones([2, 3, 5]), labels(), temperature=t, **o),
    "linear": lambda t, **o: linear_logprobs_of_labels(
        paddle.ones([2, 3, 4]), paddle.ones([5, 4]), labels(), temperature=t, **o
    ),
    "terms": lambda t, **o: linear_label_terms(
        paddle.ones([2, 3, 4]), paddle.ones([5, 4]), labels(), temperature=t, **o
    ),
    "sequences": lambda t, **o: sequence_logprobs(
        paddle.ones([2, 3, 5]), labels(), paddle.ones([2, 3]), temperature=t, **o
    ),
}


@pytest.mark.parametrize("backend", ["paddle", "triton"])
@pytest.mark.parametrize("name", OF_LABELS)
def test_a_temperature_that_would_lose_its_gradient_is_refused(name, backend):
    for shape in ([], [1]):
        t = paddle.full(shape, 0.5)
        t.stop_gradient = False
        learnt = "hidden states and the bias" if name in ("linear", "terms") else "logits"
        with pytest.raises(ValueError, match=f"temperature: a number is needed, got a tensor.* divide the {learnt}"):
            OF_LABELS[name](t, backend=backend)


@pytest.mark.parametrize("temperature", ["0.5", None, True, math.nan, math.inf, 0.0, -1])
@pytest.mark.parametrize("name", OF_LABELS)
def test_a_temperature_that_is_none(name, temperature):
    with pytest.raises(ValueError, match=f"temperature: must be positive and finite, got {temperature!r}"):
        OF_LABELS[name](temperature, backend="paddle")


@pytest.mark.parametrize("temperature", [2, 2.0, np.float32(2.0), np.int64(2)])
def test_numbers_of_all_kinds(temperature):
    for call in OF_LABELS.values():
        got, want = call(temperature, backend="paddle"), call(2.0, backend="paddle")
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_the_layers_temperature():
    with pytest.raises(ValueError, match=r"temperature: must be positive and finite, got '0\.02'"):
        InfCLLoss("0.02")
    with pytest.raises(ValueError, match=r"temperature: a number is needed, got a tensor.*learnable_temperature"):
        InfCLLoss(paddle.ones([1]), learnable_temperature=True)


def columns():
    return [paddle.eye(3), paddle.eye(3)]


MARGINS = {
    "inf_cl_loss": lambda m: inf_cl_loss(*columns(), margin=m, backend="paddle"),
    "qwen3_loss": lambda m: qwen3_loss(columns(), margin=m, backend="paddle"),
    "guided, absolute": lambda m: guided_inf_cl_loss(columns(), columns(), margin=m, backend="paddle"),
    "guided, relative": lambda m: guided_inf_cl_loss(
        columns(), columns(), margin=m, margin_strategy="relative", backend="paddle"
    ),
    "Matryoshka": lambda m: Matryoshka([2], margin=m),
    "InfCLLoss": lambda m: InfCLLoss(margin=m),
    "InfoNCEObjective": lambda m: ObjectiveLoss(InfoNCEObjective(m)),
    "Qwen3Objective": lambda m: ObjectiveLoss(Qwen3Objective(m)),
    "GuidedObjective": lambda m: GuidedObjective(guide_margin=m),
}


@pytest.mark.parametrize("margin", ["x", "0.1", math.nan, math.inf, -math.inf, True, [0.1], paddle.zeros([3])])
@pytest.mark.parametrize("name", MARGINS)
def test_a_margin_that_is_no_number(name, margin):
    """Text would fail somewhere or other, and with NaN or infinity nothing is ever above the threshold."""
    with pytest.raises(ValueError, match="margin: a finite number is needed"):
        MARGINS[name](margin)


@pytest.mark.parametrize("margin", [0, -0.5, np.float32(0.1)])
@pytest.mark.parametrize("name", MARGINS)
def test_margins(name, margin):
    MARGINS[name](margin)


@pytest.mark.parametrize("tau_plus", [1.0, -0.1, math.nan, "0.1", True])
def test_a_share_that_is_none(tau_plus):
    for make in (Debiased, lambda t: ObjectiveLoss(InfoNCEObjective(), tau_plus=t)):
        with pytest.raises(ValueError, match="tau_plus: must be between 0 and 1"):
            make(tau_plus)
    for call in (
        lambda e: inf_cl_loss(*columns(), label_smoothing=e),
        lambda e: ObjectiveLoss(InfoNCEObjective(), label_smoothing=e),
    ):
        with pytest.raises(ValueError, match="label_smoothing: must be between 0 and 1"):
            call(tau_plus)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("wrong", [2.0, 1.0, -0.5, math.nan])
def test_a_share_per_row_is_checked_on_a_cpu(wrong, dtype):
    tau_plus = paddle.to_tensor([0.0, 0.5, wrong]).astype(dtype)
    with pytest.raises(ValueError, match=r"tau_plus\[2\]: must be between 0 and 1"):
        inf_cl_loss(*columns(), tau_plus=tau_plus)
    right = paddle.to_tensor([0.0, 0.5, 0.25]).astype(dtype)
    assert np.isfinite(float(inf_cl_loss(*columns(), tau_plus=right, backend="paddle")))
