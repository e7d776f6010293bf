# SPDX-License-Identifier: Apache-2.0
"""Pieces of the backward pass of log-probabilities from hidden states: within the budget, and at full waves."""

from __future__ import annotations

import itertools

import paddle
import pytest

pytest.importorskip("triton")
from paddle_infcl_ops import driver, linear_logprobs, linear_plan, tuning
from paddle_infcl_ops.linear_plan import Problem, cut, default_budget

MIB = 2**20
#: A large language model's output layer on an H200.
LLAMA = Problem(R=8192, V=128256, D=4096, itemsize=2, sms=132, BM=128, BN=256)


def scratch(problem, rows, columns, splits):
    return rows * columns * problem.itemsize + splits * rows * problem.D * 4 * problem.hidden


@pytest.mark.parametrize("R, V, D", list(itertools.product((1, 100, 2304, 8192, 40000), (1, 255, 50257), (64, 4096))))
@pytest.mark.parametrize("budget", [64 * MIB, 800 * MIB])
@pytest.mark.parametrize("hidden", [False, True])
def test_pieces_fit_the_budget_and_cover_the_vocabulary(R, V, D, budget, hidden):
    problem = Problem(R, V, D, 2, 132, 128, 256, hidden)
    rows, columns, splits = cut(problem, budget)
    assert scratch(problem, rows, columns, splits) <= budget
    assert 0 < rows <= R and 0 < columns <= V and 1 <= splits <= 4
    assert columns == V or columns % 256 == 0
    assert rows == R or (rows % 128 == 0 and rows >= 1024)
    # Split sums only where one range leaves multiprocessors idle.
    assert splits == 1 or (hidden and splits * -(-rows // 128) * -(-D // 256) <= 132)


def test_default_pieces_of_a_large_output_layer():
    """Within 56 MiB, and three full waves of tiles."""
    assert default_budget(8192, 4096, 2, 2 * 4096 * (8192 + 128256)) == 56 * MIB
    assert cut(LLAMA, 56 * MIB) == (2048, 6144, 1)
    # With more, all rows at once: dweight is written once.
    assert cut(LLAMA, 1024 * MIB)[0] == 8192
    times = [linear_plan._steps(LLAMA, *cut(LLAMA, size * MIB)) for size in (56, 128, 512, 1024, 4096)]
    assert times == sorted(times, reverse=True) and times[0] < 1.1 * times[-1]


# Milliseconds on an H200, and what the estimate makes of them: it must put them in order.
MEASURED = {(8192, 42752): 37.3, (8192, 8448): 38.2, (2048, 8448): 40.4, (8192, 4352): 42.1, (4096, 4352): 44.8,
            (2048, 4352): 47.1, (2048, 2816): 49.4}  # fmt: skip


def test_the_estimate_orders_pieces_as_an_h200_does():
    estimates = [linear_plan._steps(LLAMA, rows, columns, 1) for rows, columns in MEASURED]
    assert estimates == sorted(estimates)
    for estimate, ms in zip(estimates, MEASURED.values(), strict=True):
        assert abs(estimate / estimates[0] / (ms / 37.3) - 1) < 0.05


def test_the_default_budget_has_bounds():
    assert default_budget(100, 64, 2, 10**6) == linear_plan.LEAST
    many = 1 << 20
    assert default_budget(many, 256, 2, 2 * many * 256) == 2 * many * 256
    assert default_budget(many // 4, 256, 2, 10) <= linear_plan.MOST
    # Small problems are one piece.
    assert cut(Problem(512, 32000, 1024, 2, 132, 128, 256), linear_plan.LEAST)[:2] == (512, 32000)


def test_where_nothing_fits_there_is_still_a_piece():
    assert cut(LLAMA, 1) == (2048, 256, 1)
    assert cut(Problem(5, 100, 8, 2, 1, 32, 32), 1) == (5, 32, 1)
    assert cut(Problem(0, 100, 8, 2, 1, 32, 32), 1 << 20)[0] == 1


def test_tiles():
    usual = linear_plan.tile("lse", 90, 4096, False, True, False)
    assert usual.per_sm == 0 and (usual.BM, usual.BN) == (128, 256)
    assert linear_plan.tile("prob", 90, 4096, False, True, False) == tuning.choose("prob", 90, 4096, False, True)
    for arch, D, fp32, described in ((0, 4096, False, False), (80, 4096, False, False), (90, 256, False, True),
                                     (90, 4096, True, True), (90, 4096, False, False)):  # fmt: skip
        for kind in ("lse", "prob"):
            assert linear_plan.tile(kind, arch, D, fp32, described, True) == tuning.choose(
                kind, arch, D, fp32, described
            )


@pytest.mark.parametrize("budget", [1, 30000, None])
def test_scratch_is_what_the_plan_says(budget, monkeypatch):
    """Everything that a backward pass allocates beside its gradients."""
    monkeypatch.setattr(linear_plan, "FEWEST_ROWS", 64)
    monkeypatch.setattr(linear_plan, "cut", cut.__wrapped__)
    R, V, D = 130, 300, 40
    hidden, weight = paddle.randn([R, D]), paddle.randn([V, D])
    hidden.stop_gradient = weight.stop_gradient = False
    out = linear_logprobs.linear_logprobs_of_labels(
        hidden, weight, paddle.zeros([R], dtype="int64"), memory_budget=budget
    )
    sizes = []
    real = driver.empty
    monkeypatch.setattr(linear_logprobs, "empty", lambda shape, *rest: sizes.append(shape) or real(shape, *rest))
    from paddle_infcl_ops import views

    monkeypatch.setattr(views.driver, "empty", lambda shape, *rest: sizes.append(shape) or real(shape, *rest))
    out.sum().backward()
    used = 4 * sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes) - 4 * (R + V) * D
    problem = Problem(R, V, D, 4, 1, 32, 32)
    planned = scratch(problem, *linear_plan.cut(problem, budget or linear_plan.LEAST))
    assert planned <= used <= planned + 8 * R + 64 * 16
    if budget != 1:
        assert planned <= (budget or linear_plan.LEAST)
