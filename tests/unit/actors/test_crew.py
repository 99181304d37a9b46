"""Asking for room, starting, losing and dismissing workers, without ever waiting."""

import time
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import ClusterError, WorkerLostError
from elastic_trainer.testing.fake_site import FakeSite


def config(*overrides: str) -> Config:
    base = {"data": {"format": "synthetic"}, "train": {"max_steps": 4}}
    return load_config(base, ["cluster.num_workers=3", *overrides])


class World:
    """A crew on a cluster with so many places."""

    def __init__(self, folder: Path, places: int, *overrides: str) -> None:
        self.site = FakeSite(str(folder), ["a", "b"], places=places)
        self.log: list[str] = []
        settings = config(*overrides)
        self.calls = Calls(Vigil(settings), self.failed, self.site.wait)
        self.crew = Crew(settings, self.site, self.calls, 60.0, self)

    def starting(self) -> None:
        self.log.append(f"next is {self.crew.next_worker}")

    def joined(self, worker: str) -> None:
        self.log.append(worker)

    def failed(self, call: Any, generation: int | None, error: Exception) -> None:
        self.log.append(f"{call.worker} failed")
        assert isinstance(error, WorkerLostError)
        self.crew.lose(call.worker, error.what)

    def pass_time(self, steps: int = 4) -> None:
        for _ in range(steps):
            self.calls.collect(0.0)
            self.crew.tick()

    def taken(self) -> int:
        return sum(room.node is not None and not room.is_released for room in self.site.rooms)


def test_workers_come_as_rooms_come(tmp_path: Path) -> None:
    world = World(tmp_path, places=2)
    world.crew.want(3)
    world.pass_time()
    assert set(world.crew.present()) == {"stage-0", "stage-1"} and world.crew.num_pending == 1
    world.site.places = 3
    world.pass_time()
    assert set(world.crew.present()) == {"stage-0", "stage-1", "stage-2"}
    assert world.log[:1] == ["next is 1"], "its name is taken before it starts"


def test_fewer_wanted_takes_back_what_was_asked_and_ends_nobody(tmp_path: Path) -> None:
    world = World(tmp_path, places=2)
    world.crew.want(5)
    world.pass_time()
    world.crew.want(1)
    world.site.places = 9
    world.pass_time()
    assert len(world.crew.present()) == 2 and world.crew.num_pending == 0
    assert len(world.site.rooms) == 5 and world.taken() == 2
    world.crew.want(3)
    world.pass_time()
    assert set(world.crew.present()) == {"stage-0", "stage-1", "stage-2"}


def test_the_room_of_a_lost_worker_is_free_for_its_successor(tmp_path: Path) -> None:
    world = World(tmp_path, places=2)
    world.crew.want(2)
    world.pass_time()
    lost = world.site.stages["stage-1"]
    lost.is_frozen = True
    world.calls.when(lost.take_stock(2, {}), world.log.append)  # type: ignore[arg-type]
    world.crew.lose("stage-1", "it is silent")
    assert lost.is_dead and "stage-1" not in world.crew.descriptions and len(world.calls) == 0
    world.pass_time()
    assert set(world.crew.present()) == {"stage-0", "stage-2"}, "no name is used twice"
    world.crew.lose("stage-1", "again")
    assert set(world.crew.present()) == {"stage-0", "stage-2"}


def test_a_dismissed_worker_may_end_what_it_writes(tmp_path: Path) -> None:
    world = World(tmp_path, places=2)
    world.crew.want(2)
    world.pass_time()
    leaving = world.site.stages["stage-1"]
    leaving.is_frozen = True
    world.crew.want(1)
    world.crew.dismiss(["stage-1", "nobody"])
    world.pass_time()
    assert not leaving.is_dead and "stage-1" not in world.crew.stages
    leaving.is_frozen = False
    world.pass_time()
    assert leaving.is_dead and world.taken() == 1


def test_a_dismissed_worker_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 2, "elastic.stall_limit_s=1")
    world.crew.want(2)
    world.pass_time()
    leaving = world.site.stages["stage-1"]
    leaving.is_frozen = True
    world.crew.want(1)
    world.crew.dismiss(["stage-1"])
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 2.0)
    world.pass_time(1)
    assert leaving.is_dead and world.taken() == 1 and len(world.calls) == 0


def test_a_dismissed_worker_that_dies_is_no_loss(tmp_path: Path) -> None:
    world = World(tmp_path, places=2)
    world.crew.want(2)
    world.pass_time()
    world.crew.want(1)
    world.crew.dismiss(["stage-1"])
    world.site.stages["stage-1"].is_dead = True
    world.pass_time()
    assert world.taken() == 1 and set(world.crew.present()) == {"stage-0"}


def test_nobody_comes_to_a_node_that_goes(tmp_path: Path) -> None:
    world = World(tmp_path, places=3)
    world.crew.avoid({"node0", "node1"})
    world.crew.want(3)
    world.pass_time()
    assert {s.node.node_id for s in world.site.stages.values()} == {"node2", "node3"}


def test_room_that_is_given_where_nobody_may_come_is_given_back(tmp_path: Path) -> None:
    """The cluster may have chosen the node before it was told."""
    world = World(tmp_path, places=3)
    world.crew.want(1)
    room, call = world.site.asked[0]
    world.crew.avoid({"node1"})
    assert room.is_released and len(world.site.asked) == 2
    later, call = world.site.asked[1]
    world.site.wait([], 0.0)  # it is given
    world.crew.avoided.add(later.node_id())
    world.pass_time()
    assert later.is_released
    assert world.site.stages["stage-0"].node.node_id not in world.crew.avoided


def test_no_room_in_time_is_said_once_at_the_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, 2, "elastic.min_workers=2", "cluster.start_timeout_s=5")
    world.crew.want(3)
    assert world.crew.missing_room() is None
    begun = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: begun + 6.0)
        trouble = world.crew.missing_room()
    assert isinstance(trouble, ClusterError)
    assert "no room for 2 workers after 5 s" in str(trouble) and "fewer --workers" in str(trouble)
    world.pass_time()
    assert world.crew.missing_room() is None
    world.crew.lose("stage-0", "killed")
    monkeypatch.setattr(time, "monotonic", lambda: begun + 60.0)
    assert world.crew.missing_room() is None, "from now on it waits"


def test_the_end_leaves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, places=2)
    world.crew.start_loaders()
    world.crew.want(3)
    world.pass_time()
    world.crew.dismiss(["stage-1"])
    world.crew.close(1.0)
    assert world.site.alive() == [] and all(room.is_released for room in world.site.rooms)
    assert world.site.loaders and world.site.alive_loaders() == []


def test_what_earlier_trainers_left_is_cleared_away(tmp_path: Path) -> None:
    world = World(tmp_path, places=3)
    left = world.site.ask_room({"CPU": 1.0}, ())
    left.ready()
    world.site.wait([], 0.0)
    world.site.start_stage("stage-9", left)
    world.crew.clear_away()
    assert left.is_released and world.site.alive() == []
