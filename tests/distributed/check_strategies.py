# SPDX-License-Identifier: Apache-2.0
"""One process of the equality test: several processes, averaged, against one process with the whole batch.

`python check_strategies.py DP SHARDING MP`: degrees of a fleet topology, or 0 0 0 for data parallel without fleet.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial

import numpy as np
import paddle
import paddle.distributed as dist

from paddle_infcl.distributed.negatives import global_info_nce
from paddle_infcl.distributed.ranks import Ranks
from paddle_infcl.distributed.watch import end_process
from paddle_infcl.gradcache import window_step
from paddle_infcl.losses import InfCLLoss
from paddle_infcl.objectives import InfoNCEObjective, ObjectiveLoss, Qwen3Objective, RankingObjective
from tests.distributed.batches import OBJECTIVES, Part, parts, whole
from tests.distributed.gloo_groups import separate_stores

D, INPUTS, STEPS = 8, 6, 3


class Encoder(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        values = np.random.default_rng(7).standard_normal((INPUTS, D))
        self.weight = self.create_parameter([INPUTS, D], dtype="float64")
        self.weight.set_value(paddle.to_tensor(values))

    def forward(self, x):
        if len(x) == 0:
            return paddle.zeros([0, D], dtype="float64")  # nothing to differentiate on this process
        return paddle.nn.functional.normalize(paddle.to_tensor(x) @ self.weight, axis=-1)


def micro_batches(part: Part, count: int) -> list[dict]:
    """Cuts of a part; some may be uneven, none empty unless the part is."""
    rows = np.array_split(np.arange(len(part.q)), min(count, max(1, len(part.q))))
    ends = np.append(part.own, len(part.p))
    out = []
    for index in rows:
        if len(index) == 0:
            passages = slice(0, 0)
        else:
            passages = slice(ends[index[0]], ends[index[-1] + 1])
        out.append(
            {
                "query": part.q[index],
                "passages": part.p[passages],
                "own": part.own[index] - (passages.start or 0),
                "q_ids": part.q_ids[index],
                "p_ids": part.p_ids[passages],
            }
        )
    return out


def layer(make, ids: bool, **where):
    """A loss layer as a function of a part, vectors and what GradCache hands over."""
    module = make(**where)

    def loss(part, q, p, **targets):
        if not ids:
            targets = {"own": targets["own"]}
        return module(q, p, **targets)

    return loss, module.parameters()


def blocks(name: str, ranks: Ranks, strategy: str, backend: str):
    """An objective as a function of the same."""

    def loss(part, q, p, **targets):
        return global_info_nce(
            OBJECTIVES[name](part, q, p), temperature=0.1, ranks=ranks, strategy=strategy, backend=backend
        )

    return loss, []


def train(batches: list[Part], loss, parameters, average, accumulation: int):
    """Losses and the weights' gradients of some SGD steps. `average` is over the processes."""
    encoder = Encoder()
    parameters = [*encoder.parameters(), *parameters]
    optimizer = paddle.optimizer.SGD(0.5, parameters=parameters)
    seen = []
    for part in batches:
        step = window_step(
            lambda batch: (encoder(batch["query"]), encoder(batch["passages"])),
            micro_batches(part, accumulation),
            lambda q, p, part=part, **targets: loss(part, q, p, **targets),
        )
        values = [average(step.loss.astype("float64"))]
        for parameter in parameters:
            own_part = paddle.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = average(own_part)
            values.append(parameter.grad)
        seen.append([np.array(v.numpy(), dtype="float64") for v in values])
        optimizer.step()
        optimizer.clear_grad()
    return seen


def compare(mine, want, tolerance: float, what: str) -> None:
    for k, (a, b) in enumerate(zip(mine, want, strict=True)):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(
                x, y, rtol=tolerance, atol=tolerance * np.abs(y).max() + 1e-13, err_msg=f"step {k}: {what}"
            )


FOUR = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
# Name -> (makes the layer, whether it gets ids).
LAYERS = {
    "matryoshka": (partial(InfCLLoss, 0.1, matryoshka_dims=[8, 3], matryoshka_weights=[1.0, 0.5]), False),
    "learnable": (partial(InfCLLoss, 0.1, learnable_temperature=True), False),
    "layer with ids": (partial(InfCLLoss, 0.1), True),
    "debiased": (partial(ObjectiveLoss, InfoNCEObjective(), 0.5, tau_plus=0.05), False),
    "qwen3": (partial(ObjectiveLoss, Qwen3Objective(keep_own_negatives=True), 0.1), True),
    "smoothed": (
        partial(ObjectiveLoss, InfoNCEObjective(), 0.1, label_smoothing=0.2, learnable_temperature=True),
        False,
    ),
    "smoothed directions": (
        partial(ObjectiveLoss, RankingObjective(FOUR), 0.5, label_smoothing=0.2, tau_plus=0.05),
        True,
    ),
}
SHAPES = {
    "even": ([4, 4, 4, 4], [1, 1, 1, 1]),
    "uneven": ([3, 2, 4, 1], [0, 2, 1, 0]),
    "an empty process": ([3, 0, 2, 2], [1, 1, 1, 1]),
}


