"""Two hundred changes of the membership in one run, and nothing of them is left."""

import os
from functools import partial
from pathlib import Path

import pytest
import ray

from elastic_trainer import fit
from elastic_trainer.actors.handles import CoordinatorHandle
from elastic_trainer.observability.runs import read_status, read_updates
from elastic_trainer.testing.processes import (
    LIMIT_S,
    Cluster,
    has_updates,
    loader_pids,
    once_started,
    tiny_run,
    wait_for,
    worker_pids,
)
from elastic_trainer.testing.runs import assert_same_as_undisturbed, causes, holders

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(3000)]

NUM_CHANGES = 200
WARMED_UP = 40  # changes after which every cache has its size
ANSWER_S = 30.0


def counts(pid: int) -> dict[str, int]:
    """What one process holds."""
    folder = Path(f"/proc/{pid}")
    lines = (line.partition(":") for line in (folder / "status").read_text().splitlines())
    facts = {name: value.split() for name, _, value in lines if name in ("VmRSS", "Threads")}
    links = [os.readlink(entry) for entry in (folder / "fd").iterdir()]
    return {
        "megabytes": int(facts["VmRSS"][0]) // 1024,
        "threads": int(facts["Threads"][0]),
        "files": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
    }


def held_by_ray() -> dict[str, int]:
    """Living actors and placement groups."""
    actors = ray._private.state.actors().values()
    groups = ray.util.placement_group_table().values()
    return {
        "actors": sum(actor["State"] == "ALIVE" for actor in actors),
        "groups": sum(group["state"] != "REMOVED" for group in groups),
    }


def test_two_hundred_changes_leave_nothing_behind(cluster: Cluster, tmp_path: Path) -> None:
    run_dir, seen = tmp_path / "run", list[dict[str, dict[str, int]]]()
    model = {"num_layers": 6, "forward_s": 0.004, "backward_s": 0.004, "activation_bytes": 64}
    patient = {"stall_limit_s": 60.0, "lease_limit_s": 30.0, "max_failures": 0}
    config = tiny_run(model={"name": "emulated", "args": model}, elastic=patient)

    def has_stages(count: int) -> bool:
        return len(holders(run_dir)) == count

    def look(pids: dict[str, int]) -> None:
        seen.append({name: counts(pid) for name, pid in pids.items()} | {"ray": held_by_ray()})

    def change() -> None:
        coordinator = CoordinatorHandle.find(str(run_dir))
        try:
            change_often(coordinator)
        finally:  # whatever is wrong, the run must not go on for ever
            coordinator.stop("seen enough").get(ANSWER_S)

    def change_often(coordinator: CoordinatorHandle) -> None:
        pids = {"coordinator": read_status(run_dir)["pid"], **loader_pids(run_dir)}
        pids |= {w: p for w, p in worker_pids(run_dir).items() if w in ("stage-0", "stage-1")}
        wait_for(partial(has_stages, 3), "three stages", 2 * LIMIT_S)
        for number in range(NUM_CHANGES):
            target = 2 if number % 2 == 0 else 3
            coordinator.scale(target, target).get(ANSWER_S)
            wait_for(partial(has_stages, target), f"{target} stages", 2 * LIMIT_S)
            wait_for(has_updates(run_dir, len(read_updates(run_dir)) + 2), "training goes on")
            if number >= WARMED_UP and number % 2:
                wait_for(lambda: len(read_status(run_dir)["workers"]) == 3, "three workers")
                look(pids)

    background = once_started(run_dir, change, 3)
    result = fit(config, address=cluster.address, run_dir=run_dir, workers="3", display=False)
    background.result(LIMIT_S)
    assert result.status == "stopped", result
    assert causes(run_dir).count("scaled_down") >= NUM_CHANGES // 2
    assert_same_as_undisturbed(run_dir, result.update)
    first, last = seen[0], seen[-1]
    for name, held in first.items():
        for what, amount in held.items():
            slack = 0.1 * amount if what == "megabytes" else 2
            assert last[name][what] <= amount + slack, (name, what, [s[name] for s in seen])
