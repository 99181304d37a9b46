"""Whose work stands still, though its process answers; and whose is merely slow."""

from dataclasses import dataclass, replace

import pytest

from elastic_trainer.actors.faults import full_name
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.watch import Mark
from elastic_trainer.config import Config, load_config
from elastic_trainer.types import Plan, Prediction, StagePlan

STALL_S, START_S = 8.0, 30.0


@dataclass(eq=False)
class Call:
    worker: str
    line: str


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def settings() -> Config:
    limits = {"elastic": {"stall_limit_s": STALL_S}, "cluster": {"start_timeout_s": START_S}}
    return load_config({"data": {"format": "synthetic"}, "train": {"max_steps": 4}, **limits})


def plan(busy_s: float = 0.0) -> Plan:
    stages = (
        StagePlan(stage=0, first=0, stop=1, worker="stage-0"),
        StagePlan(stage=1, first=1, stop=2, worker="stage-1"),
    )
    prediction = Prediction(
        step_s=1.0, bubble_ratio=0.0, stage_busy_s=(0.0, busy_s), stage_memory_bytes=(1, 1)
    )
    return Plan(
        generation=1, schedule="1f1b", num_microbatches=4, layers=("a", "b"), stages=stages,
        predicted=prediction, reasons=(),
    )  # fmt: skip


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vigil(clock: Clock) -> Vigil:
    return Vigil(settings(), clock)


def name(worker: str) -> str:
    return full_name(worker, plan(), "10.0.0.7" if worker == "stage-1" else None)


def test_a_layer_that_hangs_ends_the_run_naming_it(vigil: Vigil, clock: Clock) -> None:
    """One stage alone: no peer waits for it, and its control thread answers all the time."""
    vigil.sent(Call("stage-1", "stages"))
    for _ in range(10):
        vigil.told("stage-1", "stages", Mark((3, 5), "1F2, action 6 of 20, at update 7"))
        assert not list(vigil.silent()) and vigil.stalled(name) is None
        clock.now += 1.0
    clock.now += 0.5
    told = vigil.stalled(name)
    assert told is not None and told.startswith(
        "no progress for 10 s: stage-1 (stage 1, node 10.0.0.7), at 1F2, action 6 of 20, at update"
    )


def test_work_that_is_slow_but_moves_on_is_left_alone(vigil: Vigil, clock: Clock) -> None:
    vigil.sent(Call("stage-0", "stages"))
    for action in range(100):
        clock.now += STALL_S
        vigil.told("stage-0", "stages", Mark((1, action), ""))
        assert vigil.stalled(name) is None


def test_a_stage_that_waits_for_a_slow_one_is_not_blamed(vigil: Vigil, clock: Clock) -> None:
    """And neither is work that is queued behind other work."""
    for _ in range(2):
        vigil.sent(Call("stage-0", "stages"))
        vigil.sent(Call("stage-1", "stages"))
    for action in range(20):
        clock.now += STALL_S / 2
        vigil.told("stage-0", "stages", Mark((1, 0), ""))
        vigil.told("stage-1", "stages", Mark((1, action), ""))
        assert vigil.stalled(name) is None


def test_the_loader_has_a_clock_of_its_own(vigil: Vigil, clock: Clock) -> None:
    vigil.sent(Call("loader-0", "loader-0"))
    vigil.sent(Call("stage-0", "stages"))
    vigil.told("loader-0", "loader-0", Mark((9, 0), "the batch of update 9"))
    clock.now += 10.5
    vigil.told("stage-0", "stages", Mark((1, 1), ""))
    told = vigil.stalled(name)
    assert told is not None and "loader-0, at the batch of update 9. Does" in told
    assert "stage-0" not in told


def test_the_longest_action_may_take_what_it_takes(vigil: Vigil, clock: Clock) -> None:
    vigil.planned(plan(busy_s=400.0))  # 4 microbatches: no action is longer than 100 s
    vigil.sent(Call("stage-0", "stages"))
    clock.now += 105.0
    assert vigil.stalled(name) is None
    clock.now += 10.0
    assert vigil.stalled(name) is not None


def test_starting_may_take_the_time_that_starting_takes(vigil: Vigil, clock: Clock) -> None:
    call = Call("stage-0", "stages")
    vigil.sent(call, vigil.start_limit_s)
    clock.now += START_S + STALL_S
    assert vigil.stalled(name) is None
    clock.now += 0.1
    assert vigil.stalled(name) is not None
    vigil.returned(call)
    assert vigil.stalled(name) is None


def test_what_is_asked_is_the_pulse_s_matter(vigil: Vigil, clock: Clock) -> None:
    vigil.asked(Call("stage-1", "stage-1 control"))
    clock.now += STALL_S + 1.0
    assert list(vigil.silent()) == [
        ("stage-1", "it has not answered for 9 s; is it stopped or overloaded?")
    ]
    clock.now += 1000.0
    assert vigil.stalled(name) is None
    assert vigil.due() == set()


def test_nothing_is_awaited_after_an_abort(vigil: Vigil, clock: Clock) -> None:
    vigil.sent(Call("stage-0", "stages"))
    vigil.clear()
    clock.now += 1000.0
    assert vigil.stalled(name) is None


def test_names() -> None:
    assert name("stage-0") == "stage-0 (stage 0)"
    assert name("loader-0") == "loader-0"
    assert full_name("stage-1", None, "10.0.0.7") == "stage-1 (node 10.0.0.7)"
    assert full_name("stage-1", replace(plan(), stages=()), None) == "stage-1"
