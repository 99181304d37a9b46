"""The verdict: each way in which a run can fail the test, and that it passes otherwise."""

from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.elastic.events import Cause
from elastic_trainer.testing.chaos.script import parse_step
from elastic_trainer.testing.chaos.verdict import Commit, Done, Facts, Loss, Verdict, judge

LIMIT_S = 5.0


def commits(stop: int, gap_after: int = 30, gap_s: float = 2.0) -> tuple[Commit, ...]:
    """Updates 1, 2, … one second apart; after one of them comes a gap and the next generation."""
    return tuple(
        Commit(
            update=update,
            generation=1 + (update > gap_after),
            at=1000.0 + update + (gap_s if update > gap_after else 0.0),
        )
        for update in range(1, stop)
    )


def facts(**changed: Any) -> Facts:
    """A run that lost stage-1 half a second after update 30, and went on at 1033."""
    base = Facts(
        state="running",
        reason="",
        now=1050.0,
        losses=(Loss(worker="stage-1", cause=Cause.CRASHED, at=1030.7, detect_s=0.2),),
        commits=commits(48),
        audit="",
        num_audited=47,
    )
    return replace(base, **changed)


def done(text: str = "kill stage=1@update=31", **changed: Any) -> Done:
    base = Done(step=parse_step(text), workers=("stage-1",), at=1010.0)
    return replace(base, **changed)


def only_problem(verdict: Verdict) -> str:
    assert not verdict.passed
    problems = [*(row.problem for row in verdict.rows if row.problem), *verdict.problems]
    assert len(problems) == 1, problems
    return problems[0]


def test_all_is_well() -> None:
    verdict = judge([done()], facts(), LIMIT_S)
    assert verdict.passed and verdict.update == 47 and verdict.num_audited == 47
    (row,) = verdict.rows
    assert row.found == "stage-1 crashed"
    assert row.recovery_s == pytest.approx(1033 - 1030.5)


def test_a_run_that_has_completed() -> None:
    assert judge([done()], facts(state="completed", now=9999.0), LIMIT_S).passed


def test_too_slow() -> None:
    verdict = judge([done()], facts(commits=commits(48, gap_s=9.0)), LIMIT_S)
    assert only_problem(verdict) == "9.5 s to the next committed update, more than 5 s"


def test_never_recovered() -> None:
    verdict = judge([done()], facts(commits=commits(31), now=1032.0), LIMIT_S)
    assert only_problem(verdict) == "no update committed after it: running"


def test_the_commit_of_an_older_generation_is_no_recovery() -> None:
    """A segment that was complete when the worker died may be recorded after that."""
    late = (*commits(31), Commit(update=31, generation=1, at=1031.0))
    verdict = judge([done()], facts(commits=late, now=1032.0), LIMIT_S)
    assert only_problem(verdict) == "no update committed after it: running"


def test_stands_still_in_the_end() -> None:
    verdict = judge([done()], facts(now=1090.0, reason="2 of 3 workers"), LIMIT_S)
    assert only_problem(verdict) == "no update committed for 41 s: running, 2 of 3 workers"


@pytest.mark.parametrize("state", ["failed", "interrupted", "not responding"])
def test_the_run_has_ended_badly(state: str) -> None:
    verdict = judge([done()], facts(state=state, reason="too many failures"), LIMIT_S)
    assert only_problem(verdict) == f"the run {state}: too many failures"


def test_nobody_was_found_guilty() -> None:
    verdict = judge([done()], facts(losses=()), LIMIT_S)
    assert only_problem(verdict) == "stage-1 was not found guilty"


def test_another_one_was_found_guilty() -> None:
    other = Loss(worker="stage-2", cause=Cause.WEDGED, at=1030.7)
    verdict = judge([done()], facts(losses=(other,)), LIMIT_S)
    assert verdict.rows[0].problem == "stage-1 was not found guilty"
    assert verdict.problems == ("stage-2 was blamed (wedged), and nothing was done to it",)


def test_one_more_was_found_guilty() -> None:
    other = Loss(worker="stage-2", cause=Cause.LEASE_EXPIRED, at=1030.8)
    verdict = judge([done()], facts(losses=(*facts().losses, other)), LIMIT_S)
    assert only_problem(verdict) == (
        "stage-2 was blamed (lease expired), and nothing was done to it"
    )


