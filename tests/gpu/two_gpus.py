# SPDX-License-Identifier: Apache-2.0
"""Gather and ring on several GPUs: equality with one process in bf16, speed against one GPU, overlap.

    python -m paddle.distributed.launch --nproc_per_node 2 tests/gpu/two_gpus.py gpu --out two_gpus.json

Every process runs this file; the first one prints one JSON object and writes it to --out. It exits with 1 where an
error is above its bound. With a CUDA-like custom device, name it in place of "gpu"; the script then also keeps the
ring's [B, D] passes in small Triton kernels and its tiles on a stream of their own, which CUDA builds of Paddle do not
need: there Paddle's operators run on the GPU, and communication has its own streams.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import paddle
import paddle.distributed as dist

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle_infcl_ops as ops  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from paddle_infcl_ops import driver  # noqa: E402

from paddle_infcl.distributed.columns import meet, numbered_owners  # noqa: E402
from paddle_infcl.distributed.exchange import Exchange  # noqa: E402
from paddle_infcl.distributed.negatives import global_info_nce  # noqa: E402
from paddle_infcl.distributed.ranks import Ranks  # noqa: E402
from paddle_infcl.distributed.ring import RingPlan, ring_loss  # noqa: E402
from paddle_infcl.functional.blocks import Block  # noqa: E402
from paddle_infcl.functional.contrastive import info_nce  # noqa: E402
from paddle_infcl.functional.hops import BlockFunctions, block_functions  # noqa: E402
from paddle_infcl.functional.row_losses import InfoNCE  # noqa: E402

BF16_BOUND = 2.5e-3
T = 0.02


@triton.jit
def _own_kernel(left, right, weights, scale, dleft, dright, terms, rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Own entries, row i in column i: dleft_i += w s right_i, dright_i += w s left_i, terms_i += w left_i right_i."""
    i = tl.program_id(0).to(tl.int64)
    w, s = tl.load(weights + i), tl.load(scale)
    total = 0.0
    for d in range(0, D, BLOCK):
        c = d + tl.arange(0, BLOCK)
        x = tl.load(left + i * D + c, mask=c < D, other=0.0).to(tl.float32)
        y = tl.load(right + i * D + c, mask=c < D, other=0.0).to(tl.float32)
        a, b = dleft + i * D + c, dright + i * D + c
        tl.store(a, tl.load(a, mask=c < D, other=0.0) + w * s * y, mask=c < D)
        tl.store(b, tl.load(b, mask=c < D, other=0.0) + w * s * x, mask=c < D)
        total += tl.sum(x * y)
    tl.store(terms + i, tl.load(terms + i) + w * total)


@triton.jit
def _add_kernel(x, y, out, n, HAS_Y: tl.constexpr, BLOCK: tl.constexpr):
    k = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + k, mask=k < n, other=0.0)
    if HAS_Y:
        value += tl.load(y + k, mask=k < n, other=0.0)
    tl.store(out + k, value.to(out.dtype.element_ty), mask=k < n)


