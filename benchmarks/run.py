# SPDX-License-Identifier: Apache-2.0
"""Times the Triton loss on a GPU: loss and both gradients, through the operator that users call.

    python benchmarks/run.py gpu:0 --out results.json                 the table of the README
    python benchmarks/run.py gpu:0 --cases "8k,32k, ids" --repeat 5

Every case prints one JSON line: ms (median), tflops (6BND / time for every block; 2BND for a value alone), mib (memory
beyond the inputs, gradients included; only of the first case of a process, memory that was held before is not seen),
and for objectives the ratio to their plain counterpart, if that was among the cases before. Objectives are timed as
their lists of blocks (`groups.py`), the debiased loss as its two sweeps over them, own terms not included.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402
from paddle_infcl_ops import driver  # noqa: E402

from benchmarks.cases import CASES, TEMPERATURE, Case, report  # noqa: E402
from benchmarks.groups import groups_of, rows_of  # noqa: E402
from benchmarks.vectors import unit_vectors  # noqa: E402


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


def two_sweeps(one, scale: float, weights: paddle.Tensor) -> paddle.Tensor:
    """What the debiased loss asks of the operators: log-sum-exps, then gradients weighted by row."""
    return ops.block_grads(one, scale, ops.block_lse(one, scale), weights)[2]


def run(case: Case, repeat: int) -> dict:
    """One row of results."""
    q = unit_vectors(case.B, case.D, case.dtype, 1)
    p = unit_vectors(case.N, case.D, case.dtype, 2, near=(case.B, 1))
    q.stop_gradient = p.stop_gradient = case.kind == "lse"
    groups = groups_of(case, q, p, lambda rows, seed: unit_vectors(rows, 384, case.dtype, seed))
    weights = rows_of(1 / case.B, case.B)
    one = paddle.to_tensor(1.0)  # the incoming gradient: making one waits for the device on a custom device
    before = free_bytes()

    def once():
        if case.kind == "debiased":
            return two_sweeps(groups[0][0], 1 / TEMPERATURE, weights)
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
        "mib": round(used / 2**20, 1), "loss": float(loss.numpy().ravel()[0]),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device")
    parser.add_argument("--cases", default=";".join(CASES), help="names of cases.py, separated by semicolons")
    parser.add_argument("--repeat", type=int, default=0, help="repetitions; 0: as many as take about half a second")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file as well")
    parser.add_argument("--budget", type=int, help="memory_budget in MiB, instead of the cases'")
    arguments = parser.parse_args()
    use(arguments.device)
    ms: dict[str, float] = {}
    for name in arguments.cases.split(";"):
        case = CASES[name]
        if arguments.budget:
            case = replace(case, budget=arguments.budget << 20)
        try:
            result = run(case, arguments.repeat)
            ms[name] = result["ms"]
            if case.than in ms:
                result |= {"than": case.than, "ratio": round(ms[name] / ms[case.than], 2)}
        except Exception as error:
            result = {"case": name, "error": f"{type(error).__name__}: {error}"[:300]}
        report(result, arguments.out)


if __name__ == "__main__":
    main()
