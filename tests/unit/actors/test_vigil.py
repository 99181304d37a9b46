"""Whose work stands still, though its process answers; and whose is merely slow."""

import pickle
from dataclasses import dataclass, replace

import pytest

from elastic_trainer.actors.faults import full_name
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.watch import Mark, Standing
from elastic_trainer.config import Config, load_config
from elastic_trainer.schedule.actions import Action
from elastic_trainer.schedule.build import build
from elastic_trainer.schedule.culprit import LOADER
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import BatchInfo, Cursor, Plan, Prediction, StagePlan

STALL_S, LEASE_S, START_S = 8.0, 2.0, 30.0


STAGES = "stages"
WORKERS = ("stage-7", "stage-1")  # of the stages 0 and 1
LOADERS = ("loader-0", "loader-4")
LISTS = build("1f1b", 2, [4])


@dataclass(eq=False)
class Call:
    worker: str
    line: str = STAGES


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def settings() -> Config:
    elastic = {"stall_limit_s": STALL_S, "lease_limit_s": LEASE_S}
    limits = {"elastic": elastic, "cluster": {"start_timeout_s": START_S}}
    return load_config({"data": {"format": "synthetic"}, "train": {"max_steps": 4}, **limits})


def plan(busy_s: float = 0.0) -> Plan:
    stages = tuple(StagePlan(stage=s, first=s, stop=s + 1, worker=w) for s, w in enumerate(WORKERS))
    prediction = Prediction(
        step_s=1.0, bubble_ratio=0.0, stage_busy_s=(0.0, busy_s), stage_memory_bytes=(1, 1)
    )
    return Plan(
        generation=1, schedule="1f1b", num_microbatches=4, layers=("a", "b"), stages=stages,
        predicted=prediction, reasons=(),
    )  # fmt: skip


def make_segment(index: int, generation: int = 1) -> Segment:
    batch = BatchInfo(update=index + 1, microbatches=(), end=Cursor())
    return Segment(generation, index, "train", (batch,), LISTS, "1f1b")


def place_of(text: str) -> int:
    """How many actions were done when the stage came to this one."""
    action = Action.parse(text)
    return LISTS[action.stage].index(action)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vigil(clock: Clock) -> Vigil:
    return Vigil(settings(), clock)


def name(worker: str) -> str:
    return full_name(worker, plan(), "10.0.0.7" if worker == "stage-1" else None)


def hand_out(vigil: Vigil, segment: Segment) -> list[Call]:
    calls = [Call(worker) for worker in WORKERS]
    for call in calls:
        vigil.sent(call)
    vigil.handed_out(segment, WORKERS, LOADERS)
    return calls


def report(vigil: Vigil, segment: Segment, call: Call) -> None:
    vigil.returned(call)
    vigil.reported(segment, call.worker)


def tell(vigil: Vigil, stage: int, segment: Segment, done: int, waits_for: int | None) -> None:
    standing = Standing(segment.generation, segment.index, done, waits_for)
    words = f"{LISTS[stage][done]}" if done < len(LISTS[stage]) else "the end"
    mark = Mark((segment.index, done), words, standing=standing)
    vigil.told(WORKERS[stage], STAGES, mark)


