"""The simulator against closed forms."""

import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.errors import ScheduleError
from elastic_trainer.planner.simulate import Cores, Late, Timeline, simulate
from elastic_trainer.schedule.actions import RECEIVES, Action, ActionLists, Kind
from elastic_trainer.schedule.build import build, forward_only, most_left

SECONDS = {Kind.F: 1.0, Kind.B: 2.0}


def plain(action: Action) -> float:
    """Forward 1 s, backward 2 s, nothing else takes time."""
    return SECONDS.get(action.kind, 0.0)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_the_closed_form(name: str) -> None:
    """(M+P-1)(tf+tb), exactly: small whole numbers add without rounding."""
    for num_stages, count in itertools.product(range(1, 9), repeat=2):
        timeline = simulate(build(name, num_stages, [count]), plain)
        assert timeline.makespan_s == (count + num_stages - 1) * 3.0
        assert timeline.busy_s == (count * 3.0,) * num_stages
        idle = (num_stages - 1) / (count + num_stages - 1)
        assert timeline.bubble_ratio == pytest.approx(idle, abs=1e-12)


@given(st.integers(1, 8), st.integers(1, 8), st.floats(0.01, 10), st.floats(0.01, 10))
def test_the_closed_form_for_any_durations(p: int, m: int, tf: float, tb: float) -> None:
    timeline = simulate(build("1f1b", p, [m]), lambda a: {Kind.F: tf, Kind.B: tb}.get(a.kind, 0.0))
    assert timeline.makespan_s == pytest.approx((m + p - 1) * (tf + tb), rel=1e-12)


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "in gaps"])
@pytest.mark.parametrize(
    ("tf", "ti", "tw"),
    [(1.0, 1.0, 1.0), (1.0, 1.0, 0.5), (1.0, 1.0, 1.5), (0.5, 1.0, 1.0), (1.0, 1.0, 3.0)],
)
def test_input_gradients_that_leave_first_shorten_the_bubble(
    tf: float, ti: float, tw: float, waits: bool
) -> None:
    """The closed forms of Qi et al. (2024): M(tf+ti+tw) + (P-1)(tf+ti) if what is left is done at
    once, and (P-1)tw less if it fills the gaps as in their ZB-H1, if tw is not the longest."""

    def duration(action: Action) -> float:
        # The first stage has nothing to send: all of its backward is one action.
        back = ti + tw * (action.stage == 0)
        return {Kind.F: tf, Kind.B: back}.get(action.kind, 0.0)

    for num_stages, more in itertools.product(range(1, 9), range(4)):
        count = num_stages + more
        most = [most_left("1f1b", stage) if waits else 0 for stage in range(num_stages)]
        seconds = [tw * (stage > 0) for stage in range(num_stages)]
        lists = build("1f1b", num_stages, [count])
        timeline = simulate(lists, duration, late=Late(seconds, seconds, most))
        gap = tf + ti - (min(tf, ti, tw) if waits else 0.0)
        assert timeline.busy_s == (count * (tf + ti + tw),) * num_stages
        assert timeline.makespan_s == count * (tf + ti + tw) + (num_stages - 1) * gap


@given(st.integers(1, 5), st.integers(1, 8), st.floats(0.01, 10), st.floats(0.01, 10), st.data())
def test_what_is_left_is_done_in_time(p: int, m: int, ti: float, tw: float, data: Any) -> None:
    """All of it, whatever the cores; never later than if all were done at once on own cores."""
    late = Late([tw] * p, [tw] * p, [most_left("1f1b", stage) for stage in range(p)])
    lists = build("1f1b", p, [m])

    def duration(action: Action) -> float:
        return {Kind.F: 1.0, Kind.B: ti}.get(action.kind, 0.0)

    at_once = simulate(lists, duration, late=replace(late, most=[0] * p))
    count = data.draw(st.integers(1, p))
    cores = Cores(["here"] * p, {"here": count}, duration)
    for shared in (None, cores):
        timeline = simulate(lists, duration, cores=shared, late=late)
        # No gradient leaves the first stage, and so nothing is left there.
        assert timeline.busy_s == pytest.approx([m * (1 + ti + tw * (s > 0)) for s in range(p)])
        if shared is None:
            assert timeline.makespan_s <= at_once.makespan_s * (1 + 1e-12)
        else:
            assert timeline.makespan_s >= sum(timeline.busy_s) / count * (1 - 1e-12)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_an_asynchronous_segment_fills_and_drains_once(num_stages: int) -> None:
    for count in (1, 5, 40):
        lists = build("async_1f1b", num_stages, [1] * count)
        assert simulate(lists, plain).makespan_s == (count + num_stages - 1) * 3.0


