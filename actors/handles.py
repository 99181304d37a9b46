"""Typed handles of the actors: the only module that writes `.remote`.

The plain classes behind the handles know nothing of Ray.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorAlreadyExistsError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from elastic_trainer.actors.entry import Loader, StageWorker
from elastic_trainer.actors.pending import Pending
from elastic_trainer.actors.watch import Mark
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.config import Config
from elastic_trainer.errors import RunError
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import (
    BatchInfo,
    ConfigureReport,
    Cursor,
    LayerName,
    Plan,
    Profile,
    Restore,
    StageReport,
    WorkerId,
)

if TYPE_CHECKING:
    from elastic_trainer.pipeline.hooks import RuntimeHooks

Address = Mapping[str, Any]
NAMESPACE = "elastic-trainer"
COORDINATOR = "the coordinator"
NODE_ID_LABEL = "ray.io/node-id"  # on every node, with its id
STAGES = "stages"  # the line of work of all stages: they wait for each other


class StageHandle:
    """Remote face of a StageWorker. Calls of the compute group run one by one, in order.

    The actor outlives the coordinator that started it, so that a restarted one finds it again; once
    nobody calls it any more, it ends by itself.
    """

    def __init__(self, worker: WorkerId, actor: Any) -> None:
        self.worker = worker
        self.line = STAGES
        self._actor = actor

    @classmethod
    def start(
        cls,
        worker: WorkerId,
        config: Config,
        private_dir: str,
        *,
        run_dir: str,
        resources: Mapping[str, float],
        group: PlacementGroup,
        env: Mapping[str, str],
    ) -> "StageHandle":
        """Start the worker in the one bundle of `group`; never waits."""
        actor = (
            ray.remote(**_groups(compute=1, control=2, storage=1))(StageWorker)
            .options(
                name=worker_name(run_dir, worker),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=0
                ),
                runtime_env=_variables(env),
                **_resource_options(resources),
            )
            .remote(worker, config, private_dir)
        )
        return cls(worker, actor)

    @classmethod
    def find(cls, run_dir: str, worker: WorkerId) -> "StageHandle":
        """A living worker that an earlier coordinator of the run in this folder has started.

        Raises:
            ValueError: no such actor.
        """
        return cls(worker, ray.get_actor(worker_name(run_dir, worker), namespace=NAMESPACE))

    def _call(self, group: str, method: str, *args: Any) -> Pending[Any]:
        call = self._actor.call.options(concurrency_group=group)
        line = self.line if group == "compute" else f"{self.worker} {group}"
        return Pending(call.remote(method, *args), self.worker, line)

    def describe(self) -> Pending[Mapping[str, Any]]:
        return self._call("control", "describe")

    def ping(self, generation: int = 0, stored: int = -1, committed: int = -1) -> Pending[Mark]:
        """Ask how far it is, and tell how far the run is. Call it for idle workers, too.

        Args:
            generation: what the rest is told of.
            stored: every layer's state after it stands at two places: older copies may go.
            committed: all stages hold it: idle workers may drop the layers that they gave away.
        """
        return self._call("control", "ping", generation, stored, committed)

    def profile(self, sample: Any) -> Pending[Profile]:
        return self._call("compute", "profile", sample)

    def abort(self, generation: int, reason: str) -> Pending[None]:
        """Wake whatever waits in `generation` or an older one; all its queued work ends at once."""
        return self._call("control", "abort", generation, reason)

    def take_stock(
        self, generation: int, peers: Mapping[WorkerId, Address]
    ) -> Pending[Mapping[int, Sequence[LayerName]]]:
        """Enter `generation`, and say which layers it holds whole, by update.

        Args:
            peers: descriptions of all other living workers: any may ask it for state from now on.
        """
        return self._call("compute", "take_stock", generation, peers)

    def configure(
        self,
        plan: Plan,
        peers: Mapping[WorkerId, Address],
        restore: Restore,
        buddy: WorkerId | None,
    ) -> Pending[ConfigureReport]:
        """Take over its stage of `plan`; without one there it becomes idle.

        Call it for every living worker, idle ones as well: copies of abandoned updates go with it.

        Args:
            peers: descriptions of all other living workers, and of the loader that feeds it.
            restore: `sources` for all layers of the plan.
            buddy: who keeps copies of this worker's snapshots, if anybody.
        """
        return self._call("compute", "configure", plan, peers, restore, buddy)

    def run_segment(self, segment: Segment) -> Pending[StageReport]:
        return self._call("compute", "run_segment", segment)

    def save(self, generation: int, update: int, root: str) -> Pending[Mapping[str, Any] | str]:
        return self._call("compute", "save", generation, update, root)

    def saved(self, update: int) -> Pending[SaveProgress]:
        return self._call("storage", "saved", update)

    def inject(self, name: str, hooks: "RuntimeHooks | None") -> Pending[None]:
        return self._call("control", "inject", name, hooks)

    def close(self) -> Pending[None]:
        return self._call("control", "close")

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


class LoaderHandle:
    """Remote face of a Loader. Calls of the main group run one by one, in order."""

    def __init__(
        self,
        worker: WorkerId,
        config: Config,
        private_dir: str,
        env: Mapping[str, str],
        *,
        spread: bool = False,
        avoid: Collection[str] = (),
    ) -> None:
        """
        Args:
            spread: put it on any node, with as few other actors as may be, instead of this one.
            avoid: ids of nodes to which it may not be spread.
        """
        self.worker = worker
        self.line = str(worker)
        place: dict[str, Any] = {"scheduling_strategy": "SPREAD" if spread else _this_node()}
        if spread and avoid:
            place["label_selector"] = apart_from(avoid)
        self._actor: Any = (
            ray.remote(**_groups(main=1, control=1))(Loader)
            .options(num_cpus=0, max_restarts=0, runtime_env=_variables(env), **place)
            .remote(worker, config, private_dir)
        )

    def _call(self, method: str, *args: Any, group: str = "main") -> Pending[Any]:
        call = self._actor.call.options(concurrency_group=group)
        line = self.line if group == "main" else f"{self.worker} {group}"
        return Pending(call.remote(method, *args), self.worker, line)

    def describe(self) -> Pending[Mapping[str, Any]]:
        return self._call("describe")

    def ping(self) -> Pending[Mark]:
        return self._call("ping", group="control")

    def sample(self) -> Pending[Any]:
        return self._call("sample")

    def configure(
        self,
        generation: int,
        peers: Mapping[WorkerId, Address],
        routes: Mapping[str, Sequence[WorkerId]],
        cursor: Cursor,
        first_update: int,
        rates: Rates | None = None,
    ) -> Pending[None]:
        return self._call("configure", generation, peers, routes, cursor, first_update, rates)

    def abort(self, generation: int, reason: str) -> Pending[None]:
        """End what it does for `generation` or an older one at once."""
        return self._call("abort", generation, reason, group="control")

    def prepare(
        self, generation: int, first_update: int, num_updates: int, rates: Rates | None = None
    ) -> Pending[list[BatchInfo]]:
        return self._call("prepare", generation, first_update, num_updates, rates)

    def prepare_eval(self, generation: int, first_key: int) -> Pending[list[BatchInfo]]:
        return self._call("prepare_eval", generation, first_key)

    def close(self) -> Pending[None]:
        return self._call("close")

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


class CoordinatorHandle:
    """Remote face of a run's Coordinator, a named actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    @classmethod
    def start(
        cls,
        run: str,
        config: Config,
        run_dir: str,
        start: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> "CoordinatorHandle":
        """Start the coordinator on this node, so that it shares the driver's files.

        If its process dies, Ray starts another one, in which the calls under way run again.

        Raises:
            RunError: the cluster has one for this folder already.
        """
        from elastic_trainer.actors.coordinator import Coordinator

        remote = ray.remote(**_groups(main=1, control=4))(Coordinator).options(
            name=actor_name(run_dir),
            namespace=NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=_this_node(),
            runtime_env=_variables(env),
        )
        try:
            return cls(remote.remote(run, config, run_dir, start))
        except ActorAlreadyExistsError as error:
            raise RunError(
                f"a trainer is already running in {run_dir}",
                "Choose another --run-dir, or stop it: `elastic-trainer stop RUN`. If it has just "
                "ended, try again in a few seconds.",
            ) from error

    @classmethod
    def find(cls, run_dir: str) -> "CoordinatorHandle":
        """The living coordinator of the run in this folder.

        Raises:
            ValueError: no such actor.
        """
        return cls(ray.get_actor(actor_name(run_dir), namespace=NAMESPACE))

    def _call(self, group: str, method: str, *args: Any) -> Pending[Any]:
        call = getattr(self._actor, method).options(concurrency_group=group)
        return Pending(call.remote(*args), COORDINATOR, group)

    def run(self) -> Pending[Any]:
        return self._call("main", "run")

    def stop(self, reason: str) -> Pending[None]:
        return self._call("control", "stop", reason)

    def scale(self, min_workers: int, max_workers: int) -> Pending[Mapping[str, Any]]:
        return self._call("control", "scale", min_workers, max_workers)

    def drain(self, node: str, deadline_s: float | None) -> Pending[Mapping[str, Any]]:
        return self._call("control", "drain", node, deadline_s)

    def ping(self) -> Pending[float]:
        return self._call("control", "ping")

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


def actor_name(run_dir: str) -> str:
    """Name of the coordinator of the run in this folder: runs of one name may lie apart."""
    digest = hashlib.sha256(run_dir.encode()).hexdigest()[:12]
    return f"coordinator:{run_dir.rpartition('/')[2]}:{digest}"


def worker_name(run_dir: str, worker: WorkerId) -> str:
    """Actor name of a stage worker of the run in this folder."""
    return f"{actor_name(run_dir)}:{worker}"


def apart_from(nodes: Collection[str]) -> dict[str, str]:
    """What Ray is told to keep something off the nodes with these ids."""
    return {NODE_ID_LABEL: f"!in({','.join(sorted(nodes))})"}


def _groups(**threads: int) -> dict[str, Any]:
    """Calls of one group run in order on that many threads; Ray's own typing lacks the option."""
    return {"concurrency_groups": threads}


def _variables(env: Mapping[str, str]) -> dict[str, Any]:
    """A runtime environment with these variables: none at all lets Ray use a waiting process."""
    return {"env_vars": dict(env)} if env else {}


def _this_node() -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(
        node_id=ray.get_runtime_context().get_node_id(), soft=False
    )


def _resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for a resource mapping as users write it ({CPU: 1, GPU: 1, other: 2})."""
    rest = {k: v for k, v in resources.items() if k not in ("CPU", "GPU", "memory")}
    return {
        "num_cpus": resources.get("CPU", 0),
        "num_gpus": resources.get("GPU", 0),
        **({"memory": int(resources["memory"])} if "memory" in resources else {}),
        "resources": rest,
    }
