"""The Ray cluster as the coordinator sees it: nodes, rooms and actors of one run."""

import hashlib
import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Protocol

import ray
from ray._private.state import state as ray_state

from elastic_trainer.actors.handles import LoaderHandle, StageHandle
from elastic_trainer.actors.resources import Node, Resources
from elastic_trainer.actors.rooms import Room, clear_away
from elastic_trainer.config import Config
from elastic_trainer.types import WorkerId

MAX_PARENT = 64  # bytes: what is left of a socket's path of at most 107 for the folder it lies in


class Site(Protocol):
    """What a crew needs of its cluster. Nothing here waits."""

    private_dir: str

    @property
    def address(self) -> str: ...
    def total(self) -> Resources: ...
    def free(self) -> Resources: ...
    def nodes(self) -> list[Node]: ...
    def draining(self) -> Mapping[str, float | None]: ...
    def ask_room(self, resources: Resources, avoid: Collection[str]) -> Room: ...
    def known_room(self, room_id: str, resources: Resources) -> Room: ...
    def clear_away(self, keep: Collection[str]) -> None: ...
    def start_stage(self, worker: WorkerId, room: Room) -> StageHandle: ...
    def find_stage(self, worker: WorkerId) -> StageHandle | None: ...
    def start_loader(
        self, worker: WorkerId, *, spread: bool, avoid: Collection[str]
    ) -> LoaderHandle: ...


class RaySite:
    """The cluster that this process is connected to."""

    def __init__(self, config: Config, run_dir: str, launch: str) -> None:
        """
        Args:
            config: the resolved configuration.
            run_dir: folder of the run.
            launch: tells the trainers that were ever started in that folder apart.
        """
        self.config = config
        self.run_dir = run_dir
        self.private_dir = private_folder(f"{run_dir}:{launch}")

    @property
    def address(self) -> str:
        """Of the cluster, HOST:PORT."""
        return str(ray.get_runtime_context().gcs_address)

    def total(self) -> Resources:
        """Resources of the cluster, as Ray counts them."""
        found: Resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return found

    def free(self) -> Resources:
        """What is left of them."""
        found: Resources = ray.available_resources()  # type: ignore[no-untyped-call]
        return found

    def nodes(self) -> list[Node]:
        """All that live."""
        return [
            Node(
                node_id=facts["NodeID"],
                ip=facts["NodeManagerAddress"],
                name=facts["NodeManagerHostname"],
                total=facts["Resources"],
            )
            for facts in ray.nodes()  # type: ignore[no-untyped-call]
            if facts["Alive"]
        ]

    def draining(self) -> Mapping[str, float | None]:
        """Ids of nodes that Ray was told to drain: time by which they go, None if not said."""
        found = ray_state.get_draining_nodes()
        return {node: ms / 1000 if ms else None for node, ms in found.items()}

    def ask_room(self, resources: Resources, avoid: Collection[str]) -> Room:
        return Room.ask(self.run_dir, resources, avoid)

    def known_room(self, room_id: str, resources: Resources) -> Room:
        return Room.known(room_id, resources)

    def clear_away(self, keep: Collection[str]) -> None:
        clear_away(self.run_dir, keep)

    def start_stage(self, worker: WorkerId, room: Room) -> StageHandle:
        return StageHandle.start(
            worker,
            self.config,
            self.private_dir,
            run_dir=self.run_dir,
            resources=room.resources,
            group=room.group,
            env=_environment(self.config.numerics.threads_per_stage),
        )

    def find_stage(self, worker: WorkerId) -> StageHandle | None:
        """One that an earlier coordinator of this run has started; None if Ray knows it no more."""
        try:
            return StageHandle.find(self.run_dir, worker)
        except ValueError:
            return None

    def start_loader(
        self, worker: WorkerId, *, spread: bool, avoid: Collection[str]
    ) -> LoaderHandle:
        """Start a loader: on this node, or on any one.

        Args:
            spread: any, with as few other actors as may be.
            avoid: ids of nodes to which it is not spread, unless there are no others.
        """
        if avoid and all(node.node_id in avoid for node in self.nodes()):
            avoid = ()
        env = _environment(1)
        return LoaderHandle(worker, self.config, self.private_dir, env, spread=spread, avoid=avoid)


def private_folder(key: str) -> str:
    """A folder for one run's sockets, short as socket paths must be; channels make it 0700."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PARENT:
        parent = "/tmp"
    return str(Path(parent) / f"et-{digest}")


def thread_limits(threads: int) -> dict[str, str]:
    """Environment variables that limit a process to so many compute threads."""
    # OpenMP reads it once, at start; torch.set_num_threads alone leaves other pools unlimited.
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def _environment(threads: int) -> dict[str, str]:
    """What an actor's process needs beyond what it inherits from its node, as this one did."""
    return {k: v for k, v in thread_limits(threads).items() if os.environ.get(k) != v}
