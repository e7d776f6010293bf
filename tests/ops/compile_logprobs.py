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
from paddle_infcl_ops import (  # noqa: E402
    chunked_logprobs,
    driver,
    gradients,
    launch,
    linear_logprobs,
    logprobs,
    one_pass,
    tuning,
    two_pass,
)

from tests.ops import compile_all  # noqa: E402


def main() -> None:
    tuning.device = lambda tensor: (compile_all.ARCH, 132)
    for module in (chunked_logprobs, driver, gradients, launch, linear_logprobs, one_pass, two_pass):
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
    wide = paddle.zeros([7, 4, 2]).transpose([1, 2, 0])
    logprobs.logprobs_of_labels(wide, paddle.zeros([4, 2], dtype="int64"))
    # Most of their launches are the contrastive loss's, which compile_all.py takes in every dtype.
    for terms in (False, True):
        hidden, weight = (paddle.zeros([n, 512]).astype("bfloat16").detach() for n in (256, 1024))
        hidden.stop_gradient = weight.stop_gradient = False
        labels = paddle.zeros([256], dtype="int64")
        out = linear_logprobs.linear_logprobs_of_labels(hidden, weight, labels, terms=terms)
        (sum(x.sum() for x in out) if terms else out.sum()).backward()
    # Not in bfloat16, whose products a CPU lacks.
    hidden, weight, bias = (paddle.zeros(shape) for shape in ([256, 512], [512, 1024], [1024]))
    hidden.stop_gradient = weight.stop_gradient = bias.stop_gradient = False
    labels = paddle.zeros([256], dtype="int64")
    out = linear_logprobs.linear_logprobs_of_labels(hidden, weight, labels, bias=bias, transposed_weight=True)
    out.sum().backward()
    print(f"{len(compile_all.compiled)} launches compile for sm_{compile_all.ARCH}")


if __name__ == "__main__":
    compile_all.ARCH = int(sys.argv[1])
    main()