def test_batches_do_not_overlap_when_synchronous() -> None:
    assert simulate(build("1f1b", 4, [8] * 3), plain).makespan_s == 3 * 11 * 3.0


def test_asynchronous_gains_what_the_bubble_cost() -> None:
    """P=4, 8 microbatches: 11/8 in the limit."""
    synchronous = simulate(build("1f1b", 4, [8] * 100), plain).makespan_s
    asynchronous = simulate(build("async_1f1b", 4, [1] * 800), plain).makespan_s
    assert synchronous / asynchronous == pytest.approx(11 / 8 * 800 / 803, rel=1e-12)


def test_the_slowest_stage_sets_the_pace() -> None:
    speed = (1.0, 3.0, 2.0)

    def duration(action: Action) -> float:
        return plain(action) * speed[action.stage]

    shorter = simulate(build("async_1f1b", 3, [1] * 50), duration).makespan_s
    longer = simulate(build("async_1f1b", 3, [1] * 60), duration).makespan_s
    assert longer - shorter == 10 * 9.0


def test_links_of_one_second_cost_1f1b_every_hop() -> None:
    """Known value for P=4, M=32, tf=1, tb=2 and one second per transfer."""
    assert simulate(build("1f1b", 4, [32]), plain, lambda send: 1.0).makespan_s == 157.0


def test_a_link_delays_the_message_not_the_sender() -> None:
    timeline = simulate(build("1f1b", 2, [1]), plain, lambda send: 5.0)
    starts = {
        str(action): start
        for actions, row in zip(build("1f1b", 2, [1]), timeline.start_s, strict=True)
        for action, start in zip(actions, row, strict=True)
    }
    assert starts["0RECV_B0"] == 1.0
    assert starts["1F0"] == 6.0
    assert starts["0B0"] == 1.0 + 5.0 + 3.0 + 5.0
    assert timeline.makespan_s == 16.0


def test_sending_itself_may_keep_a_stage_busy() -> None:
    def duration(action: Action) -> float:
        return 0.5 if action.kind in (Kind.SEND_F, Kind.SEND_B) else plain(action)

    timeline = simulate(build("1f1b", 2, [1]), duration)
    assert timeline.makespan_s == 1 + 0.5 + 3 + 0.5 + 2
    assert timeline.busy_s == (3.5, 3.5)


def test_a_reduction_waits_for_the_last_stage() -> None:
    def duration(action: Action) -> float:
        return 4.0 if action.kind is Kind.REDUCE else plain(action)

    lists = build("1f1b", 3, [1, 1], ties=[(0, 2)], reduce=True)
    timeline = simulate(lists, duration)
    assert timeline.makespan_s == 2 * (3 * 3.0 + 4.0)
    reduces = [
        (timeline.start_s[s][i], timeline.end_s[s][i])
        for s, actions in enumerate(lists)
        for i, action in enumerate(actions)
        if str(action).endswith("REDUCE0")
    ]
    assert reduces == [(9.0, 13.0)] * 3


def test_a_reduction_waits_for_the_latest_not_for_the_one_played_last() -> None:
    lists = tuple(
        tuple(Action.parse(text) for text in row.split()) for row in ("0F0 0REDUCE0", "1REDUCE0")
    )
    assert simulate(lists, plain).start_s == ((0.0, 1.0), (1.0,))


def test_tied_weights_make_owner_and_follower_wait_for_each_other() -> None:
    def duration(action: Action) -> float:
        return 1.0 if action.kind is Kind.OPT and action.stage == 0 else plain(action)

    lists = build("1f1b", 2, [1], ties=[(0, 1)])

    def slow_gradient(send: Action) -> float:
        return 10.0 if send.kind is Kind.SEND_G else 0.0

    timeline = simulate(lists, duration, slow_gradient)
    assert timeline.start_s[0][[str(a) for a in lists[0]].index("0OPT0")] == 14.0
    assert timeline.end_s[1][-1] == 15.0


