# SPDX-License-Identifier: Apache-2.0
"""Compiles, without a GPU, every kernel launch of the label log-probabilities.

    python tests/ops/compile_logprobs.py 90

See compile_all.py, whose ways it shares. A process of its own: the tests' process has Triton's interpreter on.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle  # noqa: E402
from paddle_infcl_ops import driver, gradients, launch, linear_logprobs, linear_plan, logprobs, tuning  # noqa: E402

from tests.ops import compile_all  # noqa: E402


def main() -> None:
    tuning.device = lambda tensor: (compile_all.ARCH, 132)
    for module in (driver, gradients, launch, linear_logprobs):
        module.launch = compile_all.compile_launch
    for dtype, V in (("float32", 33), ("float32", 6400), ("float16", 5003), ("bfloat16", 6400)):
        z = paddle.zeros([2, 4, V]).astype(dtype).detach()
        y = paddle.zeros([2, 3], dtype="int64")
        for logits, entropy, ignore in ((z, False, None), (z, True, -100), (z.transpose([1, 0, 2]), False, 0)):
            leaf = logits.detach()
            leaf.stop_gradient = False
            labels = y if logits is z else paddle.zeros([4, 2], dtype="int32")
            out = logprobs.logprobs_of_labels(leaf, labels, ignore_index=ignore, return_entropy=entropy)
            (out[0].sum() + out[1].sum() if entropy else out.sum()).backward()
        # A slice, whose gradient's rows lie differently to the aligned addresses.
        leaf = z[:, 1:].detach()
        leaf.stop_gradient = False
        logprobs.logprobs_of_labels(leaf, y).sum().backward()
    wide = paddle.zeros([7, 4, 2]).transpose([1, 2, 0])
    logprobs.logprobs_of_labels(wide, paddle.zeros([4, 2], dtype="int64"))
    # An uneven vocabulary has rows that no descriptor takes, and a small budget several pieces of rows and columns.
    linear_plan.FEWEST_ROWS = 128
    for dtype, V, D in (
        ("bfloat16", 1024, 512),
        ("bfloat16", 1024, 1024),
        ("float16", 1024, 512),
        ("float32", 1024, 512),
        ("bfloat16", 1003, 512),
    ):
        for transposed, with_bias, budget in (
            (False, False, None),
            (False, True, 1),
            (True, False, 1),
            (True, True, None),
        ):
            hidden, weight, bias = (
                paddle.zeros(shape).astype(dtype).detach()
                for shape in ([300, D], [D, V] if transposed else [V, D], [V])
            )
            hidden.stop_gradient = weight.stop_gradient = bias.stop_gradient = False
            labels = paddle.zeros([300], dtype="int64")
            out = linear_logprobs.linear_logprobs_of_labels(
                hidden, weight, labels, bias=bias if with_bias else None, transposed_weight=transposed,
                memory_budget=budget, terms=dtype == "float32",
            )  # fmt: skip
            (sum(x.sum() for x in out) if dtype == "float32" else out.sum()).backward()
    print(f"{len(compile_all.compiled)} launches compile for sm_{compile_all.ARCH}")


if __name__ == "__main__":
    compile_all.ARCH = int(sys.argv[1])
    main()
