# SPDX-License-Identifier: Apache-2.0
"""Several processes on one GPU: gather and ring equal one process with the whole batch, in bf16 and fp32.

    python tests/gpu/two_processes.py gpu:0                      under two minutes
    TRITON_INTERPRET=1 python tests/gpu/two_processes.py cpu --scale 0.05 --width 21          a dry run

So far every check has passed in the dry run only: on the one device where it was started, gloo ended the processes in
their first message.

NCCL wants a GPU per process. Here messages go through gloo by way of host memory: `HostCopies` stands in for the
process group, below everything that the product does (its groups, both strategies, the ring's exchange with its
thread). So this shows what is computed on a device, not how fast messages are; `two_gpus.py` does that.

Starts its processes itself, for 2, 3 and 4 of them and both dtypes at once. Prints a line per check: relative errors
of loss, dq, dp and dT against float64 NumPy, those of one process with the whole batch, how far the two are apart, and
errors of the textbook loss in the same dtype. Exits with 1 where an error is above its bound.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

T, COSINE = 0.02, 0.3
BOUNDS = {"bfloat16": 2.5e-3, "float32": 2e-5}
ROWS = {2: (300, 211), 3: (211, 120, 180), 4: (150, 61, 200, 100)}
# What is checked with how many processes.
KINDS = {
    2: ("plain", "plain, even width", "ids", "margin", "guide", "hard negatives"),
    3: ("plain", "hard negatives", "an empty process"),
    4: ("plain", "hard negatives"),
}


class HostCopies:
    """Gloo for tensors on a device: every message by way of a copy in host memory."""

    def __init__(self, gloo):
        self._gloo = gloo

    def name(self):
        return self._gloo.name()

    def _through(self, call, received, *sent):
        """call(*CPU tensors); the first is copied back if it is received."""
        copies = [_on_host(t) for t in sent]
        task = call(*copies)
        if task is not None:
            task.wait()
        if received is not None:
            received.copy_(copies[0], True)
        return _Done()

    def all_gather_into_tensor(self, out, tensor, sync_op):
        return self._through(lambda o, t: self._gloo.all_gather_into_tensor(o, t, True), out, out, tensor)

    def all_reduce(self, tensor, op, sync_op):
        return self._through(lambda t: self._gloo.all_reduce(t, op, True), tensor, tensor)

    def send(self, tensor, peer, sync_op):
        return self._through(lambda t: self._gloo.send(t, peer, True), None, tensor)

    def recv(self, tensor, peer, sync_op):
        return self._through(lambda t: self._gloo.recv(t, peer, True), tensor, tensor)


def _on_host(tensor):
    import paddle

    return paddle.to_tensor(tensor.numpy(), place=paddle.CPUPlace())  # uint16 numbers are bfloat16 to Paddle


class _Done:
    def wait(self):
        return True


@dataclass
class Batch:
    """The whole batch, float64 numbers that the dtype holds, and how it is cut.

    Attributes:
        own: columns of the positives, over the whole batch.
        rows, columns: how many each process has.
        dropped: [B, N] entries that the masks drop.
    """

    q: np.ndarray
    p: np.ndarray
    own: np.ndarray
    rows: list[int]
    columns: list[int]
    dropped: np.ndarray
    margin: float | None = None
    q_ids: np.ndarray | None = None
    p_ids: np.ndarray | None = None
    guide_q: np.ndarray | None = None
    guide_p: np.ndarray | None = None
    threshold: np.ndarray | None = None


def widest_gaps(s: np.ndarray) -> np.ndarray:
    """[B] per row a number in the widest gap among its larger entries, so that rounding decides nothing."""
    ordered = np.sort(s, axis=1)[:, int(0.85 * s.shape[1]) :]
    at, rows = np.diff(ordered, axis=1).argmax(1), np.arange(len(s))
    return (ordered[rows, at] + ordered[rows, at + 1]) / 2


def make_batch(kind: str, dtype: str, rows: list[int], width: int) -> Batch:
    from tests.gpu.check_contrastive import host, on_device, pairs, unit

    def held(x):
        return host(on_device(x, dtype))

    columns = [n * (2 + r % 2) if kind == "hard negatives" else n for r, n in enumerate(rows)]
    cosine = 0.12 if kind == "margin" else COSINE
    pieces = [pairs(B, N, width, cosine, seed=r) for r, (B, N) in enumerate(zip(rows, columns, strict=True))]
    starts = np.cumsum([0, *columns[:-1]])
    q, p = (held(np.concatenate([piece[k] for piece in pieces])) for k in (0, 1))
    own = np.concatenate([piece[2] + start for piece, start in zip(pieces, starts, strict=True)]).astype("int64")
    B, N = len(q), len(p)
    g = np.random.default_rng(7)
    batch = Batch(q, p, own, rows, columns, np.zeros((B, N), bool))
    if kind == "ids":
        batch.q_ids, batch.p_ids = g.integers(-1, 2 + B // 4, (B, 2)), g.integers(-1, 2 + B // 4, (N, 2))
        same = (batch.q_ids[:, None, :] == batch.p_ids[None, :, :]) & (batch.q_ids >= 0)[:, None, :]
        batch.dropped = same.any(-1)
    elif kind == "margin":
        above = q @ p.T - (q * p[own]).sum(1, keepdims=True) - 8 * 2.0**-23
        above[np.arange(B), own] = -1
        batch.margin = max(np.linspace(0, 0.05, 50), key=lambda m: np.abs(above - m).min())
        batch.dropped = above > batch.margin
    elif kind == "guide":
        batch.guide_q, batch.guide_p = (held(unit(g.standard_normal((n, 33)))) for n in (B, N))
        seen = batch.guide_q @ batch.guide_p.T
        batch.threshold = widest_gaps(seen)
        batch.dropped = seen > batch.threshold[:, None]
    return batch


def loss_and_gradients(batch: Batch, dtype: str, ranks, strategy: str) -> list:
    """[loss, dq, dp, dT] of this process's share, which is everything where `ranks` is one process."""
    import paddle

    from paddle_infcl.distributed.negatives import global_info_nce
    from paddle_infcl.functional.blocks import Guide
    from paddle_infcl.functional.contrastive import info_nce_groups
    from tests.gpu.check_contrastive import host, on_device

    r, W = ranks.rank, ranks.world
    row, column = slice(None), slice(None)
    if W > 1:
        row = slice(sum(batch.rows[:r]), sum(batch.rows[: r + 1]))
        column = slice(sum(batch.columns[:r]), sum(batch.columns[: r + 1]))

    def integers(x, part, offset=0):
        return None if x is None else paddle.to_tensor(np.ascontiguousarray(x[part] - offset))

    q, p = on_device(batch.q[row], dtype), on_device(batch.p[column], dtype)
    q.stop_gradient = p.stop_gradient = False
    temperature = paddle.to_tensor([T], dtype="float32", stop_gradient=False)
    groups = info_nce_groups(
        q, p, own=integers(batch.own, row, column.start or 0), q_ids=integers(batch.q_ids, row),
        p_ids=integers(batch.p_ids, column), margin=batch.margin,
    )  # fmt: skip
    if batch.threshold is not None:
        seen = on_device(batch.guide_q[row], dtype), on_device(batch.guide_p[column], dtype)
        groups[0][0].guide = Guide(*seen, paddle.to_tensor(batch.threshold[row].astype("float32")))
    loss = global_info_nce(groups, temperature=temperature, ranks=ranks, strategy=strategy, backend="triton")
    loss.backward()
    gradients = [np.zeros(t.shape) if t.grad is None else host(t.grad) for t in (q, p, temperature)]
    # Averages over the processes are those of the whole batch; rows belong to one process.
    return [float(loss), *(g / W for g in gradients)]


