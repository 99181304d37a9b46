"""Which data positions are remembered: all to which training may return, and few others."""

import json

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.actors.positions import NUM_RECENT, Positions
from elastic_trainer.types import BatchInfo, Cursor


def segment(positions: Positions, last: int, *, snapshot: bool = False, length: int = 2) -> None:
    batches = [
        BatchInfo(update=u, microbatches=(), end=Cursor(row=u))
        for u in range(last - length + 1, last + 1)
    ]
    positions.note(batches, snapshot=snapshot)


def known(positions: Positions, updates: range) -> list[int]:
    return [u for u in updates if u in positions]


def test_only_commit_points_count() -> None:
    positions = Positions(0, Cursor(epoch=3))
    positions.note([])
    segment(positions, 4, length=4)
    assert known(positions, range(6)) == [0, 4]
    assert positions.at(0) == Cursor(epoch=3) and positions.at(4) == Cursor(row=4)


def test_what_is_far_back_is_forgotten() -> None:
    positions = Positions(0, Cursor())
    for last in range(2, 2002, 2):
        segment(positions, last)
    assert known(positions, range(2002)) == [0, *range(2002 - 2 * NUM_RECENT, 2002, 2)]


def test_checkpoints_and_snapshots_are_remembered() -> None:
    positions = Positions(0, Cursor())
    for last in range(2, 402, 2):
        segment(positions, last, snapshot=last % 100 == 0)
        if last in (50, 150):
            positions.saving(last)
        if last == 300:
            positions.stored(200)
            positions.not_saving(50)
            positions.saved(50)
    far_back = range(380 - 2 * NUM_RECENT)
    assert known(positions, far_back) == [50, 100, 150, 200, 300]
    positions.not_saving(150)
    positions.stored(400)
    segment(positions, 402)
    assert known(positions, far_back) == [50, 300]


def test_what_comes_after_the_state_that_is_restored_is_void() -> None:
    positions = Positions(0, Cursor())
    for last in (2, 4, 6, 8):
        segment(positions, last, snapshot=True)
    positions.saving(8)
    positions.rewind(4)
    assert known(positions, range(10)) == [0, 2, 4, 8], "8 may yet become a checkpoint"
    segment(positions, 6)
    positions.stored(4)
    assert known(positions, range(10)) == [0, 2, 4, 6, 8]


@given(st.lists(st.sampled_from(["segment", "snapshot", "save", "saved", "stored"]), max_size=60))
def test_another_process_knows_the_same(steps: list[str]) -> None:
    positions, last, saving, snapshots, saved = Positions(0, Cursor()), 0, [0], [0], 0
    for step in steps:
        if step in ("segment", "snapshot"):
            last += 2
            segment(positions, last, snapshot=step == "snapshot")
            if step == "snapshot":
                snapshots.append(last)
        elif step == "save" and last in positions:
            positions.saving(last)
            saving.append(last)
        elif step == "saved":
            saved = max(saved, saving[-1])
            positions.saved(saved)
        elif step == "stored":
            positions.stored(snapshots[-1])
        assert saved in positions and last in positions
    other = Positions(0, Cursor())
    other.restore(json.loads(json.dumps(positions.facts())), saved)
    everything = range(last + 1)
    assert known(other, everything) == known(positions, everything)
    assert all(other.at(u) == positions.at(u) for u in known(other, everything))
