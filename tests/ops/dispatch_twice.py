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
from paddle_infcl_ops import dispatch, tuning  # noqa: E402
from paddle_infcl_ops.launch import Similarity, product  # noqa: E402
from paddle_infcl_ops.rows import scale_kernel, sum_kernel  # noqa: E402
from paddle_infcl_ops.tiles import EXP  # noqa: E402
from paddle_infcl_ops.views import Rows, vectors  # noqa: E402

from tests.ops.note_taker import install, started  # noqa: E402


def check(launch_once, known: bool = False) -> None:
    """First launch: Triton's way, unless it is known. Second: the shortcut. Both hand over the same."""
    started.clear()
    after = len(dispatch._compiled) + (not known)
    launch_once()
    assert len(dispatch._compiled) == after, "nothing was learned"
    launch_once()
    assert len(dispatch._compiled) == after, "the second launch was not recognised"
    assert len(started) == 2 and started[0] == started[1], started


def kernels() -> set[str]:
    return {note[4] for note in started}


def hopper(block, E, ends, number) -> None:
    """The hand-scheduled kernels, and where they are not taken."""
    s = Similarity(block)
    for scale in (50.0, number):
        check(lambda scale=scale: s.launch(EXP, scale, (0, 256), (0, 256), kind="exp", out=E, **ends))
        assert kernels() == {"exp_kernel"}
        # Blocks of A, B and E: whole tiles of a warpgroup, E's in two halves.
        assert [x[3] for x in started[0][5:8]] == [(128, 64), (128, 64), (128, 64)]
    assert s.tile("exp").BN == 128
    # A block without own columns leaves the row itself out, if it says which column that is.
    itself = paddle.arange(256)
    of_itself = Similarity(SimpleNamespace(**vars(block) | {"own": None, "self_column": itself}))
    check(lambda: of_itself.launch(EXP, 50.0, (0, 256), (0, 256), kind="exp", out=E, **ends), known=True)
    assert kernels() == {"exp_kernel"} and itself.data_ptr() in started[0]
    # Documents against queries leave nothing out.
    nothing = Similarity(SimpleNamespace(**vars(block) | {"own": None}))
    check(lambda: nothing.launch(EXP, 50.0, (0, 256), (0, 256), kind="exp", out=E, **ends))
    assert kernels() == {"exp_kernel"}
    # Other rows: the same kernel, whatever their number and alignment.
    started.clear()
    known = len(dispatch._compiled)
    for _ in range(2):
        s.launch(EXP, 50.0, (128, 255), (0, 256), kind="exp", out=E, **ends | {"part_stride": 128})
    assert len(dispatch._compiled) == known + 1 and len(started) == 2 and started[0] == started[1]
    assert started[0][5][:2] == (block.left.data_ptr() + 128 * 256, (127, 128))

    sums = paddle.zeros([512, 128])
    like = {"M": 256, "N": 128, "K": 256, "transposed": True}
    for kind, transposed, splits in (("right", True, 1), ("left", False, 1), ("left", False, 2)):
        for alpha in (1.0, 2.0, number):
            for accumulate in (False, True):
                one = {**like, "accumulate": accumulate, "transposed": transposed, "splits": splits}
                check(lambda kind=kind, alpha=alpha, one=one: product(kind, s, E, s.left, sums, alpha, **one))
                assert kernels() == {"matmul_kernel"}

    # The repair, pieces of the columns, rules, and other dtypes: the general kernels.
    flags = paddle.zeros([16], dtype="int32")
    check(lambda: s.launch(EXP, 50.0, (0, 256), (0, 256), kind="exp", out=E, flags=flags, **ends))
    assert kernels() == {"similarity_kernel"}
    started.clear()
    s.launch(EXP, 50.0, (0, 256), (0, 128), kind="exp", out=E, **ends)
    assert kernels() == {"similarity_kernel"}
    row = paddle.zeros([256])
    for rule in (
        {"limit": row},
        {"self_column": block.own},
        {"owner_rule": "only", "owner": block.own},
    ):
        assert not Similarity(SimpleNamespace(**vars(block) | rule)).hopper, rule
    for dtype in ("float16", "float32"):
        x = block.left.astype(dtype)
        assert not Similarity(SimpleNamespace(**vars(block) | {"left": x, "right": x})).hopper
    check(lambda: product("right", s, E, s.left, block.left, 1.0, accumulate=True, **like))
    assert kernels() == {"product_kernel"}
    for arch in (80, 100):
        tuning.device = lambda tensor, arch=arch: (arch, 132)
        assert not Similarity(block).hopper


def main() -> None:
    install()
    x, out = paddle.ones([1000]), paddle.empty([1000])
    check(lambda: dispatch.launch(scale_kernel, (4,), x, out, 2.0, 1000, BLOCK=256, num_warps=8))
    check(lambda: dispatch.launch(scale_kernel, (4,), None, out, 2.0, 1000, BLOCK=256, num_warps=8))
    check(lambda: dispatch.launch(scale_kernel, (4,), Rows(x, 1), out, out, 999, BLOCK=256, num_warps=8))
    # Triton compiles anew for one, for multiples of 16, and for either beyond 32 bits.
    for n in (1, 16, 2**31, 2**31 + 1):
        check(lambda n=n: dispatch.launch(scale_kernel, (4,), x, x, 2.0, n, BLOCK=256, num_warps=8))
    check(lambda: dispatch.launch(sum_kernel, (1,), x, out, 1, 1.0, LARGEST=True, BLOCK=256))
    names = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
    q = paddle.zeros([256, 128]).astype("bfloat16")
    block = SimpleNamespace(left=q, right=q, own=paddle.arange(256), row_offset=0, **dict.fromkeys(names))
    reference, part_sum, part_max = vectors([256, 2560, 2560], q)
    E = paddle.zeros([256, 256]).astype("bfloat16")
    ends = {"reference": reference, "part_sum": part_sum, "part_max": part_max, "part_stride": 256}
    tuning.HOPPER = False
    check(lambda: Similarity(block).launch(EXP, 50.0, (0, 256), (0, 256), kind="exp", out=E, **ends))
    tuning.HOPPER = True
    hopper(block, E, ends, out)
    print("the same")


if __name__ == "__main__":
    main()
