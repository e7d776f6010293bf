# SPDX-License-Identifier: Apache-2.0
"""Windows: every row once over all ranks, the same steps everywhere, reproducible, resumable."""

import logging
from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_infcl.data.jsonl import load_pairs
from paddle_infcl.data.rows import DataError, Example
from paddle_infcl.data.sampler import WindowSampler, spread_duplicates
from tests.data.tokenizers import write_rows

FEW = settings(max_examples=150, deadline=None)


class Rows:
    """A data set whose row i has the keys given for it."""

    def __init__(self, keys):
        self.keys = [list(k) for k in keys]

    def __len__(self):
        return len(self.keys)

    def row_keys(self):
        starts = np.cumsum([0, *map(len, self.keys)])
        return np.array([k for row in self.keys for k in row], dtype=np.int64), starts.astype(np.int64)


def sampler(rows, micro=2, accumulation=3, **options) -> WindowSampler:
    dataset = range(rows) if isinstance(rows, int) else rows
    return WindowSampler(dataset, **{"micro_batch_size": micro, "accumulation": accumulation, "seed": 5, **options})


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def flat(windows) -> list[list[int]]:
    return [sorted(row for micro in window for row in micro) for window in windows]


sizes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 70),
        "micro": st.integers(1, 5),
        "accumulation": st.integers(1, 4),
        "world": st.integers(1, 5),
        "epoch": st.integers(0, 3),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
        "sort_by_length": st.booleans(),
    }
).filter(lambda s: s["rows"] >= s["micro"] * s["accumulation"] * s["world"])


def all_ranks(size, **more):
    size = {**size, **more}
    rows, epoch = size.pop("rows"), size.pop("epoch", 0)
    made = []
    for rank in range(size.get("world", 1)):
        lengths = np.arange(rows) * 7 % 11 if size.get("sort_by_length") else None
        made.append(sampler(rows, **size, rank=rank, lengths=lengths))
        made[-1].set_epoch(epoch)
    return made


