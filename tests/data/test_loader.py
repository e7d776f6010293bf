# SPDX-License-Identifier: Apache-2.0
"""Collated windows: order, skipping without reading, workers, other people's loaders."""

import numpy as np
import paddle
import pytest

from paddle_infcl.data.collator import PairCollator
from paddle_infcl.data.loader import MicroBatchWindows, WindowLoader
from paddle_infcl.data.rows import DataError, Example
from paddle_infcl.data.sampler import WindowSampler


class Counting(list):
    """Examples that note which rows were read."""

    def __init__(self, examples):
        super().__init__(examples)
        self.read = []

    def __getitem__(self, row):
        self.read.append(row)
        return super().__getitem__(row)


def rows(n: int) -> Counting:
    words = ["cat", "mat", "red", "blue", "this"]
    return Counting(Example("hello " + "cat " * (i % 4), [words[i % 5], "world"], words[: i % 3]) for i in range(n))


def loader(bert, data, *, num_workers=0, world=1, rank=0, micro=2, accumulation=3, **options) -> WindowLoader:
    sampler = WindowSampler(
        data, micro_batch_size=micro, accumulation=accumulation, seed=3, world=world, rank=rank, **options
    )
    collator = PairCollator(bert, max_query_len=12, max_passage_len=8, group_size=2)
    return WindowLoader(data, sampler, collator, num_workers=num_workers)


def plain(value):
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value if value is None else np.asarray(value).tolist()


def test_windows_of_tensors_in_the_samplers_order(bert):
    data = rows(14)
    one = loader(bert, data)
    windows = list(one)
    assert len(windows) == len(one) == 3
    assert [len(window) for window in windows] == [3, 3, 1]
    assert data.read == [row for window in one.sampler for micro in window for row in micro]
    for batch in windows[0]:
        for array in (batch["own"], *batch["query"].values(), *batch["passages"].values()):
            assert isinstance(array, paddle.Tensor) and array.dtype == paddle.int64


def test_nothing_is_read_before_it_is_needed(bert):
    data = rows(18)
    one = loader(bert, data)
    stream = iter(one)
    assert data.read == []
    next(stream)
    assert len(data.read) == 6


def test_epochs_differ_and_repeat(bert):
    one = loader(bert, rows(14))
    first = plain(list(one))
    one.set_epoch(1)
    second = plain(list(one))
    one.set_epoch(0)
    assert plain(list(one)) == first != second


def test_a_row_draws_anew_in_every_epoch(bert):
    data = Counting([Example("hello", ["cat", "mat", "red", "blue"])] * 6)
    one = loader(bert, data, shuffle=False)
    seen = set()
    for epoch in range(4):
        one.set_epoch(epoch)
        seen.add(str(plain(list(one))))
    assert len(seen) == 4


def test_draws_do_not_depend_on_ranks(bert):
    # Resuming on another number of processes must not change what a row draws.
    whole = plain(list(loader(bert, rows(12), micro=1, accumulation=12)))[0]
    shares = [plain(list(loader(bert, rows(12), micro=1, accumulation=4, world=3, rank=r)))[0] for r in range(3)]
    assert sorted(map(str, whole)) == sorted(str(batch) for share in shares for batch in share)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_skipping_reads_nothing_and_happens_once(bert, num_workers):
    # transformers 5605: a resumed run goes on with the rows that the other would have seen.
    whole = plain(list(loader(bert, rows(20))))
    data = rows(20)
    one = loader(bert, data, num_workers=num_workers)
    one.skip(2)
    windows = plain(list(one))
    assert windows == [None, None, *whole[2:]]
    assert len(windows) == len(one)
    if not num_workers:
        assert len(data.read) == 20 - 12
        assert plain(list(one)) == whole


def test_skipping_more_than_there_is(bert):
    one = loader(bert, rows(12))
    one.skip(2)
    assert list(one) == [None, None]
    one.skip(3)
    with pytest.raises(ValueError, match="start_window is 3"):
        list(one)


