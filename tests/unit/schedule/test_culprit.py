"""Who holds up the rest: in simulated runs of which one stage, or one message, stops."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.schedule.actions import RECEIVES, Action, ActionLists, Kind
from elastic_trainer.schedule.build import build, forward_only, is_asynchronous
from elastic_trainer.schedule.culprit import LOADER, fed, find_culprits
from elastic_trainer.testing.standstill import Play

NAMES = ("gpipe", "1f1b", "async_1f1b")
SIZES = range(1, 9)
SAMPLE = 4  # places at which to stop, of each schedule


def schedules(name: str, num_stages: int, count: int) -> Iterator[ActionLists]:
    """Two updates of `count` microbatches, with and without ties and REDUCE."""
    groups = [1] * (2 * count) if is_asynchronous(name) else [count, count]
    every = [(o, f) for o in range(num_stages) for f in range(o + 1, num_stages)]
    for ties in ([], [(0, num_stages - 1)] if num_stages > 1 else [], every):
        for reduce in (False, True):
            if not (reduce and is_asynchronous(name)):
                yield build(name, num_stages, groups, ties=ties, reduce=reduce)


def places(lists: ActionLists) -> list[tuple[int, int]]:
    return [(stage, index) for stage, row in enumerate(lists) for index in range(len(row))]


def check(lists: ActionLists, stop: tuple[int, int]) -> None:
    """One stage stops, the others play on until they wait or end: exactly that one is named."""
    play = Play(lists, frozenset({stop})).run()
    assert play.progress[stop[0]] == stop[1]
    assert find_culprits(lists, play.progress, play.waiting) == [stop[0]], (
        f"{lists[stop[0]][stop[1]]} does not act; {play.progress}, waiting {play.waiting}"
    )


def test_undisturbed_all_end_and_nobody_is_named() -> None:
    for lists in [*schedules("1f1b", 4, 3), *schedules("async_1f1b", 3, 4), forward_only(4, 3)]:
        play = Play(lists).run()
        assert play.progress == [len(row) for row in lists] and not play.waiting
        assert find_culprits(lists, play.progress, play.waiting) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_place_of_small_schedules(name: str, num_stages: int) -> None:
    for count in (1, 2, 3):
        for lists in schedules(name, num_stages, count):
            for stop in places(lists):
                check(lists, stop)


@pytest.mark.parametrize("name", NAMES)
def test_some_places_of_all_schedules(name: str) -> None:
    chosen = random.Random(7)
    for num_stages in SIZES:
        for count in SIZES:
            for lists in schedules(name, num_stages, count):
                for stop in chosen.sample(places(lists), min(SAMPLE, len(places(lists)))):
                    check(lists, stop)


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 8), st.data())
def test_any_place(name: str, num_stages: int, count: int, data: st.DataObject) -> None:
    lists = data.draw(st.sampled_from(list(schedules(name, num_stages, count))))
    check(lists, data.draw(st.sampled_from(places(lists))))


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_evaluations(num_stages: int, count: int, data: st.DataObject) -> None:
    lists = forward_only(num_stages, count)
    check(lists, data.draw(st.sampled_from(places(lists))))


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 8), st.data())
def test_progress_alone_tells_but_inside_reduce(
    name: str, num_stages: int, count: int, data: st.DataObject
) -> None:
    lists = data.draw(st.sampled_from(list(schedules(name, num_stages, count))))
    stop = data.draw(st.sampled_from(places(lists)))
    play = Play(lists, frozenset({stop})).run()
    named = find_culprits(lists, play.progress)
    inside = {s for s in play.waiting if lists[s][play.progress[s]].kind is Kind.REDUCE}
    assert set(named) - inside <= {stop[0]}
    if lists[stop[0]][stop[1]].kind is not Kind.REDUCE:
        assert named[0] == stop[0]


@given(st.sampled_from(NAMES), st.integers(1, 8), st.integers(1, 8), st.data())
def test_the_loader_is_named_where_a_batch_is_missing(
    name: str, num_stages: int, count: int, data: st.DataObject
) -> None:
    lists = data.draw(st.sampled_from(list(schedules(name, num_stages, count))))
    play = Play(lists, batch=data.draw(st.integers(0, 2 * count - 1))).run()
    assert LOADER in play.waiting.values()
    (stage,) = [s for s, whom in play.waiting.items() if whom == LOADER]
    assert find_culprits(lists, play.progress, play.waiting) == [fed(stage)]
    assert fed(fed(stage)) == stage and fed(stage) < 0


@given(st.sampled_from(NAMES), st.integers(2, 8), st.integers(1, 8), st.data())
def test_who_sent_a_message_that_is_lost(
    name: str, num_stages: int, count: int, data: st.DataObject
) -> None:
    lists = data.draw(st.sampled_from(list(schedules(name, num_stages, count))))
    every = sorted(Play(lists).run().sent)
    message = data.draw(st.sampled_from(every))
    play = Play(lists, lost=frozenset({message})).run()
    assert find_culprits(lists, play.progress, play.waiting) == [message[2]], message


@given(st.sampled_from(NAMES), st.integers(3, 8), st.integers(3, 8), st.data())
def test_a_stage_that_is_cut_off_from_all_others(
    name: str, num_stages: int, count: int, data: st.DataObject
) -> None:
    """One that still answers the coordinator, with no message in or out after some time."""
    lists = data.draw(st.sampled_from(list(schedules(name, num_stages, count))))
    cut = data.draw(st.integers(1, num_stages - 2))
    every = sorted(Play(lists).run().sent)
    arrived = data.draw(st.integers(0, count // 2))
    lost = {m for m in every if cut in m[2:] and m[1] >= arrived}
    play = Play(lists, lost=frozenset(lost)).run()
    missed = [message for _, message in play.needs.values() if message in play.sent]
    named = find_culprits(lists, play.progress, play.waiting)
    assert missed and all(cut in message[2:] for message in missed)
    if len(missed) > 1:
        assert named == [cut]
    else:  # one message has two ends, and nothing tells which of them
        assert named == [missed[0][2]]


@given(st.sampled_from(NAMES), st.integers(2, 8), st.integers(1, 8), st.data())
def test_of_several_the_earliest_in_dependency_order_comes_first(
    name: str, num_stages: int, count: int, data: st.DataObject
) -> None:
    """First is one that would have stopped alone, too: what it does not do, no other prevents."""
    lists = data.draw(st.sampled_from(list(schedules(name, num_stages, count))))
    acting = [(s, i) for s, i in places(lists) if lists[s][i].kind not in RECEIVES]
    stops = data.draw(st.sets(st.sampled_from(acting), min_size=2, max_size=4))
    play = Play(lists, frozenset(stops)).run()
    reached = {s for s, index in stops if play.progress[s] == index and s not in play.waiting}
    named = find_culprits(lists, play.progress, play.waiting)
    assert set(named) <= reached and named
    when = first_possible(lists)
    rounds = [when[stage, play.progress[stage]] for stage in named]
    assert rounds == sorted(rounds)


def first_possible(lists: ActionLists) -> dict[tuple[int, int], int]:
    """Length of the longest chain of actions that must come before each."""
    index = {action: (s, i) for s, row in enumerate(lists) for i, action in enumerate(row)}
    last = len(lists) - 1
    rounds: dict[tuple[int, int], int] = {}

    def before(action: Action) -> Iterator[tuple[int, int]]:
        stage, i = index[action]
        if i:
            yield stage, i - 1
        j = action.microbatch
        if action.kind is Kind.F and stage > 0:
            yield index[Action(Kind.SEND_F, stage - 1, j)]
        if action.kind is Kind.B and stage < last:
            yield index[Action(Kind.SEND_B, stage + 1, j)]
        if action.kind is Kind.TIE and action.peer is not None:
            yield index[Action(Kind.SEND_W, action.peer, j, stage)]
        if action.kind in (Kind.OPT, Kind.REDUCE):
            for other in lists[stage]:
                if other.kind is Kind.RECV_G and other.microbatch == j:
                    yield index[other.counterpart()]

    def length(place: tuple[int, int]) -> int:
        if place not in rounds:
            action = lists[place[0]][place[1]]
            group = [action]
            if action.kind is Kind.REDUCE:
                group = [Action(Kind.REDUCE, s, action.microbatch) for s in range(len(lists))]
            chains = [length(p) for member in group for p in before(member)]
            for member in group:
                rounds[index[member]] = max(chains, default=-1) + 1
        return rounds[place]

    for place in places(lists):
        length(place)
    return rounds


def test_by_hand() -> None:
    lists = build("1f1b", 3, [2])
    assert " ".join(map(str, lists[0])).startswith("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0")
    f1 = lists[1].index(Action(Kind.F, 1, 1))
    ends = [len(row) for row in lists]
    assert find_culprits(lists, [5, f1, ends[2]]) == [1], "stage 2 did all that it could"
    assert find_culprits(lists, [0, 0, 0]) == [0], "the others have not begun for want of input"
    assert find_culprits(lists, [0, 0, 0], {0: LOADER}) == [fed(0)]
    assert find_culprits(lists, ends) == []