def _sum_into(out, x, y=None):
    grid = (-(-out.size // 4096),)
    driver.launch(_add_kernel, grid, x, x if y is None else y, out, out.size, HAS_Y=y is not None, BLOCK=4096)
    return out


def _own(block, scale):
    return ops.own_similarity(block.left, block.right, block.own) * scale


def _add_own(block, scale, weights, dleft, dright, terms):
    rows, D = block.left.shape
    arguments = (block.left, block.right, weights, scale, dleft, dright, terms, rows)
    driver.launch(_own_kernel, (rows,), *arguments, D=D, BLOCK=1024)


def _total(like, as_left, as_right):
    one, other = (as_left, as_right) if as_left is not None else (as_right, None)
    return _sum_into(driver.empty(like.shape, like.dtype, like), one, other)


TRITON_ONLY = BlockFunctions(
    ops.block_lse, ops.block_grads, _own, _add_own, lambda total, part: _sum_into(total, total, part), _total
)


class Streams:
    """On a custom device: kernels on a stream of torch's, so that communication can run beside them."""

    def __init__(self, custom: bool):
        self.side = None
        if custom:
            import torch

            torch.cuda.set_device(dist.get_rank())
            self.side = torch.cuda.Stream()
            self._torch = torch

    def kernels(self):
        return contextlib.nullcontext() if self.side is None else self._torch.cuda.stream(self.side)

    def wait_for_kernels(self) -> None:
        if self.side is not None:
            self.side.synchronize()

    def wait_for_all(self) -> None:
        if self.side is not None:
            self._torch.cuda.synchronize()
        elif not paddle.get_device().startswith("cpu"):
            paddle.device.synchronize()


class TimedExchange(Exchange):
    """The product's exchange with this script's streams; `silent` passes nothing on, to time the work alone."""

    def __init__(self, ranks, streams, silent=False):
        super().__init__(ranks)
        self._streams, self._silent = streams, silent

    def start(self, outgoing, incoming):
        if self._silent:
            return lambda: None
        self._streams.wait_for_kernels()
        wait = super().start(outgoing, incoming)

        def done():
            wait()
            if self._streams.side is not None:
                self._streams.wait_for_all()

        return done


def unit(rows: int, D: int, seed: int, near=None, cosine: float = 0.12):
    """[rows, D] float32 unit vectors, with this cosine to `near`."""
    x = np.random.default_rng(seed).standard_normal((rows, D), dtype="float32")
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    if near is not None:
        x = cosine * near + np.sqrt(1 - cosine**2) * x
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x


def bf16(x):
    return paddle.to_tensor(x).astype("bfloat16")


def host(x):
    return x.astype("float32").numpy().astype("float64")


def error(got, want) -> float:
    value = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return value if np.isfinite(value) else float("inf")


def exact(q, p):
    """dq and dp in float64 of the mean loss over rows with own columns 0 ... B - 1."""
    B = len(q)
    z = q @ p.T / T
    own = np.diag(z).copy()
    np.fill_diagonal(z, -np.inf)
    top = z.max(1)
    lse = top + np.log(np.exp(z - top[:, None]).sum(1))
    P = np.exp(z - np.logaddexp(lse, own)[:, None])
    np.fill_diagonal(P, -P.sum(1))
    P /= B
    return P @ p / T, P.T @ q / T


def dense_errors(q, p, want, streams) -> list[float]:
    """Errors of the textbook loss in bf16 with autograd, by torch where Paddle's device has no such operators."""
    if streams.side is None:
        on_cpu = paddle.get_device().startswith("cpu")  # a dry run; no products of bf16 there
        x, y = (paddle.to_tensor(v) if on_cpu else bf16(v) for v in (q, p))
        x.stop_gradient = y.stop_gradient = False
        logits = (x @ y.T) / T
        paddle.nn.functional.cross_entropy(logits, paddle.arange(len(q))).backward()
        return [error(host(x.grad), want[0]), error(host(y.grad), want[1])]
    import torch

    x, y = (torch.from_numpy(v).cuda().bfloat16().requires_grad_() for v in (q, p))
    torch.nn.functional.cross_entropy(x @ y.T / T, torch.arange(len(q), device=x.device)).backward()
    return [error(v.grad.float().cpu().numpy().astype("float64"), w) for v, w in zip((x, y), want, strict=True)]


def equality(ranks, streams, functions, B: int, D: int) -> dict:
    """Errors of every process's rows against float64, for gather and ring; the dense loss's beside them."""
    found = {}
    mine = slice(B // ranks.world * ranks.rank, B // ranks.world * (ranks.rank + 1))
    for cosine in (0.12, 0.5, 0.9):
        q = unit(B, D, 1)
        p = unit(B, D, 2, q, cosine)
        rounded = [host(bf16(x)) for x in (q, p)]
        want = exact(*rounded)
        line = {"dense bf16 dq, dp": dense_errors(*(x.astype("float32") for x in rounded), want, streams)}
        for strategy in ("gather", "ring"):
            x, y = bf16(q[mine]), bf16(p[mine])
            x.stop_gradient = y.stop_gradient = False
            loss_of(x, y, ranks, strategy, functions, Exchange(ranks)).backward()
            # A process's gradients are W times its share of the mean over processes.
            errors = [error(host(v.grad) / ranks.world, w[mine]) for v, w in zip((x, y), want, strict=True)]
            worst = paddle.to_tensor(errors)
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            line[f"{strategy} dq, dp"] = [float(v) for v in worst.numpy()]
        found[f"own cosine {cosine}"] = line
    return found


def blocks_of(q, p, own=None):
    return [[Block(q, p, own=paddle.arange(q.shape[0], dtype="int64") if own is None else own)]]


def loss_of(q, p, ranks, strategy, functions, exchange, own=None, **fields):
    groups = [[replace(blocks_of(q, p, own)[0][0], **fields)]]
    if strategy == "gather":
        return global_info_nce(groups, temperature=T, ranks=ranks, strategy="gather", backend="triton")
    scale = paddle.full([], 1 / T, "float32")
    layout = meet(groups, ranks, scale)
    groups = numbered_owners(groups, layout, ranks.rank)
    B = q.shape[0]
    weights = paddle.full([B], ranks.world / sum(layout.rows), "float32")
    plan = RingPlan(groups, layout, exchange, functions, [InfoNCE()], weights, None)
    if functions is TRITON_ONLY:
        plan.parts = 1  # slices are copies on such a device
    return ring_loss(plan, scale)


def timed(run, streams, repeats: int) -> float:
    """Median milliseconds of a call; all processes start together."""
    times = []
    for _ in range(repeats + 2):
        streams.wait_for_all()
        dist.barrier()
        begin = time.perf_counter()
        run()
        streams.wait_for_all()
        times.append((time.perf_counter() - begin) * 1e3)
    worst = paddle.to_tensor([float(np.median(times[2:]))])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst.numpy()[0])


def speed(ranks, streams, functions, total: int, D: int, repeats: int) -> dict:
    """One GPU with everything, gather and ring with a share each, the ring's work without messages, messages alone."""
    B, W = total // ranks.world, ranks.world
    q, p = bf16(unit(B, D, 10 + ranks.rank)), bf16(unit(B, D, 20 + ranks.rank))
    own, all_own = (paddle.arange(n, dtype="int64") for n in (B, total))
    found = {"global batch": total, "D": D, "processes": W}

    def time_of(loss, q, p, beside=False):
        def run():
            x, y = q.detach(), p.detach()
            x.stop_gradient = y.stop_gradient = False
            with streams.kernels() if beside else contextlib.nullcontext():
                loss(x, y).backward()

        return timed(run, streams, repeats)

    def whole(x, y):
        return info_nce(blocks_of(x, y, all_own), temperature=T, row_weights=1 / total, backend="triton")

    found["one GPU, ms"] = time_of(whole, bf16(unit(total, D, 30)), bf16(unit(total, D, 31)))
    found["gather, ms"] = time_of(lambda x, y: loss_of(x, y, ranks, "gather", functions, None, own), q, p)
    found["gather, speed-up"] = found["one GPU, ms"] / found["gather, ms"]
    found["gather, TFLOP/s per GPU (6BND)"] = 6 * B * total * D / found["gather, ms"] / 1e9
    for name, silent in (("ring", False), ("ring without messages", True)):
        exchange = TimedExchange(ranks, streams, silent)
        found[f"{name}, ms"] = time_of(
            lambda x, y, e=exchange: loss_of(x, y, ranks, "ring", functions, e, own), q, p, beside=True
        )
    found["ring, speed-up"] = found["one GPU, ms"] / found["ring, ms"]
    found["ring, TFLOP/s per GPU (8BND)"] = 8 * B * total * D / found["ring, ms"] / 1e9
    exchange = TimedExchange(ranks, streams)
    columns, sums = driver.empty([B, D], q.dtype, q), driver.empty([B, D], paddle.float32, q)
    room = driver.empty([B, D], paddle.float32, q)

    def messages():
        for _ in range(W - 1):
            exchange.start([p], [columns])()
            exchange.start([p], [columns])()
            exchange.start([sums], [room])()

    found["ring's messages alone, ms"] = timed(messages, streams, repeats)
    exposed = found["ring, ms"] - found["ring without messages, ms"]
    found["share of messages hidden behind work"] = 1 - exposed / found["ring's messages alone, ms"]
    return found


def masks(ranks, streams, functions) -> dict:
    """Ids in the ring on the device: against gather, which runs the same kernels."""
    B, D = 128, 64
    q, p = unit(B, D, 40 + ranks.rank), unit(B, D, 50 + ranks.rank)
    ids = paddle.to_tensor(np.random.default_rng(ranks.rank).integers(0, 300, B))
    gradients = []
    for strategy in ("gather", "ring"):
        x, y = bf16(q), bf16(p)
        x.stop_gradient = y.stop_gradient = False
        exchange = Exchange(ranks)
        loss_of(x, y, ranks, strategy, functions, exchange, row_ids=ids, column_ids=ids).backward()
        gradients.append((host(x.grad), host(y.grad)))
    return {"ids, ring against gather, dq, dp": [error(a, b) for a, b in zip(*gradients, strict=True)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu, or the name of a CUDA-like custom device")
    parser.add_argument("--out", default="two_gpus.json")
    parser.add_argument("--total", type=int, default=65536, help="rows of the global batch")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--small", type=int, nargs=2, default=(2048, 512), help="rows and width of the equality test")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a hanging process ends itself")
    arguments = parser.parse_args()
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    custom = arguments.device not in ("gpu", "cpu")  # cpu: a dry run under TRITON_INTERPRET=1
    if custom:
        driver.device_types.add(arguments.device)
        paddle.set_device(f"{arguments.device}:{os.environ['PADDLE_TRAINER_ID']}")
    dist.init_parallel_env()
    ranks, streams = Ranks.current(), Streams(custom)
    functions = TRITON_ONLY if arguments.device != "gpu" else block_functions("triton", paddle.zeros([1]))
    result = {"device": arguments.device, "processes": ranks.world}
    parts = {
        "equality": lambda: equality(ranks, streams, functions, *arguments.small),
        "masks": lambda: masks(ranks, streams, functions),
        "speed": lambda: speed(ranks, streams, functions, arguments.total, arguments.width, arguments.repeats),
    }
    for name, part in parts.items():
        result[name] = part()
        if ranks.rank == 0:  # after every part: a later one that hangs takes nothing away
            print(json.dumps({name: result[name]}, indent=1), flush=True)
            Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    bad = [
        f"{case}: {name} {values}"
        for case, line in result["equality"].items()
        for name, values in line.items()
        if "dense" not in name and max(values) > max(BF16_BOUND, *line["dense bf16 dq, dp"])
    ]
    if max(result["masks"]["ids, ring against gather, dq, dp"]) > 2 * BF16_BOUND:
        bad.append(f"masks: {result['masks']}")
    if ranks.rank == 0 and bad:
        print("above the bound: " + "; ".join(bad), flush=True)
    dist.barrier()
    os._exit(int(bool(bad)))  # at once: taking process groups down can hang in Paddle


if __name__ == "__main__":
    main()
