# SPDX-License-Identifier: Apache-2.0
"""Compiles, without a GPU, every kernel launch of the Matryoshka loss.

    python tests/ops/compile_prefixes.py 90

See compile_all.py, whose ways it shares. A process of its own: the tests' process has Triton's interpreter on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle  # noqa: E402
from paddle_infcl_ops import contrastive, gradients, hopper, prefix_pass, prefixes, tuning  # noqa: E402

from tests.ops import compile_all  # noqa: E402

HAND = ("prefix_kernel", "matmul_kernel")
CASES = (
    # dtype, width, dims, rules: plain ones on either kind of tile for the products, then unaligned widths and fp32
    ("bfloat16", 1024, (128, 256, 512, 1024), ()),
    ("bfloat16", 768, (256, 512, 768), ("ids", "limit", "self_column")),
    ("bfloat16", 384, (96, 384), ()),
    ("bfloat16", 100, (33, 70), ("ids",)),
    ("bfloat16", 128, (33, 128), ()),  # rows for descriptors, but not the second segment's columns
    ("float32", 512, (128, 512), ()),
    # A guided loss of three blocks, whose sides are both each other's and their own; on pointers and in fp32 as well.
    ("bfloat16", 1024, (128, 256, 512, 1024), ("guide",)),
    ("bfloat16", 100, (33, 70), ("guide",)),
    ("float32", 512, (128, 512), ("guide",)),
)


def groups(q, p, index, rules):
    """One block with these rules, or a guided loss."""
    made = compile_all.block
    if "guide" in rules:
        seen, threshold = paddle.zeros([len(index), 64]).astype(q.dtype), paddle.zeros([len(index)])
        guide, keeping = (
            SimpleNamespace(left=seen, right=seen, threshold=threshold, keep_own=keep) for keep in (False, True)
        )
        return [
            [
                made(q, p, index, owner=index, guide=keeping),
                made(q, q, self_column=index, guide=guide),
                made(p, p, owner=index, owner_rule="only", guide=guide),
            ]
        ]
    fields = {"row_ids": index, "column_ids": index} if "ids" in rules else {}
    fields |= {"self_column": index} if "self_column" in rules else {}
    fields |= {"limit": paddle.zeros([len(index)])} if "limit" in rules else {}
    return [[made(q, p, index, **fields)]]


def vectors(rows: int, width: int, dtype: str):
    """Two tensors that want gradients."""
    made = [paddle.zeros([rows, width]).astype(dtype).detach() for _ in range(2)]
    for x in made:
        x.stop_gradient = False
    return made


def checked(kernel, grid, *args, **meta):
    """Compiles a launch, and looks at what no compiler says: a GPU refuses columns from anywhere in a row."""
    if meta.get("TMA") and "STARTS" in meta:
        size = args[1].base.element_size()
        assert all(start * size % 16 == 0 for start in meta["STARTS"]), meta
    compile_all.compile_launch(kernel, grid, *args, **meta)


def every_case(rows: int, index) -> None:
    for dtype, width, dims, rules in CASES:
        # Without a budget one chunk, with a small one several.
        size = 4 if dtype == "float32" else 2
        for budget in (None, 160 * (len(dims) * rows * (size + 1) + 4 * dims[-1])):
            q, p = vectors(rows, width, dtype)
            scale = paddle.to_tensor([50.0], stop_gradient=False)
            options = {"scale": scale, "margin": 0.1, "memory_budget": budget, "row_weights": 1.0}
            made = groups(q, p, index, rules)
            prefixes.prefix_info_nce(made, dims, [1.0] * len(dims), **options).backward()


def main() -> None:
    tuning.device = lambda tensor: (compile_all.ARCH, 132)
    for module in (contrastive, gradients, prefix_pass, prefixes):
        module.launch = checked
    prefixes.FEWEST_ROWS = 1
    rows = 384
    index = paddle.zeros([rows], dtype="int64")
    for tuning.HOPPER in (True, False):
        every_case(rows, index)
    made = groups(*vectors(rows, 512, "float32"), index, ())
    with paddle.no_grad():
        prefixes.prefix_info_nce(made, (128, 512), [1.0, 1.0], scale=50.0, row_weights=paddle.ones([rows]))
    # The hand-scheduled ones.
    by_hand = [sum(key.startswith(f"('{name}'") for key in compile_all.compiled) for name in HAND]
    assert all(by_hand) == (compile_all.ARCH == 90 and hopper.available()), by_hand
    print(f"{len(compile_all.compiled)} launches compile for sm_{compile_all.ARCH}")


if __name__ == "__main__":
    compile_all.ARCH = int(sys.argv[1])
    main()
