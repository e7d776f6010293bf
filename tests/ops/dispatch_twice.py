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
from paddle_infcl_ops import dispatch  # noqa: E402
from paddle_infcl_ops.launch import Similarity  # noqa: E402
from paddle_infcl_ops.rows import scale_kernel, sum_kernel  # noqa: E402
from paddle_infcl_ops.tiles import EXP  # noqa: E402
from paddle_infcl_ops.views import Rows, vectors  # noqa: E402

from tests.ops.note_taker import install, started  # noqa: E402


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
    install()
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