def stand(vigil: Vigil, clock: Clock, seconds: float) -> None:
    """Let time pass in which everybody looks and answers as usual."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(end, clock.now + vigil.poll_s)
        for worker in vigil.due():
            vigil.asked(Call(worker, f"{worker} control"))
            vigil.answered(worker)
        assert not list(vigil.silent())


def test_a_layer_that_hangs_ends_the_run_naming_it(vigil: Vigil, clock: Clock) -> None:
    """One stage alone: no peer waits for it, and its control thread answers all the time."""
    vigil.sent(Call("stage-1", "stages"))
    for _ in range(10):
        vigil.told("stage-1", "stages", Mark((3, 5), "1F2, action 6 of 20, at update 7"))
        assert not list(vigil.silent()) and vigil.stalled(name) is None
        clock.now += 1.0
    clock.now += 0.5
    told = vigil.stalled(name)
    assert told is not None and told.workers == ("stage-1",)
    assert told.reason.startswith(
        "no progress for 10 s: stage-1 (stage 1, node 10.0.0.7), at 1F2, action 6 of 20, at update"
    )


def test_work_that_is_slow_but_moves_on_is_left_alone(vigil: Vigil, clock: Clock) -> None:
    vigil.sent(Call("stage-7", "stages"))
    for action in range(100):
        clock.now += STALL_S
        vigil.told("stage-7", "stages", Mark((1, action), ""))
        assert vigil.stalled(name) is None


def test_a_stage_that_waits_for_a_slow_one_is_not_blamed(vigil: Vigil, clock: Clock) -> None:
    """And neither is work that is queued behind other work."""
    for _ in range(2):
        vigil.sent(Call("stage-7", "stages"))
        vigil.sent(Call("stage-1", "stages"))
    for action in range(20):
        clock.now += STALL_S / 2
        vigil.told("stage-7", "stages", Mark((1, 0), ""))
        vigil.told("stage-1", "stages", Mark((1, action), ""))
        assert vigil.stalled(name) is None


def test_the_loader_has_a_clock_of_its_own(vigil: Vigil, clock: Clock) -> None:
    vigil.sent(Call("loader-0", "loader-0"))
    vigil.sent(Call("stage-7", "stages"))
    vigil.told("loader-0", "loader-0", Mark((9, 0), "the batch of update 9"))
    clock.now += 10.5
    vigil.told("stage-7", "stages", Mark((1, 1), ""))
    told = vigil.stalled(name)
    assert told is not None and told.workers == ("loader-0",) and not told.wedged
    assert "loader-0, at the batch of update 9. Does" in told.reason


def test_the_longest_action_may_take_what_it_takes(vigil: Vigil, clock: Clock) -> None:
    vigil.planned(plan(busy_s=400.0))  # 4 microbatches: no action is longer than 100 s
    vigil.sent(Call("stage-7", "stages"))
    clock.now += 105.0
    assert vigil.stalled(name) is None
    clock.now += 10.0
    assert vigil.stalled(name) is not None


def test_starting_may_take_the_time_that_starting_takes(vigil: Vigil, clock: Clock) -> None:
    call = Call("stage-7", "stages")
    vigil.sent(call, vigil.start_limit_s)
    clock.now += START_S + STALL_S
    assert vigil.stalled(name) is None
    clock.now += 0.1
    assert vigil.stalled(name) is not None
    vigil.returned(call)
    assert vigil.stalled(name) is None


def test_the_longest_action_is_that_of_the_newest_plan(vigil: Vigil) -> None:
    before = vigil.work_limit_s
    for _ in range(3):
        vigil.planned(plan(busy_s=400.0))
    assert vigil.work_limit_s == before + 100.0
    vigil.planned(plan(busy_s=0.0))
    assert vigil.work_limit_s == before


def ask_once(vigil: Vigil, worker: str) -> None:
    assert worker in vigil.due()
    vigil.asked(Call(worker, f"{worker} control"))


def watch_silence(vigil: Vigil, clock: Clock, limit_s: float, who: str = "stage-1") -> float | None:
    """After how many seconds a worker that was asked counts as lost."""
    begin = clock.now
    while clock.now < begin + limit_s:
        clock.now += vigil.poll_s
        for worker, reason in vigil.silent():
            assert worker == who and reason.endswith("s; is it stopped or overloaded?")
            return clock.now - begin
    return None


def join(vigil: Vigil, clock: Clock) -> None:
    vigil.asked(Call("stage-1", "stage-1 control"), vigil.start_limit_s)
    vigil.answered("stage-1")
    clock.now += LEASE_S / 3
    ask_once(vigil, "stage-1")
    vigil.told("stage-1", STAGES, Mark((0, 0), "its start"))


def test_a_worker_that_falls_silent_is_lost_after_its_lease(vigil: Vigil, clock: Clock) -> None:
    join(vigil, clock)
    clock.now += LEASE_S / 3
    ask_once(vigil, "stage-1")
    assert vigil.stalled(name) is None
    seconds = watch_silence(vigil, clock, 100.0)
    assert seconds is not None and 0 <= seconds - LEASE_S * 2 / 3 <= 2 * vigil.poll_s
    assert vigil.silence_s("stage-1") == pytest.approx(seconds + LEASE_S / 3)
    assert vigil.due() == set() and vigil.stalled(name) is None
    vigil.forget("stage-1")
    assert watch_silence(vigil, clock, 100.0) is None


def test_a_worker_that_starts_has_the_time_that_starting_takes(vigil: Vigil, clock: Clock) -> None:
    vigil.asked(Call("stage-1", "stage-1 control"), vigil.start_limit_s)
    seconds = watch_silence(vigil, clock, 100.0)
    assert seconds == pytest.approx(START_S + STALL_S, abs=1.0)


def test_first_work_suspends_the_lease_and_later_work_does_not(vigil: Vigil, clock: Clock) -> None:
    join(vigil, clock)
    build_layers = Call("stage-1")
    vigil.sent(build_layers, vigil.start_limit_s)
    clock.now += LEASE_S / 3
    ask_once(vigil, "stage-1")
    assert watch_silence(vigil, clock, 2 * LEASE_S) is None, "it holds Python's lock"
    vigil.returned(build_layers)
    assert watch_silence(vigil, clock, LEASE_S - vigil.poll_s) is None
    vigil.answered("stage-1")

    tell(vigil, 1, make_segment(0), 3, None)
    vigil.sent(Call("stage-1"), vigil.start_limit_s)
    clock.now += LEASE_S / 3
    ask_once(vigil, "stage-1")
    seconds = watch_silence(vigil, clock, 100.0)
    assert seconds is not None and seconds <= LEASE_S


def test_first_work_that_never_ends_is_lost_after_the_stall_limit(
    vigil: Vigil, clock: Clock
) -> None:
    join(vigil, clock)
    vigil.sent(Call("stage-1"), vigil.start_limit_s)
    clock.now += LEASE_S / 3
    ask_once(vigil, "stage-1")
    assert watch_silence(vigil, clock, 100.0) == pytest.approx(STALL_S, abs=1.0)


def test_a_loader_holds_a_lease_too(vigil: Vigil, clock: Clock) -> None:
    vigil.asked(Call("loader-0", "loader-0 control"))
    vigil.told("loader-0", "loader-0", Mark((1, 0), "its start"))
    opens = Call("loader-0", "loader-0")
    vigil.sent(opens, vigil.start_limit_s)
    clock.now += LEASE_S / 3
    ask_once(vigil, "loader-0")
    assert watch_silence(vigil, clock, 2 * LEASE_S, "loader-0") is None, "it opens its data"
    vigil.returned(opens)
    seconds = watch_silence(vigil, clock, 100.0, "loader-0")
    assert seconds == pytest.approx(LEASE_S, abs=1.1 * vigil.poll_s)


def test_a_loader_that_hangs_while_a_segment_goes_on(vigil: Vigil, clock: Clock) -> None:
    hand_out(vigil, make_segment(4))
    vigil.sent(Call("loader-0", "loader-0"))
    clock.now += vigil.work_limit_s + 0.5
    tell(vigil, 1, make_segment(4), place_of("1F1"), None)
    told = vigil.stalled(name)
    assert told is not None and told.workers == ("loader-0",) and not told.wedged


def test_a_coordinator_that_was_stopped_itself_loses_nobody(vigil: Vigil, clock: Clock) -> None:
    join(vigil, clock)
    clock.now += LEASE_S / 3
    ask_once(vigil, "stage-1")
    assert not list(vigil.silent())
    clock.now += 500.0
    assert not list(vigil.silent()), "the answer may lie there unread"
    vigil.answered("stage-1")
    assert watch_silence(vigil, clock, 10.0) is None


def test_the_lease_is_never_longer_than_the_stall_limit(clock: Clock) -> None:
    config = load_config(None, ["elastic.stall_limit_s=2"])
    assert config.elastic.lease_limit_s > 2 and Vigil(config, clock).lease_s == 2


def test_of_a_segment_only_the_culprit_is_named(vigil: Vigil, clock: Clock) -> None:
    segment = make_segment(4)
    hand_out(vigil, segment)
    tell(vigil, 1, segment, place_of("1B1"), None)
    tell(vigil, 0, segment, place_of("0B1"), 1)
    clock.now += vigil.work_limit_s
    assert vigil.stalled(name) is None
    clock.now += 0.5
    told = vigil.stalled(name)
    assert told is not None and told.wedged and told.workers == ("stage-1",)
    assert told.reason.startswith(
        "no progress for 10 s: stage-1 (stage 1, node 10.0.0.7), at 1B1. Does"
    )


def test_the_oldest_segment_tells(vigil: Vigil, clock: Clock) -> None:
    """Stage 0 has its part and has begun the next; stage 1 stands at the end of the old one."""
    older, newer = make_segment(4), make_segment(5)
    calls = hand_out(vigil, older)
    hand_out(vigil, newer)
    tell(vigil, 1, older, place_of("1OPT3"), None)
    tell(vigil, 0, newer, place_of("0B0"), 1)
    report(vigil, older, calls[0])
    clock.now += vigil.work_limit_s + 0.5
    told = vigil.stalled(name)
    assert told is not None and told.workers == ("stage-1",)


def test_a_stage_that_has_not_begun_the_segment(vigil: Vigil, clock: Clock) -> None:
    older, newer = make_segment(4), make_segment(5)
    for call in hand_out(vigil, older):
        report(vigil, older, call)
    hand_out(vigil, newer)
    tell(vigil, 0, newer, place_of("0B0"), 1)
    tell(vigil, 1, older, len(LISTS[1]), None)
    clock.now += vigil.work_limit_s + 0.5
    told = vigil.stalled(name)
    assert told is not None and told.workers == ("stage-1",)


def test_a_stage_that_does_not_report_what_it_has_done(vigil: Vigil, clock: Clock) -> None:
    segment = make_segment(4)
    calls = hand_out(vigil, segment)
    report(vigil, segment, calls[1])
    tell(vigil, 0, segment, len(LISTS[0]), None)
    clock.now += vigil.work_limit_s + 0.5
    told = vigil.stalled(name)
    assert told is not None and told.workers == ("stage-7",)


def test_a_missing_batch_is_the_loader_s_fault(vigil: Vigil, clock: Clock) -> None:
    segment = make_segment(4)
    hand_out(vigil, segment)
    tell(vigil, 0, segment, place_of("0F2"), LOADER)
    tell(vigil, 1, segment, place_of("1F2"), 0)
    clock.now += vigil.work_limit_s + 0.5
    told = vigil.stalled(name)
    assert told is not None and told.wedged and told.workers == ("loader-0",)


def test_the_loader_of_the_stage_that_waits_is_named(vigil: Vigil, clock: Clock) -> None:
    segment = make_segment(4)
    hand_out(vigil, segment)
    tell(vigil, 0, segment, place_of("0B0"), 1)
    tell(vigil, 1, segment, place_of("1F0"), LOADER)
    clock.now += vigil.work_limit_s + 0.5
    told = vigil.stalled(name)
    assert told is not None and told.wedged and told.workers == ("loader-4",)


def test_who_gives_up_waiting_is_not_to_blame(vigil: Vigil, clock: Clock) -> None:
    """Its error comes first; what it said last still tells whom it waited for."""
    segment = make_segment(4)
    calls = hand_out(vigil, segment)
    tell(vigil, 0, segment, place_of("0B1"), 1)
    tell(vigil, 1, segment, place_of("1B1"), None)
    stand(vigil, clock, STALL_S)
    vigil.told(WORKERS[0], STAGES, Mark((9, 0), "a segment"))
    vigil.returned(calls[0])
    told = vigil.blame(name)
    assert told is not None and told.wedged and told.workers == ("stage-1",)
    assert told.still_s == pytest.approx(STALL_S)
    assert told.reason.startswith("no progress for 8 s: stage-1 ")


def test_the_last_one_to_wait_may_give_up_too(vigil: Vigil, clock: Clock) -> None:
    """All others are through; what they sent did not arrive."""
    segment = make_segment(4)
    calls = hand_out(vigil, segment)
    tell(vigil, 0, segment, place_of("0B1"), 1)
    report(vigil, segment, calls[1])
    vigil.returned(calls[0])
    told = vigil.blame(name)
    assert told is not None and told.workers == ("stage-1",)


def test_segments_of_an_aborted_generation_blame_nobody(vigil: Vigil, clock: Clock) -> None:
    segment = make_segment(4)
    calls = hand_out(vigil, segment)
    tell(vigil, 0, segment, place_of("0B1"), 1)
    for call in calls:
        vigil.dropped(call)
    vigil.ended(0)
    assert vigil.blame(name) is not None
    vigil.ended(1)
    assert vigil.blame(name) is None
    vigil.sent(Call("stage-7"))
    clock.now += vigil.work_limit_s + 0.5
    told = vigil.stalled(name)
    assert told is not None and not told.wedged and told.workers == ("stage-7",)


def test_nothing_is_kept_of_workers_that_are_gone(vigil: Vigil, clock: Clock) -> None:
    sizes = set()
    for number in range(50):
        worker = f"stage-{number}"
        call = Call(worker)
        vigil.sent(call, vigil.start_limit_s)
        vigil.asked(asked := Call(worker, f"{worker} control"))
        vigil.told(worker, STAGES, Mark((1, 0), "", standing=Standing(1, 1, 0)))
        vigil.returned(asked)
        vigil.returned(call)
        vigil.forget(worker)
        sizes.add(len(pickle.dumps((vars(vigil._pulse), vars(vigil._watch), vigil._starting))))
    assert max(sizes) - min(sizes) < 10


def test_nothing_is_awaited_after_an_abort(vigil: Vigil, clock: Clock) -> None:
    vigil.sent(Call("stage-7", "stages"))
    vigil.clear()
    clock.now += 1000.0
    assert vigil.stalled(name) is None


def test_names() -> None:
    assert name("stage-7") == "stage-7 (stage 0)"
    assert name("loader-0") == "loader-0"
    assert full_name("stage-1", None, "10.0.0.7") == "stage-1 (node 10.0.0.7)"
    assert full_name("stage-1", replace(plan(), stages=()), None) == "stage-1"
