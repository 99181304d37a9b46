"""Copies of a worker's state lie on another node, and no worker keeps more than it must."""

from collections import Counter

import pytest

from elastic_trainer.actors.buddies import choose_buddies

STAGES = [f"stage-{i}" for i in range(4)]


def test_each_keeps_the_copies_of_its_predecessor() -> None:
    buddies = choose_buddies(STAGES, [], dict.fromkeys(STAGES, "here"))
    assert buddies == dict(zip(STAGES, [*STAGES[1:], STAGES[0]], strict=True))


@pytest.mark.parametrize(
    "nodes", [["a", "a", "b", "b"], ["a", "b", "a", "b"], ["a", "a", "a", "b"]]
)
def test_on_another_node_where_there_is_one(nodes: list[str]) -> None:
    places = dict(zip(STAGES, nodes, strict=True))
    buddies = choose_buddies(STAGES, [], places)
    for worker, buddy in buddies.items():
        assert buddy is not None and places[buddy] != places[worker]
    load = Counter(buddies.values())
    if Counter(nodes)["b"] == 2:
        assert max(load.values()) == 1


def test_a_spare_elsewhere_is_better_than_a_stage_beside() -> None:
    places = {"stage-0": "a", "stage-1": "a", "stage-2": "b"}
    buddies = choose_buddies(["stage-0", "stage-1"], ["stage-2"], places)
    assert set(buddies.values()) == {"stage-2"}


def test_one_worker_has_a_spare_or_nobody() -> None:
    assert choose_buddies(["stage-0"], ["stage-1"], {}) == {"stage-0": "stage-1"}
    assert choose_buddies(["stage-0"], [], {}) == {"stage-0": None}
    assert choose_buddies([], [], {}) == {}
