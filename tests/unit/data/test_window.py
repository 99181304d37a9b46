"""Going back in what was read gives the same batches, without reading."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.data.window import Batch, Window
from elastic_trainer.types import BatchInfo, Cursor


def batches(read: list[int], stop: int = 1000) -> Iterator[Batch]:
    """Batch i ends at row i+1 and holds 8 bytes."""
    for i in range(stop):
        read.append(i)
        info = BatchInfo(update=i, microbatches=(), end=Cursor(row=i + 1))
        yield info, [{"x": np.array([i])}]


def rows(window: Iterator[Batch], count: int) -> list[int]:
    return [int(fields[0]["x"][0]) for _, fields in islice(window, count)]


def test_it_goes_back_without_reading_again() -> None:
    read: list[int] = []
    window = Window(batches(read), Cursor())
    assert rows(window, 10) == list(range(10))
    assert window.seek(Cursor(row=4))
    assert rows(window, 8) == list(range(4, 12))
    assert window.seek(Cursor())
    assert rows(window, 3) == [0, 1, 2]
    assert window.seek(Cursor(row=12)), "where it had come to"
    assert rows(window, 1) == [12]
    assert read == list(range(13))


def test_what_is_not_kept_cannot_be_gone_back_to() -> None:
    window = Window(batches([]), Cursor(), max_bytes=8 * 3)
    assert rows(window, 10) == list(range(10))
    for row in (0, 6, 11):
        assert not window.seek(Cursor(row=row))
    assert rows(window, 1) == [10], "nothing has changed"
    assert window.seek(Cursor(row=8)) and rows(window, 3) == [8, 9, 10]


def test_the_end_stays_the_end() -> None:
    window = Window(batches([], stop=3), Cursor())
    assert rows(window, 9) == [0, 1, 2] and rows(window, 9) == []
    assert window.seek(Cursor(row=2)) and rows(window, 9) == [2]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6))), st.integers(0, 10))
def test_any_way_back_and_forth(moves: list[tuple[int, int]], kept: int) -> None:
    read: list[int] = []
    window = Window(batches(read), Cursor(), max_bytes=8 * kept)
    at = 0
    for row, count in moves:
        if window.seek(Cursor(row=row)):
            at = row
        assert rows(window, count) == list(range(at, at + count))
        at += count
        assert len(window._kept) <= max(kept, len(read) - at + 1)
    assert read == sorted(set(read)), "nothing is read twice"
