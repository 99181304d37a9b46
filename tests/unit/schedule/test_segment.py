"""Segments number their microbatches and travel small."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.schedule.build import build
from elastic_trainer.schedule.segment import ActionTable, Segment
from elastic_trainer.types import BatchInfo, Cursor, MicrobatchInfo

MICROBATCH = MicrobatchInfo(num_samples=1, num_tokens=8, num_valid=8, sample_ids=("0",))


def segment(groups: list[int], first_update: int = 1, name: str = "1f1b") -> Segment:
    batches = tuple(
        BatchInfo(update=first_update + u, microbatches=(MICROBATCH,) * count, end=Cursor())
        for u, count in enumerate(groups)
    )
    return Segment(3, 7, "train", batches, build(name, 2, groups), name)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=20))
def test_every_microbatch_is_located(groups: list[int]) -> None:
    seg = segment(groups, first_update=11)
    places = [(u, i) for u, count in enumerate(groups) for i in range(count)]
    assert seg.groups == tuple(groups)
    assert seg.num_microbatches == len(places)
    assert [seg.locate(j) for j in range(len(places))] == places
    assert (seg.first_update, seg.last_update) == (11, 10 + len(groups))


@pytest.mark.parametrize("microbatch", [-1, 3])
def test_a_microbatch_outside_is_no_silent_wrap(microbatch: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        segment([2, 1]).locate(microbatch)


def test_it_survives_pickling_used_or_not() -> None:
    seg = segment([2, 1])
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(seg))
        assert copy == seg
        assert copy.locate(2) == (1, 0)
        assert copy.actions == build("1f1b", 2, [2, 1])
        seg = copy


def test_tied_actions_survive_pickling() -> None:
    lists = build("async_1f1b", 3, [1] * 3, ties=[(0, 1), (0, 2)])
    assert pickle.loads(pickle.dumps(ActionTable(lists))) == lists


def test_actions_cost_few_bytes() -> None:
    lists = build("async_1f1b", 8, [1] * 350, ties=[(0, 7)])
    num_actions = sum(map(len, lists))
    assert len(pickle.dumps(ActionTable(lists))) < 3 * num_actions


def test_only_the_rows_that_are_looked_at_are_decoded() -> None:
    table = pickle.loads(pickle.dumps(ActionTable(build("1f1b", 4, [2]))))
    assert table[-1] == build("1f1b", 4, [2])[3]
    assert [row is not None for row in table._rows] == [False, False, False, True]
    assert table[1:] == build("1f1b", 4, [2])[1:]
    assert "3F0" in repr(table)
    with pytest.raises(IndexError):
        table[4]


def test_equal_tables_hash_equally() -> None:
    lists = build("1f1b", 2, [2])
    assert hash(ActionTable(lists)) == hash(pickle.loads(pickle.dumps(ActionTable(lists))))
    assert ActionTable(lists) != ActionTable(build("1f1b", 2, [3]))
