"""The generators, compared with lists written by hand."""

import pytest

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import Action, ActionLists, Kind
from elastic_trainer.schedule.build import build, delay, forward_only, is_asynchronous
from elastic_trainer.schedule.lower import add_communication

COMPUTE = {Kind.F, Kind.B, Kind.REDUCE, Kind.OPT, Kind.TIE}


def compute(lists: ActionLists) -> list[str]:
    """The compute actions of each stage, without the stage's number."""
    return [
        " ".join(str(a).removeprefix(str(a.stage)) for a in actions if a.kind in COMPUTE)
        for actions in lists
    ]


def test_gpipe_does_all_forwards_first() -> None:
    assert compute(build("gpipe", 2, [3])) == ["F0 F1 F2 B0 B1 B2 OPT2"] * 2


def test_1f1b_warms_up_by_the_stages_behind() -> None:
    assert compute(build("1f1b", 3, [4])) == [
        "F0 F1 F2 B0 F3 B1 B2 B3 OPT3",
        "F0 F1 B0 F2 B1 F3 B2 B3 OPT3",
        "F0 B0 F1 B1 F2 B2 F3 B3 OPT3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert compute(build("1f1b", 4, [2])) == [
        "F0 F1 B0 B1 OPT1",
        "F0 F1 B0 B1 OPT1",
        "F0 F1 B0 B1 OPT1",
        "F0 B0 F1 B1 OPT1",
    ]


def test_updates_follow_each_other_and_may_differ_in_size() -> None:
    assert compute(build("1f1b", 2, [2, 1], reduce=True)) == [
        "F0 F1 B0 B1 REDUCE1 OPT1 F2 B2 REDUCE2 OPT2",
        "F0 B0 F1 B1 REDUCE1 OPT1 F2 B2 REDUCE2 OPT2",
    ]


def test_asynchronous_updates_after_each_backward() -> None:
    assert compute(build("async_1f1b", 3, [1] * 4)) == [
        "F0 F1 F2 B0 OPT0 F3 B1 OPT1 B2 OPT2 B3 OPT3",
        "F0 F1 B0 OPT0 F2 B1 OPT1 F3 B2 OPT2 B3 OPT3",
        "F0 B0 OPT0 F1 B1 OPT1 F2 B2 OPT2 F3 B3 OPT3",
    ]


def test_asynchronous_with_less_work_than_stages() -> None:
    assert compute(build("async_1f1b", 4, [1])) == ["F0 B0 OPT0"] * 4


def test_messages_of_1f1b() -> None:
    lists = build("1f1b", 2, [2])
    assert [" ".join(map(str, actions)) for actions in lists] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0OPT1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1OPT1",
    ]


def test_synchronous_ties_move_gradients_before_and_weights_after_the_step() -> None:
    first, _, last = (" ".join(map(str, a)) for a in build("gpipe", 3, [1], ties=[(0, 2)]))
    assert first == "0F0 0SEND_F0 0RECV_G0@2 0RECV_B0 0B0 0OPT0 0SEND_W0@2"
    assert last == "2RECV_F0 2F0 2B0 2SEND_B0 2SEND_G0@0 2OPT0 2RECV_W0@0 2TIE0@0"


def test_an_asynchronous_follower_lags_as_its_owner_does() -> None:
    """Stage 0 of 3 runs F3 after its OPT 0, so stage 2 installs those weights right before F3."""
    assert compute(build("async_1f1b", 3, [1] * 5, ties=[(0, 2)]))[2] == (
        "F0 B0 OPT0 F1 B1 OPT1 F2 B2 OPT2 TIE0@0 F3 B3 OPT3 TIE1@0 F4 B4 OPT4 TIE2@0 TIE3@0 TIE4@0"
    )


def test_a_follower_of_two_owners_installs_each_at_its_own_time() -> None:
    assert compute(build("async_1f1b", 3, [1] * 3, ties=[(1, 2), (0, 2), (0, 2)]))[2] == (
        "F0 B0 OPT0 F1 B1 OPT1 TIE0@1 F2 B2 OPT2 TIE0@0 TIE1@0 TIE1@1 TIE2@0 TIE2@1"
    )


def test_evaluation_has_forwards_only() -> None:
    assert [" ".join(map(str, a)) for a in forward_only(2, 2)] == [
        "0F0 0SEND_F0 0F1 0SEND_F1",
        "1RECV_F0 1F0 1RECV_F1 1F1",
    ]


def test_which_schedules_are_asynchronous_and_how_late_they_are() -> None:
    assert [is_asynchronous(name) for name in ("gpipe", "1f1b", "async_1f1b")] == [0, 0, 1]
    assert [delay(stage, 4) for stage in range(4)] == [3, 2, 1, 0]


def test_the_same_request_gives_the_same_lists() -> None:
    assert build("1f1b", 3, [4, 4]) == build("1f1b", 3, (4, 4))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("2f2b", 2, [1]), {}, "no schedule '2f2b'.*1f1b, async_1f1b, gpipe"),
        (("1f1b", 0, [1]), {}, "0 stages"),
        (("1f1b", 2, []), {}, "at least one update"),
        (("1f1b", 2, [2, 0]), {}, "at least one microbatch"),
        (("1f1b", 2, [1]), {"ties": [(1, 0)]}, "stages 1 and 0 of 2 cannot be tied"),
        (("1f1b", 2, [1]), {"ties": [(0, 2)]}, "stages 0 and 2 of 2 cannot be tied"),
        (("async_1f1b", 2, [2]), {}, "updates after each microbatch"),
        (("async_1f1b", 2, [1]), {"reduce": True}, "updates after each microbatch"),
    ],
)
def test_what_cannot_be_built_is_refused(
    arguments: tuple[str, int, list[int]], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        build(*arguments, **options)  # type: ignore[arg-type]


def test_evaluation_of_nothing_is_refused() -> None:
    with pytest.raises(ScheduleError, match="at least one microbatch"):
        forward_only(2, 0)


def test_lowering_refuses_what_waits_for_ever() -> None:
    lists = ((Action(Kind.B, 0, 0), Action(Kind.F, 0, 0)), (Action(Kind.F, 1, 0),))
    with pytest.raises(ScheduleError, match=r"0B0, 1F0 wait .*(?s:.*)0B0 <-- HERE"):
        add_communication(lists)


def test_lowering_refuses_what_is_lowered_already() -> None:
    with pytest.raises(ScheduleError, match="1RECV_F0 is not a compute action"):
        add_communication(build("1f1b", 2, [1]))
