# SPDX-License-Identifier: Apache-2.0
"""Before anything imports Triton: its kernels run under the interpreter here, on CPU tensors."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from paddle_infcl import log


@pytest.fixture(autouse=True)
def _warnings_may_be_said_again():
    log.forget_warnings()
    log.logger.propagate = True  # to pytest's caplog
    yield
    log.logger.propagate = False
