"""The elastic core under thousands of event orders, with every kind of trouble in between.

The simulated cluster asserts what must hold after each step; here hypothesis, or a seed, decides
what happens. Whatever that was: left alone afterwards, a run comes to its end.
"""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic.state import Goal, State
from elastic_trainer.testing.simulated_cluster import SimCluster

# Arriving twice, these would be news; all others may.
ONCE = (
    ev.Disturbed,
    ev.LoaderLost,
    ev.ScaleRequested,
    ev.WorkersDraining,
    ev.CheckpointFailed,
    ev.StopRequested,
)
CURVES = {
    "linear": lambda stages: 1.0 / stages,
    "three is best": lambda stages: 1.0 + abs(stages - 3),
    "all the same": lambda stages: 1.0,
}
CAUSES = [ev.Cause.CRASHED, ev.Cause.LEASE_EXPIRED, ev.Cause.WEDGED, ev.Cause.PREEMPTED]
BUDGETS = {"failures": "max_failures", "preemptions": "max_preemptions"}
REST = 6000  # steps in which a run that is left alone must end


class Trouble:
    """A simulated cluster, and all that may go wrong with it."""

    def __init__(self, fields: dict[str, Any], own: dict[str, Any]) -> None:
        self.sim = SimCluster(State(Goal(**fields)), **own)
        self.unlimited = fields["max_failures"] < 0 and fields["max_preemptions"] < 0
        self.writes_failed = False
        self.sim.begin()

    def step(self, index: int) -> None:
        actions = self.sim.actions()
        if actions:
            actions[index % len(actions)][1]()
        else:
            self.sim.pass_time(2.0)

    def pick(self, index: int) -> str | None:
        names = list(self.sim.workers)
        return names[index % len(names)] if names else None

    def kill(self, index: int, cause: ev.Cause) -> None:
        if (name := self.pick(index)) is not None:
            self.sim.kill(name, cause)

    def drain(self, index: int, deadline_s: float | None) -> None:
        if (name := self.pick(index)) is not None:
            self.sim.drain(name, deadline_s)

    def scale(self, fewest: int, most: int) -> None:
        limits = {"min_workers": fewest, "max_workers": max(fewest, most)}
        self.sim.tell(ev.ScaleRequested(**limits, reason="scale"))

    def disturb(self, age: int) -> None:
        generation = self.sim.state.generation - age
        self.sim.tell(ev.Disturbed(generation=generation, reason="a link broke"))

    def repeat(self, index: int) -> None:
        """Something that was said long ago is said again."""
        told = self.sim.told[-40:]
        if told and not isinstance(event := told[index % len(told)], ONCE):
            self.sim.tell(event)

    def fail_write(self) -> None:
        self.writes_failed = True
        self.sim.fail_write()

    def check(self) -> None:
        """With no news, nothing is ordered; no budget is exceeded."""
        state, goal = self.sim.state, self.sim.state.goal
        if not state.done:
            self.sim.tell(ev.Tick())
        if not state.done:
            assert state.handle(ev.Tick(), self.sim.now) == [], "it does not come to rest"
        for budget, setting in BUDGETS.items():
            limit = getattr(goal, setting)
            assert state.done or not 0 <= limit < state.counts[budget] or budget != "failures"
        if (end := self.sim.finished) is not None and self.unlimited and not self.writes_failed:
            assert end.status != "failed", end.reason

    def rest(self, choose: random.Random) -> None:
        """Without more trouble, and with room for all, the run ends."""
        self.sim.capacity = 99
        for turn in range(REST):
            if self.sim.finished is not None:
                return
            if turn == REST // 20 and self.endless:
                self.sim.tell(ev.StopRequested(reason="enough"))
            self.step(choose.randrange(1 << 16))
            if choose.random() < 0.2:
                self.sim.pass_time(0.5)
            self.check()
        pytest.fail(f"the run never ends: {self.sim.state.phase}, {self.sim.state.reason}")

    @property
    def endless(self) -> bool:
        return self.sim.state.goal.max_steps is None and self.sim.data_end is None


def any_run(choose: random.Random) -> Trouble:
    """A run with any goal, on any cluster."""
    fewest = choose.randint(1, 3)
    most = choose.randint(fewest, 5)
    layers = choose.choice([6, 4, 3])
    fields = {
        "min_workers": fewest,
        "max_workers": most,
        "num_spares": choose.choice([0, 0, 1, 2]),
        "max_layers": layers,
        "max_steps": choose.choice([None, 10, 30, 60]),
        "eval_steps": choose.choice([0, 3, 5, 7]),
        "save_steps": choose.choice([0, 4, 6, 10]),
        "start_update": choose.choice([0, 0, 5]),
        "max_failures": choose.choice([-1, -1, -1, -1, 0, 1, 3]),
        "max_preemptions": choose.choice([-1, -1, -1, 1]),
        "refill_updates": choose.choice([5, 20]),
        "snapshot_every": choose.choice([-1, 0, 1, 2]),
        "grid": choose.random() < 0.4,
        "final_eval": choose.random() < 0.7,
    }
    own = {
        "step_s": choose.choice(list(CURVES.values())),
        "layers": layers,
        "data_end": choose.choice([None, None, 7, 25]),
        "segment_updates": choose.randint(1, 6),
    }
    return Trouble(fields, own)