def joined(share: list, ranks) -> list:
    """[loss, dq, dp, dT] of all, from the shares; the same on all processes."""
    import paddle

    from paddle_infcl.distributed.gather import gather_constants, row_counts

    paddle_device = paddle.device.get_device()
    paddle.set_device("cpu")
    try:
        out = []
        for k, value in enumerate(share):
            rows = paddle.to_tensor(np.atleast_2d(np.asarray(value, "float64")))
            whole = gather_constants(rows, ranks, row_counts(rows.shape[0], ranks)).numpy()
            out.append(whole if k in (1, 2) else whole.reshape(ranks.world, -1).sum(0))
        return [out[0] / ranks.world, *out[1:]]
    finally:
        paddle.set_device(paddle_device)


def textbook(batch: Batch, dtype: str) -> list[np.ndarray] | None:
    """dq and dp of the loss with all logits in `dtype`, by torch; None where there is none on a GPU."""
    try:
        import torch

        device = torch.device("cuda:0")
        x, y = (
            torch.tensor(v, device=device, dtype=getattr(torch, dtype)).requires_grad_() for v in (batch.q, batch.p)
        )
        own = torch.tensor(batch.own, device=device)
        dropped = torch.tensor(batch.dropped, device=device).scatter(1, own[:, None], False)
    except (ImportError, AssertionError, RuntimeError):
        return None
    logits = (x @ y.T / T).masked_fill(dropped, float("-inf"))
    torch.nn.functional.cross_entropy(logits, own).backward()
    return [v.grad.double().cpu().numpy() for v in (x, y)]


def errors(got: list, want: list) -> list[float]:
    return [np.linalg.norm(np.subtract(a, b)) / max(np.linalg.norm(b), 1e-300) for a, b in zip(got, want, strict=True)]


