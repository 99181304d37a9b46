"""Every generated schedule is valid (cases C9 and C10), with the facts that theory says."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.schedule.actions import RECEIVES, SENDS, Action, ActionLists, Kind
from elastic_trainer.schedule.build import build, forward_only, is_asynchronous
from elastic_trainer.schedule.validate import ScheduleFacts, validate, validate_forward_only

NAMES = ("gpipe", "1f1b", "async_1f1b")
SIZES = range(1, 9)


def play_blocking(lists: ActionLists) -> bool:
    """Whether the lists end when both SEND and RECV block until the other side has come.

    Stricter than the trainer needs, and written apart from it: any stage takes part in a message,
    or in a REDUCE of all, only when it stands there; all else is free once it is reached.
    """
    position = [0] * len(lists)

    def current(stage: int) -> Action | None:
        return lists[stage][position[stage]] if position[stage] < len(lists[stage]) else None

    moved = True
    while moved:
        moved = False
        for stage in range(len(lists)):
            action = current(stage)
            if action is None:
                continue
            group = [stage]
            if action.kind in SENDS | RECEIVES:
                if current(action.other) != action.counterpart():
                    continue
                group.append(action.other)
            elif action.kind is Kind.REDUCE:
                group = list(range(len(lists)))
                here = [current(s) for s in group]
                if any(a is None or a.kind is not Kind.REDUCE for a in here):
                    continue
            for member in group:
                position[member] += 1
            moved = True
    return position == [len(actions) for actions in lists]


def all_ties(num_stages: int) -> list[tuple[int, int]]:
    return [(o, f) for o in range(num_stages) for f in range(o + 1, num_stages)]


def ring_size(tau: int, count: int) -> int:
    """Versions alive right after update i: the newest, and those of microbatches in flight."""
    return max(
        len({i + 1} | {max(0, j - tau) for j in range(i + 1, min(i + tau, count - 1) + 1)})
        for i in range(count)
    )


def check(
    name: str,
    num_stages: int,
    groups: Sequence[int],
    ties: Sequence[tuple[int, int]] = (),
    reduce: bool = False,
) -> ScheduleFacts:
    """Build and validate; compare the facts with the closed forms."""
    asynchronous = is_asynchronous(name)
    if asynchronous:
        groups = [1] * sum(groups)
    lists = build(name, num_stages, groups, ties=ties, reduce=reduce)
    facts = validate(lists, num_stages, groups, asynchronous=asynchronous, ties=ties, reduce=reduce)
    assert play_blocking(lists)
    count = sum(groups) if asynchronous else max(groups)
    late = [num_stages - 1 - stage for stage in range(num_stages)]
    in_flight = [count if name == "gpipe" else min(tau + 1, count) for tau in late]
    assert facts.peak_live == tuple(in_flight)
    assert facts.num_updates == len(groups)
    for stage, tau in enumerate(late):
        expected = [min(j, tau) if asynchronous else 0 for j in range(sum(groups))]
        assert list(facts.staleness[stage]) == expected
        versions = ring_size(tau, sum(groups)) if asynchronous else 1
        assert facts.ring_size[stage] == versions
    return facts


@pytest.mark.parametrize("num_stages", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_valid(name: str, num_stages: int) -> None:
    """C9 and C10: all stages × microbatches, one update and several, ties and norms or not."""
    for num_microbatches in SIZES:
        first_to_last = [(0, num_stages - 1)] if num_stages > 1 else []
        for groups in ([num_microbatches], [num_microbatches] * 3, [num_microbatches, 1, 3]):
            check(name, num_stages, groups)
            check(name, num_stages, groups, first_to_last)
            check(name, num_stages, groups, all_ties(num_stages), reduce=name != "async_1f1b")


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, int, list[int], list[tuple[int, int]], bool]:
    name = draw(st.sampled_from(NAMES))
    num_stages = draw(st.integers(1, 8))
    groups = draw(st.lists(st.integers(1, 8), min_size=1, max_size=5))
    possible = all_ties(num_stages)
    ties = draw(st.lists(st.sampled_from(possible), max_size=4)) if possible else []
    reduce = draw(st.booleans()) and not is_asynchronous(name)
    return name, num_stages, groups, ties, reduce


@given(requests())
def test_any_request_is_valid(
    request: tuple[str, int, list[int], list[tuple[int, int]], bool],
) -> None:
    check(*request)


@pytest.mark.parametrize("num_stages", SIZES)
def test_every_evaluation_is_valid(num_stages: int) -> None:
    for num_microbatches in SIZES:
        lists = forward_only(num_stages, num_microbatches)
        validate_forward_only(lists, num_stages, num_microbatches)
        assert play_blocking(lists)


def test_a_long_asynchronous_segment_reaches_its_full_delay() -> None:
    facts = check("async_1f1b", 8, [1] * 400, [(0, 7)])
    assert facts.ring_size == (8, 7, 6, 5, 4, 3, 2, 1)
    assert [max(delays) for delays in facts.staleness] == [7, 6, 5, 4, 3, 2, 1, 0]