def main(dp: int, sharding: int, mp: int) -> None:
    if dp:
        from paddle.distributed import fleet

        # Topologies make many groups.
        separate_stores()
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {
            "dp_degree": dp, "sharding_degree": sharding, "mp_degree": mp, "pp_degree": 1,
            "order": ["dp", "pp", "sharding", "sep", "mp"],
        }  # fmt: skip
        fleet.init(is_collective=True, strategy=strategy)
    else:
        dist.init_parallel_env()
    print("started", flush=True)
    ranks = Ranks.current()
    world = dp * sharding if dp else dist.get_world_size()
    assert ranks.world == world, (ranks.world, world)
    rank = ranks.rank
    assert len(set(ranks.peers)) == world and ranks.peers[rank] == dist.get_rank()

    def average(x):
        total = x.clone()
        for group in ranks.groups:
            dist.all_reduce(total, group=group)
        return total / world

    checked = 0
    for (shape, (rows, negatives)), name, accumulation in itertools.product(
        SHAPES.items(), (*OBJECTIVES, *LAYERS), (1, 4)
    ):
        # Everything on two processes; on more of them and in topologies, what can depend on these.
        if world > 2 and accumulation != (1 if shape == "even" else 4):
            continue
        if dp and (shape != "uneven" or accumulation == 1):
            continue
        rows, negatives = rows[:world], negatives[:world]
        steps = [parts(rows, negatives, width=INPUTS, seed=seed, unit=False) for seed in range(STEPS)]
        alone = Ranks()
        if name in LAYERS:
            loss, extra = layer(*LAYERS[name], backend="paddle", ranks=alone)
        else:
            loss, extra = blocks(name, alone, "gather", "paddle")
        # Averages are the same on all processes: one compares.
        want = train([whole(step) for step in steps], loss, extra, lambda x: x, 1) if rank == 0 else None
        for strategy, backend in (("gather", "paddle"), ("ring", "paddle"), ("ring", "dense"), ("auto", "dense")):
            if backend == "dense" and (accumulation == 1 or dp or world > 2 or shape == "even"):
                continue  # what differs between backends does not depend on it
            if name in LAYERS:
                loss, extra = layer(*LAYERS[name], backend=backend, ranks=ranks, strategy=strategy)
            else:
                loss, extra = blocks(name, ranks, strategy, backend)
            mine = train([step[rank] for step in steps], loss, extra, average, accumulation)
            tolerance = 1e-5 if name in ("learnable", "smoothed") else 1e-9  # their temperature is float32
            if rank == 0:
                compare(mine, want, tolerance, f"{shape}, {name}, {strategy}, {backend}, {accumulation}")
            checked += 1
    remote_gradients(ranks)
    disagreement(ranks)
    print(f"checked {checked} combinations on {world} processes", flush=True)


def remote_gradients(ranks: Ranks) -> None:
    """A remote passage gets gradient, and the right one: from every process, summed. And counts are global."""
    rank, world = ranks.rank, ranks.world
    q = paddle.to_tensor(np.random.default_rng(rank).standard_normal((2, D)))
    gradients = {}
    for strategy in ("local", "gather", "ring"):
        p = paddle.to_tensor(np.random.default_rng(10 + rank).standard_normal((2, D)), stop_gradient=False)
        loss = InfCLLoss(0.5, backend="paddle", strategy=strategy, ranks=ranks)
        loss(q, p).backward()
        gradients[strategy] = p.grad.numpy()
        with paddle.no_grad():
            assert float(loss(q, p)) == float(loss(q, p))  # evaluation runs no backward pass
        want = 1 if strategy == "local" else 2 * world - 1
        assert loss.effective_negatives(q, p) == want
        assert (
            InfCLLoss(0.5, backend="paddle", strategy=strategy, ranks=ranks, margin=9.0).effective_negatives(q, p)
            == want
        )
    if world > 1:
        assert np.abs(gradients["gather"] - gradients["local"]).max() > 1e-3
    np.testing.assert_allclose(gradients["gather"], gradients["ring"], rtol=1e-10)


def disagreement(ranks: Ranks) -> None:
    """Ids on one process only: the same error everywhere instead of a hang."""
    q, p = (paddle.to_tensor(np.ones((2, D))) for _ in range(2))
    ids = (paddle.to_tensor([1, 2]), paddle.to_tensor([1, 2])) if ranks.rank == 0 else (None, None)
    for strategy in ("gather", "ring"):
        try:
            InfCLLoss(0.5, backend="paddle", strategy=strategy, ranks=ranks)(q, p, None, *ids)
        except ValueError as error:
            assert "differ in the number of tensors" in str(error) and "by rank" in str(error)
        else:
            assert ranks.world == 1


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
    end_process(0)