def test_each_action_has_a_start_and_an_end_in_order() -> None:
    lists = build("async_1f1b", 4, [1] * 20, ties=[(0, 3)])
    timeline = simulate(lists, plain, lambda send: 0.25)
    for actions, starts, ends in zip(lists, timeline.start_s, timeline.end_s, strict=True):
        assert len(actions) == len(starts) == len(ends)
        assert all(a <= b for a, b in zip(starts, ends, strict=True))
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize(("name", "peak"), [("gpipe", (6,) * 4), ("1f1b", (4, 3, 2, 1))])
def test_live_activations(name: str, peak: tuple[int, ...]) -> None:
    assert simulate(build(name, 4, [6]), plain).peak_live == peak


def test_evaluation_and_nothing_at_all() -> None:
    assert simulate(forward_only(3, 4), plain).makespan_s == 6.0
    nothing = simulate(((), ()), plain)
    assert (nothing.makespan_s, nothing.bubble_ratio) == (0.0, 0.0)


def test_a_list_that_waits_for_ever_is_shown() -> None:
    first, second = build("1f1b", 2, [2])
    with pytest.raises(ScheduleError, match=r"stuck at 0B1(?s:.*)0B1 <-- HERE"):
        simulate((first, second[:-2]), plain)


def test_time_grows_linearly_with_the_segment() -> None:
    """Ten times the actions may not cost anything like a hundred times the time."""

    def seconds(count: int) -> float:
        lists = build("async_1f1b", 8, [1] * count)
        samples = []
        for _ in range(3):
            begin = time.process_time()
            simulate(lists, plain)
            samples.append(time.process_time() - begin)
        return min(samples)

    assert seconds(1000) < 40 * seconds(100)


SHARED_SECONDS = st.sampled_from([0.25, 0.5, 1.0, 2.0])  # exact sums, and many ties


@st.composite
def crowds(draw: st.DrawFn) -> tuple[ActionLists, dict[Action, float], dict[Action, float], int]:
    """Lists, durations, the part of each that needs a core, and the number of stages."""
    num_stages = draw(st.integers(1, 5))
    name = draw(st.sampled_from(["gpipe", "1f1b", "async_1f1b"]))
    count = draw(st.integers(1, 5))
    lists = build(name, num_stages, [1] * count if name == "async_1f1b" else [count])
    actions = [action for stage in lists for action in stage]
    seconds = {action: draw(SHARED_SECONDS) for action in actions}
    share = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return lists, seconds, {action: share * seconds[action] for action in actions}, num_stages


def crowded(
    lists: ActionLists, seconds: dict[Action, float], need: dict[Action, float], count: int
) -> Timeline:
    cores = Cores(["here"] * len(lists), {"here": count}, lambda action: need[action])
    return simulate(lists, lambda action: seconds[action], lambda send: 0.125, cores)


@given(crowds(), st.integers(0, 3))
def test_a_core_for_each_stage_changes_nothing(crowd: Any, more: int) -> None:
    lists, seconds, need, num_stages = crowd
    alone = simulate(lists, lambda action: seconds[action], lambda send: 0.125)
    assert crowded(lists, seconds, need, num_stages + more) == alone
    elsewhere = Cores([f"node-{s}" for s in range(num_stages)], {}, lambda action: need[action])
    counts = {f"node-{s}": 1 for s in range(num_stages)}
    apart = replace(elsewhere, count=counts)
    on_gpus = Cores([None] * num_stages, {"here": 1}, lambda action: need[action])
    for cores in (apart, on_gpus):
        told = simulate(lists, lambda action: seconds[action], lambda send: 0.125, cores)
        assert told == alone


