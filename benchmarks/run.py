# SPDX-License-Identifier: Apache-2.0
"""Times the Triton loss on a GPU: loss and both gradients, through the operator that users call.

    python benchmarks/run.py gpu:0 --out results.json                 the table of the README
    python benchmarks/run.py gpu:0 --cases "8k,32k, ids" --repeat 5

Every case prints one JSON line: ms (median), tflops (6BND / time; 2BND for a value alone), mib (memory beyond the
inputs, gradients included; only of the first case of a process, memory that was held before is not seen).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402
from paddle_infcl_ops import driver  # noqa: E402

from benchmarks.cases import CASES, TEMPERATURE, Case  # noqa: E402


def use(device: str) -> None:
    """Makes `device` the current one; custom devices are declared CUDA-like."""
    kind = device.partition(":")[0]
    driver.device_types.add(kind)
    paddle.set_device(device)


def free_bytes() -> int:
    """Free memory of the current CUDA device."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    if ctypes.CDLL("libcuda.so.1").cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
        raise RuntimeError("cuMemGetInfo fails: no CUDA context in this thread")
    return free.value


def wait(tensor: paddle.Tensor) -> None:
    """Until the device has computed `tensor`."""
    tensor.numpy()


def vectors(rows: int, width: int, dtype: str, seed: int, near: np.ndarray | None = None) -> paddle.Tensor:
    """[rows, width] unit vectors; near [n, width] are mixed into every (rows / n)-th one."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, width), dtype="float32")
    if near is not None:
        x[:: rows // len(near)] += 0.12 * near
    host = x
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    return paddle.to_tensor(x).astype(dtype) if dtype != "float32" else paddle.to_tensor(x), host


def block(left, right, own=None, **fields) -> SimpleNamespace:
    """A block as the operators take it."""
    names = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
    return SimpleNamespace(left=left, right=right, own=own, row_offset=0, **{n: fields.get(n) for n in names})


def groups_of(case: Case, q, p) -> list:
    """The blocks of a case."""
    B, N = case.B, case.N
    own = paddle.to_tensor(np.arange(B) * (N // B))
    if case.kind == "ids":
        generator = np.random.default_rng(7)
        ids = [paddle.to_tensor(generator.integers(0, 2**40, (n, 2))) for n in (B, N)]
        return [[block(q, p, own, row_ids=ids[0], column_ids=ids[1])]]
    if case.kind == "margin":
        return [[block(q, p, own, limit=paddle.to_tensor(np.full(B, 0.22, "float32")))]]
    if case.kind in ("blocks", "guide", "blocks guide"):
        itself, guide = paddle.to_tensor(np.arange(B)), lambda x, y: None
        if "guide" in case.kind:
            seen = {id(q): vectors(B, 384, case.dtype, 3)[0], id(p): vectors(N, 384, case.dtype, 4)[0]}
            threshold = paddle.to_tensor(np.full(B, 0.3, "float32"))

            def guide(x, y):
                return SimpleNamespace(left=seen[id(x)], right=seen[id(y)], threshold=threshold, keep_own=False)

        first = block(q, p, own, guide=guide(q, p))
        if case.kind == "guide":
            return [[first]]
        return [[first, block(q, q, self_column=itself, guide=guide(q, q)),
                 block(p, p, self_column=itself, guide=guide(p, p))]]  # fmt: skip
    return [[block(q, p, own)]]


def run(case: Case, repeat: int) -> dict:
    """One row of results."""
    q, host = vectors(case.B, case.D, case.dtype, 1)
    p, _ = vectors(case.N, case.D, case.dtype, 2, near=host)
    del host
    q.stop_gradient = p.stop_gradient = case.kind == "lse"
    groups = groups_of(case, q, p)
    one = paddle.to_tensor(1.0)  # the incoming gradient: making one waits for the device on a custom device
    before = free_bytes()

    def once():
        loss = ops.info_nce(groups, scale=1 / TEMPERATURE, row_weights=1 / case.B, memory_budget=case.budget)
        if not loss.stop_gradient:
            loss.backward(one)
        return loss

    def clear():
        q.clear_gradient(False)
        p.clear_gradient(False)

    wait(once())
    used = before - free_bytes()
    clear()
    start = time.perf_counter()
    wait(once())
    rough = time.perf_counter() - start
    clear()
    times = []
    rounds = repeat or max(3, min(30, int(0.6 / rough)))
    inner = max(1, min(20, int(0.02 / rough)))
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(inner):
            loss = once()
            clear()
        wait(loss)
        times.append((time.perf_counter() - start) / inner)
    middle = float(np.median(times))
    return {
        "case": case.name, "B": case.B, "N": case.N, "D": case.D, "kind": case.kind, "dtype": case.dtype,
        "ms": round(middle * 1e3, 3), "fastest": round(min(times) * 1e3, 3),
        "tflops": round(case.flop / middle / 1e12, 1),
        "mib": round(used / 2**20, 1), "loss": float(loss),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device")
    parser.add_argument("--cases", default=";".join(CASES), help="names of cases.py, separated by semicolons")
    parser.add_argument("--repeat", type=int, default=0, help="repetitions; 0: as many as take about half a second")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file as well")
    arguments = parser.parse_args()
    use(arguments.device)
    for name in arguments.cases.split(";"):
        try:
            line = json.dumps(run(CASES[name], arguments.repeat))
        except Exception as error:
            line = json.dumps({"case": name, "error": f"{type(error).__name__}: {error}"[:300]})
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
