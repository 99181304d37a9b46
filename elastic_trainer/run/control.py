"""Looking at runs, and stopping them, from another process."""

from pathlib import Path
from typing import Any

import ray

from elastic_trainer.actors.handles import CoordinatorHandle
from elastic_trainer.errors import RunError
from elastic_trainer.observability.record import ENDED
from elastic_trainer.observability.runs import (
    list_runs,
    read_status,
    resolve_run,
    run_story,
)
from elastic_trainer.run.cluster import connect_for_control

ANSWER_S = 30.0


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
    run_dir = resolve_run(run)
    found = read_status(run_dir)
    if found["state"] in ENDED or not found["alive"]:
        raise RunError(f"{run_dir.name} is not running: {found['state']}")
    address = found.get("ray_address")
    if not address:
        raise RunError(f"{run_dir.name} is still starting", "Try again in a few seconds.")
    connect_for_control(address)
    try:
        CoordinatorHandle.find(str(run_dir)).stop("stop requested").get(ANSWER_S)
    except (ValueError, TimeoutError) as error:
        raise RunError(
            f"the coordinator of {run_dir.name} does not answer: {error}",
            "If it is wedged, end its process; `--resume auto` continues the run.",
        ) from error
    finally:
        ray.shutdown()
    return found
