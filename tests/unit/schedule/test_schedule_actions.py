"""Actions print, parse and find their other end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import RECEIVES, SENDS, Action, Kind

NUMBERS = st.integers(min_value=0, max_value=10**6)
ACTIONS = st.builds(Action, st.sampled_from(Kind), NUMBERS, NUMBERS, st.none() | NUMBERS)


@given(ACTIONS)
def test_printing_and_parsing_are_inverse(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.F, 2, 0)),
        ("0SEND_F3", Action(Kind.SEND_F, 0, 3)),
        ("3SEND_G7@0", Action(Kind.SEND_G, 3, 7, 0)),
        (" 12OPT345 ", Action(Kind.OPT, 12, 345)),
    ],
)
def test_the_notation(text: str, action: Action) -> None:
    assert Action.parse(text) == action
    assert str(action) == text.strip()


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "-1F0", "2F0@", "2F0 1", "2SEND0", "2F٣"])
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        ("0SEND_F3", "1RECV_F3"),
        ("2SEND_B1", "1RECV_B1"),
        ("3SEND_G7@0", "0RECV_G7@3"),
        ("0SEND_W7@3", "3RECV_W7@0"),
    ],
)
def test_the_two_ends_of_a_message(sent: str, received: str) -> None:
    send, receive = Action.parse(sent), Action.parse(received)
    assert send.counterpart() == receive
    assert receive.counterpart() == send
    assert (send.other, receive.other) == (receive.stage, send.stage)
    assert send.kind in SENDS
    assert receive.kind in RECEIVES