def check(kind: str, dtype: str, ranks, width: int, scale: float, bound: float) -> bool:
    from paddle_infcl.distributed.ranks import Ranks
    from tests.gpu.reference import Spec, exact

    rows = [max(2, int(n * scale)) for n in ROWS[ranks.world]]
    if kind == "an empty process":
        rows[1] = 0
    batch = make_batch(kind, dtype, rows, (width + 16) // 16 * 16 if kind == "plain, even width" else width)
    true_scale = 1 / np.float64(np.float32(T))
    spec = Spec("q", "p", batch.own, batch.dropped)
    want = exact({"q": batch.q, "p": batch.p}, [[spec]], true_scale, np.full(len(batch.q), 1 / len(batch.q)))
    want = [np.array([want["loss"]]), want["dq"], want["dp"], np.array([-want["dscale"] * true_scale**2])]
    dense = textbook(batch, dtype)
    dense = None if dense is None else errors(dense, want[1:3])
    one = loss_and_gradients(batch, dtype, Ranks(), "auto")
    one_errors = errors(one, want)
    limit = max([bound, *(dense or [])])
    good = True
    for strategy in ("gather", "ring"):
        got = joined(loss_and_gradients(batch, dtype, ranks, strategy), ranks)
        found = errors(got, want)
        # A temperature's gradient is a difference of large sums.
        fine = max(found[:3]) <= limit and found[3] <= max(10 * limit, 2 * one_errors[3])
        good &= fine
        if ranks.rank == 0:
            text = " ".join(f"{name} {e:.1e}" for name, e in zip(("loss", "dq", "dp", "dT"), found, strict=True))
            apart = " ".join(f"{e:.1e}" for e in errors(got, one)[:3])
            alone = " ".join(f"{e:.1e}" for e in one_errors)
            beside = "" if dense is None else " | textbook " + " ".join(f"{e:.1e}" for e in dense)
            print(
                f"{'ok  ' if fine else 'FAIL'} {dtype:8} W={ranks.world} {kind:18}{strategy:7}{text} | one process "
                f"{alone}, apart {apart}{beside}",
                flush=True,
            )
    return good


def work(arguments) -> None:
    """One process."""
    faulthandler.dump_traceback_later(arguments.limit, exit=True)
    import paddle
    import paddle.distributed as dist

    from paddle_infcl.distributed import ring
    from paddle_infcl.distributed.ranks import Ranks
    from tests.gpu.check_contrastive import use

    faulthandler.enable()  # after Paddle, whose handlers don't show where Python is
    kind, _, _ = arguments.device.partition(":")
    dist.init_parallel_env()
    group = dist.get_group()
    group.pg = HostCopies(group.process_group)
    if kind == "cpu":
        paddle.set_device("cpu")
    else:
        use(arguments.device)
    if kind not in ("cpu", "gpu"):
        ring._FEWEST_TO_HALVE = 2**30  # slices are copies on such devices; halves add in place to slices
    ranks = Ranks.current()
    # The interpreter cuts bf16 off where a GPU rounds it.
    bound = BOUNDS[arguments.dtype] * (1 if not os.environ.get("TRITON_INTERPRET") else 8)
    good = True
    for name in KINDS[ranks.world]:
        try:
            good &= check(name, arguments.dtype, ranks, arguments.width, arguments.scale, bound)
        except Exception as error:  # the other checks go on; processes fail alike, or the next message ends the run
            good = False
            lines = "\n".join(traceback.format_exc().splitlines()[-6:])
            what = f"{arguments.dtype} W={ranks.world} {name}: {type(error).__name__} in process {ranks.rank}"
            print(f"FAIL {what}\n{lines}", flush=True)
    sys.stdout.flush()
    os._exit(int(not good))  # at once: taking process groups down can hang in Paddle


def main(arguments) -> int:
    from tests.distributed.launcher import environment, free_ports

    begin = time.monotonic()
    running = []
    ports = free_ports(40)
    with tempfile.TemporaryDirectory() as folder:
        for world in arguments.worlds:
            for dtype in arguments.dtypes:
                taken, ports = ports[: world + 1], ports[world + 1 :]
                for rank in range(world):
                    log = Path(folder) / f"{dtype} W={world} process {rank}"
                    options = ["--dtype", dtype, "--width", arguments.width, "--scale", arguments.scale]
                    command = [sys.executable, __file__, arguments.device, *options, "--limit", arguments.limit]
                    with log.open("w") as file:
                        process = subprocess.Popen(
                            [str(part) for part in command],
                            env=environment(rank, world, taken) | {"FLAGS_selected_gpus": "0"},
                            stdout=None if rank == 0 else file,
                            stderr=file,
                            cwd=ROOT,
                        )
                    running.append((log, process))
        codes = [process.wait() for _, process in running]
        for (log, _), code in zip(running, codes, strict=True):
            if code:
                print(f"--- {log.name} ended with {code}\n" + "\n".join(log.read_text().splitlines()[-12:]))
    print(f"{'all good' if not any(codes) else 'FAILED'}, {time.monotonic() - begin:.0f} s")
    return int(any(codes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("device", help="gpu:0, a CUDA-like custom device, or cpu: a dry run in Triton's interpreter")
    parser.add_argument("--worlds", type=int, nargs="+", default=sorted(ROWS), choices=sorted(ROWS))
    parser.add_argument("--dtypes", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    parser.add_argument("--width", type=int, default=123)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--limit", type=float, default=85.0, help="seconds after which a process ends itself")
    parser.add_argument("--dtype", help="(what one of the processes checks)")
    parsed = parser.parse_args()
    if parsed.dtype is None:
        sys.exit(main(parsed))
    work(parsed)
