"""Rates count from the same update on for everybody, however far ahead each is."""

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.prefetch import Prefetcher
from elastic_trainer.data.rates import RateTable, effective_from
from elastic_trainer.types import BatchInfo

BEFORE, AFTER = ((1.0, 0.0), (0.0, 1.0)), ((1.0, 0.0), (0.0, 9.0))
DEPTH, BATCH, WAIT_S = 3, 12, 20.0


def config() -> Config:
    base = {
        "model": {"name": "emulated"},
        "data": {"format": "synthetic", "sequence_length": 4, "size_sigma": 1.0},
        "train": {"global_batch_size": BATCH, "max_steps": 4},
        "pipeline": {"microbatch_size": 4},
    }
    return load_config(base, [])


class Watched:
    """A stream that counts what it has made, and waits before it makes the batch of an update."""

    def __init__(self, table: RateTable, held_at: int | None = None) -> None:
        self._stream = BatchStream(config(), "train", BATCH, rates=table)
        self._made = threading.Semaphore(0)
        self._held_at, self.go_on = held_at, threading.Event()

    def __iter__(self) -> Iterator[tuple[BatchInfo, Any]]:
        for update in itertools.count(1):
            if update == self._held_at:
                assert self.go_on.wait(WAIT_S)
            batch = next(self._stream)
            self._made.release()
            yield batch

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._made.acquire(timeout=WAIT_S)


def infos(batches: Any, count: int) -> list[BatchInfo]:
    return [info for info, _ in itertools.islice(batches, count)]


def test_a_table_knows_from_when_on() -> None:
    table = RateTable(BEFORE)
    assert table.at(4) == BEFORE
    table.announce(6, AFTER)
    table.announce(8, BEFORE)
    assert [table.at(u) for u in (5, 6, 7, 8, 90)] == [BEFORE, AFTER, AFTER, BEFORE, BEFORE]
    with pytest.raises(AssertionError, match="other rates already"):
        table.announce(90, AFTER)


def test_rates_count_from_the_first_update_that_may_not_have_begun() -> None:
    table = RateTable(BEFORE)
    watched = Watched(table)
    ahead = Prefetcher(iter(watched), DEPTH, WAIT_S)
    try:
        found = infos(ahead, 2)
        watched.wait_for(2 + DEPTH + 1)  # it is as far ahead as it may be
        first = effective_from(3, DEPTH)
        with pytest.raises(AssertionError, match="other rates already"):
            table.announce(first - 1, AFTER)
        table.announce(first, AFTER)
        found += infos(ahead, 8)
    finally:
        ahead.close()
    before = infos(BatchStream(config(), "train", BATCH, rates=RateTable(BEFORE)), 10)
    after = infos(BatchStream(config(), "train", BATCH, rates=RateTable(AFTER)), 10)
    assert all(a != b for a, b in zip(before, after, strict=True)), "else nothing is shown"
    assert found == before[: first - 1] + after[first - 1 :]


@pytest.mark.parametrize("held_at", [3, 4, 6])
def test_loaders_pack_alike_whichever_is_ahead(held_at: int) -> None:
    found = []
    for held in (None, held_at):
        table = RateTable(BEFORE)
        watched = Watched(table, held)
        ahead = Prefetcher(iter(watched), DEPTH, WAIT_S)
        try:
            mine = infos(ahead, 2)
            watched.wait_for(2 + DEPTH + 1 if held is None else held - 1)
            table.announce(effective_from(3, DEPTH), AFTER)
            watched.go_on.set()
            found.append(mine + infos(ahead, 8))
        finally:
            ahead.close()
    assert found[0] == found[1]


def test_a_stream_opened_again_at_an_earlier_place_reads_the_same_samples() -> None:
    whole = BatchStream(config(), "train", BATCH, rates=RateTable(BEFORE))
    first, second, third = infos(whole, 3)
    again = BatchStream(config(), "train", BATCH, first.end, first_update=2, rates=RateTable(AFTER))
    for old, new in zip((second, third), infos(again, 2), strict=True):
        assert (new.update, new.end, new.costs) == (old.update, old.end, old.costs)
        assert new.microbatches != old.microbatches and ids(new) == ids(old)


def ids(info: BatchInfo) -> list[str]:
    return sorted(i for m in info.microbatches for i in m.sample_ids)