def make_trouble(trouble: Trouble, choose: random.Random, fewest: int = 1) -> None:
    """One thing, whatever it is, goes wrong or is asked for."""
    index = choose.randrange(1 << 16)
    low = choose.randint(fewest, 4)
    options = [
        lambda: trouble.kill(index, choose.choice(CAUSES)),
        lambda: trouble.kill(index, choose.choice(CAUSES)),
        lambda: trouble.drain(index, choose.choice([None, 1.0, 15.0, 60.0])),
        lambda: trouble.scale(low, choose.randint(low, 5)),
        lambda: trouble.disturb(choose.choice([0, 0, 1])),
        lambda: trouble.sim.tell(ev.LoaderLost(worker="loader-0", node="", detail="it is gone")),
        lambda: trouble.sim.pass_time(choose.choice([1.0, 5.0, 31.0])),
        lambda: trouble.repeat(index),
        lambda: setattr(trouble.sim, "capacity", choose.randint(0, 7)),
        trouble.fail_write,
        trouble.sim.stillborn,
    ]
    choose.choice(options)()
    if choose.random() < 0.005:
        trouble.sim.tell(ev.StopRequested(reason="SIGINT"))


def play(seed: int) -> Trouble:
    choose = random.Random(seed)
    trouble = any_run(choose)
    how_much = choose.choice([0.02, 0.1, 0.3])
    for _ in range(choose.randint(20, 400)):
        if trouble.sim.finished is not None:
            break
        if choose.random() < how_much:
            make_trouble(trouble, choose)
        else:
            trouble.step(choose.randrange(1 << 16))
        if choose.random() < 0.15:
            trouble.sim.pass_time(choose.choice([0.1, 0.5]))
        trouble.check()
    trouble.rest(choose)
    return trouble


@pytest.mark.parametrize("part", range(4))
def test_seeded_runs_keep_the_rules_and_end(part: int) -> None:
    for seed in range(part * 100, (part + 1) * 100):
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_seeded_runs_keep_the_rules_and_end() -> None:
    for seed in range(1000, 31_000):
        try:
            play(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


class AnyOrder(RuleBasedStateMachine):
    """The same, with orders that hypothesis looks for and makes short."""

    @initialize(seed=st.integers(0, 1 << 16))
    def begin(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.trouble = any_run(self.choose)

    @rule(indices=st.lists(st.integers(0, 40), min_size=1, max_size=20))
    def go_on(self, indices: list[int]) -> None:
        for index in indices:
            self.trouble.step(index)

    @rule(index=st.integers(0, 6), cause=st.sampled_from(CAUSES))
    def kill(self, index: int, cause: ev.Cause) -> None:
        self.trouble.kill(index, cause)

    @rule(index=st.integers(0, 6), deadline_s=st.sampled_from([None, 1.0, 15.0, 60.0]))
    def drain(self, index: int, deadline_s: float | None) -> None:
        self.trouble.drain(index, deadline_s)

    @rule(fewest=st.integers(1, 4), most=st.integers(1, 5))
    def scale(self, fewest: int, most: int) -> None:
        self.trouble.scale(fewest, most)

    @rule(age=st.integers(0, 1))
    def disturb(self, age: int) -> None:
        self.trouble.disturb(age)

    @rule()
    def lose_the_loader(self) -> None:
        self.trouble.sim.tell(ev.LoaderLost(worker="loader-0", node="", detail="it is gone"))

    @rule(seconds=st.floats(0.0, 40.0))
    def pass_time(self, seconds: float) -> None:
        self.trouble.sim.pass_time(seconds)

    @rule(index=st.integers(0, 39))
    def repeat(self, index: int) -> None:
        self.trouble.repeat(index)

    @rule(capacity=st.integers(0, 7))
    def change_room(self, capacity: int) -> None:
        self.trouble.sim.capacity = capacity

    @rule()
    def fail_write(self) -> None:
        self.trouble.fail_write()

    @rule()
    def stillborn(self) -> None:
        self.trouble.sim.stillborn()

    @rule()
    def stop(self) -> None:
        self.trouble.sim.tell(ev.StopRequested(reason="SIGINT"))

    @invariant()
    def it_is_at_rest(self) -> None:
        if hasattr(self, "trouble"):
            self.trouble.check()

    def teardown(self) -> None:
        if hasattr(self, "trouble"):
            self.trouble.rest(self.choose)


AnyOrder.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrder = AnyOrder.TestCase
