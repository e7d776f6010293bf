# SPDX-License-Identifier: Apache-2.0
"""GradCache against the same micro-batches with one graph, and against one big batch."""

import contextlib

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.base import core

from paddle_infcl import gradcache
from paddle_infcl.functional import inf_cl_loss
from paddle_infcl.gradcache import RandomState, window_loss, window_step, window_targets
from paddle_infcl.losses import InfCLLoss

VOCABULARY, HIDDEN, DIM = 50, 32, 16


class Encoder(nn.Layer):
    """Mean of embedded tokens through two layers; small, with everything that GradCache must replay."""

    def __init__(self, dropout=0.1, recompute=False, hidden=HIDDEN):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.inner, self.outer = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, DIM)
        self.dropout, self.recompute = nn.Dropout(dropout), recompute

    def body(self, x):
        return self.outer(self.dropout(nn.functional.gelu(self.inner(self.dropout(x)))).mean(axis=1))

    def encode(self, ids):
        x = self.embed(paddle.to_tensor(ids))
        if self.recompute and not x.stop_gradient:
            from paddle.distributed.fleet.utils import recompute

            return nn.functional.normalize(recompute(self.body, x))
        return nn.functional.normalize(self.body(x))

    def forward(self, batch):
        return self.encode(batch["query"]), self.encode(batch["passages"])


def make_encoder(**options):
    paddle.seed(1)
    encoder = Encoder(**options)
    # Paddle's embeddings start at 1/sqrt(V): spread them, so that the rows differ.
    encoder.embed.weight.set_value(encoder.embed.weight * 5)
    return encoder


def make_window(micro_batches, b, group=2, length=6, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "query": rng.integers(0, VOCABULARY, (b, length)),
            "passages": rng.integers(0, VOCABULARY, (b * group, length)),
        }
        for _ in range(micro_batches)
    ]


def joined(window):
    return [{key: np.concatenate([batch[key] for batch in window]) for key in window[0]}]


class Recorder:
    """The loss, keeping the gradient of the representations it was given."""

    def __init__(self, **options):
        self.options, self.grads, self.calls = {"temperature": 0.05, "backend": "dense", **options}, {}, 0

    def __call__(self, q, p, **targets):
        self.calls += 1
        for name, reps in (("q", q), ("p", p)):
            if not reps.stop_gradient:
                reps.register_hook(lambda grad, name=name: self.grads.__setitem__(name, grad.numpy().copy()))
        return inf_cl_loss(q, p, **targets, **self.options)


def plain_step(encoder, window, loss):
    """The same micro-batches with one graph over all of them."""
    reps = [encoder(batch) for batch in window]
    q_reps, p_reps = [q for q, _ in reps], [p for _, p in reps]
    value = loss(paddle.concat(q_reps), paddle.concat(p_reps), **window_targets(window, q_reps, p_reps))
    value.backward()
    return value


def gradients(encoder):
    found = {name: p.grad.numpy().astype("float64") for name, p in encoder.named_parameters() if p.grad is not None}
    encoder.clear_gradients(set_to_zero=False)
    return found


def assert_same_gradients(got, want):
    """All within 1e-5 of the whole norm; each within 1e-4 of its own plus 1e-7 of the whole."""
    assert got.keys() == want.keys() and want
    whole = np.sqrt(sum((g**2).sum() for g in want.values()))
    assert np.sqrt(sum(((got[k] - want[k]) ** 2).sum() for k in want)) <= 1e-5 * whole
    for name, g in want.items():
        assert np.linalg.norm(got[name] - g) <= 1e-4 * np.linalg.norm(g) + 1e-7 * whole, name


@pytest.mark.parametrize("recompute", [False, True])
def test_cached_equals_one_graph_with_dropout(recompute):
    window = make_window(5, 4)
    encoder, plain, cached = make_encoder(recompute=recompute), Recorder(), Recorder()
    paddle.seed(7)
    want_loss = plain_step(encoder, window, plain)
    want = gradients(encoder)
    paddle.seed(7)
    step = window_step(encoder, window, cached)
    assert float(step.loss) == float(want_loss)
    assert (step.rows, step.columns, cached.calls) == (20, 40, 1)
    for side in "qp":
        np.testing.assert_array_equal(cached.grads[side], plain.grads[side])
    assert_same_gradients(gradients(encoder), want)


