"""Room for the workers on the cluster: what each needs, whether it is there, and starting them."""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ray

from elastic_trainer.actors.handles import LoaderHandle, Room, StageHandle
from elastic_trainer.config import ClusterConfig, Config
from elastic_trainer.errors import ClusterError

POLL_S = 0.2
MAX_PARENT = 64  # bytes: what is left of a socket's path of at most 107 for the folder it lies in


def bundles(config: ClusterConfig, cluster: Mapping[str, float]) -> list[dict[str, float]]:
    """Resources of each worker: as configured, else one GPU where the cluster has one left for it,
    else one CPU.

    Args:
        config: how many workers and what they need.
        cluster: total resources, as Ray counts them.

    Raises:
        ClusterError: a type of accelerator is asked for, and no worker has one.
    """
    if config.resources_per_worker:
        each = [dict(config.resources_per_worker) for _ in range(config.num_workers)]
    else:
        num_gpus = int(cluster.get("GPU", 0))
        each = [{"GPU": 1.0} if i < num_gpus else {"CPU": 1.0} for i in range(config.num_workers)]
    if config.accelerator_type:
        on_gpu = [bundle for bundle in each if bundle.get("GPU")]
        if not on_gpu:
            raise ClusterError(
                f"cluster.accelerator_type is {config.accelerator_type}, but no worker gets a GPU",
                "Ask for one in cluster.resources_per_worker, or leave cluster.accelerator_type "
                "null.",
            )
        for bundle in on_gpu:
            bundle[f"accelerator_type:{config.accelerator_type}"] = 0.001
    return each


class Crew:
    """The actors of one run: stage workers and the loader."""

    def __init__(self, config: Config, private_dir: str) -> None:
        self.config = config
        self.private_dir = private_dir
        self.stages: dict[str, StageHandle] = {}
        self.loader: LoaderHandle | None = None
        self._room: Room | None = None

    def reserve(self, stopped: Callable[[], bool]) -> list[dict[str, float]]:
        """Wait for room for all workers.

        Raises:
            ClusterError: no room within `cluster.start_timeout_s`; says what is asked and there.
        """
        wanted = bundles(self.config.cluster, _resources()[0])
        self._room = Room(wanted)
        deadline = time.monotonic() + self.config.cluster.start_timeout_s
        while not self._room.ready(POLL_S):
            if stopped():
                return []
            if time.monotonic() > deadline:
                raise ClusterError(
                    _no_room(wanted, self.config.cluster.start_timeout_s),
                    "Ask for fewer --workers or smaller "
                    "cluster.resources_per_worker, or add nodes.",
                )
        return wanted

    def start_loader(self) -> LoaderHandle:
        self.loader = LoaderHandle("loader-0", self.config, self.private_dir, _environment(1))
        return self.loader

    def start_stages(self, wanted: Sequence[Mapping[str, float]]) -> list[StageHandle]:
        """Start one worker per bundle."""
        assert self._room is not None, "reserve comes first"
        threads = self.config.numerics.threads_per_stage
        for index, resources in enumerate(wanted):
            worker = f"stage-{index}"
            self.stages[worker] = StageHandle(
                worker,
                self.config,
                self.private_dir,
                resources=resources,
                group=self._room.group,
                bundle=index,
                env=_environment(threads),
            )
        return list(self.stages.values())

    def members(self) -> list[StageHandle | LoaderHandle]:
        """All actors that were started."""
        loader = [self.loader] if self.loader is not None else []
        return [*self.stages.values(), *loader]

    def dismiss(self, timeout_s: float) -> None:
        """Close what answers in time, kill everything, give the room back."""
        members = self.members()
        closing = [member.close() for member in members]
        deadline = time.monotonic() + timeout_s
        for pending in closing:
            try:
                pending.get(max(0.1, deadline - time.monotonic()))
            except Exception:  # noqa: BLE001, S112 - it is dead or wedged: the kill below settles it
                continue
        for member in members:
            member.kill()
        if self._room is not None:
            self._room.release()
        shutil.rmtree(self.private_dir, ignore_errors=True)


def private_folder(run_dir: str) -> str:
    """A folder for this run's sockets, short as socket paths must be; channels make it 0700."""
    digest = hashlib.sha256(f"{run_dir}:{os.getpid()}".encode()).hexdigest()[:12]
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


def _no_room(wanted: Sequence[Mapping[str, float]], waited_s: float) -> str:
    total, free = _resources()
    kinds = sorted({kind for bundle in wanted for kind in bundle})
    asked = ", ".join(f"{kind} {sum(b.get(kind, 0) for b in wanted):g}" for kind in kinds)
    there = ", ".join(
        f"{kind} {free.get(kind, 0):g} free of {total.get(kind, 0):g}" for kind in kinds
    )
    return (
        f"the cluster has no room for {len(wanted)} workers after {waited_s:.0f} s: "
        f"asked for {asked}; there is {there}"
    )


def _resources() -> tuple[dict[str, float], dict[str, float]]:
    """Total and free resources of the cluster, as Ray counts them."""
    return ray.cluster_resources(), ray.available_resources()  # type: ignore[no-untyped-call]
