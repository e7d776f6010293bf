# SPDX-License-Identifier: Apache-2.0
"""Times torch's ways to the log-probabilities of labels, on one CUDA GPU, beside tests/gpu/logprobs_gpu.py.

    python benchmarks/logprobs_peers.py             under torch; liger-kernel and cut-cross-entropy where installed

`given`: [32, 2048, 64000] float16 logits, sliced to 2047: log_softmax + gather on the slice, and trlx's variant, which
cuts after the gather. `linear`: [8192, 4096] x [128256, 4096] bfloat16, loss and both gradients: Liger's fused linear
cross-entropy, cut-cross-entropy, and the dense loss. `errors`: relative errors of the gradients against float64 at
[1024, 512] x [8192, 512]. Prints one JSON line per result.
"""

from __future__ import annotations

import gc
import json
import time

import numpy as np
import torch
import torch.nn.functional as F


def linear_peers() -> dict:
    """Functions of (hidden, weight, labels) that give the mean cross-entropy."""
    out = {"dense bf16": lambda h, w, y: F.cross_entropy(h @ w.t(), y)}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(h, w, y):
            result = LigerFusedLinearCrossEntropyFunction.apply(h, w, y)
            return result[0] if isinstance(result, tuple) else result

        out["liger"] = liger
    except ImportError as error:
        print("skip liger:", error)
    try:
        from cut_cross_entropy import linear_cross_entropy

        out["cut-cross-entropy"] = linear_cross_entropy
        out["cut-cross-entropy, no filter"] = lambda h, w, y: linear_cross_entropy(h, w, y, filter_eps=None)
    except ImportError as error:
        print("skip cut-cross-entropy:", error)
    return out


def measure(call) -> dict:
    """Median milliseconds of a call, and its peak beyond what was held before."""
    call()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - held
    times = []
    while len(times) < 5:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return {"ms": round(float(np.median(times)) * 1e3, 3), "mib": round(peak / 2**20, 1)}


def say(**row) -> None:
    print(json.dumps(row), flush=True)


def attempt(call, **names) -> None:
    try:
        say(**names, **measure(call))
    except Exception as error:
        say(**names, error=f"{type(error).__name__}: {error}"[:200])


def given() -> None:
    """The published case."""
    logits = torch.randn(32, 2048, 64000, device="cuda", dtype=torch.float16)
    labels = torch.randint(0, 64000, (32, 2047), device="cuda")

    def on_the_slice():
        return F.log_softmax(logits[:, :-1], dim=-1).gather(2, labels.unsqueeze(-1)).squeeze(-1)

    def after_the_gather():
        padded = F.pad(labels, (0, 1))
        return F.log_softmax(logits, dim=-1).gather(2, padded.unsqueeze(-1)).squeeze(-1)[:, :-1]

    with torch.no_grad():
        attempt(on_the_slice, given="log_softmax + gather on the slice")
        attempt(after_the_gather, given="log_softmax + gather, then cut")


def errors(peers: dict) -> None:
    """Relative errors of the gradients against float64."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    h = torch.randn(1024, 512, device="cuda", generator=generator).bfloat16()
    w = (torch.randn(8192, 512, device="cuda", generator=generator) * 3 * 512**-0.5).bfloat16()
    y = torch.randint(0, 8192, (1024,), device="cuda", generator=generator)

    def gradients(function, *tensors):
        leaves = [t.detach().requires_grad_() for t in tensors]
        loss = function(*leaves, y)
        loss.backward()
        return loss.item(), *(leaf.grad.double() for leaf in leaves)

    want = gradients(lambda h, w, y: F.cross_entropy(h @ w.t(), y), h.double(), w.double())
    for name, function in peers.items():
        try:
            got = gradients(function, h, w)
            relative = [((a - b).norm() / b.norm()).item() for a, b in zip(got[1:], want[1:], strict=True)]
            say(errors=name, loss=abs(got[0] - want[0]), dhidden=relative[0], dweight=relative[1])
        except Exception as error:
            say(errors=name, error=f"{type(error).__name__}: {error}"[:200])


def linear(peers: dict) -> None:
    """Loss and both gradients at a large language model's size."""
    h = torch.randn(8192, 4096, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(128256, 4096, device="cuda") * 4096**-0.5).bfloat16().requires_grad_()
    y = torch.randint(0, 128256, (8192,), device="cuda")
    for name, function in peers.items():

        def call(function=function):
            h.grad = w.grad = None
            function(h, w, y).backward()

        attempt(call, linear=name)


def main() -> None:
    say(gpu=torch.cuda.get_device_name(), torch=torch.__version__)
    peers = linear_peers()
    errors(peers)
    linear(peers)
    gc.collect()
    torch.cuda.empty_cache()
    given()


if __name__ == "__main__":
    main()