@given(sizes)
@FEW
def test_every_row_once_and_the_same_steps_on_every_rank(size):
    ranks = all_ranks(size)
    windows = [list(rank) for rank in ranks]
    # sentence-transformers 3348, 3946: len == yielded, on every rank.
    assert {len(rank) for rank in ranks} == {len(w) for w in windows}
    full = size["micro"] * size["accumulation"] * size["world"]
    seen = sorted(row for w in windows for window in w for micro in window for row in micro)
    expected = size["rows"] // full * full if size["drop_last"] else size["rows"]
    assert len(seen) == len(set(seen)) == expected
    for number, window in enumerate(zip(*windows, strict=True)):
        micro_batches = [micro for rank in window for micro in rank]
        assert all(1 <= len(micro) <= size["micro"] for micro in micro_batches)
        shares = [sum(map(len, rank)) for rank in window]
        assert max(shares) - min(shares) <= 1
        steps = {len(rank) for rank in window}
        if number < size["rows"] // full:
            assert shares == [full // size["world"]] * size["world"]
            assert steps == {size["accumulation"]}
        elif size["micro"] > 1 and min(shares) > 0:
            assert len(steps) == 1
        assert max(steps) == -(-max(shares) // size["micro"])


@given(sizes)
@FEW
def test_windows_do_not_depend_on_how_they_are_shared(size):
    full = size["micro"] * size["accumulation"] * size["world"]
    alone = all_ranks(size, micro=full, accumulation=1, world=1)[0]
    shared = [flat(rank) for rank in all_ranks(size)]
    together = [sorted(joined(parts)) for parts in zip(*shared, strict=True)]
    assert together == flat(alone)


@given(sizes, st.integers(0, 8))
@FEW
def test_resume_at_a_window_or_at_a_row(size, start):
    ranks, again = all_ranks(size), all_ranks(size)
    start = min(start, len(ranks[0]))
    for rank, other in zip(ranks, again, strict=True):
        windows = list(rank)
        other.start_window = start
        assert list(other) == windows[start:]
        other.start_row = other.rows_before(start)
        assert list(other) == windows[start:]
        assert list(other) == windows  # skipping happens once
        assert len(other) == len(windows)


@given(sizes, st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
@FEW
def test_resume_on_another_number_of_ranks(size, world, micro, start):
    size = {**size, "drop_last": False}
    first = all_ranks(size)
    start = min(start, len(first[0]))
    done = [row for rank in first for window in list(rank)[:start] for micro_batch in window for row in micro_batch]
    if size["rows"] < micro * world:
        return
    rest = []
    for rank in all_ranks(size, world=world, micro=micro, accumulation=1):
        rank.start_row = len(done)
        rest.extend(row for window in rank for micro_batch in window for row in micro_batch)
    assert sorted(done + rest) == list(range(size["rows"]))


def test_windows_never_cross_an_epoch():
    # transformers 22082, 22098: 7 micro-batches, accumulation 4.
    windows = sampler(14, 2, 4)
    for epoch in range(3):
        windows.set_epoch(epoch)
        assert [len(window) for window in windows] == [4, 3]


def test_epochs_differ_and_come_from_the_seed():
    # sentence-transformers 3069
    def epoch(number, seed):
        one = sampler(60, seed=seed)
        one.set_epoch(number)
        return list(one)

    assert epoch(0, 1) == epoch(0, 1)
    assert epoch(1, 1) == epoch(1, 1)
    assert epoch(0, 1) != epoch(1, 1)
    assert epoch(0, 1) != epoch(0, 2)
    assert epoch(0, 1) != epoch(1, 0)
    in_order = sampler(7, 2, 1, shuffle=False)
    assert list(in_order) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6]]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_fewer_rows_than_one_batch(drop_last, world):
    # FlagEmbedding 56: zero steps without a word.
    size = 6 * world
    with pytest.raises(
        DataError, match=rf"{size - 1} rows per epoch and one global batch takes {size} .*{world} devices"
    ):
        sampler(size - 1, 2, 3, drop_last=drop_last, world=world)
    assert len(sampler(size, 2, 3, drop_last=drop_last, world=world)) == 1


def test_uneven_windows_over_ranks():
    # 13 rows, windows of 4 x 2 x 1: 8 and 5; 5 rows over 4 ranks: 2, 1, 1, 1.
    windows = [list(sampler(13, 2, 1, world=4, rank=rank)) for rank in range(4)]
    assert [[len(m) for m in w[1]] for w in windows] == [[2], [1], [1], [1]]
    # Fewer rows than ranks: the last rank has an empty window, not one window less.
    windows = [list(sampler(11, 2, 1, world=4, rank=rank)) for rank in range(4)]
    assert [w[1] for w in windows][3] == []
    assert [len(w) for w in windows] == [2] * 4


def test_sorted_micro_batches():
    lengths = np.random.default_rng(0).permutation(64)
    rows = 64
    plain = sampler(rows, 4, 4)
    in_lengths = sampler(rows, 4, 4, sort_by_length=True, lengths=lengths)
    for window, other in zip(in_lengths, plain, strict=True):
        values = [lengths[micro].tolist() for micro in window]
        assert joined(values) == sorted(joined(values), reverse=True)
        assert sorted(joined(window)) == sorted(joined(other))
    # Over ranks: at every step all ranks work on neighbouring lengths.
    ranks = [next(iter(sampler(rows, 4, 2, world=2, rank=r, sort_by_length=True, lengths=lengths))) for r in (0, 1)]
    for step in range(1):
        later = [lengths[ranks[r][step + 1]].max() for r in (0, 1)]
        assert min(lengths[ranks[r][step]].min() for r in (0, 1)) > max(later)


def test_lengths_come_from_the_data(tmp_path):
    rows = [{"query": "q", "pos": "p" * n} for n in (3, 9, 1, 5)]
    data = load_pairs(write_rows(tmp_path / "a.jsonl", rows))
    assert list(sampler(data, 2, 2, sort_by_length=True)) == [[[1, 3], [0, 2]]]
    with pytest.raises(ValueError, match="4 rows, no lengths"):
        sampler(4, 2, 2, sort_by_length=True)
    with pytest.raises(ValueError, match="4 rows, 3 lengths"):
        sampler(4, 2, 2, sort_by_length=True, lengths=[1, 2, 3])


def test_weights_shape_the_epoch(tmp_path):
    a = write_rows(tmp_path / "a.jsonl", [{"query": f"a{i}", "pos": "p"} for i in range(8)])
    b = write_rows(tmp_path / "b.jsonl", [{"query": f"b{i}", "pos": "p"} for i in range(3)])
    windows = sampler(load_pairs([a, b], weights=[0.5, 3]), 2, 3)
    counts = Counter(row for window in windows for micro in window for row in micro)
    assert sum(counts.values()) == 13
    assert sum(counts[row] for row in range(8)) == 4 and max(counts[row] for row in range(8)) == 1
    assert [counts[row] for row in (8, 9, 10)] == [3, 3, 3]
    with pytest.raises(DataError, match="13 rows per epoch and one global batch takes 14"):
        sampler(load_pairs([a, b], weights=[0.5, 3]), 2, 7)


keyed = st.lists(
    st.tuples(st.integers(0, 12), st.integers(20, 60)) | st.tuples(st.integers(0, 12)), min_size=1, max_size=60
)


@given(keyed, st.integers(1, 9), st.integers(0, 4))
@FEW
def test_no_two_rows_of_a_window_share_a_key(keys, size, seed):
    data = Rows(keys)
    order = np.random.default_rng(seed).permutation(len(keys))
    rows, bounds = spread_duplicates(order, *data.row_keys(), size)
    assert sorted(rows.tolist()) == list(range(len(keys)))
    assert bounds[0] == 0 and bounds[-1] == len(keys)
    windows = [rows[a:b].tolist() for a, b in pairwise(bounds)]
    position = {row: place for place, row in enumerate(order.tolist())}
    for number, window in enumerate(windows):
        assert 1 <= len(window) <= size
        used = Counter(key for row in window for key in set(keys[row]))
        assert max(used.values()) == 1
        # A row without duplicates is never put off while an earlier window has room.
        counts = Counter(key for row in keys for key in set(row))
        free = [row for row in window if all(counts[key] == 1 for key in keys[row])]
        for earlier in windows[:number]:
            before = sum(position[row] < position[f] for f in free[:1] for row in earlier)
            assert not free or before == size


@given(keyed, st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.booleans())
@FEW
def test_no_duplicates_over_ranks(keys, micro, accumulation, world, drop_last):
    data, full = Rows(keys), micro * accumulation * world
    options = {"no_duplicates": True, "drop_last": drop_last, "world": world}
    if len(keys) < full:
        return
    try:
        ranks = [sampler(data, micro, accumulation, rank=rank, **options) for rank in range(world)]
        windows = [list(rank) for rank in ranks]
    except DataError as error:
        assert drop_last and "leaves no full batch" in str(error)
        return
    assert {len(rank) for rank in ranks} == {len(w) for w in windows}
    together = [[row for rank in window for m in rank for row in m] for window in zip(*windows, strict=True)]
    seen = joined(together)
    assert len(set(seen)) == len(seen)
    if drop_last:
        assert {len(window) for window in together} == {full}
    else:
        assert len(seen) == len(keys)
    for window in together:
        used = Counter(key for row in window for key in set(keys[row]))
        assert max(used.values()) == 1


@given(keyed, st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
@FEW
def test_no_duplicates_resumed_with_another_window(keys, old, new, start):
    data = Rows(keys)
    if len(keys) < max(old, new):
        return
    first = sampler(data, old, 1, no_duplicates=True)
    windows = flat(first)
    start = min(start, len(windows))
    second = sampler(data, new, 1, no_duplicates=True)
    second.start_row, second.start_row_window = first.rows_before(start), old
    rest = flat(second)
    if old == new:
        assert rest == windows[start:]
    assert sorted(joined(windows[:start]) + joined(rest)) == list(range(len(keys)))
    for window in rest:
        assert max(Counter(key for row in window for key in set(keys[row])).values()) == 1


def test_duplicates_cost_few_rows_their_place():
    # 1000 rows, each query twice: 10 full windows, none more.
    data = Rows([(i % 500, 1000 + i) for i in range(1000)])
    windows = flat(sampler(data, 100, 1, no_duplicates=True))
    assert [len(window) for window in windows][:9] == [100] * 9
    assert len(windows) <= 11


def test_a_query_more_frequent_than_windows_is_said(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("paddle_infcl"), "propagate", True)
    data = Rows([(0, i + 10) if i < 8 else (i + 10,) for i in range(20)])
    windows = sampler(data, 5, 1, no_duplicates=True)
    assert len(windows) == 8
    assert "20 rows need 8 windows of 5 instead of 4: the rest are smaller windows" in caplog.text
    assert sum(map(len, flat(windows))) == 20
    with pytest.raises(DataError, match="leaves no full batch of 5"):
        list(sampler(Rows([(0,)] * 6), 5, 1, no_duplicates=True, drop_last=True))


def test_no_duplicates_reads_plain_examples():
    data = [Example("q", [f"p{i}"]) for i in range(2)] + [Example("r", ["p0"]), Example("s", ["t"])]
    for window in sampler(data, 2, 1, no_duplicates=True):
        queries = [data[row].query for micro in window for row in micro]
        positives = [data[row].positives[0] for micro in window for row in micro]
        assert len(set(queries)) == len(queries) and len(set(positives)) == len(positives)


def test_a_row_that_a_weight_repeats_is_a_duplicate_of_itself(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"query": f"q{i}", "pos": f"p{i}"} for i in range(6)])
    windows = flat(sampler(load_pairs(path, weights=[3]), 2, 2, no_duplicates=True))
    assert all(len(set(window)) == len(window) for window in windows)
    assert Counter(joined(windows)) == dict.fromkeys(range(6), 3)


def test_a_large_epoch_takes_linear_time():
    # Every row the same key: a list of rows put off that is searched for every window would take 10^10 steps.
    keys, starts = np.zeros(100_000, dtype=np.int64), np.arange(100_001)
    _, bounds = spread_duplicates(np.arange(100_000), keys, starts, 64)
    assert len(bounds) == 100_001


@pytest.mark.parametrize(
    "options, message",
    [
        ({"micro": 0}, "micro_batch_size is 0"),
        ({"accumulation": 0}, "accumulation is 0"),
        ({"world": 0}, "world is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"world": 2, "rank": 2}, "rank is 2; from 0 to 1"),
        ({"rank": -1}, "rank is -1"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        sampler(100, **options)


def test_wrong_starts():
    one = sampler(12)
    one.start_window = 3
    with pytest.raises(ValueError, match="start_window is 3, and epoch 0 has 2"):
        list(one)
    one.start_window, one.start_row = 1, 6
    with pytest.raises(ValueError, match="exclude each other"):
        list(one)
    one.start_window, one.start_row = 0, 13
    with pytest.raises(ValueError, match="start_row is 13, and epoch 0 has 12 rows"):
        list(one)
    one.start_row = 0
    assert len(list(one)) == 2
