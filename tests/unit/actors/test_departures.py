"""Nodes that are about to go."""

from typing import Any

import pytest

from elastic_trainer.actors.departures import LOOK_S, Departures
from elastic_trainer.actors.resources import Node
from elastic_trainer.elastic import events as ev


class Site:
    """Two nodes, and what Ray says of them."""

    def __init__(self) -> None:
        self.told: dict[str, float | None] = {}

    def draining(self) -> dict[str, float | None]:
        return self.told

    def nodes(self) -> list[Node]:
        ips = {"a": "10.0.0.1", "b": "10.0.0.2"}
        return [Node(node_id=n, ip=ip, name=n, total={}) for n, ip in ips.items()]


class Crew:
    def __init__(self) -> None:
        self.avoided: set[str] = set()
        self.places = {"stage-0": "a", "stage-1": "b", "stage-2": "b"}

    def on_nodes(self, node_ids: set[str]) -> list[str]:
        return [w for w, node in self.places.items() if node in node_ids]

    def avoid(self, node_ids: set[str]) -> None:
        self.avoided |= set(node_ids)


class World:
    def __init__(self) -> None:
        self.now = 1000.0
        self.site, self.crew = Site(), Crew()
        self.facts: list[ev.Event] = []
        self.departures = self.new()

    def new(self) -> Departures:
        site: Any = self.site
        return Departures(site, self.crew, self.facts.append, lambda: self.now)

    def look(self) -> list[ev.Event]:
        self.facts.clear()
        self.departures.look()
        return list(self.facts)


def leaving(reason: str, deadline_s: float | None, *workers: str) -> ev.WorkersDraining:
    return ev.WorkersDraining(workers=workers, reason=reason, deadline_s=deadline_s)


def test_a_request() -> None:
    world = World()
    world.departures.request({"b"}, "asked for", 30.0)
    world.now += 2.0
    assert world.look() == [leaving("asked for", 28.0, "stage-1", "stage-2")]
    assert world.crew.avoided == {"b"} and world.look() == []


def test_a_notice_of_ray_is_told_once_and_again_if_it_comes_closer() -> None:
    world = World()
    world.site.told = {"b": 1060.0}
    assert world.look() == [leaving("Ray drains node 10.0.0.2", 60.0, "stage-1", "stage-2")]
    world.now += LOOK_S
    assert world.look() == []
    world.site.told = {"b": 1030.0}
    assert world.look() == [], "it is not asked all the time"
    world.now += LOOK_S
    (fact,) = world.look()
    assert isinstance(fact, ev.WorkersDraining) and fact.deadline_s == pytest.approx(28.0)


def test_a_node_without_workers_is_avoided() -> None:
    world = World()
    world.site.told = {"elsewhere": None}
    assert world.look() == [] and world.crew.avoided == {"elsewhere"}


def test_who_joins_on_a_node_that_goes_leaves_with_it() -> None:
    world = World()
    world.departures.request({"b"}, "asked for", None)
    world.look()
    world.crew.places["stage-3"] = "b"
    world.facts.clear()
    world.departures.joined("stage-3")
    world.departures.joined("stage-0")
    assert world.facts == [leaving("asked for", None, "stage-3")]


def test_another_coordinator_knows_them() -> None:
    world = World()
    world.departures.request({"b"}, "asked for", 30.0)
    world.look()
    facts = world.departures.facts()
    world.crew.avoided.clear()
    world.facts.clear()
    world.now += 10.0
    world.departures = world.new()
    world.departures.restore(facts)
    assert world.facts == [leaving("asked for", 20.0, "stage-1", "stage-2")]
    assert world.crew.avoided == {"b"} and world.look() == []
