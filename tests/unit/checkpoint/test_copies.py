"""Which snapshots are kept, and that only whole ones count."""

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from elastic_trainer.checkpoint.copies import MAX_UPDATES, PER_ORIGIN, Copies, Found

LAYERS = {"a": ("x", "y"), "b": ("z",)}
UPDATES = st.integers(min_value=0, max_value=8)
ORIGINS = st.sampled_from(sorted(LAYERS))


def state(origin: str, update: int, layer: str) -> dict[str, Tensor]:
    return {"param/w": torch.tensor([float(update), float(ord(origin)), float(ord(layer))])}


class Keeping(RuleBasedStateMachine):
    """Against a model that remembers which snapshots arrived whole and what was forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()
        self.whole: dict[str, set[int]] = {origin: set() for origin in LAYERS}
        self.named: set[int] = set()  # updates of which anything came

    def arrived(self, origin: str, update: int) -> None:
        """A snapshot is whole: it is there, whatever was there before."""
        self.whole[origin].add(update)
        if len({u for u in self.named if u > update}) < MAX_UPDATES:
            assert set(LAYERS[origin]) <= set(self.copies.stock()[update])

    def next_one(self, origin: str, update: int) -> int:
        """Snapshots come in order; one of an earlier update comes only after an `abandon`."""
        return max(update, *self.whole[origin], 0)

    @rule(origin=ORIGINS, update=UPDATES)
    def put(self, origin: str, update: int) -> None:
        update = self.next_one(origin, update)
        states = {layer: state(origin, update, layer) for layer in LAYERS[origin]}
        self.named.add(update)
        self.copies.put(origin, update, states, {"scaler": update})
        self.arrived(origin, update)

    @rule(origin=ORIGINS, update=UPDATES, data=st.data())
    def add(self, origin: str, update: int, data: Any) -> None:
        update = self.next_one(origin, update)
        layer = data.draw(st.sampled_from(LAYERS[origin]))
        self.named.add(update)
        found = Found(state(origin, update, layer), {"scaler": update})
        if self.copies.add(origin, update, LAYERS[origin], layer, found):
            self.arrived(origin, update)

    @rule(update=UPDATES)
    def abandon(self, update: int) -> None:
        self.copies.forget_after(update)
        self.named = {u for u in self.named if u <= update}
        for updates in self.whole.values():
            updates -= {u for u in updates if u > update}

    @rule(update=UPDATES)
    def stored(self, update: int) -> None:
        self.copies.forget_before(update)
        self.named = {u for u in self.named if u >= update}
        for updates in self.whole.values():
            updates -= {u for u in updates if u < update}

    @rule()
    def new_generation(self) -> None:
        self.copies.forget_parts()

    @invariant()
    def only_what_arrived_is_there_and_it_is_right(self) -> None:
        stock = self.copies.stock()
        for update, layers in stock.items():
            for layer in layers:
                origin = next(o for o, names in LAYERS.items() if layer in names)
                assert update in self.whole[origin]
                found = self.copies.find(update, layer)
                assert found is not None and found.facts == {"scaler": update}
                assert torch.equal(found.state["param/w"], state(origin, update, layer)["param/w"])

    @invariant()
    def bounded(self) -> None:
        stock = self.copies.stock()
        assert len(stock) <= MAX_UPDATES + 1
        for layer in "xyz":
            assert sum(layer in layers for layers in stock.values()) <= PER_ORIGIN + 1
        each = state("a", 0, "x")["param/w"].nbytes
        assert self.copies.num_bytes <= each * 3 * (PER_ORIGIN + 2)


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def put(copies: Copies, origin: str, update: int) -> None:
    states = {layer: state(origin, update, layer) for layer in LAYERS[origin]}
    copies.put(origin, update, states, {})


def held(stock: Mapping[int, list[str]]) -> dict[int, set[str]]:
    return {update: set(layers) for update, layers in stock.items()}


def test_what_is_stored_everywhere_survives_two_newer_ones_that_are_not() -> None:
    copies = Copies()
    for update in (20, 40, 60, 80):
        put(copies, "a", update)
        if update == 20:
            copies.forget_before(20)
    assert held(copies.stock()) == {20: {"x", "y"}, 60: {"x", "y"}, 80: {"x", "y"}}
    copies.forget_before(80)
    assert held(copies.stock()) == {80: {"x", "y"}}


def test_copies_of_an_origin_that_is_gone_stay_until_newer_ones_are_stored() -> None:
    copies = Copies()
    put(copies, "b", 20)
    for update in (40, 60):
        put(copies, "a", update)
    assert held(copies.stock())[20] == {"z"}
    copies.forget_before(40)
    assert held(copies.stock()) == {40: {"x", "y"}, 60: {"x", "y"}}


def test_without_word_of_what_is_stored_memory_is_bounded_all_the_same() -> None:
    copies = Copies()
    for update in range(200):
        copies.put(f"stage-{update}", update, {"x": state("a", update, "x")}, {})
    assert sorted(copies.stock()) == [196, 197, 198, 199]


def test_a_snapshot_of_other_layers_replaces_a_part_of_the_same_update() -> None:
    copies = Copies()
    assert not copies.add("a", 5, ("x", "y"), "x", Found(state("a", 5, "x"), {}))
    assert copies.add("a", 5, ("y",), "y", Found(state("a", 5, "y"), {}))
    assert held(copies.stock()) == {5: {"y"}}
