"""Working ahead changes nothing but the time at which work is done."""

import threading
from collections.abc import Iterator

import pytest

from elastic_trainer.data.prefetch import Prefetcher
from elastic_trainer.errors import StallError


def test_items_come_in_order_and_end() -> None:
    prefetcher = Prefetcher(iter(range(20)), depth=3, timeout_s=10.0)
    assert list(prefetcher) == list(range(20))
    assert list(prefetcher) == []
    prefetcher.close()


def test_it_works_ahead_but_no_further_than_its_depth() -> None:
    begun: list[int] = []
    reached = threading.Event()

    def items() -> Iterator[int]:
        for i in range(100):
            begun.append(i)
            if i == 3:  # 3 are queued, this one waits for room
                reached.set()
            yield i

    prefetcher = Prefetcher(items(), depth=3, timeout_s=10.0)
    assert reached.wait(10.0), "nothing was read, yet it must have worked ahead"
    assert begun == [0, 1, 2, 3]
    prefetcher.close()


def test_an_error_comes_in_its_turn() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("row 2 is damaged")

    prefetcher = Prefetcher(items(), depth=4, timeout_s=10.0)
    assert next(prefetcher) == 1
    with pytest.raises(ValueError, match="row 2"):
        next(prefetcher)
    prefetcher.close()


def test_close_ends_the_thread_of_an_endless_iterator() -> None:
    def forever() -> Iterator[int]:
        while True:
            yield 0

    prefetcher = Prefetcher(forever(), depth=2, timeout_s=10.0)
    assert next(prefetcher) == 0
    prefetcher.close()
    assert not any(t.name == "prefetch" for t in threading.enumerate())


def test_a_reader_that_waits_too_long_is_told_and_close_does_not_wait_for_ever() -> None:
    release = threading.Event()

    def hangs() -> Iterator[int]:
        yield 1
        release.wait(30.0)
        yield 2

    prefetcher = Prefetcher(hangs(), depth=1, timeout_s=0.1)
    assert next(prefetcher) == 1
    with pytest.raises(StallError, match=r"no data within 0.1 s.*stall_limit_s"):
        next(prefetcher)
    prefetcher.close()
    assert not release.is_set(), "left behind, not waited for"
    release.set()


def test_a_waiting_reader_is_interrupted_and_nothing_is_lost() -> None:
    release, waiting = threading.Event(), threading.Event()

    def slow() -> Iterator[int]:
        yield 1
        waiting.set()
        release.wait(30.0)
        yield 2

    prefetcher = Prefetcher(slow(), depth=2, timeout_s=20.0)
    assert next(prefetcher) == 1
    assert waiting.wait(10.0)
    timer = threading.Timer(0.05, prefetcher.interrupt, (ValueError("over"),))
    timer.start()
    for _ in range(2):  # this one, and any later one
        with pytest.raises(ValueError, match="over"):
            next(prefetcher)
    release.set()
    prefetcher.resume()
    assert list(prefetcher) == [2] and not prefetcher.failed
    prefetcher.close()


def test_an_error_is_raised_again_and_told() -> None:
    def damaged() -> Iterator[int]:
        yield 1
        raise ValueError("row 2 is damaged")

    prefetcher = Prefetcher(damaged(), depth=4, timeout_s=10.0)
    assert next(prefetcher) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="row 2"):
            next(prefetcher)
    assert prefetcher.failed
    prefetcher.close()
