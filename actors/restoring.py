"""Where the state of a worker's new layers comes from: its own memory, peers, storage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.checkpoint.copies import LayerState, state_bytes
from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.state_service import StateService
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.elastic.instructions import INITIAL, STORAGE
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import LayerName, Restore, WorkerId


@dataclass(slots=True)
class Gathered:
    """States of layers. Those of `lent` layers are the taker's: nobody else will write to them.

    `facts` are those of the whole update, alike wherever they come from; None where nothing came.
    """

    states: dict[LayerName, LayerState] = field(default_factory=dict)
    lent: set[LayerName] = field(default_factory=set)
    facts: Mapping[str, Any] | None = None
    own_bytes: int = 0
    peer_bytes: int = 0
    snapshot_bytes: int = 0
    storage_bytes: int = 0


def gather(
    layers: Sequence[LayerName],
    restore: Restore,
    service: StateService,
    at: Callable[[str], None],
) -> Gathered:
    """Collect the state of these layers after `restore.update`; nothing changes until all is here.

    What this worker holds itself never travels. Layers whose source is INITIAL are left out.

    Args:
        at: told what is being done, for those who watch over progress.

    Raises:
        CheckpointError: a source does not hold what it should, or the checkpoint is damaged.
        TransportError: nothing came from a peer, or this generation has ended.
    """
    gathered = Gathered()
    remote: dict[LayerName, WorkerId] = {}
    stored: list[LayerName] = []
    for layer in layers:
        source = restore.sources[layer]
        if source == STORAGE:
            stored.append(layer)
        elif source != INITIAL and not _take_own(gathered, layer, restore.update, service):
            remote[layer] = source
    if service.worker in remote.values():
        missing = [layer for layer, source in remote.items() if source == service.worker]
        raise CheckpointError(
            f"{service.worker} does not hold {', '.join(missing)} after update {restore.update}"
        )
    if remote:
        at(f"fetching {len(remote)} layers")
        _take_remote(gathered, remote, restore.update, service)
    if stored:
        _take_stored(gathered, stored, restore, at)
    return gathered


def _take_own(gathered: Gathered, layer: LayerName, update: int, service: StateService) -> bool:
    if (found := service.live(update, layer)) is not None:
        gathered.own_bytes += state_bytes(found.state)
        gathered.lent.add(layer)
    elif (found := service.copies.find(update, layer)) is not None:
        gathered.snapshot_bytes += state_bytes(found.state)
    else:
        return False
    gathered.states[layer] = found.state
    gathered.facts = found.facts
    return True


def _take_remote(
    gathered: Gathered, sources: Mapping[LayerName, WorkerId], update: int, service: StateService
) -> None:
    for layer, fetched in service.fetch(update, sources).items():
        num_bytes = state_bytes(fetched.found.state)
        if fetched.is_copy:
            gathered.snapshot_bytes += num_bytes
        else:
            gathered.peer_bytes += num_bytes
        gathered.states[layer] = fetched.found.state
        gathered.lent.add(layer)
        gathered.facts = fetched.found.facts


def _take_stored(
    gathered: Gathered, layers: Sequence[LayerName], restore: Restore, at: Callable[[str], None]
) -> None:
    if restore.root is None:
        raise CheckpointError(f"there is no checkpoint to read {', '.join(layers)} from")
    store = CheckpointStore(restore.root)
    manifest = store.manifest(restore.update)
    for layer in layers:
        at(f"restoring layer {layer}")
        state = read_layer(store, manifest, layer)
        gathered.states[layer] = state
        gathered.lent.add(layer)
        gathered.storage_bytes += state_bytes(state)
    gathered.facts = {"scaler": manifest.extra.get("scaler")}
