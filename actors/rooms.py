"""Room for workers on the cluster: one placement group of one bundle for each of them.

Rooms belong to the run: Ray takes them back, and ends the workers in them, once both the driver and
the coordinator are gone. A restarted coordinator finds them again by their ids.
"""

import secrets
from collections.abc import Collection, Mapping
from typing import Any

from ray._raylet import PlacementGroupID
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastic_trainer.actors.handles import actor_name, apart_from
from elastic_trainer.actors.pending import Pending


class Room:
    """Room for one worker; ours once `ready` has its result."""

    def __init__(self, group: PlacementGroup, resources: Mapping[str, float]) -> None:
        self.group = group
        self.resources = resources

    @classmethod
    def ask(
        cls, run_dir: str, resources: Mapping[str, float], avoid: Collection[str] = ()
    ) -> "Room":
        """Ask the cluster for room, on none of the nodes with the ids in `avoid`; never waits."""
        apart = [apart_from(avoid)] if avoid else None
        name = f"{_name(run_dir)}:{secrets.token_hex(4)}"  # Ray wants different ones
        group = placement_group([dict(resources)], name=name, bundle_label_selector=apart)
        return cls(group, resources)

    @classmethod
    def known(cls, room_id: str, resources: Mapping[str, float]) -> "Room":
        """One that an earlier coordinator of the run has asked for."""
        return cls(PlacementGroup(PlacementGroupID(bytes.fromhex(room_id))), resources)

    @property
    def room_id(self) -> str:
        return str(self.group.id.hex())

    def ready(self) -> Pending[Any]:
        """Has its result once the room is ours."""
        return Pending(self.group.ready(), f"room {self.room_id[:8]}", "room")

    def node_id(self) -> str:
        """Ray's id of the node that it lies on; empty while it is not ours."""
        places = placement_group_table(self.group).get("bundles_to_node_id", {})
        return str(places.get(0) or "")

    def release(self) -> None:
        """Give it back; whoever works in it is ended."""
        remove_placement_group(self.group)


def clear_away(run_dir: str, keep: Collection[str] = ()) -> None:
    """Release the rooms of earlier trainers in this folder, and end whoever is left in them.

    Only the holder of the run folder's lock may call it: nobody else is there by right.

    Args:
        keep: ids of rooms that stay.
    """
    for room_id, facts in placement_group_table().items():
        ours = facts["name"].startswith(_name(run_dir)) and room_id not in keep
        if ours and facts["state"] != "REMOVED":
            Room.known(room_id, {}).release()


def _name(run_dir: str) -> str:
    return f"{actor_name(run_dir)}:room"
