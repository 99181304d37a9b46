"""When actors are asked whether they are there, and when their silence counts as loss."""

import pytest

from elastic_trainer.actors.pulse import Pulse

LEASE_S, LIMIT_S = 6.0, 30.0


@pytest.fixture
def pulse() -> Pulse:
    return Pulse(LIMIT_S, LEASE_S / 3)


def test_asked_three_times_per_lease(pulse: Pulse) -> None:
    assert pulse.due(100.0) == [], "who has never answered is still starting"
    pulse.answered("a", 0.0)
    pulse.answered("b", 1.0)
    assert pulse.due(1.9) == []
    assert pulse.due(2.0) == ["a"]
    assert pulse.due(3.0) == ["a", "b"]
    pulse.ask("a", 3.0)
    assert pulse.due(4.0) == ["b"], "one question at a time"
    pulse.answered("a", 4.0)
    assert pulse.due(5.5) == ["b"]
    assert pulse.due(6.0) == ["a", "b"]


def test_who_has_no_lease_answers_within_the_limit(pulse: Pulse) -> None:
    pulse.ask("a", 1.0)
    pulse.ask("b", 2.0, limit_s=50.0)
    assert pulse.silent(31.0) == {}
    assert pulse.silent(31.5) == {"a": 30.5}
    assert pulse.silent(53.0) == {"a": 52.0, "b": 51.0}
    pulse.answered("a", 53.0)
    assert pulse.silent(53.0) == {"b": 51.0}


def test_a_lease_runs_out_after_the_last_answer_not_after_the_question(pulse: Pulse) -> None:
    pulse.lease("a", LEASE_S)
    pulse.answered("a", 0.0)
    pulse.ask("a", 2.0)
    assert pulse.silent(6.0) == {}
    assert pulse.silent(6.5) == {"a": 6.5}
    pulse.answered("a", 6.6)
    assert pulse.silent(7.0) == {}


def test_who_is_asked_late_gets_time_to_answer(pulse: Pulse) -> None:
    pulse.lease("a", LEASE_S)
    pulse.answered("a", 0.0)
    assert pulse.silent(20.0) == {}, "nobody asked it anything"
    pulse.ask("a", 20.0)
    assert pulse.silent(24.0) == {}
    assert pulse.silent(24.5) == {"a": 24.5}


def test_a_question_may_have_a_limit_of_its_own_and_the_next_one_has_not(pulse: Pulse) -> None:
    pulse.lease("a", LEASE_S)
    pulse.ask("a", 1.0, limit_s=100.0)
    assert pulse.silent(101.0) == {}
    assert pulse.silent(101.5) == {"a": 100.5}
    pulse.answered("a", 102.0)
    pulse.ask("a", 104.0)
    assert pulse.silent(108.5) == {"a": 6.5}


def test_a_lease_may_be_suspended_and_counts_from_a_sign_of_life(pulse: Pulse) -> None:
    pulse.lease("a", LEASE_S)
    pulse.answered("a", 0.0)
    pulse.ask("a", 2.0)
    pulse.lease("a", None)
    assert pulse.silent(20.0) == {}
    pulse.lease("a", LEASE_S)
    pulse.seen("a", 20.0)
    assert pulse.silent(26.0) == {}, "what kept it busy is over; the answer is on its way"
    assert pulse.silent(26.5) == {"a": 6.5}


def test_the_caller_s_own_absence_is_nobody_s_silence(pulse: Pulse) -> None:
    pulse.lease("a", LEASE_S)
    pulse.answered("a", 0.0)
    pulse.ask("a", 2.0)
    pulse.excuse(10.0, 13.0)
    assert pulse.silent(16.0) == {}, "its answer may lie there unread"
    assert pulse.silent(16.5) == {"a": 6.5}, "but a dead one is found all the same"


def test_who_is_gone_is_neither_asked_nor_awaited(pulse: Pulse) -> None:
    pulse.lease("a", LEASE_S)
    pulse.answered("a", 0.0)
    pulse.ask("a", 2.0)
    pulse.forget("a")
    assert pulse.silent(100.0) == {} and pulse.due(100.0) == []
    assert pulse.silence("a", 100.0) is None


def test_the_time_since_the_last_sign_of_life(pulse: Pulse) -> None:
    assert pulse.silence("a", 0.0) is None
    pulse.answered("a", 1.0)
    pulse.ask("a", 3.0)
    assert pulse.silence("a", 4.0) == 3.0
    pulse.seen("a", 4.5)
    assert pulse.silence("a", 5.0) == 0.5
