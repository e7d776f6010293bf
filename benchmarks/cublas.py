# SPDX-License-Identifier: Apache-2.0
"""The three matrix products of a loss alone, with cuBLAS under torch: what the GPU sustains at its power limit.

    python benchmarks/cublas.py                         rows x columns x width as in the README beside this
    python benchmarks/cublas.py 4096x131072x768

Prints TFLOP/s of each product and of the three in turn, back to back for --seconds after a warm-up.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F


def tflops(run, flop: float, seconds: float) -> float:
    """Of a function that does `flop` operations."""
    start = time.perf_counter()
    while time.perf_counter() - start < 0.2:
        run()
        torch.cuda.synchronize()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        count += 10
    return count * flop / (time.perf_counter() - start) / 1e12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shapes", nargs="*", default=["1920x131072x1024", "896x131072x384"], help="rows x columns x D")
    parser.add_argument("--seconds", type=float, default=0.6)
    arguments = parser.parse_args()
    for shape in arguments.shapes:
        R, N, D = map(int, shape.split("x"))
        left, right = (F.normalize(torch.randn(n, D, device="cuda"), dim=-1).bfloat16() for n in (R, N))
        E = torch.exp(50 * (left @ right.T).float() - 7).bfloat16()
        out, dleft, dright = torch.empty_like(E), torch.empty_like(left), torch.empty_like(right)
        products = {
            "left @ right^T": lambda a=left, b=right, o=out: torch.matmul(a, b.T, out=o),
            "E @ right": lambda a=E, b=right, o=dleft: torch.matmul(a, b, out=o),
            "E^T @ left": lambda a=E, b=left, o=dright: torch.matmul(a.T, b, out=o),
        }
        flop = 2.0 * R * N * D
        for name, run in products.items():
            print(f"{shape} {name}: {tflops(run, flop, arguments.seconds):.0f} TFLOP/s", flush=True)
        together = tflops(lambda p=products: [run() for run in p.values()], 3 * flop, arguments.seconds)
        print(f"{shape} in turn: {together:.0f} TFLOP/s", flush=True)


if __name__ == "__main__":
    main()
