# SPDX-License-Identifier: Apache-2.0
"""The guard around the Triton package: one warning with the true cause, or an error with the original as its cause."""

from __future__ import annotations

import logging
import sys
import types

import numpy as np
import paddle
import pytest

from paddle_infcl import kernels
from paddle_infcl.functional import inf_cl_loss
from paddle_infcl.log import logger


@pytest.fixture
def fake_ops(monkeypatch):
    """Puts an object in the place of the ops package; None makes its import fail."""

    def put(module):
        kernels.load_ops.cache_clear()
        monkeypatch.setitem(sys.modules, "paddle_infcl_ops", module)

    yield put
    kernels.load_ops.cache_clear()


@pytest.fixture
def said():
    """Messages of the package's logger."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def ops(availability=(True, "", None), can_run=(True, ""), **attributes):
    return types.SimpleNamespace(availability=lambda: availability, can_run=lambda tensor: can_run, **attributes)


def broken_import():
    class Broken(types.ModuleType):
        def __getattr__(self, name):
            raise OSError("libcuda.so.1: cannot open shared object file")

    return Broken("paddle_infcl_ops")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: None, "can't be used"),
        (broken_import, "libcuda.so.1"),
        (lambda: ops(availability=(False, "Triton 2.1 is too old, 3.3 is needed", ImportError("x"))), "Triton 2.1"),
        (lambda: ops(can_run=(False, "the tensors are on the CPU")), "the tensors are on the CPU"),
    ],
)
def test_auto_falls_back_with_one_warning_that_says_why(fake_ops, said, module, reason):
    fake_ops(module())
    q = paddle.to_tensor(np.eye(3, dtype="float32"))
    values = [float(inf_cl_loss(q, q, backend=backend)) for backend in ("auto", "auto", "paddle")]
    assert values[0] == values[1] == values[2]
    assert len(said) == 1
    assert reason in said[0] and "same gradients" in said[0]


def test_an_explicit_backend_that_cannot_run_raises_with_its_cause(fake_ops):
    cause = ImportError("no ptxas")
    fake_ops(ops(availability=(False, "no compiler", cause)))
    q = paddle.eye(2)
    with pytest.raises(kernels.BackendError, match="'triton' can't run: no compiler") as raised:
        inf_cl_loss(q, q, backend="triton")
    assert raised.value.__cause__ is cause
    assert kernels.triton_status() == (False, "no compiler", cause)


def test_triton_gets_the_blocks_where_it_runs(fake_ops):
    seen = {}

    def info_nce(groups, **options):
        seen.update(options, groups=groups)
        return paddle.zeros([])

    fake_ops(ops(info_nce=info_nce))
    q = paddle.eye(2)
    assert kernels.choose_backend("auto", q) == "triton"
    inf_cl_loss(q, q, temperature=0.5, memory_budget=77)
    assert float(seen["scale"]) == 2.0 and seen["row_weights"] == 0.5 and seen["memory_budget"] == 77
    assert seen["groups"][0][0].left is q
    assert kernels.triton_status(q)[0]


def test_float64_is_not_for_the_kernels(fake_ops, said):
    """Where they run, too: auto computes it in plain Paddle and says so."""
    ops = types.ModuleType("paddle_infcl_ops")
    ops.availability = lambda: (True, "", None)
    ops.can_run = lambda tensor: (True, "")
    fake_ops(ops)
    assert kernels.choose_backend("auto", paddle.zeros([1])) == "triton"
    assert kernels.choose_backend("auto", paddle.zeros([1], dtype="float64")) == "paddle"
    assert "the tensors are float64" in said[0]
