"""Generations: what is refused, and an end that comes at the wrong moment."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.actors.fence import Fence
from elastic_trainer.errors import FencedError


def test_work_of_another_generation_is_refused() -> None:
    fence = Fence("stage-0")
    fence.enter(2, lambda: None)
    fence.check(2)
    for generation in (0, 1, 3):
        with pytest.raises(FencedError, match=f"stage-0 works for generation 2, not {generation}"):
            fence.check(generation)
    with pytest.raises(FencedError, match="works for generation 2, not 1"):
        fence.enter(1, pytest.fail)


def test_a_generation_that_was_ended_is_over_also_if_it_has_not_begun() -> None:
    fence, errors = Fence("stage-0"), list[Exception]()
    fence.enter(1, lambda: None)
    fence.end(2, "stage-1 is lost", errors.append)
    assert str(errors[0]) == "the coordinator ended generation 2: stage-1 is lost"
    with pytest.raises(FencedError, match="generation 1 was ended"):
        fence.check(1)
    with pytest.raises(FencedError, match="generation 2 was ended"):
        fence.enter(2, pytest.fail)
    fence.enter(3, lambda: None)
    fence.check(3)


def test_a_late_end_does_not_harm_the_next_generation() -> None:
    fence = Fence("stage-0")
    fence.enter(2, lambda: None)
    fence.end(1, "late", lambda _: pytest.fail("nothing waits in generation 1"))
    fence.check(2)


def test_what_fails_to_begin_leaves_the_older_one() -> None:
    fence = Fence("stage-0")
    fence.enter(1, lambda: None)

    def broken() -> None:
        raise OSError

    with pytest.raises(OSError):
        fence.enter(2, broken)
    fence.check(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
def test_any_order_of_calls(calls: list[tuple[bool, int]]) -> None:
    """Against the rule: a generation works if it is the newest entered and was not ended."""
    fence, entered, ended = Fence("w"), 0, -1
    for enters, generation in calls:
        if enters and generation >= entered and generation > ended:
            fence.enter(generation, lambda: None)
            entered = generation
        elif enters:
            with pytest.raises(FencedError):
                fence.enter(generation, pytest.fail)
        else:
            woken = list[Exception]()
            fence.end(generation, "", woken.append)
            assert len(woken) == (generation >= entered)
            ended = max(ended, generation) if woken else ended
        assert fence.generation == entered
        if entered > ended:
            fence.check(entered)
        else:
            with pytest.raises(FencedError):
                fence.check(entered)


def test_an_end_and_the_next_generation_may_come_in_any_order() -> None:
    for order in permutations(["end", "enter"]):
        fence = Fence("w")
        fence.enter(1, lambda: None)
        for step in order:
            if step == "end":
                fence.end(1, "", lambda _: None)
            else:
                fence.enter(2, lambda: None)
        fence.check(2)