@given(crowds(), st.integers(1, 5))
def test_fewer_cores_take_as_long_as_their_work_and_what_waits_for_it(
    crowd: Any, count: int
) -> None:
    """Between the two bounds that hold for any order in which a free core is never left idle."""
    lists, seconds, need, _ = crowd
    alone = simulate(lists, lambda action: seconds[action], lambda send: 0.125)
    shared = crowded(lists, seconds, need, count)
    work = sum(need[a] for stage in lists for a in stage if a.kind not in RECEIVES)
    assert shared.makespan_s >= max(alone.makespan_s, work / count)
    assert shared.makespan_s <= alone.makespan_s + work / count + 1e-9
    for mine, others in zip(shared.start_s, alone.start_s, strict=True):
        assert all(a >= b for a, b in zip(mine, others, strict=True)), "none starts earlier"


@settings(derandomize=True)  # no such order gains from cores always: here it does
@given(crowds())
def test_fewer_cores_are_never_faster(crowd: Any) -> None:
    lists, seconds, need, num_stages = crowd
    spans = [crowded(lists, seconds, need, count).makespan_s for count in range(1, num_stages + 1)]
    assert spans == sorted(spans, reverse=True)


@given(crowds(), st.integers(1, 4))
def test_cores_are_given_as_a_clock_that_ticks_would(crowd: Any, count: int) -> None:
    """Brute force: ask every eighth of a second who could start, and which core is free."""
    lists, seconds, need, _ = crowd
    assert crowded(lists, seconds, need, count).start_s == ticking(lists, seconds, need, count)


def ticking(
    lists: ActionLists, seconds: dict[Action, float], need: dict[Action, float], count: int
) -> tuple[tuple[float, ...], ...]:
    """When each action starts; all durations are whole ticks of an eighth."""
    starts: list[list[float]] = [[] for _ in lists]
    ends = [0.0] * len(lists)
    arrivals: dict[Action, float] = {}
    cores = [0.0] * count
    asked: list[tuple[float, int]] = []
    now = 0.0
    while any(len(done) < len(actions) for done, actions in zip(starts, lists, strict=True)):
        moved = True
        while moved:
            moved = False
            for stage, actions in enumerate(lists):
                rest = actions[len(starts[stage]) :]
                for _ in itertools.takewhile(lambda action: action.kind in RECEIVES, rest):
                    starts[stage].append(ends[stage])
                if len(starts[stage]) == len(actions) or ends[stage] > now:
                    continue
                action = actions[len(starts[stage])]
                source = source_of(action, len(lists))
                if source is not None and arrivals.get(source, now + 1) > now:
                    continue
                if need[action] and all(waiting != stage for _, waiting in asked):
                    asked.append((now, stage))
                    asked.sort()
                if need[action]:
                    free = min(cores)
                    if free > now or asked[0][1] != stage:
                        continue
                    asked.pop(0)
                    cores[cores.index(free)] = now + need[action]
                starts[stage].append(now)
                ends[stage] = now + seconds[action]
                if action.kind in (Kind.SEND_F, Kind.SEND_B):
                    arrivals[action] = ends[stage] + 0.125
                moved = True
        now += 0.125
    return tuple(map(tuple, starts))


def source_of(action: Action, num_stages: int) -> Action | None:
    """The SEND that an action waits for."""
    if action.kind is Kind.F and action.stage > 0:
        return Action(Kind.SEND_F, action.stage - 1, action.microbatch)
    if action.kind is Kind.B and action.stage < num_stages - 1:
        return Action(Kind.SEND_B, action.stage + 1, action.microbatch)
    return None


def test_one_core_does_one_thing_after_the_other() -> None:
    """Two stages, one microbatch each way: by hand."""
    lists = build("1f1b", 2, [2])
    seconds = {Kind.F: 1.0, Kind.B: 2.0}
    cores = Cores(["a", "a"], {"a": 1}, lambda action: seconds.get(action.kind, 0.0))
    assert simulate(lists, plain, cores=cores).makespan_s == 2 * 2 * 3.0
    half = replace(cores, need=lambda action: seconds.get(action.kind, 0.0) / 2)
    timeline = simulate(lists, plain, cores=half)
    # 0F0 0-1; 0F1 and 1F0 both at 1: stage 0 has the core until 1.5, then stage 1.
    assert timeline.start_s[1][1] == 1.5
    assert timeline.busy_s == (6.0, 6.0)
