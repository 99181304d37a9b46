"""What failed calls, silent workers and standing work mean."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_trainer.actors.judge import MARGIN_S, Judge
from elastic_trainer.actors.vigil import Standstill
from elastic_trainer.elastic import events as ev
from elastic_trainer.errors import (
    CheckpointError,
    DataError,
    FencedError,
    StallError,
    TransportError,
    WorkerLostError,
)

LEASE_S, STALL_S = 3.0, 60.0


class Call:
    def __init__(self, worker: str) -> None:
        self.worker = worker


class Watcher:
    """Stands in for the vigil."""

    lease_s, stall_s = LEASE_S, STALL_S

    def __init__(self) -> None:
        self.quiet: dict[str, str] = {}
        self.still: Standstill | None = None
        self.guilty: Standstill | None = None

    def silent(self) -> list[tuple[str, str]]:
        return list(self.quiet.items())

    def stalled(self, name: Callable[[str], str]) -> Standstill | None:
        return self.still

    def blame(self, name: Callable[[str], str]) -> Standstill | None:
        return self.guilty


class World:
    """A run of two stages and a loader; it is also its crew."""

    def __init__(self) -> None:
        self.now = 0.0
        self.generation = 3
        self.taking_stock = False
        self.has_trained = True
        self.stages: dict[str, Any] = {"stage-0": None, "stage-1": None}
        self.loaders: Any = SimpleNamespace(handles={"loader-0": None, "loader-1": None})
        self.idle: set[str] = set()
        self.facts: list[ev.Event] = []
        self.told: list[str] = []
        self.vigil = Watcher()
        self.judge = Judge(
            self,
            self,
            self.vigil,  # type: ignore[arg-type]
            self.facts.append,
            lambda: self.now,
        )

    def name(self, worker: str) -> str:
        return f"{worker} (somewhere)"

    def losing(self, worker: str, detail: str, cause: ev.Cause) -> None:
        assert worker in self.stages, "what is known of it is still known"
        self.told.append(f"{worker} {cause}")

    def lost(self, worker: str, detail: str, cause: ev.Cause) -> None:
        self.facts.append(ev.WorkerLost(worker=worker, detail=detail, cause=cause))

    def loader_lost(self, worker: str, detail: str, cause: ev.Cause) -> bool:
        assert worker in self.loaders.handles, "what is known of it is still known"
        self.facts.append(ev.LoaderLost(worker=worker, node="", detail=detail))
        return worker not in self.idle

    def start_loaders(self) -> None:
        self.told.append(f"others than {sorted(self.loaders.handles)}")

    def trace(self, text: str) -> None:
        self.told.append(text)

    def lose(self, worker: str, reason: str) -> None:
        self.stages.pop(worker, None)
        self.loaders.handles.pop(worker, None)

    def fail(self, worker: str, error: Exception, generation: int | None = 3) -> None:
        call: Any = Call(worker)
        self.judge.failed(call, generation, error)

    def pass_time(self, seconds: float) -> list[ev.Event]:
        self.now += seconds
        self.judge.look()
        return self.facts


PATIENCE_S = LEASE_S * 4 / 3 + MARGIN_S


def standstill(worker: str, still_s: float = STALL_S, *, wedged: bool = True) -> Standstill:
    return Standstill(workers=(worker,), reason="no progress", still_s=still_s, wedged=wedged)


def test_a_dead_worker_is_lost_once() -> None:
    world = World()
    for _ in range(3):
        world.fail("stage-1", WorkerLostError("stage-1 is gone: killed"))
    lost = ev.WorkerLost(worker="stage-1", detail="stage-1 is gone: killed", cause=ev.Cause.CRASHED)
    assert world.facts == [lost] and world.told == ["stage-1 crashed"]


def test_a_dead_worker_is_lost_whatever_its_call_was_for() -> None:
    for generation in (None, 1, 3):
        world = World()
        world.fail("stage-1", WorkerLostError("gone"), generation)
        assert len(world.facts) == 1


def test_a_dead_loader() -> None:
    world = World()
    world.fail("loader-0", WorkerLostError("gone"))
    assert world.facts == [ev.LoaderLost(worker="loader-0", node="", detail="gone")]
    assert world.told == ["others than ['loader-1']"]
    world.idle.add("loader-1")
    world.fail("loader-1", WorkerLostError("gone"))
    assert len(world.facts) == 2 and len(world.told) == 1, "nobody misses it"
    world.fail("loader-0", WorkerLostError("gone"))
    assert len(world.facts) == 2


def test_a_dismissed_worker_is_no_loss() -> None:
    world = World()
    world.fail("stage-9", WorkerLostError("gone"))
    assert world.facts == [] and world.told == []


def test_a_silent_worker() -> None:
    world = World()
    world.vigil.quiet = {"stage-0": "it has not answered for 3 s"}
    (lost,) = world.pass_time(1.0)
    assert isinstance(lost, ev.WorkerLost) and lost.cause is ev.Cause.LEASE_EXPIRED


@pytest.mark.parametrize("error", [FencedError("over"), TransportError("x"), CheckpointError("x")])
def test_an_error_that_others_may_have_caused_waits_for_its_explanation(error: Exception) -> None:
    world = World()
    world.fail("stage-0", error)
    world.now = 1.0
    world.fail("stage-1", TransportError("later"))
    assert world.pass_time(PATIENCE_S - 1.1) == [] and world.judge.wonders
    assert world.pass_time(0.2) == [ev.Disturbed(generation=3, reason=str(error))]
    assert not world.judge.wonders
    assert len(world.pass_time(PATIENCE_S)) == 1, "it is one disturbance"


def test_the_loss_that_explains_it_is_enough() -> None:
    world = World()
    world.fail("stage-0", FencedError("interrupted"))
    world.generation = 4
    assert world.pass_time(PATIENCE_S + 1) == [] and not world.judge.wonders


def test_errors_of_a_generation_that_is_over_mean_nothing() -> None:
    world = World()
    for error in (FencedError("over"), DataError("bad"), KeyError("x")):
        world.fail("stage-0", error, 2)
    assert world.pass_time(PATIENCE_S + 1) == []


def test_what_no_other_worker_would_change_ends_the_run() -> None:
    world = World()
    world.fail("stage-0", DataError("row 7 is not UTF-8"))
    assert world.facts == [ev.Failed(generation=3, reason="row 7 is not UTF-8")]


def test_a_fault_of_ours_is_traced_and_named() -> None:
    world = World()
    world.fail("stage-0", KeyError("exp_avg"))
    assert world.told == ["'exp_avg'"]
    assert world.facts == [
        ev.Failed(generation=3, reason="KeyError: 'exp_avg' on stage-0 (somewhere)")
    ]


def test_before_anything_was_trained_nothing_is_repeated() -> None:
    """A checkpoint that cannot be read will not be readable the next time."""
    world = World()
    world.has_trained = False
    world.fail("stage-0", CheckpointError("is damaged"))
    assert world.facts == [ev.Failed(generation=3, reason="is damaged")]


def test_who_kept_others_waiting_is_lost() -> None:
    world = World()
    world.fail("stage-0", StallError("no message from stage-1"))
    world.vigil.guilty = standstill("stage-1")
    (lost,) = world.pass_time(PATIENCE_S + 0.1)
    assert lost == ev.WorkerLost(worker="stage-1", detail="no progress", cause=ev.Cause.WEDGED)


def test_who_has_moved_or_complained_itself_is_not_to_blame() -> None:
    for guilty in (standstill("stage-1", STALL_S - 1), standstill("stage-0"), None):
        world = World()
        world.fail("stage-0", StallError("no message from stage-1"))
        world.vigil.guilty = guilty
        (fact,) = world.pass_time(PATIENCE_S + 0.1)
        assert isinstance(fact, ev.Disturbed)


def test_work_that_stands_still() -> None:
    world = World()
    world.vigil.still = standstill("stage-1")
    (lost,) = world.pass_time(1.0)
    assert isinstance(lost, ev.WorkerLost) and lost.cause is ev.Cause.WEDGED

    world = World()
    world.vigil.still = standstill("loader-0")
    (fact,) = world.pass_time(1.0)
    assert isinstance(fact, ev.LoaderLost)


def test_work_that_stands_still_by_nobodys_fault() -> None:
    """Such as a storage that hangs, from which all restore."""
    world = World()
    world.vigil.still = Standstill(
        workers=("stage-0", "stage-1"), reason="no progress", still_s=9.0, wedged=False
    )
    assert world.pass_time(1.0) == [ev.Disturbed(generation=3, reason="no progress")]
    world.facts.clear()
    world.taking_stock = True
    assert [type(fact) for fact in world.pass_time(1.0)] == [ev.WorkerLost] * 2
    world = World()
    world.has_trained = False
    world.vigil.still = standstill("stage-0", wedged=False)
    assert world.pass_time(1.0) == [ev.Failed(generation=3, reason="no progress")]
