"""Which loader feeds which stage: every stage has one, near it where that can be, and evenly."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.planner.loaders import assign_loaders

NODES = st.sampled_from(["a", "b", "c"])
STAGES = st.dictionaries(st.integers(0, 9), NODES)
LOADERS = st.lists(NODES, min_size=1, max_size=6)


def named(nodes: list[str]) -> dict[str, str]:
    return {f"loader-{i}": node for i, node in enumerate(nodes)}


@given(STAGES, LOADERS)
def test_every_stage_has_one_loader(stages: dict[int, str], nodes: list[str]) -> None:
    found = assign_loaders(stages, named(nodes))
    assert list(found) == list(named(nodes))
    assert sorted(stage for held in found.values() for stage in held) == sorted(stages)
    assert all(list(held) == sorted(held) for held in found.values())


@given(STAGES, LOADERS)
def test_a_loader_of_the_stage_s_node_comes_first(stages: dict[int, str], nodes: list[str]) -> None:
    where = named(nodes)
    for loader, held in assign_loaders(stages, where).items():
        assert all(stages[s] == where[loader] or stages[s] not in nodes for s in held)


@given(STAGES, LOADERS)
def test_nobody_could_take_over_a_stage_of_another_one(
    stages: dict[int, str], nodes: list[str]
) -> None:
    where = named(nodes)
    load = {loader: len(held) for loader, held in assign_loaders(stages, where).items()}
    for loader, held in assign_loaders(stages, where).items():
        for stage in held:
            free = [w for w in where if where[w] == stages[stage] or stages[stage] not in nodes]
            assert load[loader] <= 1 + min(load[w] for w in free)


@given(st.integers(0, 9), st.integers(1, 6))
def test_on_one_node_the_load_is_even(num_stages: int, num_loaders: int) -> None:
    found = assign_loaders(dict.fromkeys(range(num_stages), "a"), named(["a"] * num_loaders))
    load = Counter(len(held) for held in found.values())
    assert max(load) - min(load) <= 1


@given(STAGES, LOADERS, st.randoms())
def test_the_order_in_which_stages_are_named_does_not_matter(
    stages: dict[int, str], nodes: list[str], dice: random.Random
) -> None:
    mixed = list(stages.items())
    dice.shuffle(mixed)
    assert assign_loaders(dict(mixed), named(nodes)) == assign_loaders(stages, named(nodes))


@given(STAGES, LOADERS, st.data())
def test_a_successor_in_the_same_place_changes_nothing_for_the_others(
    stages: dict[int, str], nodes: list[str], data: st.DataObject
) -> None:
    lost = f"loader-{data.draw(st.integers(0, len(nodes) - 1))}"
    after = {("new" if w == lost else w): node for w, node in named(nodes).items()}
    before = assign_loaders(stages, named(nodes))
    assert assign_loaders(stages, after) == {
        ("new" if w == lost else w): held for w, held in before.items()
    }


def test_by_hand() -> None:
    stages = {0: "a", 1: "b", 2: "b", 3: "c"}
    assert assign_loaders(stages, {"x": "a"}) == {"x": (0, 1, 2, 3)}
    assert assign_loaders(stages, {"x": "a", "y": "b"}) == {"x": (0, 3), "y": (1, 2)}
    assert assign_loaders(stages, {"x": "b", "y": "b"}) == {"x": (0, 1), "y": (2, 3)}
    assert assign_loaders({0: "a"}, {"x": "b", "y": "a"}) == {"x": (), "y": (0,)}
    assert assign_loaders({}, {"x": "a"}) == {"x": ()}