def test_dropout_matters_and_is_replayed():
    """Without the replay, the second pass would draw other masks: the gradients would be wrong."""
    window, encoder = make_window(3, 4), make_encoder(dropout=0.3)
    paddle.seed(7)
    plain_step(encoder, window, Recorder())
    want = gradients(encoder)
    paddle.seed(8)
    window_step(encoder, window, Recorder())
    with pytest.raises(AssertionError):
        assert_same_gradients(gradients(encoder), want)


def test_eight_of_eight_equal_one_of_sixty_four():
    window, encoder = make_window(8, 8), make_encoder(dropout=0.0)
    many = window_step(encoder, window, Recorder())
    got = gradients(encoder)
    one = window_step(encoder, joined(window), Recorder())
    assert float(many.loss) == pytest.approx(float(one.loss), rel=1e-6)
    assert_same_gradients(got, gradients(encoder))


@pytest.mark.parametrize("recompute", [False, True])
def test_random_state_ends_after_one_forward_pass(recompute):
    window, encoder = make_window(3, 2), make_encoder(recompute=recompute)
    paddle.seed(3)
    for batch in window:
        with paddle.no_grad():
            encoder(batch)
    want = paddle.rand([4]).numpy()
    paddle.seed(3)
    window_step(encoder, window, Recorder())
    np.testing.assert_array_equal(paddle.rand([4]).numpy(), want)


def test_random_state_of_fleets_tracker():
    from paddle.distributed import fleet

    tracker = fleet.meta_parallel.get_rng_state_tracker()
    tracker.add("test_rng", 1234)
    try:
        state = RandomState()
        with tracker.rng_state("test_rng"):
            first = paddle.rand([3]).numpy()
        state.restore()
        with tracker.rng_state("test_rng"):
            np.testing.assert_array_equal(paddle.rand([3]).numpy(), first)
    finally:
        tracker.reset()


def test_a_window_of_one_takes_one_pass():
    calls, encoder, window = [], make_encoder(), make_window(1, 8)

    def forward(batch):
        calls.append(paddle.is_grad_enabled())
        return encoder(batch)

    paddle.seed(5)
    step = window_step(forward, window, Recorder())
    got = gradients(encoder)
    assert calls == [True]
    paddle.seed(5)
    assert float(step.loss) == float(plain_step(encoder, window, Recorder()))
    assert_same_gradients(got, gradients(encoder))


def test_uneven_rows_with_own_and_ids():
    """Rows with different numbers of negatives, and a last micro-batch that is smaller."""
    rng = np.random.default_rng(0)
    window, q_id = [], 0
    for counts in ([2, 1, 3], [1, 1], [4]):
        own = np.concatenate([[0], np.cumsum(counts)[:-1]])
        ids = rng.integers(0, 3, (sum(counts), 2))
        window.append(
            {
                "query": rng.integers(0, VOCABULARY, (len(counts), 5)),
                "passages": rng.integers(0, VOCABULARY, (sum(counts), 5)),
                "own": own,
                "q_ids": ids[own],
                "p_ids": ids,
            }
        )
        q_id += len(counts)
    encoder, plain, cached = make_encoder(), Recorder(), Recorder()
    paddle.seed(2)
    want_loss = plain_step(encoder, window, plain)
    want = gradients(encoder)
    paddle.seed(2)
    step = window_step(encoder, window, cached)
    assert step.targets["own"].tolist() == [0, 2, 3, 6, 7, 8]
    assert float(step.loss) == float(want_loss)
    np.testing.assert_array_equal(cached.grads["p"], plain.grads["p"])
    assert_same_gradients(gradients(encoder), want)


def test_targets():
    window = [
        {"own": np.array([0, 3]), "q_ids": np.array([1, 2]), "p_ids": np.array([1, 5, 6, 2])},
        {},
    ]
    targets = window_targets(window, [paddle.zeros([2, 3])] * 2, [paddle.zeros([4, 3])] * 2)
    assert targets["own"].tolist() == [0, 3, 4, 6]
    assert targets["q_ids"].tolist() == [[1], [2], [-1], [-1]]
    assert targets["p_ids"].tolist() == [[1], [5], [6], [2], [-1], [-1], [-1], [-1]]
    with pytest.raises(ValueError, match=r"micro-batch 0 has 3 passages for 2 queries and no 'own'"):
        window_targets([{}], [paddle.zeros([2, 3])], [paddle.zeros([3, 3])])
    with pytest.raises(ValueError, match=r"\[1, 2\] columns"):
        window_targets(
            [{"q_ids": np.zeros([1, 1])}, {"q_ids": np.zeros([1, 2])}],
            [paddle.zeros([1, 3])] * 2,
            [paddle.zeros([1, 3])] * 2,
        )
    with pytest.raises(ValueError, match="one side only"):
        window_targets([{"q_ids": np.zeros([1, 1])}], [paddle.zeros([1, 3])], [paddle.zeros([1, 3])])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind, micro_batches", [("query", 3), ("passage", 3), ("passage", 1)])
