"""The driver notices a coordinator that does not answer, or whose loop stands still."""

from typing import Any

import pytest

from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import WorkerLostError
from elastic_trainer.run.lifeline import Lifeline


class Coordinator:
    """Answers with `answer`; None: not yet."""

    answer: float | Exception | None = None
    asked = 0

    def ping(self) -> Any:
        self.asked += 1
        return self

    def get(self, timeout_s: float) -> float:
        assert timeout_s == 0.0, "a driver that waits here does not see Ctrl-C"
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            raise TimeoutError
        return self.answer


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def config() -> Config:
    limits = {"elastic": {"stall_limit_s": 8.0}, "cluster": {"start_timeout_s": 30.0}}
    return load_config({"data": {"format": "synthetic"}, "train": {"max_steps": 1}, **limits})


def test_a_frozen_coordinator_is_noticed(clock: Clock) -> None:
    coordinator = Coordinator()
    lifeline = Lifeline(coordinator, config(), clock)
    clock.now = 37.0
    assert lifeline.check() is None, "it may take long to start"
    coordinator.answer = 0.1
    assert lifeline.check() is None
    coordinator.answer = None
    clock.now = 40.0
    assert lifeline.check() is None and coordinator.asked == 2
    clock.now = 47.9
    assert lifeline.check() is None
    clock.now = 48.1
    assert lifeline.check() == "has not answered for 8 s"


def test_it_never_starts(clock: Clock) -> None:
    lifeline = Lifeline(Coordinator(), config(), clock)
    clock.now = 39.0
    assert lifeline.check() == "has not answered for 39 s"


def test_a_loop_that_stands_still_although_pings_are_answered(clock: Clock) -> None:
    coordinator = Coordinator()
    lifeline = Lifeline(coordinator, config(), clock)
    coordinator.answer = 45.0
    assert lifeline.check() is None, "it may wait for room on the cluster"
    clock.now += 3.0
    coordinator.answer = 47.0
    assert lifeline.check() == "has been at one thing for 47 s"


def test_little_is_asked_and_a_death_is_left_to_the_run_s_own_call(clock: Clock) -> None:
    coordinator = Coordinator()
    coordinator.answer = 0.0
    lifeline = Lifeline(coordinator, config(), clock)
    for _ in range(80):
        clock.now += 0.5
        assert lifeline.check() is None
    assert coordinator.asked <= 1 + 40 / 2
    coordinator.answer = WorkerLostError("gone")
    clock.now += 100.0
    assert lifeline.check() is None
