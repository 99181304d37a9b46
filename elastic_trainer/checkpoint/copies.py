"""Copies of layer states in this worker's memory: of its own layers, and of those of others.

A *snapshot* is the state of all layers of one worker, its *origin*, after one update. Only whole
snapshots count. What is put here never changes any more, and is dropped, not overwritten.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from elastic_trainer.types import LayerName, WorkerId

LayerState = Mapping[str, Tensor]

PER_ORIGIN = 2  # one that is stored everywhere, and one on its way
MAX_UPDATES = 4  # where nobody tells what is stored, as while the coordinator is gone


@dataclass(frozen=True, slots=True)
class Found:
    """One layer's state, and facts of the whole stage, such as the state of the loss scaler."""

    state: LayerState
    facts: Mapping[str, Any]


@dataclass(slots=True)
class _Snapshot:
    layers: tuple[LayerName, ...]
    facts: Mapping[str, Any]
    states: dict[LayerName, LayerState] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return len(self.states) == len(self.layers)

    @property
    def num_bytes(self) -> int:
        return sum(state_bytes(state) for state in self.states.values())


class Copies:
    """Snapshots by origin and update; any thread may call it.

    Of each origin it keeps the newest two, and the one that `forget_before` has named as stored. Of
    all origins together it never keeps more than `MAX_UPDATES` updates.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshots: dict[WorkerId, dict[int, _Snapshot]] = {}
        self._stored = -1

    def put(
        self,
        origin: WorkerId,
        update: int,
        states: Mapping[LayerName, LayerState],
        facts: Mapping[str, Any],
    ) -> None:
        """Keep a whole snapshot."""
        with self._lock:
            snapshot = _Snapshot(tuple(states), facts, dict(states))
            self._snapshots.setdefault(origin, {})[update] = snapshot
            self._shrink(origin)

    def add(
        self,
        origin: WorkerId,
        update: int,
        layers: Sequence[LayerName],
        layer: LayerName,
        found: Found,
    ) -> bool:
        """Keep one layer of a snapshot that holds `layers`.

        Returns:
            Whether the snapshot is whole now.
        """
        assert layer in layers
        with self._lock:
            known = self._snapshots.setdefault(origin, {})
            snapshot = known.get(update)
            if snapshot is None or snapshot.layers != tuple(layers):
                snapshot = known[update] = _Snapshot(tuple(layers), found.facts)
            snapshot.states[layer] = found.state
            # A part of another update that has not become whole by now never will.
            for other in [u for u, s in known.items() if not s.is_whole and u != update]:
                del known[other]
            if snapshot.is_whole:
                self._shrink(origin)
            return snapshot.is_whole

    def find(self, update: int, layer: LayerName) -> Found | None:
        """The state of `layer` after `update`, if a whole snapshot holds it."""
        with self._lock:
            for snapshots in self._snapshots.values():
                snapshot = snapshots.get(update)
                if snapshot is not None and snapshot.is_whole and layer in snapshot.states:
                    return Found(snapshot.states[layer], snapshot.facts)
            return None

    def stock(self) -> dict[int, list[LayerName]]:
        """Which layers are held whole, by update."""
        stock: dict[int, list[LayerName]] = {}
        with self._lock:
            for snapshots in self._snapshots.values():
                for update, snapshot in snapshots.items():
                    if snapshot.is_whole:
                        stock.setdefault(update, []).extend(snapshot.layers)
        return {update: list(dict.fromkeys(layers)) for update, layers in sorted(stock.items())}

    def forget_after(self, update: int) -> None:
        """Updates after this one are abandoned: what will follow it may have other bits."""
        with self._lock:
            self._stored = min(self._stored, update)
            self._keep(lambda other, _: other <= update)

    def forget_before(self, update: int) -> None:
        """Every layer's state after `update` stands at two places: older ones are not needed."""
        with self._lock:
            self._stored = max(self._stored, update)
            self._keep(lambda other, _: other >= update)

    def forget_parts(self) -> None:
        """Nobody will complete what is not whole: its sender is of an older generation."""
        with self._lock:
            self._keep(lambda _, snapshot: snapshot.is_whole)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors held."""
        with self._lock:
            held = [s for snapshots in self._snapshots.values() for s in snapshots.values()]
            return sum(snapshot.num_bytes for snapshot in held)

    def _shrink(self, origin: WorkerId) -> None:
        known = self._snapshots[origin]
        newest = sorted(u for u, snapshot in known.items() if snapshot.is_whole)[-PER_ORIGIN:]
        self._snapshots[origin] = {
            u: s for u, s in known.items() if not s.is_whole or u in newest or u == self._stored
        }
        held = {u for snapshots in self._snapshots.values() for u in snapshots}
        kept = {*sorted(held)[-MAX_UPDATES:], self._stored}
        self._keep(lambda other, _: other in kept)

    def _keep(self, wanted: Callable[[int, _Snapshot], bool]) -> None:
        kept = {
            origin: {u: s for u, s in snapshots.items() if wanted(u, s)}
            for origin, snapshots in self._snapshots.items()
        }
        self._snapshots = {origin: snapshots for origin, snapshots in kept.items() if snapshots}


def state_bytes(state: LayerState) -> int:
    """Bytes of one layer's tensors."""
    return sum(tensor.nbytes for tensor in state.values())