def test_broken_representations_are_named(bad, kind, micro_batches):
    encoder, window = make_encoder(), make_window(micro_batches, 4)

    def forward(batch):
        q, p = encoder(batch)
        if batch is window[-1]:
            broken = paddle.zeros_like(q if kind == "query" else p)
            broken[2] = bad
            return (q + broken, p) if kind == "query" else (q, p + broken)
        return q, p

    message = f"micro-batch {micro_batches - 1} of {micro_batches}: NaN or inf in the {kind} .* first row 2"
    with pytest.raises(ValueError, match=message):
        window_step(forward, window, Recorder())
    assert not gradients(encoder)
    with pytest.raises(ValueError, match=message):
        window_loss(forward, window, Recorder())


def test_one_synchronisation_per_step():
    events, encoder = [], make_encoder()

    @contextlib.contextmanager
    def no_sync():
        events.append("hold")
        yield
        events.append("release")

    rows = []
    window_step(encoder, make_window(4, 2), Recorder(), no_sync=no_sync, on_rows=rows.append)
    assert events == ["hold", "release"] * 3
    assert rows == [2] * 4
    events.clear()
    window_step(encoder, make_window(1, 2), Recorder(), no_sync=no_sync)
    assert not events


def test_scale_and_autocast():
    encoder, window, inside = make_encoder(dropout=0.0), make_window(3, 2), []

    @contextlib.contextmanager
    def autocast():
        inside.append(True)
        yield
        inside.pop()

    def forward(batch):
        assert inside
        return encoder(batch)

    def loss(q, p, own):
        assert not inside
        return inf_cl_loss(q, p, own=own, temperature=0.05, backend="dense")

    step = window_step(forward, window, loss, autocast=autocast)
    want = gradients(encoder)
    scaled = window_step(forward, window, loss, scale=lambda x: x * 1024.0, autocast=autocast)
    assert float(step.loss) == float(scaled.loss)
    got = gradients(encoder)
    assert_same_gradients({k: g / 1024 for k, g in got.items()}, want)


def test_frozen_sides():
    """A frozen passage encoder: its representations have no graph, the queries' gradients are right."""
    window, query, passage = make_window(3, 2), make_encoder(), make_encoder()
    for parameter in passage.parameters():
        parameter.stop_gradient = True

    def forward(batch):
        return query.encode(batch["query"]), passage.encode(batch["passages"])

    paddle.seed(4)
    reps = [forward(batch) for batch in window]
    q_reps, p_reps = [q for q, _ in reps], [p for _, p in reps]
    Recorder()(paddle.concat(q_reps), paddle.concat(p_reps), **window_targets(window, q_reps, p_reps)).backward()
    want = gradients(query)
    paddle.seed(4)
    window_step(forward, window, Recorder())
    assert_same_gradients(gradients(query), want)
    assert not gradients(passage)
    for parameter in query.parameters():
        parameter.stop_gradient = True
    window_step(forward, window, Recorder())
    assert not gradients(query)


def test_learnable_temperature_gets_its_gradient():
    window, encoder = make_window(3, 4), make_encoder(dropout=0.0)
    grads = []
    for step in (plain_step, window_step):
        temperature = paddle.to_tensor([1.0], stop_gradient=False)
        step(encoder, window, Recorder(temperature=temperature))
        grads.append(float(temperature.grad))
    assert grads[0] == grads[1] != 0


