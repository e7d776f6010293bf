# SPDX-License-Identifier: Apache-2.0
"""Options that are numbers: tensors whose gradient would be lost, strings and NaN are refused by name."""

from __future__ import annotations

import math

import numpy as np
import paddle
import pytest

from paddle_infcl.functional import (
    linear_label_terms,
    linear_logprobs_of_labels,
    logprobs_of_labels,
    sequence_logprobs,
)
from paddle_infcl.losses import InfCLLoss


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
