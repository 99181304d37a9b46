"""Recoveries and pauses, found in the commits of a run."""

import pytest
from timeline import Commit, gaps, pause_s, recovery


def commits(*lines: tuple[int, int, float]) -> list[Commit]:
    """Of (update, generation, seconds), each seen half a second after its work was done."""
    return [Commit(update=u, generation=g, time=t, seen_at=t + 0.5) for u, g, t in lines]


BEFORE = [(1, 1, 0.0), (2, 1, 1.0), (3, 1, 2.0)]


def test_recovery_is_told_by_what_a_reader_sees() -> None:
    found = recovery(commits(*BEFORE, (3, 2, 5.0), (4, 2, 6.0)), at=3.0)
    assert found is not None and (found.commit_s, found.regained_s) == (2.5, 3.5)


def test_what_the_lost_took_part_in_is_no_recovery() -> None:
    """Update 3 is seen after the kill, but is of the old generation: 4 need not exceed it."""
    lines = commits(*BEFORE, (4, 2, 6.0))
    found = recovery(lines, at=2.2)
    assert found is not None and found.commit_s == found.regained_s == pytest.approx(4.3)


def test_no_recovery_before_the_lost_update_is_exceeded() -> None:
    assert recovery(commits(*BEFORE, (2, 2, 5.0), (3, 2, 6.0)), at=3.0) is None
    assert recovery(commits(*BEFORE), at=3.0) is None
    with pytest.raises(ValueError, match="before the loss"):
        recovery(commits(*BEFORE), at=0.1)


def test_a_pause_is_what_exceeds_the_step_that_goes_on() -> None:
    after = [(4, 1, 3.0), (5, 2, 6.0), (6, 2, 7.5), (7, 2, 9.0)]
    assert pause_s(commits(*BEFORE, *after), since=2.5, usual=2) == 1.5
    assert pause_s(commits(*BEFORE, *after[:-1]), since=2.5, usual=2) is None
    assert pause_s(commits(*BEFORE), since=1.5, usual=1) is None


def test_a_pause_before_the_change_counts_too() -> None:
    """A drain is long when the new generation begins at once after it."""
    lines = commits(*BEFORE, (4, 1, 9.0), (5, 2, 10.0), (6, 2, 11.0), (7, 2, 12.0))
    assert pause_s(lines, since=2.5, usual=2) == 6.0


def test_what_came_long_before_the_change_is_no_pause() -> None:
    lines = commits((1, 1, 0.0), (2, 1, 9.0), *((u, 1 + u // 5, 7.0 + u) for u in range(3, 8)))
    assert pause_s(lines, since=0.5, usual=2) == 0.0


def test_a_pause_needs_something_before_it() -> None:
    with pytest.raises(ValueError, match="before the change"):
        pause_s(commits(*BEFORE), since=-1.0, usual=1)


def test_gaps() -> None:
    assert gaps(commits(*BEFORE)) == [1.0, 1.0]
    assert gaps([]) == []
