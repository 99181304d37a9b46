"""Typed handles of the actors: the only module that writes `.remote`.

A call returns a `Pending`; `wait_any` blocks until some of them are ready. The plain classes behind
the handles know nothing of Ray.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from elastic_trainer.actors.entry import Loader, StageWorker
from elastic_trainer.actors.watch import Mark
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.config import Config
from elastic_trainer.errors import ElasticTrainerError, WorkerLostError
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import BatchInfo, Cursor, Plan, Profile, StageReport, WorkerId

T = TypeVar("T")
Address = Mapping[str, Any]
NAMESPACE = "elastic-trainer"
COORDINATOR = "the coordinator"
STAGES = "stages"  # the line of work of all stages: they wait for each other


class Pending(Generic[T]):
    """The result of a remote call that may not be there yet.

    `line` names the calls that wait for each other; see `watch.py`.
    """

    def __init__(self, ref: Any, worker: WorkerId, line: str) -> None:
        self.ref = ref
        self.worker = worker
        self.line = line

    def get(self, timeout_s: float) -> T:
        """The result.

        Raises:
            WorkerLostError: the actor is dead or unreachable.
            ElasticTrainerError: what the call raised, if it was one of ours.
            TimeoutError: no answer within `timeout_s` seconds.
        """
        try:
            value: T = ray.get(self.ref, timeout=timeout_s)
            return value
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"{self.worker} did not answer in {timeout_s:.0f} s") from error
        except (ActorDiedError, ActorUnavailableError, RayActorError) as error:
            raise _actor_error(self.worker, error) from error
        except RayTaskError as error:
            if isinstance(error.cause, ElasticTrainerError):
                raise error.cause from None
            raise


def wait_any(pending: Sequence[Pending[Any]], timeout_s: float) -> list[Pending[Any]]:
    """Those that are ready, after `timeout_s` seconds at most."""
    if not pending:
        return []
    by_ref = {p.ref: p for p in pending}
    ready, _ = ray.wait(list(by_ref), num_returns=1, timeout=timeout_s, fetch_local=True)
    if ready:  # take along what came at the same time
        ready, _ = ray.wait(list(by_ref), num_returns=len(by_ref), timeout=0)
    return [by_ref[ref] for ref in ready]


def _actor_error(worker: WorkerId, error: RayActorError) -> ElasticTrainerError:
    """What a dead actor's constructor raised, if it was one of ours; else that it is lost."""
    cause = getattr(error.args[0], "cause", None) if error.args else None
    if isinstance(cause, ElasticTrainerError):
        return cause
    if isinstance(cause, Exception):
        said = next((line for line in str(cause).splitlines() if line.strip()), "no message")
        return WorkerLostError(f"{worker} could not start: {type(cause).__name__}: {said}")
    return WorkerLostError(f"{worker} is gone: {_why(error)}")


def _why(error: RayActorError) -> str:
    """What Ray knows of an actor's end, in a few words."""
    text = str(error)
    if "unexpectedly exits with a connection error" in text:
        pid = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
        return (
            f"its process{f' {pid[1]}' if pid else ''} was killed (SIGKILL, as when memory runs "
            "out) or crashed (SIGSEGV)"
        )
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "exit" in line or "killed" in line.lower()), lines[0])


class StageHandle:
    """Remote face of a StageWorker. Calls of the compute group run one by one, in order."""

    def __init__(
        self,
        worker: WorkerId,
        config: Config,
        private_dir: str,
        *,
        resources: Mapping[str, float],
        group: PlacementGroup,
        bundle: int,
        env: Mapping[str, str],
    ) -> None:
        self.worker = worker
        self.line = STAGES
        options = _resource_options(resources)
        actor = ray.remote(**_groups(compute=1, control=2))(StageWorker)
        self._actor: Any = actor.options(
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
            runtime_env=_variables(env),
            **options,
        ).remote(worker, config, private_dir)

    def _call(self, group: str, method: str, *args: Any) -> Pending[Any]:
        call = self._actor.call.options(concurrency_group=group)
        line = self.line if group == "compute" else f"{self.worker} {group}"
        return Pending(call.remote(method, *args), self.worker, line)

    def describe(self) -> Pending[Mapping[str, Any]]:
        return self._call("control", "describe")

    def ping(self) -> Pending[Mark]:
        return self._call("control", "ping")

    def profile(self, sample: Any) -> Pending[Profile]:
        return self._call("compute", "profile", sample)

    def configure(
        self, plan: Plan, peers: Mapping[WorkerId, Address], restore: tuple[str, int] | None
    ) -> Pending[int]:
        return self._call("compute", "configure", plan, peers, restore)

    def run_segment(self, segment: Segment) -> Pending[StageReport]:
        return self._call("compute", "run_segment", segment)

    def save(self, update: int, root: str) -> Pending[Mapping[str, Any] | str]:
        return self._call("compute", "save", update, root)

    def saved(self, update: int) -> Pending[SaveProgress]:
        return self._call("control", "saved", update)

    def abort(self, reason: str) -> Pending[None]:
        return self._call("control", "abort", reason)

    def close(self) -> Pending[None]:
        return self._call("control", "close")

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


class LoaderHandle:
    """Remote face of a Loader. Calls of the main group run one by one, in order."""

    def __init__(
        self, worker: WorkerId, config: Config, private_dir: str, env: Mapping[str, str]
    ) -> None:
        self.worker = worker
        self.line = str(worker)
        self._actor: Any = (
            ray.remote(**_groups(main=1, control=1))(Loader)
            .options(
                num_cpus=0,
                max_restarts=0,
                scheduling_strategy=_this_node(),
                runtime_env=_variables(env),
            )
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
    ) -> Pending[None]:
        return self._call("configure", generation, peers, routes, cursor)

    def prepare(self, first_update: int, num_updates: int) -> Pending[list[BatchInfo]]:
        return self._call("prepare", first_update, num_updates)

    def prepare_eval(self, first_key: int) -> Pending[list[BatchInfo]]:
        return self._call("prepare_eval", first_key)

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
        detached: bool,
        env: Mapping[str, str],
    ) -> "CoordinatorHandle":
        """Start the coordinator on this node, so that it shares the driver's files."""
        from elastic_trainer.actors.coordinator import Coordinator

        actor = (
            ray.remote(**_groups(main=1, control=4))(Coordinator)
            .options(
                name=actor_name(run_dir),
                namespace=NAMESPACE,
                lifetime="detached" if detached else None,
                num_cpus=0,
                scheduling_strategy=_this_node(),
                runtime_env=_variables(env),
            )
            .remote(run, config, run_dir, start)
        )
        return cls(actor)

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

    def ping(self) -> Pending[float]:
        return self._call("control", "ping")

    def kill(self) -> None:
        ray.kill(self._actor, no_restart=True)


class Room:
    """A placement group with one bundle per worker."""

    def __init__(self, bundles: Sequence[Mapping[str, float]]) -> None:
        self.group = placement_group([dict(b) for b in bundles], strategy="PACK")

    def ready(self, timeout_s: float) -> bool:
        """Whether the room is ours, after `timeout_s` seconds at most."""
        return bool(self.group.wait(timeout_s))

    def release(self) -> None:
        remove_placement_group(self.group)


def actor_name(run_dir: str) -> str:
    """Name of the coordinator of the run in this folder: runs of one name may lie apart."""
    digest = hashlib.sha256(run_dir.encode()).hexdigest()[:12]
    return f"coordinator:{run_dir.rpartition('/')[2]}:{digest}"


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
