"""Broken schedules are refused, with the grid and the place marked."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import Action, ActionLists, Kind
from elastic_trainer.schedule.build import build, forward_only, is_asynchronous
from elastic_trainer.schedule.deadlock import check_deadlock
from elastic_trainer.schedule.grid import MARK
from elastic_trainer.schedule.validate import validate, validate_forward_only

Rows = list[list[str]]


def read(rows: Rows) -> ActionLists:
    return tuple(tuple(Action.parse(text) for text in row) for row in rows)


def rows_of(name: str = "1f1b", *, tied: bool = False, reduce: bool = False) -> Rows:
    """Two stages, three microbatches in updates of 2 and 1 (or 1 each), as text to break."""
    groups = [1, 1, 1] if is_asynchronous(name) else [2, 1]
    lists = build(name, 2, groups, ties=[(0, 1)] if tied else (), reduce=reduce)
    return [[str(action) for action in actions] for actions in lists]


def check(rows: Rows, name: str = "1f1b", **expected: object) -> None:
    asynchronous = is_asynchronous(name)
    groups = [1, 1, 1] if asynchronous else [2, 1]
    validate(read(rows), 2, groups, asynchronous=asynchronous, **expected)  # type: ignore[arg-type]


def move(rows: Rows, text: str, before: str) -> None:
    """Put an action of one stage right before another."""
    row = next(row for row in rows if text in row)
    row.remove(text)
    row.insert(row.index(before), text)


def refused(rows: Rows, message: str, mark: str, name: str = "1f1b", **expected: object) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        check(rows, name, **expected)
    marked = [line for line in str(caught.value).splitlines() if MARK in line]
    assert len(marked) == 1
    assert f"{mark} {MARK}" in marked[0]


ORDERS = [
    ("1f1b", "0B0", "0F0", "0B0 must come after 0F0|0B0 must come after 0RECV_B0", "0B0"),
    ("1f1b", "1F0", "1RECV_F0", "1F0 must come after 1RECV_F0", "1F0"),
    ("1f1b", "0SEND_F0", "0F0", "0SEND_F0 must come after 0F0", "0SEND_F0"),
    ("1f1b", "0B0", "0RECV_B0", "0B0 must come after 0RECV_B0", "0B0"),
    ("1f1b", "1SEND_B0", "1B0", "1SEND_B0 must come after 1B0", "1SEND_B0"),
    ("gpipe", "1B1", "1B0", "1B1 must come after 1B0", "1B1"),
    ("1f1b", "0OPT1", "0B1", "0OPT1 must come after 0B1", "0OPT1"),
    ("1f1b", "0F2", "0OPT1", "0F2 runs on the wrong weights: .* 1 updates late, not 0", "0F2"),
    ("async_1f1b", "1OPT0", "1B0", "1OPT0 must come after 1B0", "1OPT0"),
    (
        "async_1f1b",
        "1F1",
        "1OPT0",
        "1F1 runs on the wrong weights: .* 1 updates late, not 0",
        "1F1",
    ),
]


@pytest.mark.parametrize(("name", "action", "before", "message", "mark"), ORDERS)
def test_a_wrong_order(name: str, action: str, before: str, message: str, mark: str) -> None:
    rows = rows_of(name)
    check(rows, name)
    move(rows, action, before)
    refused(rows, message, mark, name)


def test_an_asynchronous_update_too_early_is_too_little_late() -> None:
    rows = rows_of("async_1f1b")
    for text in ("0RECV_B0", "0B0", "0OPT0"):
        move(rows, text, "0F1")
    refused(rows, "0F1 runs on the wrong weights: .* 0 updates late, not 1", "0F1", "async_1f1b")


TIED = [
    ("0RECV_G1@1", "0SEND_W1@1", "0OPT1 must come after 0RECV_G1@1", "0OPT1"),
    ("0SEND_W1@1", "0OPT1", "0SEND_W1@1 must come after 0OPT1", "0SEND_W1@1"),
    ("1SEND_G1@0", "1B1", "1SEND_G1@0 must come after 1B1", "1SEND_G1@0"),
    ("1SEND_G1@0", "1TIE1@0", "1OPT1 must come after 1SEND_G1@0", "1OPT1"),
    ("1TIE1@0", "1RECV_W1@0", "1TIE1@0 must come after 1RECV_W1@0", "1TIE1@0"),
    ("1TIE1@0", "1B2", "1F2 runs on version 0 of the weights tied to stage 0", "1F2"),
]


@pytest.mark.parametrize(("action", "before", "message", "mark"), TIED)
def test_tied_parameters_in_the_wrong_order(
    action: str, before: str, message: str, mark: str
) -> None:
    rows = rows_of(tied=True)
    check(rows, ties=[(0, 1)])
    move(rows, action, before)
    refused(rows, message, mark)


def test_reduce_before_the_gradients_are_complete() -> None:
    rows = rows_of(tied=True, reduce=True)
    check(rows, reduce=True)
    move(rows, "0REDUCE1", "0RECV_G1@1")
    refused(rows, "0REDUCE1 must come after 0B1", "0REDUCE1")


def test_a_follower_on_another_version_than_its_owner() -> None:
    rows = rows_of("async_1f1b", tied=True)
    rows[1].remove("1TIE0@0")
    rows[1].insert(rows[1].index("1B2"), "1TIE0@0")
    message = "1F2 runs on version 0 of the weights tied to stage 0, which runs it on 1"
    refused(rows, message, "1F2", "async_1f1b")


def test_crossed_rendezvous_sends_deadlock() -> None:
    """C10: both stages send before they reach what the other one sends."""
    rows = rows_of()
    move(rows, "0SEND_F1", "0RECV_B0")
    move(rows, "1SEND_B0", "1RECV_F1")
    for text in ("1F0", "1B0", "1SEND_B0"):
        move(rows, text, "1RECV_F1")
    refused(
        rows,
        "deadlock: 0SEND_F1 waits for 1RECV_F1; 1SEND_B0 waits for 0RECV_B0",
        "0SEND_F1",
    )


def test_a_collective_that_one_stage_reaches_too_late_deadlocks() -> None:
    lists = read(
        [["0F0", "0REDUCE0", "0SEND_F0", "0OPT0"], ["1RECV_F0", "1F0", "1REDUCE0", "1OPT0"]]
    )
    with pytest.raises(
        ScheduleError, match="0REDUCE0 waits for all stages; 1F0 waits for 0SEND_F0"
    ):
        check_deadlock(lists)


def test_a_collective_with_late_tied_gradients_still_ends() -> None:
    """The owner reaches REDUCE first, is woken by the gradient and then waits for the others."""
    check_deadlock(read([["0RECV_G0@1", "0REDUCE0"], ["1SEND_G0@0", "1REDUCE0"], ["2REDUCE0"]]))


def test_a_collective_that_needs_gradients_sent_behind_it_deadlocks() -> None:
    lists = read([["0RECV_G0@1", "0REDUCE0"], ["1REDUCE0", "1SEND_G0@0"]])
    message = "0REDUCE0 waits for 1SEND_G0@0; 1REDUCE0 waits for all stages"
    with pytest.raises(ScheduleError, match=message):
        check_deadlock(lists)


def test_a_step_before_the_norms_are_exchanged() -> None:
    rows = rows_of(reduce=True)
    move(rows, "0OPT1", "0REDUCE1")
    refused(rows, "0OPT1 must come after 0REDUCE1", "0OPT1")


def test_tied_weights_installed_in_the_wrong_order() -> None:
    rows = rows_of("async_1f1b", tied=True)
    move(rows, "1TIE2@0", "1TIE1@0")
    move(rows, "1RECV_W2@0", "1TIE2@0")
    refused(rows, "1TIE2@0 must come after 1TIE1@0", "1TIE2@0", "async_1f1b")


def test_a_backward_that_would_mix_two_updates() -> None:
    rows = rows_of("async_1f1b")
    move(rows, "0RECV_B1", "0OPT0")
    move(rows, "0B1", "0OPT0")
    refused(rows, "0B1 must come after 0OPT0", "0B1", "async_1f1b")


@pytest.mark.parametrize(
    ("change", "message", "mark"),
    [
        (lambda rows: rows[0].remove("0SEND_F1"), "0SEND_F1 is missing.* 1RECV_F1", "(end)"),
        (lambda rows: rows[1].remove("1RECV_F1"), "1RECV_F1 is missing.* 0SEND_F1", "(end)"),
        (lambda rows: rows[1].remove("1B2"), "1B2 is missing", "(end)"),
        (lambda rows: rows[0].remove("0OPT2"), "0OPT2 is missing", "(end)"),
        (lambda rows: rows[0].append("0F1"), "0F1 stands here twice", "0F1"),
        (lambda rows: rows[0].append("0F3"), "0F3 has no place", "0F3"),
        (lambda rows: rows[0].append("0OPT0"), "0OPT0 has no place", "0OPT0"),
        (lambda rows: rows[0].append("1F0"), "1F0 belongs to another stage", "1F0"),
        (lambda rows: rows[1].append("1SEND_F0"), "1SEND_F0 has no place", "1SEND_F0"),
        (lambda rows: rows[0].append("0SEND_W1"), "does not name the other stage", "0SEND_W1"),
        (lambda rows: rows[0].append("0TIE1@1"), "ties stages 1 and 0", "0TIE1@1"),
        (lambda rows: rows[0].append("0REDUCE1"), "0REDUCE2 is missing", "(end)"),
    ],
)
def test_missing_and_surplus_actions(
    change: Callable[[Rows], None], message: str, mark: str
) -> None:
    rows = rows_of()
    change(rows)
    refused(rows, message, mark)


def test_ties_and_norms_that_should_be_there_but_are_not() -> None:
    refused(rows_of(), "0RECV_G1@1 is missing, which belongs to 1SEND_G1@0", "(end)", ties=[(0, 1)])
    refused(rows_of(), "0REDUCE1 is missing", "(end)", reduce=True)
    refused(rows_of(reduce=True), "0REDUCE1 has no place", "0REDUCE1", reduce=False)


def test_a_synchronous_schedule_is_no_asynchronous_one() -> None:
    lists = build("1f1b", 2, [1, 1, 1])
    with pytest.raises(ScheduleError, match=r"0F1 runs on .* 0 updates late, not 1"):
        validate(lists, 2, [1, 1, 1], asynchronous=True)
    lists = build("async_1f1b", 2, [1, 1, 1])
    with pytest.raises(ScheduleError, match=r"0F1 runs on .* 1 updates late, not 0"):
        validate(lists, 2, [1, 1, 1], asynchronous=False)


def test_the_wrong_number_of_stages_or_microbatches() -> None:
    with pytest.raises(ScheduleError, match="2 lists of actions for 3 stages"):
        validate(build("1f1b", 2, [2]), 3, [2], asynchronous=False)
    with pytest.raises(ScheduleError, match=r"\[\] microbatches per update"):
        validate(build("1f1b", 2, [2]), 2, [], asynchronous=False)


def test_an_evaluation_that_lacks_a_forward_or_does_more() -> None:
    lists = forward_only(2, 2)
    with pytest.raises(ScheduleError, match="0SEND_F1 is missing"):
        validate_forward_only((lists[0][:-1], lists[1]), 2, 2)
    with pytest.raises(ScheduleError, match="0B0 has no place"):
        validate_forward_only(((*lists[0], Action(Kind.B, 0, 0)), lists[1]), 2, 2)


@given(st.data())
def test_no_action_can_be_left_out_or_doubled(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(("gpipe", "1f1b", "async_1f1b")))
    num_stages = data.draw(st.integers(1, 5))
    groups = [1] * 4 if is_asynchronous(name) else [3, 1]
    ties = [(0, num_stages - 1)] if num_stages > 1 else []
    rows = [list(actions) for actions in build(name, num_stages, groups, ties=ties)]
    stage = data.draw(st.integers(0, num_stages - 1))
    index = data.draw(st.integers(0, len(rows[stage]) - 1))
    if data.draw(st.booleans()):
        rows[stage].insert(data.draw(st.integers(0, len(rows[stage]))), rows[stage][index])
    else:
        del rows[stage][index]
    with pytest.raises(ScheduleError) as caught:
        validate(
            tuple(map(tuple, rows)),
            num_stages,
            groups,
            asynchronous=is_asynchronous(name),
            ties=ties,
        )
    assert str(caught.value).count(MARK) == 1