def test_workers_change_nothing(bert):
    assert plain(list(loader(bert, rows(14), num_workers=2))) == plain(list(loader(bert, rows(14))))


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Broken(Counting):
    """Row 7 can't be read."""

    error: Exception

    def __getitem__(self, row):
        if row == 7:
            raise self.error
        return super().__getitem__(row)


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_errors_of_workers_are_those_of_the_data(bert, num_workers):
    data = Broken(rows(14))
    data.error = DataError("pairs.jsonl, line 8: changed after it was checked", {"changed": 1})
    with pytest.raises(DataError) as caught:
        list(loader(bert, data, num_workers=num_workers))
    assert str(caught.value) == "pairs.jsonl, line 8: changed after it was checked"
    assert caught.value.counts == {"changed": 1}
    if num_workers:
        assert "in __getitem__" in str(caught.value.__cause__)


def test_errors_of_workers_that_cannot_travel(bert):
    data = Broken(rows(14))
    data.error = Unpicklable("this", "that")
    with pytest.raises(RuntimeError, match=r"^Unpicklable: this and that$"):
        list(loader(bert, data, num_workers=1))


def test_a_rank_without_rows_gets_empty_windows(bert):
    for num_workers in (0, 1):
        windows = list(loader(bert, rows(9), world=4, rank=3, micro=2, accumulation=1, num_workers=num_workers))
        assert [len(window) for window in windows] == [1, 0]


def test_collators_of_others_are_taken():
    sampler = WindowSampler(range(6), micro_batch_size=2, accumulation=2, seed=0, shuffle=False)
    windows = list(WindowLoader(range(6), sampler, lambda pairs: {"rows": [row for row, _ in pairs]}))
    assert windows == [[{"rows": [0, 1]}, {"rows": [2, 3]}], [{"rows": [4, 5]}]]


def test_micro_batches_of_others_are_grouped():
    groups = MicroBatchWindows(range(7), 4)
    assert len(groups) == 2
    # transformers 22082: 7 micro-batches, accumulation 4, each epoch.
    for _ in range(2):
        assert list(groups) == [[0, 1, 2, 3], [4, 5, 6]]
    groups.skip(1)
    assert list(groups) == [None, [4, 5, 6]]
    assert list(groups) == [[0, 1, 2, 3], [4, 5, 6]]
    groups.skip(2)
    assert list(groups) == [None, None]
    with pytest.raises(ValueError, match="accumulation is 0"):
        MicroBatchWindows([], 0)


def test_endless_micro_batches():
    def endless():
        n = 0
        while True:
            yield n
            n += 1

    stream = iter(MicroBatchWindows(endless(), 2))
    assert [next(stream) for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]


def test_the_epoch_reaches_a_loaders_parts():
    class Part:
        def set_epoch(self, epoch):
            self.epoch = epoch

    class Loader:
        dataset, batch_sampler = Part(), Part()

    inner = Loader()
    MicroBatchWindows(inner, 2).set_epoch(3)
    assert inner.dataset.epoch == inner.batch_sampler.epoch == 3


def test_upstreams_embedding_data_runs_through(make_tokenizer):
    from paddlenlp.data import DataCollatorForEmbedding
    from paddlenlp.datasets.embedding_dataset import EmbeddingIterableDataset

    tokenizer = make_tokenizer("qwen2")
    examples = [{"query": f"q{i}", "pos_passage": [f"p{i}"], "neg_passage": []} for i in range(3)]
    dataset = EmbeddingIterableDataset(examples, tokenizer, max_query_len=6, max_passage_len=6, group_size=2)
    collate = DataCollatorForEmbedding(tokenizer=tokenizer, max_query_len=6, max_passage_len=6)
    stream = iter(MicroBatchWindows(paddle.io.DataLoader(dataset, batch_size=2, collate_fn=collate), 2))
    window = next(stream)
    assert len(window) == 2
    assert window[0]["query"]["input_ids"].shape == [2, 6]
