# SPDX-License-Identifier: Apache-2.0
"""Compiles, without a GPU, every kernel launch that the contrastive operators make.

    python tests/ops/compile_all.py 90

Runs the real launchers on CPU tensors as if they lay on a GPU of that architecture. `launch` compiles what it is asked
to run instead of running it, once for every signature. Prints a line per kernel with its resources. A process of its
own: the tests' process has Triton's interpreter on.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

assert not os.environ.get("TRITON_INTERPRET"), "kernels of the interpreter can't be compiled"
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle  # noqa: E402
import triton  # noqa: E402
from paddle_infcl_ops import contrastive, gradients, launch, one_pass, tuning, two_pass  # noqa: E402
from paddle_infcl_ops import hopper as hopper_module  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int64": "i64", "int32": "i32"}
# Shared memory that one program may have, bytes.
SHARED = {80: 163 * 1024, 90: 227 * 1024}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
MODULES = (contrastive, gradients, launch, one_pass, two_pass)
HAND = ("exp_kernel", "matmul_kernel")  # scheduled by hand, for sm_90
compiled: dict = {}


def type_of(x) -> str:
    return TYPES[str(x.dtype).split(".")[-1]]


def signature_of(kernel, args, meta):
    """(signature, constants, attributes) as Triton's own specialization would find them."""
    signature, constants, attributes = {}, {}, {}
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in meta.items() if k not in OPTIONS}
    assert set(given) == set(kernel.arg_names), set(given) ^ set(kernel.arg_names)
    for position, name in enumerate(kernel.arg_names):
        value, parameter = given[name], kernel.params[position]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[name], constants[(position,)] = "constexpr", value
        elif hasattr(value, "block_shape"):
            block = ",".join(map(str, value.block_shape))
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            signature[name] = f"tensordesc<{type_of(value.base)}[{block}]{layout}>"
        elif hasattr(value, "data_ptr"):
            signature[name] = "*" + type_of(value)
            if value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment:
                attributes[(position,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature, constants, attributes


def compile_launch(kernel, grid, *args, **meta):
    """Stands for `driver.launch`."""
    signature, constants, attributes = signature_of(kernel, args, meta)
    options = {k: meta[k] for k in OPTIONS if k in meta}
    key = str((kernel.__name__, signature, constants, attributes, options))
    if key in compiled:
        return
    source = source_class(kernel)(kernel, signature, constants, attributes)
    result = triton.compile(source, target=GPUTarget("cuda", ARCH, 32), options=options)
    compiled[key] = result
    shared = result.metadata.shared
    registers, stack = resources(result.asm["cubin"])
    shown = ("MODE", "TRANS_A", "TMA", "ACCUMULATE", "SCALED", "BM", "BN", "IDS")
    mode = {k: v for k, v in meta.items() if k in shown}
    used = f"registers {registers:3d} stack {stack:5d} shared {shared:6d}"
    print(f"{kernel.__name__:18s} {used} {options} {mode}", flush=True)
    assert shared <= SHARED[ARCH], f"{kernel.__name__} needs {shared} bytes of shared memory"


def source_class(kernel):
    if not getattr(kernel, "is_gluon", lambda: False)():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def resources(cubin: bytes) -> tuple[int, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (-1, -1)


def block(left, right, own=None, **fields):
    names = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
    return SimpleNamespace(left=left, right=right, own=own, row_offset=0, **{n: fields.get(n) for n in names})


def losses(dtype: str, width: int, rows: int):
    """The losses whose launches are compiled: the plain one for every width, every rule for one of them."""
    index = paddle.zeros([rows], dtype="int64")
    q, p = (paddle.zeros([rows, width]).astype(dtype).detach() for _ in range(2))
    q.stop_gradient = p.stop_gradient = False
    yield [[block(q, p, index)]]
    if (dtype, width) != ("bfloat16", 1024):
        return
    guide = SimpleNamespace(left=q.detach(), right=p.detach(), threshold=paddle.zeros([rows]), keep_own=True)
    hard = SimpleNamespace(strength=1.0, columns="others")
    ids, limit = paddle.zeros([rows, 2], dtype="int64"), paddle.zeros([rows])
    yield [[block(q, p, index, self_column=index, row_ids=ids, column_ids=ids)]]
    yield [[block(q, p, index), block(q, q, self_column=index)]]
    yield [[block(q, p, index, owner=index, owner_rule="only", limit=limit, guide=guide, hardness=hard)]]


def hopper(rows: int) -> None:
    """The hand-scheduled kernels, and the repair beside them: any width takes the same ones."""
    if ARCH != 90 or not hopper_module.available():
        return

    def wanted_only(kernel, grid, *args, **meta):
        if "maxnreg" in meta or meta.get("MODE") == launch.EXP:
            compile_launch(kernel, grid, *args, **meta)

    for module in MODULES:
        module.launch = wanted_only
    tuning.HOPPER, before = True, len(compiled)
    for width in (104, 384, 1024, 1536):
        groups = next(losses("bfloat16", width, rows))
        for scale in (50.0, paddle.to_tensor([50.0])):
            # One chunk, several, and two passes, whose products are scaled.
            for budget in (None, 128 * 3 * (rows * 2 + 4 * width), 1):
                contrastive.info_nce(groups, scale=scale, row_weights=1.0, memory_budget=budget).backward()
    # Every entry counts where documents meet queries.
    q, p = groups[0][0].left, groups[0][0].right
    contrastive.info_nce([[*groups[0], block(p, q)]], scale=50.0, row_weights=1.0).backward()
    taken = [[key for key in list(compiled)[before:] if key.startswith(f"('{name}'")] for name in HAND]
    # exp: two kinds of scale, and no own column; matmul: A and A^T, alpha 1, a number and a pointer, stored and added
    # (a first product that is alone in its sums is never added).
    assert [len(x) for x in taken] == [3, 11], taken


def main() -> None:
    tuning.device = lambda tensor: (ARCH, 132)
    for module in MODULES:
        module.launch = compile_launch
    one_pass.FEWEST_ROWS = 1
    two_pass._ROWS = 128
    rows = 384
    tuning.HOPPER = False
    for dtype, width in (("bfloat16", 33), ("bfloat16", 384), ("bfloat16", 1024), ("float16", 1024), ("float32", 512)):
        for groups in losses(dtype, width, rows):
            # Without a budget one chunk, with a small one several: dright is stored once or added up.
            for small in (None, 128 * 3 * (rows * (4 if dtype == "float32" else 2) + 4 * width)):
                scale = paddle.to_tensor([50.0])
                scale.stop_gradient = False
                contrastive.info_nce(groups, scale=scale, row_weights=1.0, memory_budget=small).backward()
    with paddle.no_grad():
        q = paddle.zeros([rows, 768]).astype("bfloat16")
        plain = block(q, q, paddle.zeros([rows], dtype="int64"))
        contrastive.info_nce([[plain]], scale=50.0, row_weights=paddle.ones([rows]))
    hopper(rows)
    print(f"{len(compiled)} launches compile for sm_{ARCH}")


if __name__ == "__main__":
    ARCH = int(sys.argv[1])
    main()
