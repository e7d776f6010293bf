# SPDX-License-Identifier: Apache-2.0
"""Times published contrastive losses on the same GPU and sizes as run.py: loss and both gradients, bf16.

    python benchmarks/peers.py --cases "8k;32k" --out results.json

They run under torch, which is no dependency of this project; a peer that is not installed is left out. Peers: dense
(cross entropy over the whole matrix), Inf-CL (inf-cl), memory-efficient InfoNCE (memeff), Liger's fused linear cross
entropy (liger-kernel), cut cross entropy (cut-cross-entropy). One JSON line per peer and case, as run.py prints them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.cases import CASES, TEMPERATURE, Case, report

SCALE = 1 / TEMPERATURE
LIMITS = {"dense": 2**31, "inf_cl": 2**31, "memeff": 2**31}  # of B * N: memory, and patience


def losses() -> dict:
    """Loss functions (q, p, labels) by name."""
    found = {"dense": lambda q, p, labels: F.cross_entropy((q @ p.T).float() * SCALE, labels)}
    try:
        from inf_cl.flash import cal_flash_loss

        scale = torch.tensor(SCALE, device="cuda")
        found["inf_cl"] = lambda q, p, labels: cal_flash_loss(
            q, p, labels, scale, head_dim=256 if q.shape[1] % 256 == 0 else 64
        ).mean()
    except ImportError:
        pass
    try:
        from memeff import MemoryEfficientQwen3Loss

        module = MemoryEfficientQwen3Loss(temperature=TEMPERATURE, margin=4.0, normalized_inputs=True, stable=False)
        found["memeff"] = lambda q, p, labels: module(q, p)
    except ImportError:
        pass
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger(q, p, labels):
            out = Liger.apply(q * SCALE, p, labels)
            return out[0] if isinstance(out, tuple) else out

        found["liger"] = liger
    except ImportError:
        pass
    try:
        from cut_cross_entropy import linear_cross_entropy

        found["cce"] = lambda q, p, labels: linear_cross_entropy(q * SCALE, p, labels)
    except ImportError:
        pass
    return found


def vectors(case: Case):
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(case.B, case.D, device="cuda", generator=generator)
    p = torch.randn(case.N, case.D, device="cuda", generator=generator)
    p[:: case.N // case.B] += 0.12 * q
    return F.normalize(q, dim=-1).bfloat16().requires_grad_(), F.normalize(p, dim=-1).bfloat16().requires_grad_()


def run(case: Case, name: str, loss) -> dict:
    q, p = vectors(case)
    labels = torch.arange(case.B, device="cuda") * (case.N // case.B)

    def once():
        q.grad = p.grad = None
        loss(q, p, labels).backward()

    once()
    torch.cuda.synchronize()
    q.grad = p.grad = None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    while len(times) < 3 or (sum(times) < 0.5 and len(times) < 30):
        start = time.perf_counter()
        once()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        if times[-1] > 3:
            break
    middle = sorted(times)[len(times) // 2]
    return {
        "case": case.name, "peer": name, "B": case.B, "N": case.N, "D": case.D, "ms": round(middle * 1e3, 3),
        "tflops": round(case.flop / middle / 1e12, 1),
        "mib": round((torch.cuda.max_memory_allocated() - before) / 2**20, 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default="8k;32k;128k", help="names of cases.py, separated by semicolons")
    parser.add_argument("--peers", help="names, separated by semicolons; default: all that are installed")
    parser.add_argument("--out", type=Path, help="JSON lines are appended to this file as well")
    arguments = parser.parse_args()
    wanted = None if arguments.peers is None else arguments.peers.split(";")
    for case in (CASES[name] for name in arguments.cases.split(";")):
        for name, loss in losses().items():
            if case.B * case.N > LIMITS.get(name, float("inf")) or (name == "memeff" and case.B != case.N):
                continue
            if wanted is not None and name not in wanted:
                continue
            try:
                result = run(case, name, loss)
            except Exception as error:
                result = {"case": case.name, "peer": name, "error": f"{type(error).__name__}: {error}"[:200]}
            torch.cuda.empty_cache()
            report(result, arguments.out)


if __name__ == "__main__":
    main()
