"""From which update training goes on after a change, and whence each layer comes. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic_trainer.elastic.instructions import INITIAL, STORAGE
from elastic_trainer.types import LayerName, Plan, WorkerId

Copies = Mapping[WorkerId, Mapping[int, Sequence[LayerName]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """The state that is restored, and the source of each layer: a worker, STORAGE or INITIAL."""

    update: int
    sources: Mapping[LayerName, str]

    @property
    def from_memory(self) -> bool:
        """Whether workers hold it all, so that neither storage nor a new start is needed."""
        return not {STORAGE, INITIAL} & set(self.sources.values())


def recovery_point(
    plan: Plan,
    copies: Copies,
    nodes: Mapping[WorkerId, str],
    *,
    saved: int,
    newest: int,
) -> Point:
    """The newest state of which every layer still exists, and where to fetch each layer.

    That is the newest update that the workers hold whole between them, or the newest complete
    checkpoint where that is newer, or the initial weights. Of several holders the new owner comes
    first (nothing moves), then one on its node, then the one that serves the fewest layers so far.

    Args:
        plan: who owns which layer from now on.
        copies: worker -> update -> layers that it holds whole.
        nodes: worker -> node.
        saved: update of the newest complete checkpoint, 0 if there is none.
        newest: the last committed update. What a worker holds beyond is not used.
    """
    update = max(_whole(plan.layers, copies, newest), saved)
    holders = {
        worker: frozenset(held.get(update, ())) for worker, held in copies.items() if update in held
    }
    otherwise = STORAGE if update else INITIAL
    served: dict[WorkerId, int] = {}
    sources: dict[LayerName, str] = {}
    for index, layer in enumerate(plan.layers):
        owner = plan.stages[plan.stage_of_layer(index)].worker
        found = [worker for worker, layers in holders.items() if layer in layers]
        if owner in found:
            sources[layer] = owner
            continue
        near = [w for w in found if nodes.get(w) and nodes.get(w) == nodes.get(owner)]
        source = min(near or found, key=lambda w: served.get(w, 0), default=otherwise)
        served[source] = served.get(source, 0) + 1
        sources[layer] = source
    return Point(update=update, sources=sources)


def _whole(layers: Sequence[LayerName], copies: Copies, newest: int) -> int:
    """The newest update, up to `newest`, of which all layers are held; 0 if there is none."""
    held: dict[int, set[LayerName]] = {}
    for by_update in copies.values():
        for update, names in by_update.items():
            held.setdefault(update, set()).update(names)
    wanted = set(layers)
    whole = (update for update, names in held.items() if update <= newest and wanted <= names)
    return max(whole, default=0)
