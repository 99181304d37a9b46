"""Looking at runs, and telling them what to do, from another process."""

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray

from elastic_trainer.actors.handles import CoordinatorHandle
from elastic_trainer.actors.pending import Pending
from elastic_trainer.config import parse_workers
from elastic_trainer.errors import ConfigError, RunError, WorkerLostError
from elastic_trainer.observability.record import ENDED
from elastic_trainer.observability.runs import (
    list_runs,
    read_status,
    resolve_run,
    run_story,
)
from elastic_trainer.run.cluster import connect_for_control

ANSWER_S = 30.0
T = TypeVar("T")


def status(run: str | Path) -> dict[str, Any]:
    """Where a run stands: its status, plan, newest updates and events."""
    return run_story(resolve_run(run))


def runs(storage: str | Path = "runs") -> list[dict[str, Any]]:
    """Status of every run below a folder, oldest first."""
    return list_runs(storage)


def stop(run: str | Path) -> dict[str, Any]:
    """Ask a run to end at its next commit point, with a checkpoint.

    Returns:
        The run's status at the time of asking.

    Raises:
        RunError: no such run, or it has ended.
        ClusterError: its cluster does not answer.
    """
    return _told(run, lambda coordinator: coordinator.stop("stop requested"))


def scale(run: str | Path, workers: str | int) -> dict[str, Any]:
    """Let a run go on with another number of workers, from its next commit point.

    Args:
        run: folder of the run, its name or `latest`.
        workers: a number, or `MIN:MAX`.

    Returns:
        The run's status at the time of asking, with `min_workers`, `max_workers` and `num_workers`,
        those that it has.

    Raises:
        ConfigError: `workers` is malformed.
        RunError: no such run, it has ended, or its stages are fixed.
        ClusterError: the cluster cannot hold so many.
    """
    fewest, most = parse_workers(workers)
    return _told(run, lambda coordinator: coordinator.scale(fewest, most))


def drain(run: str | Path, node: str, deadline_s: float | None = None) -> dict[str, Any]:
    """Move a run's layers off a node at the next commit point, and place none there any more.

    Args:
        run: folder of the run, its name or `latest`.
        node: address of the node, or its name or id in Ray.
        deadline_s: seconds until the node goes; None: whenever the layers have moved.

    Returns:
        The run's status at the time of asking, with `node` and `workers`, those that leave.

    Raises:
        RunError: no such run, or it has ended.
        ClusterError: there is no such node.
    """
    if deadline_s is not None and not 0 <= deadline_s < math.inf:
        raise ConfigError(f"`--deadline` is {deadline_s}", "Give seconds from now, 0 or more.")
    return _told(run, lambda coordinator: coordinator.drain(node, deadline_s))


def _told(run: str | Path, call: Callable[[CoordinatorHandle], Pending[Any]]) -> dict[str, Any]:
    """Call a running run's coordinator; the run's status, with what it answers."""
    run_dir = resolve_run(run)
    with coordinator_of(run_dir) as (coordinator, found):
        return found | dict(answer(run_dir.name, call(coordinator)) or {})


@contextlib.contextmanager
def coordinator_of(run_dir: Path) -> Iterator[tuple[CoordinatorHandle, dict[str, Any]]]:
    """The coordinator of a running run, and the run's status; connected to its cluster inside.

    Raises:
        RunError: the run has ended, or is still starting.
        ClusterError: its cluster does not answer.
    """
    found = read_status(run_dir)
    if found["state"] in ENDED or not found["alive"]:
        raise RunError(f"{run_dir.name} is not running: {found['state']}")
    address = found.get("ray_address")
    if not address:
        raise RunError(f"{run_dir.name} is still starting", "Try again in a few seconds.")
    connect_for_control(address)
    try:
        try:
            coordinator = CoordinatorHandle.find(str(run_dir))
        except ValueError as error:
            raise _silent(run_dir.name, error) from error
        yield coordinator, found
    finally:
        ray.shutdown()


def answer(name: str, pending: Pending[T]) -> T:
    """What the coordinator of the run of this name answers.

    Raises:
        RunError: it does not answer.
        ElasticTrainerError: it refuses.
    """
    try:
        return pending.get(ANSWER_S)
    except (TimeoutError, WorkerLostError) as error:
        raise _silent(name, error) from error


def _silent(name: str, error: Exception) -> RunError:
    return RunError(
        f"the coordinator of {name} does not answer: {error}",
        "If it is wedged, end its process; `--resume auto` continues the run.",
    )
