# SPDX-License-Identifier: Apache-2.0
"""Label log-probabilities on a GPU: errors against float64, then times and memory.

    python tests/gpu/logprobs_gpu.py gpu:0                      everything, about two minutes
    python tests/gpu/logprobs_gpu.py gpu:0 --parts errors       errors | given | tiles | linear

`given` is [32, 2048, 64000] float16 logits, sliced to 2047 (9 GB, and as much again for the gradient); `linear` is
[8192, 4096] x [128256, 4096] in bfloat16, the case of benchmarks/logprobs_peers.py; `tiles` times other options.
Prints one JSON line per result; exits with 1 when an error is above its bound.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import paddle
import triton
import triton.language as tl
from paddle.base import core

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402
from paddle_infcl_ops import driver, logprobs  # noqa: E402

from benchmarks.groups import block  # noqa: E402
from benchmarks.run import use  # noqa: E402
from tests.functional.oracle_logprobs import label_logprobs, linear_label_logprobs  # noqa: E402

failed: list[str] = []
#: Logits, positions without a label, standard deviation.
SHAPES = (
    ((2, 7, 11), 1, 3.0),
    ((3, 65, 1031), 0, 3.0),
    ((4, 129, 50257), 1, 3.0),
    ((2, 5, 4096), 0, 3000.0),
    ((2, 3, 1), 0, 1.0),
    ((1, 2, 1000003), 1, 2.0),
)


@triton.jit
def normal_kernel(out, n, row0, seed, scale, shift, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.randn(seed + row0 + tl.program_id(0), column) * scale + shift
        tl.store(out + row * n + column, value.to(out.dtype.element_ty), mask=column < n)


def normal(shape, dtype, *, seed=0, scale=1.0, shift=0.0, row0=0):
    """Normal numbers, made on the device; row r depends on seed + row0 + r only."""
    out = paddle.empty(shape, dtype=dtype)
    rows = int(np.prod(shape[:-1]))
    driver.launch(normal_kernel, (rows,), out, shape[-1], row0, seed, scale, shift, BLOCK=1024)
    return out


def host(x) -> np.ndarray:
    return x.astype("float32").numpy().astype("float64")


def say(**row) -> None:
    print(json.dumps(row), flush=True)


def check(what: str, bound: float, **errors: float) -> None:
    if not max(errors.values()) <= bound:
        failed.append(what)
    say(check=what, bound=bound, ok=what not in failed, **{k: float(f"{v:.3g}") for k, v in errors.items()})


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def wait() -> None:
    """Until the device is done: a copy to the host comes after all that was launched before it."""
    paddle.zeros([1]).numpy()


def timed(call, repeat: int = 7) -> float:
    """Median seconds of a call, several in a row before the wait."""
    call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    inner = max(1, min(20, int(0.05 / (time.perf_counter() - start))))
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        for _ in range(inner):
            call()
        wait()
        times.append((time.perf_counter() - start) / inner)
    return float(np.median(times))


def cost(call, results: int = 0) -> float:
    """MiB of device memory at the peak of a call, beyond what was held before and `results` bytes."""
    before = core.device_memory_stat_current_value("Allocated", 0)
    core.device_memory_stat_reset_peak_value("Allocated", 0)
    call()
    wait()
    return round((core.device_memory_stat_peak_value("Allocated", 0) - before - results) / 2**20, 1)


def errors() -> None:
    """Every dtype against float64, with odd sizes, masks and large logits."""
    rng = np.random.default_rng(0)
    for dtype, bound in (("float32", 3e-6), ("float16", 5e-4), ("bfloat16", 4e-3)):
        for shape, short, spread in SHAPES:
            z = normal(shape, dtype, scale=spread)
            labels = rng.integers(0, shape[-1], [*shape[:-2], shape[-2] - short])
            labels[0, 0] = -100
            g, h = (rng.standard_normal(labels.shape).astype("float32") for _ in range(2))
            z.stop_gradient = False
            out, entropy = ops.logprobs_of_labels(
                z, paddle.to_tensor(labels), ignore_index=-100, temperature=0.7, return_entropy=True
            )
            paddle.autograd.backward([out, entropy], [paddle.to_tensor(g), paddle.to_tensor(h)])
            want = label_logprobs(host(z.detach()), labels, temperature=0.7, ignore_index=-100, g=g, h=h)
            scale = max(1.0, float(np.abs(want[0]).max()))
            check(
                f"{dtype} {list(shape)} {spread:g}", bound,
                dz=float(np.abs(host(z.grad) - want[2]).max() / max(1.0, np.abs(want[2]).max())),
                logprobs=float(np.abs(out.numpy() - want[0]).max()) / scale,
                entropies=float(np.abs(entropy.numpy() - want[1]).max()) / 10,
            )  # fmt: skip
    z = rng.standard_normal((4, 5000)).astype("float32")
    z[:, :2000], z[0, 1:], z[1, 7] = -np.inf, -np.inf, -np.inf
    z[0, 0] = 3.0
    labels = np.array([0, 7, 3000, 4999])
    t = paddle.to_tensor(z)
    t.stop_gradient = False
    out = ops.logprobs_of_labels(t, paddle.to_tensor(labels))
    out.backward(paddle.ones([4]))
    want = label_logprobs(z, labels, g=np.ones(4))
    assert out.numpy()[0] == 0 and out.numpy()[1] == -np.inf, out.numpy()
    check("masked vocabulary", 3e-6, dz=float(np.abs(host(t.grad) - want[2]).max()),
          logprobs=float(np.abs(out.numpy()[2:] - want[0][2:]).max()))  # fmt: skip
    for dtype, bound in (("float32", 2e-5), ("float16", 1e-3), ("bfloat16", 3e-3)):
        hidden = normal([1000, 512], dtype, seed=1)
        weight = normal([8003, 512], dtype, seed=2, scale=512**-0.5 * 3)
        labels, g = rng.integers(0, 8003, 1000), rng.standard_normal(1000).astype("float32")
        hidden.stop_gradient = weight.stop_gradient = False
        out = ops.linear_logprobs_of_labels(hidden, weight, paddle.to_tensor(labels), memory_budget=4 << 20)
        out.backward(paddle.to_tensor(g))
        want = linear_label_logprobs(host(hidden.detach())[None], host(weight.detach()), labels[None], g=g[None])
        check(
            f"linear {dtype} [1000, 512] x [8003, 512]",
            bound,
            logprobs=float(np.abs(out.numpy() - want[0][0]).max()) / 10,
            dhidden=relative(host(hidden.grad), want[1][0]),
            dweight=relative(host(weight.grad), want[2]),
        )
        other = paddle.to_tensor(host(weight.detach()).T.astype("float32")).astype(dtype)
        for V in (8003, 8000):  # uneven rows, and rows that descriptors take
            bias = normal([V], dtype, seed=3)
            leaves = [hidden.detach(), paddle.to_tensor(host(other)[:, :V].astype("float32")).astype(dtype), bias]
            for leaf in leaves:
                leaf.stop_gradient = False
            y = labels % V
            out = ops.linear_logprobs_of_labels(
                *leaves[:2], paddle.to_tensor(y), bias=bias, transposed_weight=True, memory_budget=4 << 20
            )
            out.backward(paddle.to_tensor(g))
            exact = host(hidden.detach())[None], host(weight.detach())[:V]
            want = linear_label_logprobs(*exact, y[None], bias=host(bias.detach()), g=g[None])
            check(
                f"linear {dtype} [1000, 512] x [512, {V}] and a bias",
                bound,
                logprobs=float(np.abs(out.numpy() - want[0][0]).max()) / 10,
                dhidden=relative(host(leaves[0].grad), want[1][0]),
                dweight=relative(host(leaves[1].grad), want[2].T),
                dbias=relative(host(bias.grad), want[3]),
            )


def given_case():
    """Logits [32, 2048, 64000] float16, labels of 2047 positions, an incoming gradient."""
    z = normal([32, 2048, 64000], "float16", scale=2.0)
    labels = np.random.default_rng(0).integers(0, 64000, (32, 2047))
    return z, paddle.to_tensor(labels), paddle.to_tensor(np.full((32, 2047), 1e-3, "float32")), labels


def given() -> None:
    """The published case: forward, forward and backward, in place; and a row checked against float64."""
    z, y, g, labels = given_case()
    size = 32 * 2048 * 64000 * 2
    read = size * 2047 / 2048
    results = []

    def forward(entropy=False):
        results[:] = [ops.logprobs_of_labels(z, y, return_entropy=entropy)]

    def both(inplace):
        leaf = z.detach()
        leaf.stop_gradient = False
        ops.logprobs_of_labels(leaf, y, inplace_backward=inplace).backward(g)

    with paddle.no_grad():
        ops.logprobs_of_labels(normal([1, 2, 64000], "float16"), y[:1, :1])
        memory = cost(forward)
        row = host(normal([1, 64000], "float16", scale=2.0, row0=5 * 2048 + 77))
        want = label_logprobs(row, labels[5, 77:78])[0][0]
        check("given: one row", 3e-6, logprobs=abs(float(results[0].numpy()[5, 77]) - want) / 10)
        t = timed(forward)
        say(given="forward", ms=round(t * 1e3, 3), tb_per_s=round(read / t / 1e12, 2), mib=memory)
        t = timed(lambda: forward(entropy=True))
        say(given="forward with entropy", ms=round(t * 1e3, 3), tb_per_s=round(read / t / 1e12, 2))
    for inplace in (True, False):
        memory = cost(lambda inplace=inplace: both(inplace), 0 if inplace else size)
        t = timed(lambda inplace=inplace: both(inplace))
        say(given="forward and backward" + (", in place" if inplace else ""), ms=round(t * 1e3, 3),
            tb_per_s=round((2 * read + size) / t / 1e12, 2), mib=memory)  # fmt: skip


def tiles() -> None:
    """Other blocks and warps, for the record."""
    z, y, g, _ = given_case()
    usual = logprobs._tile

    def forward():
        with paddle.no_grad():
            ops.logprobs_of_labels(z, y)

    def both():
        leaf = z.detach()
        leaf.stop_gradient = False
        ops.logprobs_of_labels(leaf, y, inplace_backward=True).backward(g)

    for size, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 4), (8192, 8), (16384, 8), (16384, 16), (32768, 16)):
        logprobs._tile = lambda logits, b=size, w=warps: {"BLOCK": b, "num_warps": w}
        say(tile=[size, warps], forward_ms=round(timed(forward, 3) * 1e3, 3), both_ms=round(timed(both, 3) * 1e3, 3))
    logprobs._tile = usual
    z = normal([8, 2048, 50257], "bfloat16", scale=2.0)
    y = paddle.to_tensor(np.random.default_rng(0).integers(0, 50257, (8, 2047)))
    t = timed(forward)
    say(odd="[8, 2047 of 2048, 50257] bf16", ms=round(t * 1e3, 3), tb_per_s=round(8 * 2047 * 50257 * 2 / t / 1e12, 2))


def linear() -> None:
    """[8192, 4096] x [128256, 4096] bfloat16: log-probabilities, with gradients, and the cross-entropy in one pass."""
    R, D, V = 8192, 4096, 128256
    hidden = normal([R, D], "bfloat16", seed=1)
    weight = normal([V, D], "bfloat16", seed=10**6, scale=D**-0.5)
    labels = paddle.to_tensor(np.random.default_rng(0).integers(0, V, R))
    g = paddle.to_tensor(np.full(R, -1 / R, "float32"))
    flop = 2 * R * D * V

    def forward():
        with paddle.no_grad():
            ops.linear_logprobs_of_labels(hidden, weight, labels)

    def clear():
        hidden.clear_gradient(False)
        weight.clear_gradient(False)

    def both():
        ops.linear_logprobs_of_labels(hidden, weight, labels).backward(g)
        clear()

    def cross_entropy():
        ops.info_nce([[block(hidden, weight, labels)]], scale=1.0, row_weights=1 / R).backward()
        clear()

    def transposed():
        ops.linear_logprobs_of_labels(hidden, other, labels, bias=bias, transposed_weight=True).backward(g)
        clear()
        other.clear_gradient(False)
        bias.clear_gradient(False)

    hidden.stop_gradient = weight.stop_gradient = False
    other = normal([D, V], "bfloat16", seed=10**7, scale=D**-0.5)
    bias = normal([V], "bfloat16", seed=5)
    other.stop_gradient = bias.stop_gradient = False
    gradients = 2 * (R * D + V * D)
    for name, call, products in (
        ("logprobs", forward, 1),
        ("cross-entropy, one pass, with gradients", cross_entropy, 3),
        ("logprobs with gradients", both, 3),
        ("logprobs with gradients, weight [D, V] and a bias", transposed, 3),
    ):
        call()
        memory = cost(call, gradients if products == 3 else 0)
        t = timed(call)
        say(linear=name, ms=round(t * 1e3, 2), tflops=round(products * flop / t / 1e12, 1), mib_more=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device")
    parser.add_argument("--parts", default="errors,given,tiles,linear")
    arguments = parser.parse_args()
    use(arguments.device)
    say(triton=triton.__version__, available=str(ops.availability()[:2]), can_run=str(ops.can_run(paddle.zeros([1]))))
    for part in arguments.parts.split(","):
        try:
            {"errors": errors, "given": given, "tiles": tiles, "linear": linear}[part]()
        except Exception as error:
            failed.append(part)
            say(part=part, error=f"{type(error).__name__}: {error}"[:2000])
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