@pytest.mark.parametrize("dims", [[4, DIM], [DIM, 4]])
def test_matryoshka_with_cached_representations(dims):
    window, encoder, weights = (
        make_window(3, 4),
        make_encoder(dropout=0.0),
        dict(zip(sorted(dims), (0.5, 1.0), strict=True)),
    )
    loss = InfCLLoss(0.05, matryoshka_dims=dims, matryoshka_weights=[weights[d] for d in dims], backend="paddle")
    step = window_step(encoder, window, loss)
    got = gradients(encoder)
    q, p = encoder(joined(window)[0])
    want = 0.0
    for d, weight in weights.items():
        sides = (nn.functional.normalize(x[:, :d]) for x in (q, p))
        want = want + weight * inf_cl_loss(*sides, temperature=0.05, backend="dense")
    want.backward()
    assert float(step.loss) == pytest.approx(float(want), rel=1e-5)
    assert_same_gradients(got, gradients(encoder))


def test_loss_without_gradient_equals_training():
    window, encoder = make_window(3, 4), make_encoder()
    encoder.eval()
    step = window_step(encoder, window, Recorder())
    gradients(encoder)
    seen = window_loss(encoder, window, Recorder())
    assert float(seen.loss) == float(step.loss) and seen.rows == 12
    assert not gradients(encoder)


def test_features_are_not_changed_in_place():
    window, encoder = make_window(3, 2), make_encoder(dropout=0.0)
    copies = [{k: v.copy() for k, v in batch.items()} for batch in window]
    first = window_step(encoder, window, Recorder())
    second = window_step(encoder, window, Recorder())
    assert float(first.loss) == float(second.loss)
    for batch, copy in zip(window, copies, strict=True):
        assert batch.keys() == copy.keys() and all((batch[k] == copy[k]).all() for k in copy)


def test_an_empty_window_is_an_error():
    for run in (window_step, window_loss):
        with pytest.raises(ValueError, match="no micro-batch"):
            run(make_encoder(), [], Recorder())


def test_memory_is_flat_in_the_number_of_micro_batches():
    """Four times the micro-batches cost no more than their representations, gradients and similarities."""
    encoder = make_encoder(hidden=64)
    peaks = {}
    for micro_batches in (4, 16):
        window = make_window(micro_batches, 8, length=64)
        window_step(encoder, window, Recorder())
        encoder.clear_gradients(set_to_zero=False)
        core.host_memory_stat_reset_peak_value("Allocated", 0)
        before = core.host_memory_stat_current_value("Allocated", 0)
        window_step(encoder, window, Recorder())
        encoder.clear_gradients(set_to_zero=False)
        peaks[micro_batches] = core.host_memory_stat_peak_value("Allocated", 0) - before
    # [B, D] and [N, D] in fp32, four times each (list, concatenation, gradient, slack), and two B x N arrays.
    added = 4 * (12 * 8 * 3 * DIM * 4) + 2 * (128 * 256 * 4)
    assert peaks[16] <= peaks[4] + added
    # One micro-batch's activations are far above that: holding all graphs would show.
    assert peaks[4] > 2 * added / 12


def test_features_in_host_memory(monkeypatch):
    """offload: everything kept between the passes goes to the host and comes back; here both are one memory."""
    window, encoder = make_window(3, 4), make_encoder()
    paddle.seed(7)
    plain = Recorder()
    want_loss = float(window_step(encoder, window, plain).loss)
    want = gradients(encoder)
    moved = {"to host": [], "to device": []}

    def to_host(tensor):
        moved["to host"].append(list(tensor.shape))
        return tensor.clone().detach()

    def to_place(tensor, place):
        assert place.is_cpu_place()
        moved["to device"].append(list(tensor.shape))
        return tensor.clone().detach()

    monkeypatch.setattr(gradcache, "_to_host", to_host)
    monkeypatch.setattr(gradcache, "_to_place", to_place)
    paddle.seed(7)
    offloaded = Recorder()
    assert float(window_step(encoder, window, offloaded, offload=True).loss) == want_loss
    for side in "qp":
        np.testing.assert_array_equal(offloaded.grads[side], plain.grads[side])
    for name, gradient in gradients(encoder).items():
        np.testing.assert_array_equal(gradient, want[name])
    micro = [[4, DIM], [8, DIM]]
    assert moved["to host"] == micro * 3 + [[12, DIM], [24, DIM]]  # representations, then their gradients
    assert moved["to device"] == [[12, DIM], [24, DIM]] + micro * 3


def test_features_that_are_in_host_memory_stay_there():
    tensor = paddle.ones([2, 3])
    assert gradcache._to_host(tensor) is tensor and gradcache._to_place(tensor, tensor.place) is tensor
