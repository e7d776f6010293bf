# SPDX-License-Identifier: Apache-2.0
"""Every field of a block, alone and together, in several groups, on both plain backends, against the oracle."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.functional import Block, Guide, Hardness, inf_cl_loss, info_nce
from paddle_infcl.functional.counting import count_negatives
from tests import oracle
from tests.functional.random_groups import FIELDS, random_groups, to_paddle, unit

BACKENDS = ["paddle", "dense"]


def loss_and_gradients(arrays, groups, dtype, temperature, **options):
    tensors, blocks = to_paddle(arrays, groups, dtype)
    t = paddle.to_tensor([temperature], dtype="float64", stop_gradient=False)
    loss = info_nce(blocks, temperature=t, **options)
    loss.backward()
    grads = {k: None if v.grad is None else v.grad.numpy().astype("float64") for k, v in tensors.items()}
    return float(loss), grads, float(t.grad)


def check(got, want, dtype, temperature, magnitude=1.0):
    """`magnitude`: of the logits, where it is large; the oracle has a rounding error of that many epsilons as well."""
    loss, grads, dtemperature = got
    eps = {"float64": 2.0**-52, "float32": 2.0**-23}[dtype] * magnitude
    assert abs(loss - want["loss"]) <= (30 * eps + 3 * eps / temperature) * max(1.0, abs(want["loss"]))
    largest = max(want["magnitudes"].values())
    for name, grad in grads.items():
        if grad is None:
            assert not want["grads"][name].any(), name
            continue
        error = np.abs(grad - want["grads"][name]).max()
        assert error <= (100 * eps + 20 * eps / temperature) * largest + 1e-30, name
    if dtype == "float64":
        assert dtemperature == pytest.approx(want["dtemperature"], rel=1e-9, abs=1e-9 * largest / temperature + 1e-30)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from(["float32", "float64"]), B=st.integers(1, 9),
    N=st.integers(1, 11), temperature=st.sampled_from([0.02, 0.1, 1.0]), chunk=st.integers(1, 10),
)  # fmt: skip
def test_each_field_alone(field, backend, seed, dtype, B, N, temperature, chunk):
    rng = np.random.default_rng(seed)
    arrays, groups = random_groups(rng, B=B, N=N, D=5, groups=1, blocks=2, fields=[field], dtype=dtype)
    got = loss_and_gradients(arrays, groups, dtype, temperature, backend=backend, memory_budget=chunk * N * 12)
    check(got, oracle.info_nce(arrays, groups, temperature), dtype, temperature)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31), dtype=st.sampled_from(["float32", "float64"]), B=st.integers(1, 9),
    N=st.integers(1, 11), groups=st.integers(1, 3), blocks=st.integers(1, 4),
    temperature=st.sampled_from([0.02, 0.1, 1.0]), budget=st.sampled_from([1, 300, 1000, 3000, None]),
)  # fmt: skip
def test_all_fields_together(backend, seed, dtype, B, N, groups, blocks, temperature, budget):
    rng = np.random.default_rng(seed)
    arrays, made = random_groups(rng, B=B, N=N, D=4, groups=groups, blocks=blocks, fields=FIELDS, dtype=dtype)
    weights = rng.random(B)
    got = loss_and_gradients(
        arrays, made, dtype, temperature, backend=backend, memory_budget=budget,
        row_weights=paddle.to_tensor(weights.astype(dtype)),
    )  # fmt: skip
    want = oracle.info_nce(arrays, made, temperature, weights.astype(dtype))
    check(got, want, dtype, temperature)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), budget=st.sampled_from([1, 500, None]))
def test_chunks_of_any_size_give_the_same_and_counts_match(seed, budget):
    rng = np.random.default_rng(seed)
    arrays, groups = random_groups(rng, B=7, N=8, D=4, groups=1, blocks=3, fields=FIELDS)
    whole = loss_and_gradients(arrays, groups, "float64", 0.1, backend="paddle", memory_budget=1 << 30)
    parts = loss_and_gradients(arrays, groups, "float64", 0.1, backend="paddle", memory_budget=budget)
    assert parts[0] == pytest.approx(whole[0], rel=1e-12, abs=1e-15)
    _, blocks = to_paddle(arrays, groups, "float64")
    kept = sum(
        oracle.kept(b, arrays[b["left"]], arrays[b["right"]]).sum(1) for b in groups[0]
    ) - 1  # its own entry  # fmt: skip
    np.testing.assert_array_equal(count_negatives(blocks[0], budget).numpy(), kept)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [1000.0, -1000.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_block_with_extreme_logits_beside_a_usual_one(backend, size, dtype):
    """lse -1000 or 1000 of one block merges with that of another; nothing overflows, nothing is lost."""
    arrays = {"q": np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]]), "p": np.eye(2), "n": np.full((2, 2), size)}
    own = np.array([0, 1, 1])
    groups = [[{"left": "q", "right": "p", "own": own}, {"left": "q", "right": "n"}]]
    got = loss_and_gradients(arrays, groups, dtype, 1.0, backend=backend, memory_budget=1)
    want = oracle.info_nce(arrays, groups, 1.0)
    assert want["loss"] > 900 if size > 0 else want["loss"] < 1
    check(got, want, dtype, 1.0, magnitude=1000)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [60.0, -60.0])
def test_own_logit_and_the_rest_are_far_apart(backend, size):
    """lse -60 against an own logit of 60, and the reverse: merged by log(sigmoid) these give inf."""
    arrays = {"q": np.array([[1.0]]), "p": np.array([[size], [-size]])}
    groups = [[{"left": "q", "right": "p", "own": np.array([0])}]]
    got = loss_and_gradients(arrays, groups, "float32", 1.0, backend=backend)
    want = oracle.info_nce(arrays, groups, 1.0)
    assert got[0] == pytest.approx(want["loss"], rel=1e-6)
    assert got[1]["q"][0, 0] == pytest.approx(want["grads"]["q"][0, 0], rel=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_with_nothing_left_in_any_block(backend):
    """Every rule can empty a row: its loss and its gradients are exactly 0, and the other rows are untouched."""
    rng = np.random.default_rng(0)
    q, p = unit(rng, 3, 4), unit(rng, 3, 4)
    own = paddle.arange(3)
    empties = {
        "limit": {"limit": paddle.to_tensor([-2.0, 2.0, 2.0])},
        "guide": {
            "guide": Guide(
                paddle.ones([3, 1]), paddle.ones([3, 1]), paddle.to_tensor([0.5, 1.5, 1.5])
            )
        },
        "ids": {
            "row_ids": paddle.to_tensor([[5, 6], [-1, -1], [-1, -1]]),
            "column_ids": paddle.to_tensor([[5, 9], [8, 6], [5, 9]]),
        },
        "owner": {"owner": paddle.to_tensor([0, 0, 0]), "owner_rule": "exclude"},
    }  # fmt: skip
    for name, rules in empties.items():
        tq, tp = (paddle.to_tensor(x.astype("float32"), stop_gradient=False) for x in (q, p))
        loss = info_nce([[Block(tq, tp, own=own, **rules)]], temperature=0.05, backend=backend)
        loss.backward()
        assert np.isfinite(float(loss)) and float(loss) > 0, name
        assert not tq.grad.numpy()[0].any() and tq.grad.numpy()[1:].any(axis=1).all(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_thresholds_have_slack_for_exact_duplicates(backend):
    """Duplicates of a positive are as similar as the positive, but for rounding: a limit or guide at margin 0 keeps
    all of them, in every chunking, also where their products round differently."""
    rng = np.random.default_rng(1)
    base = rng.standard_normal((64, 96))
    base /= np.linalg.norm(base, axis=1, keepdims=True)
    for dtype in ("float32", "float64"):
        x = paddle.to_tensor(np.concatenate([base, base]).astype(dtype))
        own = paddle.arange(128)
        at_own = (x * x).sum(axis=1)
        for rules in ({"limit": at_own}, {"guide": Guide(x, x, at_own)}):
            for budget in (None, 128 * 12):
                block = Block(x, x, own=own, **rules)
                assert (count_negatives([block], budget).numpy() == 127).all()
                # Another negative is a duplicate: the loss is at least log 2 in every row.
                assert float(info_nce([[block]], temperature=0.02, backend=backend, memory_budget=budget)) > 0.69


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("own_cosine", [1.0, -1.0])
def test_dropped_entries_are_gone_to_the_last_bit(backend, own_cosine):
    """Vectorised exp(-inf) is 1e-38 on a CPU, which a row that competes with nothing and whose own logit is -200
    would notice: 40 columns, all of them dropped."""
    q = paddle.to_tensor([[1.0, 0.0]] * 2, stop_gradient=False)
    p = paddle.to_tensor([[own_cosine, 0.0]] + [[0.0, 1.0]] * 39, stop_gradient=False)
    ids = paddle.to_tensor([3, -1]), paddle.full([40], 3, "int64")
    block = Block(q, p, own=paddle.to_tensor([0, 0]), row_ids=ids[0], column_ids=ids[1])
    weights = paddle.to_tensor([1.0, 0.0])  # of the row that competes with nothing, and of one that competes with all
    loss = info_nce([[block]], temperature=0.005, backend=backend, row_weights=weights)
    loss.backward()
    assert float(loss) == 0.0
    assert not q.grad.numpy().any() and not p.grad.numpy().any()


def test_hardness_has_no_gradient_of_its_own():
    rng = np.random.default_rng(2)
    q, p = unit(rng, 4, 5), unit(rng, 4, 5)
    tq = paddle.to_tensor(q, stop_gradient=False)
    block = Block(tq, paddle.to_tensor(p), own=paddle.arange(4), hardness=Hardness(3.0, "all"))
    info_nce([[block]], temperature=0.5, backend="paddle").backward()
    z = q @ p.T * (2.0 + 3.0 * (1 - np.eye(4)))
    P = np.exp(z - np.log(np.exp(z).sum(1, keepdims=True)))
    want = (P - np.eye(4)) @ p * 2.0 / 4
    np.testing.assert_allclose(tq.grad.numpy(), want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": paddle.ones([3, 2])}, r"groups\[0\]\[1\].left: has 3 rows, the first block has 2"),
        ({"self_column": paddle.to_tensor([0, 5])}, r"self_column\[1\]: column 5 is not between 0 and 2"),
        ({"owner": paddle.to_tensor([0, 5])}, r"owner: needs int64 of shape \[3\]"),
        ({"owner_rule": "only"}, "owner: is needed"),
        ({"owner_rule": "mine", "owner": paddle.to_tensor([0, 1, 1])}, "'mine' is none of only, exclude"),
        ({"limit": paddle.ones([3])}, r"limit: needs shape \[2\], has \[3\]"),
        ({"hardness": Hardness(1.0, "some")}, "'some' is none of own, others, all"),
        ({"hardness": Hardness(1.0, "own")}, "owner: is needed"),
        ({"guide": Guide(paddle.ones([2, 3]), paddle.ones([3, 4]), paddle.ones([2]))}, "of one width"),
        ({"guide": Guide(paddle.ones([1, 3]), paddle.ones([3, 3]), paddle.ones([2]))}, "left has 1 rows"),
        (
            {"guide": Guide(paddle.ones([2, 3]), paddle.ones([3, 3]), paddle.ones([3]))},
            r"threshold: needs shape \[2\]",
        ),
        ({"guide": Guide(paddle.ones([2, 3]), paddle.ones([3, 3]), paddle.ones([2]), True)}, "owner: is needed"),
    ],
)
def test_errors_name_the_block_and_the_field(change, message):
    sides = {"left": paddle.ones([2, 2]), "right": paddle.ones([3, 2]), **change}
    first = Block(paddle.ones([2, 2]), paddle.ones([3, 2]), own=paddle.to_tensor([0, 1]))
    with pytest.raises(ValueError, match=message):
        info_nce([[first, Block(**sides)]], temperature=1.0, backend="paddle")


def test_a_group_needs_a_positive():
    block = Block(paddle.ones([2, 2]), paddle.ones([3, 2]))
    with pytest.raises(ValueError, match="which column is the row's positive"):
        info_nce([[block]], temperature=1.0, backend="paddle")
    with pytest.raises(ValueError, match="at least one group"):
        info_nce([[]], temperature=1.0, backend="paddle")


def allocated_by(run) -> int:
    """Bytes that `run` holds at its peak beyond what there was before."""
    stat = paddle.base.core
    before = stat.host_memory_stat_current_value("Allocated", 0)
    stat.host_memory_stat_reset_peak_value("Allocated", 0)
    run()
    return stat.host_memory_stat_peak_value("Allocated", 0) - before


def test_the_budget_holds_at_8192_pairs():
    """B = N = 8192, D = 256, gradients included: 40 MiB at most, where the logits alone are 256 MiB."""
    rng = np.random.default_rng(3)
    q, p = (paddle.to_tensor(unit(rng, 8192, 256).astype("float32"), stop_gradient=False) for _ in range(2))

    def run():
        inf_cl_loss(q, p, temperature=0.05, backend="paddle").backward()

    assert allocated_by(run) <= 40 * 2**20


@pytest.mark.parametrize("fields", [("guide",), ("ids", "limit"), ("hardness",), FIELDS])
def test_the_budget_holds_with_rules(fields):
    """Masks, a guide's similarities and hardness weights count: chunks get smaller, the peak doesn't grow."""
    rng = np.random.default_rng(4)
    arrays, groups = random_groups(rng, B=1500, N=2000, D=8, groups=2, blocks=2, fields=fields, dtype="float32")
    tensors, blocks = to_paddle(arrays, groups, "float32")
    budget = 2 * 2**20

    def run():
        info_nce(blocks, temperature=0.05, backend="paddle", memory_budget=budget).backward()

    inputs = sum(t.size * 4 for t in tensors.values())
    assert allocated_by(run) <= budget + 4 * inputs + 2**18
