# SPDX-License-Identifier: Apache-2.0
"""Launches kernels twice on a driver that only takes notes: the shortcut must hand over what Triton itself would.

A process of its own: the tests' process has Triton's interpreter on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle  # noqa: E402
from paddle_infcl_ops import dispatch, driver, tuning  # noqa: E402
from paddle_infcl_ops.launch import Similarity  # noqa: E402
from paddle_infcl_ops.rows import scale_kernel, sum_kernel  # noqa: E402
from paddle_infcl_ops.tiles import EXP  # noqa: E402
from paddle_infcl_ops.views import Rows, vectors  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver as config  # noqa: E402

started: list = []


class Driver:
    """As much of a driver as a launch asks for."""

    utils = SimpleNamespace(
        load_binary=lambda *args: (0, 0, 32, 0, 1024),
        get_device_properties=lambda index: {"max_shared_mem": 232448, "multiprocessor_count": 132},
    )

    def launcher_cls(self, source, metadata):
        def start(x, y, z, stream, function, packed, launch_metadata, enter, exit_, *args):
            started.append([x, y, z, stream, *map(plain, args)])

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
        return (x.base.data_ptr(), x.shape, x.strides, x.block_shape)
    return x.data_ptr() if hasattr(x, "data_ptr") else x


def check(launch_once) -> None:
    """First launch: Triton's way. Second: the shortcut. Both hand over the same."""
    started.clear()
    known = len(dispatch._compiled)
    launch_once()
    assert len(dispatch._compiled) == known + 1, "nothing was learned"
    launch_once()
    assert len(dispatch._compiled) == known + 1, "the second launch was not recognised"
    assert len(started) == 2 and started[0] == started[1], started


def main() -> None:
    config.set_active(Driver())
    tuning.device = lambda tensor: (90, 132)
    driver.launch = lambda kernel, grid, *args, **meta: driver._launch(None, kernel, grid, args, meta)
    dispatch._active = lambda place: (config.active, 0)
    dispatch._tested_version = lambda: True
    x, out = paddle.ones([1000]), paddle.empty([1000])
    check(lambda: dispatch.launch(scale_kernel, (4,), x, out, 2.0, 1000, BLOCK=256, num_warps=8))
    check(lambda: dispatch.launch(scale_kernel, (4,), None, out, 2.0, 1000, BLOCK=256, num_warps=8))
    check(lambda: dispatch.launch(scale_kernel, (4,), Rows(x, 1), out, out, 999, BLOCK=256, num_warps=8))
    check(lambda: dispatch.launch(sum_kernel, (1,), x, out, 1, 1.0, LARGEST=True, BLOCK=256))
    names = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
    q = paddle.zeros([256, 128]).astype("bfloat16")
    block = SimpleNamespace(left=q, right=q, own=paddle.arange(256), row_offset=0, **dict.fromkeys(names))
    s = Similarity(block)
    reference, part_sum, part_max = vectors([256, 2560, 2560], q)
    E = paddle.zeros([256, 256]).astype("bfloat16")
    ends = {"reference": reference, "part_sum": part_sum, "part_max": part_max, "part_stride": 256}
    check(lambda: s.launch(EXP, 50.0, (0, 256), (0, 256), kind="exp", out=E, **ends))
    print("the same")


if __name__ == "__main__":
    main()
