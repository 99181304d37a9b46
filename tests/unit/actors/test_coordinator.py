"""The whole coordinator over workers that keep accounts: whatever comes and goes, every update is
trained once on the same samples, and recorded once."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.actors import coordinator as module
from elastic_trainer.actors import departures
from elastic_trainer.actors.coordinator import Coordinator
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config, load_config
from elastic_trainer.elastic import staff
from elastic_trainer.errors import (
    ClusterError,
    ConfigError,
    FencedError,
    NonFiniteError,
    RunError,
    WorkerLostError,
)
from elastic_trainer.observability.runs import (
    read_audit,
    read_events,
    read_membership,
    read_status,
    read_updates,
)
from elastic_trainer.testing import fake_site
from elastic_trainer.testing.fake_site import SAMPLES, FakeSite, digest
from elastic_trainer.types import Cursor, RunResult

LAYERS = [f"layer{i}" for i in range(6)]
UPDATES = 40


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "yield_to_compute", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(workers: str = "2:4", *overrides: str, steps: int | None = UPDATES) -> Config:
    fewest, _, most = workers.partition(":")
    base = {
        "model": {"name": "emulated", "args": {"num_layers": len(LAYERS)}},
        "data": {"format": "synthetic"},
        "train": {"max_steps": steps, "num_epochs": None if steps else 1, "eval_batches": 0},
        "pipeline": {"segment_updates": 3},
        "metrics": {"enabled": False},
        "checkpoint": {"every_steps": 10},
        "cluster": {"num_workers": int(most or fewest), "start_timeout_s": 5.0},
        "elastic": {
            "min_workers": int(fewest),
            "stall_limit_s": 5.0,
            "lease_limit_s": 0.5,
            "max_failures": 50,
            "snapshot_every": 2,
        },
    }
    return load_config(base, overrides)


def start(**changes: Any) -> dict[str, Any]:
    given = {"update": 0, "cursor": Cursor(), "checkpoint": None, "launch": "x", "num_layers": None}
    return given | changes


class Crash(BaseException):
    """The coordinator's process is gone."""


class World:
    """One run on a fake site."""

    def __init__(self, folder: Path, settings: Config, *, places: int = 4, **site: Any) -> None:
        self.run_dir = folder / "run"
        self.settings = settings
        self.site = FakeSite(str(folder), LAYERS, places=places, **site)
        self.coordinator = self._new()

    def _new(self) -> Coordinator:
        return Coordinator(
            "run", self.settings, str(self.run_dir), start(), site=self.site, wait=self.site.wait
        )

    def run(self) -> RunResult:
        return self.coordinator.run()

    def at(self, update: int, action: Callable[[], Any]) -> None:
        """Do something once, as soon as so many updates are committed."""

        def hook() -> None:
            if self.coordinator.state.committed >= update:
                self.site.hooks.remove(hook)
                action()

        self.site.hooks.append(hook)

    def kill(self, stage: int) -> str:
        """SIGKILL of the worker that holds a stage."""
        assert self.site.plan is not None
        worker = self.site.plan.stages[stage % self.site.plan.num_stages].worker
        self.site.stages[worker].is_dead = True
        return worker

    def kill_loader(self, place: int) -> str:
        """SIGKILL of one of the loaders."""
        alive = self.site.alive_loaders()
        worker = alive[place % len(alive)]
        self.site.loaders[worker].is_dead = True
        return worker

    def crash(self) -> None:
        """End the coordinator's process as SIGKILL does; `again` starts the next one."""
        old = {id(thing) for thing in (*self.site.stages.values(), *self.site.rooms)}
        self.site.obeys = lambda thing: id(thing) not in old
        raise Crash

    def again(self) -> RunResult:
        self.coordinator.recorder.record.close()
        self.site.obeys = None
        for loader in self.site.loaders.values():
            loader.is_dead = True  # loaders end with their coordinator
        self.site.control.clear()
        for stage in self.site.stages.values():
            for call in stage.compute:
                call.actor = stage
        self.coordinator = self._new()
        return self.coordinator.run()

    def run_through(self) -> RunResult:
        """To the end, whatever becomes of coordinators."""
        run = self.run
        while True:
            try:
                return run()
            except Crash:
                run = self.again

    def final_states(self) -> dict[str, str]:
        store = CheckpointStore(self.site.root)
        newest = store.newest()
        assert newest is not None
        manifest = store.manifest(newest.update)
        return {f.name: store.read_layer_file(manifest, f.name).decode() for f in manifest.layers}

    def events(self, kind: str) -> list[str]:
        return [e["message"] for e in read_events(self.run_dir) if e["kind"] == kind]

    def plans(self) -> list[str]:
        return self.events("plan")


