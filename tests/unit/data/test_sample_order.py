"""The order of rows: permutations, windows, and that it never changes."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.data.order import EpochOrder, Permutation


def listed(permutation: Permutation) -> list[int]:
    return [permutation[index] for index in range(len(permutation))]


groups = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@settings(deadline=None)
@given(st.integers(1, 600), st.text(max_size=8))
def test_a_permutation_visits_each_index_once(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    assert sorted(listed(permutation)) == list(range(size))


def test_a_permutation_is_random_access_without_memory() -> None:
    permutation = Permutation(10**15, "large")
    seen = {permutation[i] for i in range(1000)}
    assert len(seen) == 1000 and max(seen) > 9 * 10**14 and min(seen) < 10**14
    with pytest.raises(IndexError):
        permutation[10**15]


def test_permutations_mix_well() -> None:
    """Over many keys each row of a few lands at each position about equally often."""
    size, keys = 7, 4200
    counts = [[0] * size for _ in range(size)]
    for key in range(keys):
        for position, row in enumerate(listed(Permutation(size, f"{key}"))):
            counts[position][row] += 1
    expected = keys / size
    assert all(0.8 * expected < count < 1.2 * expected for line in counts for count in line)


@settings(deadline=None)
@given(groups, st.integers(1, 40), st.text(max_size=4))
def test_an_epoch_visits_each_row_once_window_by_window(
    rows: list[int], window: int, key: str
) -> None:
    order = EpochOrder(rows, rows, key=key, window_bytes=window)
    visited = [order.row(position) for position in range(order.num_rows)]
    assert sorted(visited) == list(range(sum(rows)))
    starts = [0, *accumulate(rows)]
    group_of = [group for group, size in enumerate(rows) for _ in range(size)]
    # The groups that are open at any time (begun and not ended) fit in one window.
    for position in range(order.num_rows):
        done, ahead = visited[:position], visited[position:]
        is_open = {group_of[row] for row in done} & {group_of[row] for row in ahead}
        size = sum(rows[group] for group in is_open)
        assert size <= window or len(is_open) == 1, (starts, visited)


def test_without_a_key_rows_come_as_they_lie() -> None:
    order = EpochOrder([3, 2], [1, 1], key=None)
    assert [order.row(p) for p in range(5)] == [0, 1, 2, 3, 4]
    for position in (-1, 5):
        with pytest.raises(IndexError):
            order.row(position)


def test_golden_order() -> None:
    """Checkpoints hold positions in this order: it must not change between versions."""
    assert listed(Permutation(12, "train/0/0")) == GOLDEN_PERMUTATION
    order = EpochOrder([4, 3, 5], [40, 30, 50], key="train/0/1", window_bytes=80)
    assert [order.row(p) for p in range(12)] == GOLDEN_ORDER


GOLDEN_PERMUTATION = [7, 5, 2, 4, 9, 8, 1, 0, 10, 11, 6, 3]
GOLDEN_ORDER = [6, 10, 4, 8, 7, 9, 5, 11, 0, 1, 3, 2]
