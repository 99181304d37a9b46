"""Budgets, what a change is worth, how often to snapshot, and the order of workers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.elastic.members import Members
from elastic_trainer.elastic.policies import MAX_SNAPSHOTS_UNDER_WAY, Budget, SnapshotPace, worth_it
from elastic_trainer.testing.simulated_worker import even_cut
from elastic_trainer.types import Plan


def plan(*workers: str, step_s: float = 1.0) -> Plan:
    return even_cut(1, workers, layers=6, step_s=step_s)


def test_a_budget_is_used_up_by_one_more_than_its_limit() -> None:
    budget = Budget(limit=2, refill_updates=10)
    budget.spend(0)
    budget.spend(0)
    assert not budget.exhausted
    budget.spend(0)
    assert budget.exhausted


def test_a_budget_without_a_limit_is_never_used_up() -> None:
    budget = Budget(limit=-1, refill_updates=10)
    for _ in range(100):
        budget.spend(0)
    assert not budget.exhausted and budget.count == 100


def test_a_budget_is_refilled_by_new_updates_since_the_last_loss() -> None:
    budget = Budget(limit=2, refill_updates=10)
    budget.spend(5)
    budget.spend(12)
    budget.refill(21)
    assert budget.count == 2
    budget.refill(22)
    assert budget.count == 0


@pytest.mark.parametrize(("after", "worth"), [(0.97, True), (0.985, False), (1.1, False)])
def test_a_change_is_worth_it_when_it_saves_more_than_two_percent(
    after: float, worth: bool
) -> None:
    found, reason = worth_it(plan("a"), plan("a", "b", step_s=after))
    assert found is worth
    assert "2 stages" in reason and ("not 2% faster" in reason) is not worth


def chosen(pace: SnapshotPace, segments: int, length: int = 4) -> list[int]:
    firsts = range(1, 1 + segments * length, length)
    return [i for i, first in enumerate(firsts) if pace.choose(first, first + length - 1)]


def test_snapshots_come_at_the_given_number_of_segments_when_news_are_good() -> None:
    pace, found = SnapshotPace(3), []
    for index in range(9):
        if pace.choose(index * 4 + 1, index * 4 + 4):
            found.append(index)
            pace.stored(index * 4 + 4, cost_s=9.0, segment_s=1.0)
    assert found == [0, 3, 6]


def test_no_snapshots_at_minus_one() -> None:
    assert chosen(SnapshotPace(-1), 10) == []


def test_snapshots_that_do_not_arrive_hold_up_the_next_for_two_segments() -> None:
    assert chosen(SnapshotPace(1), 8) == [0, 1, 4, 7]


def test_without_news_of_the_cost_there_is_one_in_three_segments() -> None:
    assert chosen(SnapshotPace(0), 7) == [0, 3, 6]


@pytest.mark.parametrize("length", [1, 4, 20])
@pytest.mark.parametrize("cost_s", [0.001, 0.1, 3.0])
def test_the_interval_that_is_chosen_costs_less_than_two_percent(
    cost_s: float, length: int
) -> None:
    pace, update_s, spent, num_taken, taken = SnapshotPace(0), 0.25, 0.0, 0, []
    first = 1
    for _ in range(1000):
        last = first + length - 1
        if pace.choose(first, last):
            taken.append(last)
            pace.stored(last, cost_s=cost_s, segment_s=length * update_s)
        first = last + 1
    spent, num_taken = cost_s * (len(taken) - 1), len(taken)
    assert num_taken >= 2, "it must not give up either"
    assert spent / (1000 * length * update_s) < 0.02
    gaps = {b - a for a, b in zip(taken[1:], taken[2:], strict=False)}
    rarest = max(cost_s / 0.015, (2 * cost_s * 600) ** 0.5) / update_s
    assert all(gap - length < rarest for gap in gaps), "no rarer than needed"


@pytest.mark.parametrize("cost_s", [0.002, 0.02, 0.1])
def test_no_other_interval_loses_less_when_failures_are_ten_minutes_apart(cost_s: float) -> None:
    pace, update_s, updates, taken = SnapshotPace(0), 0.01, 200_000, 0
    for update in range(1, updates + 1):
        if pace.choose(update, update):
            taken += 1
            pace.stored(update, cost_s=cost_s, segment_s=update_s)

    def lost_s(interval_s: float) -> float:
        """Per failure: for snapshots, and of training since the last one."""
        return cost_s * 600 / interval_s + interval_s / 2

    interval_s = updates * update_s / taken
    others = [interval_s * factor for factor in (0.5, 0.7, 0.9, 1.1, 1.4, 2.0)]
    assert all(lost_s(interval_s) < lost_s(other) for other in others)


def test_a_new_generation_begins_with_a_snapshot() -> None:
    pace = SnapshotPace(100)
    assert chosen(pace, 5) == [0]
    pace.restart()
    assert chosen(pace, 5) == [0]


def test_a_line_up_keeps_stages_and_fills_gaps_with_idle_workers() -> None:
    members = Members()
    for name in ("w1", "w2", "w3", "w4", "w10", "w9"):
        members.join(name, "n", 0.0)
    members.remove("w2")
    old = plan("w3", "w2", "w1")
    assert members.lineup(old, most=3) == ("w3", "w4", "w1")
    assert members.lineup(old, most=5) == ("w3", "w4", "w1", "w9", "w10")
    assert members.lineup(old, most=2) == ("w3", "w1"), "nobody new when some are too many"
    members.announce(["w4", "w9", "w10"], None, "drain")
    assert members.lineup(old, most=3) == ("w3", "w1")
    assert members.lineup(None, most=9) == ("w1", "w3")


def test_of_two_announcements_the_earlier_departure_counts() -> None:
    members = Members()
    members.join("a", "n", 0.0)
    assert members.announce(["a", "stranger"], 30.0, "spot") == ["a"]
    assert members.announce(["a"], 20.0, "spot") == []
    assert members.leaving["a"].by == 20.0
    members.announce(["a"], 25.0, "spot")
    assert members.leaving["a"].by == 20.0
    members.announce(["a"], None, "drain")
    members.announce(["a"], 10.0, "spot")
    assert members.leaving["a"].by is None, "as soon as possible"


def test_an_id_that_is_gone_does_not_come_back() -> None:
    members = Members()
    assert members.join("a", "n", 0.0) and not members.join("a", "n", 1.0)
    assert members.remove("a") and not members.remove("a")
    assert not members.join("a", "n", 2.0)
    assert members.remove("never seen"), "lost before it could join"
    assert not members.join("never seen", "n", 3.0)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 3))
def test_snapshots_under_way_are_bounded(lengths: list[int], every: int) -> None:
    pace, first, waiting = SnapshotPace(every), 1, 0
    silent = 0
    for length in lengths:
        if pace.choose(first, first + length - 1):
            waiting = 1 if silent >= 2 else waiting + 1
            silent = 0
            assert waiting <= MAX_SNAPSHOTS_UNDER_WAY
        else:
            silent += 1
        first += length