def samples(update: int, num_microbatches: int = 2) -> list[list[str]]:
    each = SAMPLES * num_microbatches
    first = each * (update - 1)
    ids = [str(i) for i in range(first, first + each)]
    return [ids[i : i + SAMPLES] for i in range(0, each, SAMPLES)]


def undisturbed(updates: int, num_microbatches: int = 2) -> dict[str, str]:
    states = dict.fromkeys(LAYERS, "")
    for update in range(1, updates + 1):
        ids = [i for micro in samples(update, num_microbatches) for i in micro]
        states = {name: digest(state, update, ids) for name, state in states.items()}
    return states


def assert_undisturbed(world: World, result: RunResult, updates: int = UPDATES) -> None:
    """Nothing shows of what happened but the story."""
    assert (result.status, result.update) == ("completed", updates), result.reason
    assert [line["update"] for line in read_updates(world.run_dir)] == list(range(1, updates + 1))
    audit = {line["update"]: line["samples"] for line in read_audit(world.run_dir)}
    micros = world.site.num_microbatches
    assert audit == {u: samples(u, micros) for u in range(1, updates + 1)}
    assert world.final_states() == undisturbed(updates, micros)
    counters = world.coordinator.recorder.metrics.state()["counters"]
    assert counters["updates_total"] == [[[], float(updates)]]
    assert not world.site.alive() and all(room.is_released for room in world.site.rooms)
    status = read_status(world.run_dir)
    assert status["state"] == "completed" and status["workers"] == {}


def test_an_undisturbed_run(tmp_path: Path) -> None:
    world = World(tmp_path, config("3"))
    assert_undisturbed(world, world.run())
    assert len(world.plans()) == 1 and len(world.site.stages) == 3
    assert world.events("lost") == []


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("update", [0, 4, 17, 38])
def test_a_killed_worker_is_replaced(tmp_path: Path, stage: int, update: int) -> None:
    world = World(tmp_path, config("3"), places=3)
    killed: list[str] = []
    world.at(update, lambda: killed.append(world.kill(stage)) if world.site.plan else None)
    result = world.run()
    assert_undisturbed(world, result)
    if killed:
        assert killed[0] in world.events("lost")[0] and "stage-3" in world.site.stages
        assert "3 stages" in world.plans()[-1]


