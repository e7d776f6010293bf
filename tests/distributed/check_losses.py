# SPDX-License-Identifier: Apache-2.0
"""One process of the equality test: several processes, averaged, against one process with the whole batch."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.losses import InfCLLoss

D = 8


def global_batch(counts: list[int], negatives: list[int], seed: int):
    """Per process: query inputs, passage inputs, own columns, ids. `negatives` per process: hard negatives a row."""
    rng = np.random.default_rng(seed)
    out, document = [], 0
    for count, extra in zip(counts, negatives, strict=True):
        N = count * (1 + extra)
        own = np.arange(count) * (1 + extra)
        q_ids = np.stack([rng.integers(0, 5, count), document + np.arange(count)], 1)
        p_ids = np.full((N, 2), -1)
        p_ids[:, 0] = rng.integers(0, 5, N)
        p_ids[own] = q_ids
        document += count
        out.append((rng.standard_normal((count, 6)), rng.standard_normal((N, 6)), own, q_ids, p_ids))
    return out


class Encoder(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        values = np.random.default_rng(7).standard_normal((6, D))
        self.weight = self.create_parameter([6, D], dtype="float64")
        self.weight.set_value(paddle.to_tensor(values))

    def forward(self, x):
        if len(x) == 0:
            # Paddle's matmul has no backward pass for no rows; a leaf keeps the process in every collective.
            rows = paddle.zeros([0, D], dtype="float64")
            rows.stop_gradient = False
            return rows
        return paddle.nn.functional.normalize(paddle.to_tensor(x) @ self.weight, axis=-1)


def train(batches, loss_layer, average, use_ids, steps=3):
    """Losses and the weights' gradients of three SGD steps. `average` is over the processes."""
    encoder = Encoder()
    parameters = [*encoder.parameters(), *loss_layer.parameters()]
    optimizer = paddle.optimizer.SGD(0.5, parameters=parameters)
    seen = []
    for k in range(steps):
        q, p, own, q_ids, p_ids = batches[k]
        ids = (paddle.to_tensor(q_ids), paddle.to_tensor(p_ids)) if use_ids else (None, None)
        loss = loss_layer(encoder(q), encoder(p), paddle.to_tensor(own), *ids)
        loss.backward()
        values = [average(loss.detach())]
        for parameter in parameters:
            own_part = paddle.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = average(own_part)
            parameter.grad = gradient
            values.append(gradient)
        seen.append([np.array(v.numpy(), dtype="float64") for v in values])
        optimizer.step()
        optimizer.clear_grad()
    return seen


def merged(parts):
    """The batches of all processes as one process's batch."""
    q, p, own, q_ids, p_ids = zip(*parts, strict=True)
    offsets = np.cumsum([0] + [len(x) for x in p[:-1]])
    return (
        np.concatenate(q),
        np.concatenate(p),
        np.concatenate([o + offset for o, offset in zip(own, offsets, strict=True)]),
        np.concatenate(q_ids),
        np.concatenate(p_ids),
    )


def main() -> None:
    dist.init_parallel_env()
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = Ranks.current()
    assert (ranks.world, ranks.rank) == (world, rank)

    def average(x):
        total = x.clone()
        dist.all_reduce(total)
        return total / world

    shapes = {
        "even": ([3] * world, [1] * world),
        "uneven": ([3, 2, 4, 1][:world], [0, 2, 1, 0][:world]),
        "an empty process": ([3, 0, 2, 2][:world], [1] * world),
    }
    options = {
        "plain": {},
        "margin": {"margin": 0.2},
        "matryoshka": {"matryoshka_dims": [8, 3], "matryoshka_weights": [1.0, 0.5]},
        "learnable": {"learnable_temperature": True},
    }
    checked = 0
    for (shape, (counts, negatives)), (name, option), ids, backend in itertools.product(
        shapes.items(), options.items(), (False, True), ("paddle", "dense")
    ):
        steps = [global_batch(counts, negatives, seed) for seed in range(3)]
        mine = train([s[rank] for s in steps], InfCLLoss(0.1, backend=backend, **option), average, ids)
        whole = [merged(s) for s in steps]
        want = train(whole, InfCLLoss(0.1, backend=backend, ranks=Ranks(), **option), lambda x: x, ids)
        for k, (a, b) in enumerate(zip(mine, want, strict=True)):
            for x, y in zip(a, b, strict=True):
                tolerance = 1e-5 if name == "learnable" else 1e-10  # the temperature is float32
                np.testing.assert_allclose(
                    x, y, rtol=tolerance, atol=tolerance * np.abs(y).max() + 1e-13,
                    err_msg=f"step {k}: {shape}, {name}, ids={ids}, {backend}",
                )  # fmt: skip
        checked += 1

    # A remote passage gets gradient, and the right one: from every process, summed.
    q = paddle.to_tensor(np.random.default_rng(rank).standard_normal((2, D)))
    p = paddle.to_tensor(np.random.default_rng(10 + rank).standard_normal((2, D)))
    p.stop_gradient = False
    InfCLLoss(0.5, backend="paddle", cross_device=False)(q, p).backward()
    local = p.grad.numpy().copy()
    p.clear_grad()
    InfCLLoss(0.5, backend="paddle")(q, p).backward()
    assert np.abs(p.grad.numpy() - local).max() > 1e-3

    # Every process counts its own rows against the passages of all.
    counted = InfCLLoss(0.1, backend="paddle").effective_negatives(q, p)
    assert counted == 2 * world - 1
    print(f"checked {checked} combinations on {world} processes")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
