# SPDX-License-Identifier: Apache-2.0
"""Label log-probabilities on a GPU: errors against float64, then times and memory.

    python tests/gpu/logprobs_gpu.py gpu:0                      everything, about two minutes
    python tests/gpu/logprobs_gpu.py gpu:0 --parts errors       errors | given | linear | tiles

`given` is [32, 2048, 64000] float16 logits, sliced to 2047 (9 GB, and as much again for the gradient); `linear` is
[8192, 4096] x [128256, 4096] in bfloat16, the case of benchmarks/logprobs_peers.py; `tiles` times other options.
Memory is what Paddle counts as allocated, at the peak of a call, beyond its results.
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
from paddle_infcl_ops import driver, label_kernels, linear_plan, logprobs  # noqa: E402
from paddle_infcl_ops.tuning import Tile  # noqa: E402

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
    """MiB of device memory at the peak of a call, beyond what was held before and `results` bytes.

    Not from the device's free memory: Paddle keeps what it has once allocated, and the difference is 0.
    """
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
            # float64 on the host takes its time: every eighth position of large cases, the last one included.
            some = slice(None, None, 8 if z.size > 2**22 else 1)
            labels, g, h = (x[:, some] for x in (labels, g, h))
            want = label_logprobs(host(z.detach())[:, some], labels, temperature=0.7, ignore_index=-100, g=g, h=h)
            scale = max(1.0, float(np.abs(want[0]).max()))
            check(
                f"{dtype} {list(shape)} {spread:g}", bound,
                dz=float(np.abs(host(z.grad)[:, some] - want[2]).max() / max(1.0, np.abs(want[2]).max())),
                logprobs=float(np.abs(out.numpy()[:, some] - want[0]).max()) / scale,
                entropies=float(np.abs(entropy.numpy()[:, some] - want[1]).max()) / 10,
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
    for dtype, bound in (("float32", 3e-6), ("float16", 5e-4), ("bfloat16", 4e-3)):
        anywhere(dtype, bound, rng)
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

    # Several pieces of rows: dweight is rounded by each.
    hidden, weight = normal([8192, 256], "bfloat16", seed=1), normal([2048, 256], "bfloat16", seed=2, scale=256**-0.5)
    labels, g = rng.integers(0, 2048, 8192), rng.standard_normal(8192).astype("float32")
    hidden.stop_gradient = weight.stop_gradient = False
    out = ops.linear_logprobs_of_labels(hidden, weight, paddle.to_tensor(labels), memory_budget=3 << 20)
    out.backward(paddle.to_tensor(g))
    want = linear_label_logprobs(host(hidden.detach())[None], host(weight.detach()), labels[None], g=g[None])
    check(
        "linear bfloat16 [8192, 256] x [2048, 256], four pieces of rows",
        4e-3,  # pieces are added up in bf16; the dense loss is off by .0036
        logprobs=float(np.abs(out.numpy() - want[0][0]).max()) / 10,
        dhidden=relative(host(hidden.grad), want[1][0]),
        dweight=relative(host(weight.grad), want[2]),
    )


def anywhere(dtype, bound, rng) -> None:
    """Rows that start at any address, and whose gradients start at others: the kernels themselves, without views."""
    T, V, stride, shift = 9, 1031, 1037, 3
    flat = normal([1, T * stride + shift], dtype, scale=3.0)
    z = np.stack([host(flat)[0, shift + t * stride :][:V] for t in range(T)])
    labels = np.concatenate([[0, 1, V - 1, V - 2], rng.integers(0, V, T - 4)])
    y, g = paddle.to_tensor(labels), rng.standard_normal(T).astype("float32")
    rows = [driver.empty([T], "float32", flat) for _ in range(3)]
    dz = driver.empty([T, V], dtype, flat)
    where = (1, T, shift, 0, 0, stride, 1, 0, 0, 1)
    size = flat.element_size()
    driver.launch(
        label_kernels.label_forward_kernel, (T,), flat, y, *rows, None, *where, V, 1.0, 0, HAS_IGNORE=False,
        WIDE=False, ALIGN=True, **logprobs._forward_tile(V, size),
    )  # fmt: skip
    driver.launch(
        label_kernels.label_backward_kernel, (T,), flat, y, dz, *rows, None, paddle.to_tensor(g), None, 1, T, T,
        *where[2:], 0, 0, 0, V, 1, V, 1.0, 0, HAS_IGNORE=False, WIDE=False, ALIGN=True, SAME=False,
        **logprobs._backward_tile(V, size),
    )  # fmt: skip
    want = label_logprobs(z, labels, g=g)
    check(f"{dtype}, rows that start anywhere", bound, logprobs=float(np.abs(rows[0].numpy() - want[0]).max()) / 10,
          dz=float(np.abs(host(dz) - want[2]).max() / max(1.0, np.abs(want[2]).max())))  # fmt: skip


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
    result, results = 32 * 2047 * 4, []

    def forward(entropy=False):
        results[:] = [ops.logprobs_of_labels(z, y, return_entropy=entropy)]

    def both(inplace):
        leaf = z.detach()
        leaf.stop_gradient = False
        ops.logprobs_of_labels(leaf, y, inplace_backward=inplace).backward(g)

    with paddle.no_grad():
        ops.logprobs_of_labels(normal([1, 2, 64000], "float16"), y[:1, :1])
        memory = cost(forward, result)
        row = host(normal([1, 64000], "float16", scale=2.0, row0=5 * 2048 + 77))
        want = label_logprobs(row, labels[5, 77:78])[0][0]
        check("given: one row", 3e-6, logprobs=abs(float(results[0].numpy()[5, 77]) - want) / 10)
        check("given: MiB of the forward pass", 1.0, mib=memory)
        t = timed(forward)
        say(given="forward", ms=round(t * 1e3, 3), tb_per_s=round(read / t / 1e12, 2), mib=memory)
        t = timed(lambda: forward(entropy=True))
        say(given="forward with entropy", ms=round(t * 1e3, 3), tb_per_s=round(read / t / 1e12, 2))
    for inplace in (True, False):
        memory = cost(lambda inplace=inplace: both(inplace), result + (0 if inplace else size))
        check(f"given: MiB of both passes, in place {inplace}", 1.0, mib=memory)
        t = timed(lambda inplace=inplace: both(inplace))
        say(given="forward and backward" + (", in place" if inplace else ""), ms=round(t * 1e3, 3),
            tb_per_s=round((2 * read + size) / t / 1e12, 2), mib=memory)  # fmt: skip
    del z
    z, y, g = normal([16, 2048, 50257], "bfloat16", scale=2.0), y[:16] % 50257, g[:16]
    odd = 16 * 2047 * 50257 * 2
    with paddle.no_grad():
        t = timed(forward)
    say(given="[16, 2047 of 2048, 50257] bf16, forward", ms=round(t * 1e3, 3), tb_per_s=round(odd / t / 1e12, 2))
    t = timed(lambda: both(True))
    say(given="[16, 2047 of 2048, 50257] bf16, forward and backward, in place", ms=round(t * 1e3, 3),
        tb_per_s=round(3 * odd / t / 1e12, 2))  # fmt: skip


def tiles() -> None:
    """Other tiles, for the record: of given logits, and of the products."""
    z, y, g, _ = given_case()

    def forward():
        with paddle.no_grad():
            ops.logprobs_of_labels(z, y)

    def both():
        leaf = z.detach()
        leaf.stop_gradient = False
        ops.logprobs_of_labels(leaf, y, inplace_backward=True).backward(g)

    usual = logprobs._forward_tile, logprobs._backward_tile
    for vectors, warps, step in ((4, 4, 2048), (2, 4, 1024), (4, 2, 4096), (8, 4, 8192)):
        tile = {"U": vectors, "LANES": 32 * warps, "VEC": 8, "num_warps": warps}
        logprobs._forward_tile = lambda V, size, tile=tile: tile
        logprobs._backward_tile = lambda V, size, step=step: {"BLOCK": step, "VEC": 8, "num_warps": 4}
        times = [round(timed(call, 3) * 1e3, 3) for call in (forward, both)]
        say(tile=[vectors, warps, step], forward_ms=times[0], both_ms=times[1])
    logprobs._forward_tile, logprobs._backward_tile = usual
    product_tiles()


def product_tiles() -> None:
    """One program per tile, or persistent ones, for all kinds of weights."""
    R, D, V = 8192, 4096, 32768
    hidden, labels = normal([R, D], "bfloat16", seed=1), paddle.to_tensor(np.arange(R) % V)
    hidden.stop_gradient = False
    g = paddle.to_tensor(np.full(R, -1 / R, "float32"))
    usual = linear_plan.tile

    def forward(weight, bias, transposed):
        return ops.linear_logprobs_of_labels(
            hidden, weight, labels, bias=bias, transposed_weight=transposed, memory_budget=512 << 20
        )

    def both(*arguments):
        forward(*arguments).backward(g)
        hidden.clear_gradient(False)

    def tile(kind, per_sm):
        return Tile(128, 256, 64, 8, 3, per_sm, per_sm > 0, kind == "prob", 2 if kind == "prob" else 1)

    for transposed in (False, True):
        weight = normal([D, V] if transposed else [V, D], "bfloat16", seed=2, scale=D**-0.5)
        for bias in (None, normal([V], "bfloat16", seed=3)):
            for per_sm in (0, 1):
                linear_plan.tile = lambda kind, *_, per_sm=per_sm: tile(kind, per_sm)
                case = weight, bias, transposed
                times = [round(timed(lambda call=c, case=case: call(*case), 3) * 1e3, 2) for c in (forward, both)]
                say(transposed=transposed, bias=bias is not None, per_sm=per_sm, forward_ms=times[0], both_ms=times[1])
    linear_plan.tile = usual


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

    def both(budget=None):
        ops.linear_logprobs_of_labels(hidden, weight, labels, memory_budget=budget).backward(g)
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
        ("logprobs with gradients, a budget of 1 GiB", lambda: both(1 << 30), 3),
        ("logprobs with gradients, weight [D, V] and a bias", transposed, 3),
    ):
        call()
        memory = cost(call, gradients if products == 3 else 0)
        if call in (forward, both):
            # Liger's fused linear cross-entropy takes as much at this size.
            check(f"linear: MiB of {name}", 62.7, mib=memory)
        t = timed(call)
        say(linear=name, ms=round(t * 1e3, 2), tflops=round(products * flop / t / 1e12, 1), mib_more=memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, or a CUDA-like custom device")
    parser.add_argument("--parts", default="errors,given,linear,tiles")
    arguments = parser.parse_args()
    use(arguments.device)
    say(triton=triton.__version__, available=str(ops.availability()[:2]), can_run=str(ops.can_run(paddle.zeros([1]))))
    for part in arguments.parts.split(","):
        start = time.perf_counter()
        try:
            {"errors": errors, "given": given, "tiles": tiles, "linear": linear}[part]()
            say(part=part, seconds=round(time.perf_counter() - start, 1))
        except Exception as error:
            failed.append(part)
            say(part=part, error=f"{type(error).__name__}: {error}"[:2000])
    if failed:
        sys.exit(f"failed: {failed}")


if __name__ == "__main__":
    main()
