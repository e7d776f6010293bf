# SPDX-License-Identifier: Apache-2.0
"""A driver for Triton that compiles for sm_90 and only takes notes of what is started: no GPU, no interpreter.

For processes of their own: the tests' process has Triton's interpreter on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

from paddle_infcl_ops import dispatch, driver, tuning  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver as config  # noqa: E402

#: One list per launch: grid, stream, kernel, arguments; tensors as addresses, descriptors as (address, layout).
started: list = []


class Driver:
    """As much of a driver as a launch asks for."""

    utils = SimpleNamespace(
        load_binary=lambda *args: (0, 0, 32, 0, 1024),
        get_device_properties=lambda index: {"max_shared_mem": 232448, "multiprocessor_count": 132},
    )

    def launcher_cls(self, source, metadata):
        def start(x, y, z, stream, function, packed, launch_metadata, enter, exit_, *args):
            started.append([x, y, z, stream, source.fn.__name__, *map(plain, args)])

        return start

    def get_current_device(self):
        return 0

    def get_current_stream(self, index):
        return 17

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def plain(x):
    """An argument as its address and layout."""
    if hasattr(x, "block_shape"):
        layout = getattr(x, "layout", None)
        return (x.base.data_ptr(), tuple(x.shape), tuple(x.strides), tuple(x.block_shape), type(x).__module__, layout)
    return x.data_ptr() if hasattr(x, "data_ptr") else x


def install() -> None:
    """Every launch of this process goes to the notes."""
    config.set_active(Driver())
    tuning.device = lambda tensor: (90, 132)

    def ordinary(kernel, grid, *args, **meta):
        tape = getattr(driver.writing, "tape", None)
        if tape is not None:
            tape.abandon()
        driver._launch(None, kernel, grid, args, meta)

    driver.launch = ordinary
    dispatch.active_driver = lambda place: (config.active, 0)
    dispatch._tested_version = lambda: True