def test_survivors_absorb_the_layers_of_the_lost(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:4"), places=4)

    def shrink() -> None:
        world.site.places = 3
        world.kill(1)

    world.at(15, shrink)
    assert_undisturbed(world, world.run())
    assert [p.count("4 stages") for p in world.plans()][:1] == [1]
    assert "3 stages" in world.plans()[1]


def test_below_the_fewest_it_waits_and_goes_on_unaided(tmp_path: Path) -> None:
    world = World(tmp_path, config("3:3"), places=3)
    seen: list[dict[str, Any]] = []

    def shrink() -> None:
        world.site.places = 2
        world.kill(0)

    def look() -> None:
        status = read_status(world.run_dir) if world.run_dir.exists() else {}
        if status.get("state") == "waiting" and world.site.places == 2:
            seen.append(status)
            world.site.places = 3

    world.at(15, shrink)
    world.site.hooks.append(look)
    assert_undisturbed(world, world.run())
    assert "2 of 3 workers: waiting for room" in seen[0]["reason"]


def test_a_silent_worker_is_lost_when_its_lease_has_run_out(tmp_path: Path) -> None:
    world = World(tmp_path, config("2"), places=3)
    frozen: list[str] = []

    def freeze() -> None:
        assert world.site.plan is not None
        frozen.append(world.site.plan.stages[1].worker)
        world.site.stages[frozen[0]].is_frozen = True

    world.site.hooks.append(lambda: time.sleep(0.02))  # so that it is asked before
    world.at(20, freeze)
    assert_undisturbed(world, world.run())
    lost = [e for e in read_events(world.run_dir) if e["kind"] == "lost"]
    assert lost[0]["cause"] == "lease_expired" and frozen[0] in lost[0]["message"]
    assert world.site.stages[frozen[0]].is_dead, "its process is ended where it can be reached"


@pytest.mark.parametrize(("num_loaders", "place"), [(1, 0), (2, 0), (2, 1), (5, 2)])
def test_a_lost_loader_is_replaced(tmp_path: Path, num_loaders: int, place: int) -> None:
    world = World(tmp_path, config("3:3", f"data.num_loaders={num_loaders}"))
    killed: list[str] = []
    world.at(10, lambda: killed.append(world.kill_loader(place)))
    assert_undisturbed(world, world.run())
    assert list(world.site.loaders) == [f"loader-{i}" for i in range(num_loaders + 1)]
    (lost,) = [e for e in read_events(world.run_dir) if e["kind"] == "lost"]
    assert lost["message"].startswith(f"{killed[0]} (node 10.0.0.") and lost["cause"] == "crashed"
    change = read_membership(world.run_dir)[-1]
    assert (change["cause"], change["worker"]) == ("loader_lost", killed[0])
    assert change["node"].startswith("10.0.0.") and change["outcome"] == "committed"
    labels = world.coordinator.recorder.metrics.state()["counters"]["membership_changes_total"]
    assert [["loader_lost"], 1.0] in labels


def test_an_idle_loader_is_missed_only_by_the_next_plan(tmp_path: Path) -> None:
    settings = config("2:2", "data.num_loaders=4", "elastic.max_failures=0")
    world = World(tmp_path, settings)
    seen: list[list[str]] = []

    def freeze(is_frozen: bool) -> None:  # training goes on when the loss is known
        for worker in ("loader-0", "loader-1"):
            world.site.loaders[worker].is_frozen = is_frozen

    def kill() -> None:
        world.kill_loader(3)
        freeze(True)
        world.site.hooks.append(scale)

    def scale() -> None:
        if world.events("lost"):
            world.site.hooks.remove(scale)
            seen.append(world.site.alive_loaders())
            freeze(False)
            world.coordinator.scale(4, 4)

    world.at(6, kill)
    assert_undisturbed(world, world.run())
    assert seen == [["loader-0", "loader-1", "loader-2"]], "nobody takes its place"
    assert set(world.site.loaders["loader-4"].routes), "four stages need four loaders"
    changes = {c["cause"]: c["outcome"] for c in read_membership(world.run_dir)}
    assert changes["loader_lost"] == "no_new_plan" and len(world.plans()) == 2


def test_a_silent_loader_is_replaced(tmp_path: Path) -> None:
    settings = config("2:2", "data.num_loaders=2", "elastic.stall_limit_s=1")
    world = World(tmp_path, settings)

    def freeze() -> None:
        world.site.loaders["loader-1"].is_frozen = True

    world.site.hooks.append(lambda: time.sleep(0.02))  # so that it is asked before
    world.at(10, freeze)
    assert_undisturbed(world, world.run())
    (lost,) = [e for e in read_events(world.run_dir) if e["kind"] == "lost"]
    assert lost["cause"] == "lease_expired" and lost["message"].startswith("loader-1 (node ")


def test_the_other_loaders_keep_what_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor has the place of the lost one: nobody else makes other fields than before."""
    monkeypatch.setattr(fake_site, "NUM_NODES", 1)  # where only the place tells them apart
    world = World(tmp_path, config("3:3", "data.num_loaders=3"))
    before: dict[str, set[str]] = {}

    def kill() -> None:
        before.update({w: set(loader.routes) for w, loader in world.site.loaders.items()})
        world.kill_loader(0)

    world.at(10, kill)
    assert_undisturbed(world, world.run())
    loaders = world.site.loaders
    assert set(loaders["loader-3"].routes) == before.pop("loader-0")
    assert {w: set(loaders[w].routes) for w in before} == before


def test_a_loader_that_reads_other_data_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:2", "data.num_loaders=2"))
    world.at(10, lambda: setattr(world.site.loaders["loader-1"], "shift", 2))
    result = world.run()
    assert result.status == "failed"
    assert "loader-1 reads other data than loader-0: they differ in the batch of" in result.reason
    assert "data.path must lead to the same files on all nodes" in result.reason


def test_the_status_shows_loaders(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:2", "data.num_loaders=3"))
    seen: list[dict[str, Any]] = []
    world.at(20, lambda: seen.append(read_status(world.run_dir)["loaders"]))
    world.run()
    assert [facts["state"] for facts in seen[0].values()] == ["serving", "serving", "idle"]
    assert len({facts["node"] for facts in seen[0].values()}) == 3
    assert read_status(world.run_dir)["loaders"] == {}


@pytest.mark.parametrize("budget", [0, 2])
def test_too_many_losses_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.setattr(staff, "INCIDENT_S", 0.0)  # they are not one accident of one node
    world = World(tmp_path, config("2", f"elastic.max_failures={budget}"), places=3)
    for update in (12, 16, 20, 24):
        world.at(update, lambda: world.kill(1))
    result = world.run()
    assert result.status == "failed" and result.update < UPDATES
    told = "worker stage-1 (stage 1" if budget == 0 else f"elastic.max_failures is {budget}"
    assert told in result.reason and "Last good checkpoint: update 10" in result.reason
    assert not world.site.alive()


def test_the_end_of_the_data(tmp_path: Path) -> None:
    world = World(tmp_path, config("2", steps=None), num_samples=4 * 17)
    world.at(9, lambda: world.kill(0))
    assert_undisturbed(world, world.run(), 17)


def test_scaling_up_and_down(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:2"), places=4)
    answers: list[Any] = []
    world.at(6, lambda: answers.append(world.coordinator.scale(4, 4)))
    world.at(20, lambda: answers.append(world.coordinator.scale(1, 2)))
    world.at(30, lambda: answers.append(world.coordinator.scale(1, 1)))
    assert_undisturbed(world, world.run())
    assert answers[0] == {"min_workers": 4, "max_workers": 4, "num_workers": 2}
    plans = world.plans()
    assert ["2 stages", "4 stages", "2 stages", "1 stage"] == [
        next(f"{n} stage{'s' if n > 1 else ''}" for n in (4, 2, 1) if f"{n} stage" in plan)
        for plan in plans
    ]
    status = read_status(world.run_dir)
    assert (status["min_workers"], status["num_workers"]) == (1, 1)


def test_what_cannot_be_scaled_to(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:2"), places=4)
    refused: list[str] = []

    def ask() -> None:
        for fewest, most, kind in (
            (5, 5, ClusterError),
            (0, 2, ConfigError),
            (3, 2, ConfigError),
            (7, 7, ConfigError),
        ):
            with pytest.raises(kind) as caught:
                world.coordinator.scale(fewest, most)
            refused.append(str(caught.value))

    world.at(6, ask)
    assert_undisturbed(world, world.run())
    assert "can hold 4 workers of this run at most, not 5" in refused[0]
    assert "no range" in refused[1] and "no range" in refused[2]
    assert "only 6 layers" in refused[3]
    with pytest.raises(RunError, match="run is ending"):
        world.coordinator.scale(2, 2)
    with pytest.raises(RunError, match="run is ending"):
        world.coordinator.drain("10.0.0.1", None)


def test_fixed_stages_are_not_scaled(tmp_path: Path) -> None:
    world = World(tmp_path, config("2", "pipeline.num_stages=2"))

    def ask() -> None:
        with pytest.raises(ConfigError, match="fixed at 2 stages"):
            world.coordinator.scale(3, 3)

    world.at(6, ask)
    assert_undisturbed(world, world.run())


@pytest.mark.parametrize("by_ray", [False, True])
def test_a_drained_node_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_ray: bool
) -> None:
    """Its layers move at a commit point, nothing is lost, and nobody is placed there again."""
    monkeypatch.setattr(departures, "LOOK_S", 0.0)
    world = World(tmp_path, config("4:4", "elastic.max_preemptions=5"), places=5)
    answers: list[Any] = []

    def drain() -> None:
        if by_ray:
            world.site.told["node1"] = None
        else:
            answers.append(world.coordinator.drain("10.0.0.1", 30.0))

    world.at(12, drain)
    assert_undisturbed(world, world.run())
    assert world.coordinator.state.counts["failures"] == 0
    assert world.coordinator.state.counts["preemptions"] == 1
    assert world.events("lost") == []
    left = [w for w, s in world.site.stages.items() if s.node.node_id == "node1"]
    assert len(left) == 1 and len(world.site.stages) == 5
    if not by_ray:
        assert answers == [{"node": "10.0.0.1", "workers": left}]
    why = "Ray drains node 10.0.0.1" if by_ray else "node 10.0.0.1 is to be left"
    assert any(why in plan for plan in world.plans())


def test_what_cannot_be_drained(tmp_path: Path) -> None:
    world = World(tmp_path, config("2"))
    refused: list[str] = []

    def ask() -> None:
        with pytest.raises(ClusterError) as caught:
            world.coordinator.drain("10.9.9.9", None)
        refused.append(str(caught.value))

    world.at(6, ask)
    assert_undisturbed(world, world.run())
    assert "no node 10.9.9.9" in refused[0] and "10.0.0.0, 10.0.0.1" in refused[0]


def test_no_room_at_the_start(tmp_path: Path) -> None:
    world = World(tmp_path, config("3", "cluster.start_timeout_s=1"), places=2)
    result = world.run()
    assert result.status == "failed"
    assert "no room for 3 workers after 1 s: asked for CPU 3; there is CPU 0 free of 2" in (
        result.reason
    )


def test_the_fewest_are_enough_to_start(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:4", "cluster.start_timeout_s=1"), places=2)
    world.at(20, lambda: setattr(world.site, "places", 4))
    assert_undisturbed(world, world.run())
    assert "2 stages" in world.plans()[0] and "4 stages" in world.plans()[-1]


def test_a_stop(tmp_path: Path) -> None:
    world = World(tmp_path, config("2"))
    world.at(8, lambda: world.coordinator.stop("enough"))
    result = world.run()
    assert (result.status, result.reason) == ("stopped", "enough")
    assert 8 <= result.update < UPDATES
    assert world.final_states() == undisturbed(result.update)


def fail_once(world: World, update: int, stage: int, error: Exception) -> None:
    """Let one call of a stage fail, though its worker lives."""

    def arm() -> None:
        assert world.site.plan is not None
        worker = world.site.stages[world.site.plan.stages[stage].worker]
        real = worker._trained

        def broken(segment: Any) -> Any:
            worker._trained = real  # type: ignore[method-assign]
            worker.live = None
            raise error

        worker._trained = broken  # type: ignore[method-assign]

    world.at(update, arm)


def test_an_error_that_no_loss_explains_is_repeated(tmp_path: Path) -> None:
    world = World(tmp_path, config("3"))
    fail_once(world, 10, 1, FencedError("a message got lost"))
    assert_undisturbed(world, world.run())
    assert any("a message got lost" in plan for plan in world.plans())
    assert world.coordinator.state.counts["failures"] == 1 and world.events("lost") == []


def test_an_error_that_a_loss_explains_is_no_second_one(tmp_path: Path) -> None:
    world = World(tmp_path, config("3"), places=4)
    fail_once(world, 10, 1, FencedError("interrupted"))

    def kill_while_it_wonders() -> None:
        if world.coordinator.judge.wonders and not world.events("lost"):
            world.kill(2)

    world.site.hooks.append(kill_while_it_wonders)
    assert_undisturbed(world, world.run())
    assert len(world.events("lost")) == 1
    assert world.coordinator.state.counts["failures"] == 1


def test_an_error_of_the_model_ends_the_run(tmp_path: Path) -> None:
    world = World(tmp_path, config("3"))
    fail_once(world, 10, 1, NonFiniteError("the loss became NaN", "Lower the rate."))
    result = world.run()
    assert result.status == "failed" and result.reason.startswith("the loss became NaN")


@pytest.mark.parametrize("update", [0, 5, 18, 39])
def test_another_coordinator_takes_over(tmp_path: Path, update: int) -> None:
    world = World(tmp_path, config("3"))
    world.at(update, world.crash)
    assert_undisturbed(world, world.run_through())
    assert len(world.site.stages) == 3, "the workers are the same"


def test_a_worker_dies_with_the_coordinator(tmp_path: Path) -> None:
    world = World(tmp_path, config("3"), places=3)

    def both() -> None:
        world.kill(1)
        world.crash()

    world.at(18, both)
    assert_undisturbed(world, world.run_through())
    assert len(world.site.stages) == 4


def test_limits_and_departures_outlive_the_coordinator(tmp_path: Path) -> None:
    world = World(tmp_path, config("2:2", "elastic.max_preemptions=9"), places=5)
    world.at(6, lambda: world.coordinator.scale(3, 3))
    world.at(14, lambda: world.coordinator.drain("10.0.0.0", None))
    world.at(22, world.crash)
    assert_undisturbed(world, world.run_through())
    assert "3 stages" in world.plans()[-1]
    assert len([s for s in world.site.stages.values() if s.node.ip == "10.0.0.0"]) == 1


def test_budgets_outlive_the_coordinator(tmp_path: Path) -> None:
    world = World(tmp_path, config("1:4", "elastic.max_failures=2"), places=6)
    for update in (4, 8, 16):
        world.at(update, lambda: world.kill(0))
    world.at(12, world.crash)
    result = world.run_through()
    assert result.status == "failed" and "number 3 in a row" in result.reason


def test_coordinators_that_die_and_die_are_given_up(tmp_path: Path) -> None:
    world = World(tmp_path, config("2"))
    deaths: list[int] = []

    def die() -> None:
        if world.coordinator.state.committed >= 10 and world.site.turn % 5 == 0:
            deaths.append(world.coordinator.state.committed)
            world.crash()

    world.site.hooks.append(die)
    result = world.run_through()
    assert result.status == "failed" and "the coordinator died 4 times" in result.reason
    assert len(deaths) == 4 and not world.site.alive()


def test_a_run_that_has_ended_is_not_run_again(tmp_path: Path) -> None:
    """The call of the driver runs again when the coordinator dies while it answers."""
    world = World(tmp_path, config("2"))
    first = world.run()
    assert world.again() == first


def test_another_launch_knows_nothing_of_the_journal(tmp_path: Path) -> None:
    world = World(tmp_path, config("2"))
    world.run()
    journal = json.loads((world.run_dir / "journal.json").read_text())
    assert journal["launch"] == "x" and journal["committed"] == UPDATES
    other = Coordinator(
        "run", world.settings, str(world.run_dir), start(launch="y"), site=world.site
    )
    assert other.journal.found is None
    other.recorder.record.close()


def _do(action: Callable[[], Any]) -> None:
    with contextlib.suppress(RunError):  # a request that comes too late
        action()


def play(folder: Path, seed: int) -> None:
    """Kills, joins, drains, requests and dying coordinators, in any order."""
    dice = random.Random(seed)
    settings = [f"elastic.num_spares={dice.randrange(2)}", "elastic.max_preemptions=99"]
    num_microbatches = 2
    if dice.random() < 0.3:
        settings += ["pipeline.schedule=async_1f1b", "pipeline.commit_every=4"]
        num_microbatches = 1
    settings.append(f"data.num_loaders={dice.randint(1, 3)}")
    site = {"places": 6, "num_microbatches": num_microbatches}
    world = World(folder, config("1:4", *settings), **site)
    actions: Sequence[Callable[[], Any]] = (
        lambda: world.kill(dice.randrange(4)),
        lambda: [world.kill(0), world.kill(1)],
        lambda: world.coordinator.scale(1, dice.randint(1, 4)),
        lambda: setattr(world.site, "places", dice.randint(1, 6)),
        lambda: world.coordinator.drain(f"10.0.0.{dice.randrange(2)}", 60.0),
        lambda: world.site.alive_loaders() and world.kill_loader(dice.randrange(3)),
        world.crash,
    )
    for _ in range(dice.randint(2, 8)):
        world.at(dice.randrange(1, UPDATES), partial(_do, dice.choice(actions)))
    world.at(UPDATES - 3, lambda: setattr(world.site, "places", 6))
    assert_undisturbed(world, world.run_through())


@pytest.mark.parametrize("seed", range(20))
def test_any_script_of_events(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20, 420))
def test_many_scripts_of_events(tmp_path: Path, seed: int) -> None:
    play(tmp_path, seed)


def test_losses_name_the_process(tmp_path: Path) -> None:
    world = World(tmp_path, config("2", "elastic.max_failures=0"))
    world.at(10, lambda: world.kill(1))
    reason = world.run().reason
    assert WorkerLostError("x").what == "x" and "stage-1 is gone: killed" in reason