def test_a_loss_before_the_step_is_not_its_work() -> None:
    early = Loss(worker="stage-1", cause=Cause.CRASHED, at=1005.0)
    verdict = judge([done()], facts(losses=(early,)), LIMIT_S)
    assert not verdict.passed and "stage-1 was not found guilty" in verdict.rows[0].problem


def test_two_at_once() -> None:
    losses = tuple(
        Loss(worker=worker, cause=Cause.CRASHED, at=1030.7) for worker in ("stage-1", "stage-2")
    )
    both = [
        done("kill stage=any @time=20", at=1030.6),
        done("kill stage=any @time=20", workers=("stage-2",), at=1030.6),
    ]
    verdict = judge(both, facts(losses=losses), LIMIT_S)
    assert verdict.passed
    assert [row.recovery_s for row in verdict.rows] == [pytest.approx(2.4)] * 2


def test_wrong_samples() -> None:
    verdict = judge([done()], facts(audit="update 31 has other samples"), LIMIT_S)
    assert only_problem(verdict) == "update 31 has other samples"


def test_what_did_not_happen() -> None:
    step = done(problem="the run ended before", workers=(), at=0.0)
    verdict = judge([step], facts(losses=(), state="completed"), LIMIT_S)
    assert only_problem(verdict) == "did not happen: the run ended before"


def test_slowness_must_not_be_taken_for_death() -> None:
    slow = done("slow stage=1 factor=3 @update=20")
    quiet = facts(losses=(), commits=commits(48, gap_after=99))
    assert judge([slow], quiet, LIMIT_S).passed
    assert judge([slow], quiet, LIMIT_S).rows[0].recovery_s == pytest.approx(1.0)


def test_a_drained_worker_leaves_and_is_no_failure() -> None:
    drain = done("drain node=10.0.0.2 @update=20", at=1020.5)
    left = Loss(worker="stage-1", cause=Cause.PREEMPTED, at=1031.5)
    assert judge([drain], facts(losses=(left,)), LIMIT_S).passed is False  # 12 s
    assert judge([drain], facts(losses=(left,)), 20.0).passed
    crashed = replace(left, cause=Cause.CRASHED)
    verdict = judge([drain], facts(losses=(crashed,)), 20.0)
    assert only_problem(verdict) == "stage-1 was announced to leave, and counted as a failure"
    assert only_problem(judge([drain], facts(losses=()), 20.0)) == "stage-1 has not left"


def test_another_scale() -> None:
    scale = done("scale 2:4 @update=20", workers=(), at=1020.5)
    (row,) = judge([scale], facts(losses=()), LIMIT_S).rows
    assert row.passed and row.recovery_s == pytest.approx(0.5)
    assert (
        judge([scale], facts(losses=(), commits=commits(21), now=1022.0), LIMIT_S).rows[0].problem
    )


def test_a_drained_worker_that_was_slowed_before() -> None:
    """Its leaving belongs to the drain, not to the slowness."""
    slow = done("slow stage=1 factor=3 @update=10", at=1002.0)
    drain = done("drain node=10.0.0.2 @update=20", at=1020.5)
    left = Loss(worker="stage-1", cause=Cause.PREEMPTED, at=1031.5, commit_s=0.5)
    first, second = judge([slow, drain], facts(losses=(left,)), 20.0).rows
    assert (first.found, second.found) == ("", "stage-1 preempted")
    assert first.passed and second.passed and second.recovery_s == pytest.approx(11.5)


def test_a_lost_message_that_is_noticed_late() -> None:
    """What was in flight is done again after it, updates before its own as well."""
    again = [Commit(update=u, generation=2, at=1040.0 + u) for u in range(28, 33)]
    drop = done("drop stage=1 action=SEND_F @update=31")
    (row,) = judge([drop], facts(losses=(), commits=(*commits(30), *again)), 60.0).rows
    assert row.passed and row.recovery_s == pytest.approx(1068.0 - 1029.0)


def test_an_idle_worker_that_leaves_changes_no_generation() -> None:
    drain = done("drain node=10.0.0.2 @update=20", at=1020.5)
    left = Loss(worker="stage-1", cause=Cause.PREEMPTED, at=1021.5, idle=True)
    quiet = facts(losses=(left,), commits=commits(48, gap_after=99))
    (row,) = judge([drain], quiet, LIMIT_S).rows
    assert row.passed and row.recovery_s == pytest.approx(1.5)
