"""Workers are killed, join and leave on a real cluster, and nothing shows of it in the results."""

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from elastic_trainer import RunResult, fit
from elastic_trainer.actors.handles import CoordinatorHandle
from elastic_trainer.actors.pending import Pending
from elastic_trainer.observability.runs import (
    read_events,
    read_membership,
    read_status,
    read_updates,
)
from elastic_trainer.testing.processes import (
    CLI,
    LIMIT_S,
    Cluster,
    actors_on,
    config_file,
    has_updates,
    is_alive,
    once_started,
    one_line,
    run_cli,
    tiny_run,
    wait_for,
    worker_pids,
)
from elastic_trainer.testing.runs import (
    assert_same_as_undisturbed,
    causes,
    holders,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

ANSWER_S = 30.0
NUM_UPDATES = 120
# These tests share two cores with others: a worker that misses its turn is not lost.
PATIENT = {"stall_limit_s": 60.0, "lease_limit_s": 30.0, "max_failures": 10}
GPT = {
    "model": {
        "name": "gpt",
        "args": {
            "vocab_size": 61,
            "num_layers": 4,
            "dim": 16,
            "num_heads": 2,
            "dropout": 0.1,
            "tie_embeddings": True,
        },
    },
    "data": {"format": "synthetic", "sequence_length": 8},
    "train": {
        "global_batch_size": 4,
        "max_steps": NUM_UPDATES,
        "eval_batches": 0,
        "max_grad_norm": 0.3,
    },
    "pipeline": {"microbatch_size": 2, "segment_updates": 3},
}


def emulated(max_steps: int = NUM_UPDATES, **sections: dict[str, Any]) -> dict[str, Any]:
    """Six layers that sleep, so long that another stage is worth it on a busy machine, too.

    Of two microbatches a batch, three stages would be no faster than two uneven ones: no gain, so a
    worker that comes late would stay without a stage.
    """
    args = {"num_layers": 6, "forward_s": 0.003, "backward_s": 0.003, "activation_bytes": 64}
    model = {"name": "emulated", "args": args}
    pipeline = {"microbatch_size": 1, "segment_updates": 2}
    base: dict[str, dict[str, Any]] = {
        "model": model,
        "pipeline": pipeline,
        "elastic": dict(PATIENT),
    }
    return tiny_run(max_steps, **base | sections)


def train(cluster: Cluster, run_dir: Path, config: dict[str, Any], workers: str) -> RunResult:
    return fit(config, address=cluster.address, run_dir=run_dir, workers=workers, display=False)


def told(run_dir: Path, call: Callable[[CoordinatorHandle], Pending[Any]]) -> Any:
    """Ask the run's coordinator, as the commands do."""
    return call(CoordinatorHandle.find(str(run_dir))).get(ANSWER_S)


def beside(run_dir: Path, work: Callable[[], None], num_workers: int = 2) -> Future[None]:
    """`work`, beside `fit`, once all workers are there; if it fails, the run is stopped."""

    def body() -> None:
        try:
            work()
        except BaseException:
            told(run_dir, lambda c: c.stop("the test has failed"))
            raise

    return once_started(run_dir, body, num_workers)


def has_stages(run_dir: Path, count: int) -> Callable[[], bool]:
    return lambda: len(holders(run_dir)) == count


def goes_on(run_dir: Path, count: int = 6) -> None:
    """So many more updates are committed."""
    wait_for(has_updates(run_dir, len(read_updates(run_dir)) + count), "training goes on")


def kill_stage(run_dir: Path, stage: int) -> str:
    worker = holders(run_dir)[stage]
    os.kill(worker_pids(run_dir)[worker], signal.SIGKILL)
    return worker


def assert_undisturbed(run_dir: Path, result: RunResult, updates: int = NUM_UPDATES) -> None:
    """The run has ended as one that nobody disturbed."""
    assert (result.status, result.update) == ("completed", updates), result
    assert_same_as_undisturbed(run_dir, updates)


def test_killed_workers_are_replaced(cluster: Cluster, tmp_path: Path) -> None:
    """Two of three, one after the other; a tiny GPT with tied embeddings across stages."""
    run_dir, killed = tmp_path / "run", list[str]()

    def kill() -> None:
        for stage in (1, 2):
            wait_for(has_stages(run_dir, 3), "three stages")
            goes_on(run_dir)
            killed.append(kill_stage(run_dir, stage))
            wait_for(lambda: killed[-1] not in holders(run_dir).values(), "it is missed")

    background = beside(run_dir, kill, 3)
    result = train(cluster, run_dir, GPT | {"elastic": PATIENT}, "3")
    background.result(LIMIT_S)
    assert_undisturbed(run_dir, result)
    lost = [e for e in read_events(run_dir) if e["kind"] == "lost"]
    assert [e["message"].split()[0] for e in lost] == killed
    assert causes(run_dir) == ["start", "crashed", "crashed"]
    for change, stage in zip(read_membership(run_dir)[1:], (1, 2), strict=True):
        assert (change["outcome"], change["stage"]) == ("committed", stage)
        assert change["first_commit_s"] > 0 and change["updates_replayed"] >= 0


def test_survivors_absorb_layers_and_share_them_again(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def disturb() -> None:
        wait_for(has_updates(run_dir, 6), "updates")
        told(run_dir, lambda c: c.scale(2, 2))
        wait_for(has_stages(run_dir, 2), "two stages")
        goes_on(run_dir)
        told(run_dir, lambda c: c.scale(1, 2))
        kill_stage(run_dir, 0)
        wait_for(has_stages(run_dir, 1), "the survivor has all layers")
        wait_for(has_stages(run_dir, 2), "its colleague is replaced", 2 * LIMIT_S)
        goes_on(run_dir)
        told(run_dir, lambda c: c.scale(3, 3))
        wait_for(has_stages(run_dir, 3), "three stages", 2 * LIMIT_S)
        goes_on(run_dir)
        told(run_dir, lambda c: c.stop("seen enough"))

    background = beside(run_dir, disturb, 3)
    result = train(cluster, run_dir, emulated(100_000), "3")
    background.result(LIMIT_S)
    assert result.status == "stopped", result
    assert_undisturbed(run_dir, replace(result, status="completed"), result.update)
    assert causes(run_dir)[:2] == ["start", "scaled_down"] and "crashed" in causes(run_dir)
    assert (read_status(run_dir)["min_workers"], read_status(run_dir)["num_workers"]) == (3, 3)


def test_a_spare_takes_the_place_of_the_lost(cluster: Cluster, tmp_path: Path) -> None:
    run_dir, names = tmp_path / "run", list[str]()

    def kill() -> None:
        wait_for(lambda: len(worker_pids(run_dir)) == 4, "the spare")
        goes_on(run_dir)
        before = holders(run_dir)
        spare = (set(worker_pids(run_dir)) - set(before.values())).pop()
        names.extend([kill_stage(run_dir, 1), spare])
        wait_for(lambda: holders(run_dir).get(1) == spare, "the spare has the stage")
        after = holders(run_dir)
        assert {s: w for s, w in after.items() if s != 1} == {0: before[0], 2: before[2]}
        goes_on(run_dir)
        told(run_dir, lambda c: c.stop("seen enough"))

    background = beside(run_dir, kill, 3)
    config = emulated(100_000, elastic={**PATIENT, "num_spares": 1})
    result = train(cluster, run_dir, config, "3")
    background.result(LIMIT_S)
    assert result.status == "stopped", result
    assert_undisturbed(run_dir, replace(result, status="completed"), result.update)
    assert len(set(names)) == 2


@pytest.fixture
def second_node(cluster: Cluster) -> Iterator[str]:
    """Another node of the cluster with three processors; its id."""
    command = [str(CLI.parent / "ray"), "start", "--block"]
    command += [f"--address={cluster.address}", "--num-cpus=3"]
    log = cluster.folder / "second.log"
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    known = nodes_of(3.0)
    ray.shutdown()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=cluster.env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        try:
            # One of an earlier test may still seem to be alive.
            wait_for(lambda: nodes_of(3.0) - known, f"a second node: {log.read_text()}")
            (node_id,) = nodes_of(3.0) - known
        finally:
            ray.shutdown()
        yield node_id
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)


def nodes_of(num_cpus: float) -> set[str]:
    """Ids of living nodes with so many processors."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {n["NodeID"] for n in nodes if n["Alive"] and n["Resources"].get("CPU") == num_cpus}


@pytest.mark.parametrize("by", [pytest.param("request", marks=pytest.mark.soak), "ray"])
def test_a_drained_node_is_left(
    cluster: Cluster, second_node: str, tmp_path: Path, by: str
) -> None:
    """Two workers find room on the first node, the third on the second, until that is drained."""
    run_dir = tmp_path / "run"

    def drain() -> None:
        wait_for(has_stages(run_dir, 3), "three stages", 2 * LIMIT_S)
        goes_on(run_dir)
        if by == "request":
            answer = told(run_dir, lambda c: c.drain(second_node, 60.0))
            assert len(answer["workers"]) == 1
        else:
            drain_by_ray(second_node, 60.0)
        wait_for(has_stages(run_dir, 2), "two stages")
        wait_for(lambda: len(read_status(run_dir)["workers"]) == 2, "the third has left")
        goes_on(run_dir)
        told(run_dir, lambda c: c.stop("seen enough"))

    background = beside(run_dir, drain, 3)
    asked = {"resources_per_worker": {"CPU": 3}}
    result = train(cluster, run_dir, emulated(100_000, cluster=asked), "2:3")
    background.result(LIMIT_S)
    assert result.status == "stopped", result
    assert_undisturbed(run_dir, replace(result, status="completed"), result.update)
    assert "preempted" in causes(run_dir) and "crashed" not in causes(run_dir)


def drain_by_ray(node_id: str, deadline_s: float) -> None:
    """Announce to Ray that a node goes, as an autoscaler does."""
    from ray.core.generated import autoscaler_pb2

    reasons = autoscaler_pb2.DrainNodeReason  # type: ignore[attr-defined]
    worker: Any = ray._private.worker.global_worker
    accepted, why = worker.gcs_client.drain_node(
        node_id,
        reasons.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "spot",
        int((time.time() + deadline_s) * 1000),
    )
    assert accepted, why


def test_another_coordinator_takes_over(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    pids: list[int] = []

    def kill() -> None:
        wait_for(has_updates(run_dir, 12), "updates")
        pids.append(read_status(run_dir)["pid"])
        os.kill(pids[0], signal.SIGKILL)
        wait_for(lambda: read_status(run_dir)["pid"] != pids[0], "another coordinator")
        goes_on(run_dir)

    background = beside(run_dir, kill, 3)
    result = train(cluster, run_dir, GPT | {"elastic": PATIENT}, "3")
    background.result(LIMIT_S)
    assert_undisturbed(run_dir, result)
    assert sorted(worker_pids(run_dir)) == ["stage-0", "stage-1", "stage-2"], "the same workers"
    assert causes(run_dir) == ["start", "taken_over"]


def test_a_driver_that_is_killed_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", config_file(tmp_path, emulated(100_000)), "--address", cluster.address]
    process = subprocess.Popen(
        [str(CLI), *arguments, "--run-dir", str(run_dir)],
        env=cluster.env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(has_updates(run_dir, 3), "updates")
        pids = list(worker_pids(run_dir).values())
    finally:
        process.kill()
        process.wait(LIMIT_S)
    wait_for(lambda: not any(map(is_alive, pids)), "all workers have ended", 30.0)
    wait_for(lambda: not actors_on(cluster.folder), "all actors have ended", 30.0)
    assert train(cluster, tmp_path / "next", emulated(3), "6").update == 3, "all room is free"


def test_commands(cluster: Cluster, tmp_path: Path) -> None:
    """scale and drain as a user calls them, and what they refuse."""
    run_dir = tmp_path / "run"

    def refused(arguments: list[str], code: int = 1) -> str:
        done = run_cli(arguments, cluster.env, tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
        return one_line(done.stderr)

    def ask() -> None:
        run = str(run_dir)
        wait_for(has_updates(run_dir, 3), "updates")
        done = run_cli(["scale", run, "--workers", "1:3"], cluster.env, tmp_path)
        assert done.stdout == "run goes on with 1 to 3 workers (2 now).\n", done.stderr
        assert "A run needs at least one worker" in refused(["scale", run, "--workers", "0"], 2)
        assert "MIN:MAX" in refused(["scale", run, "--workers", "3:x"], 2)
        assert "8 workers of this run at most, not 10" in refused(["scale", run, "-w", "10"])
        assert "only 12 layers" in refused(["scale", run, "-w", "13"], 2)
        assert "no node 10.9.9.9" in refused(["drain", run, "--node", "10.9.9.9"])
        assert "There is no run" in refused(["scale", "nowhere", "--workers", "2"])
        wait_for(has_stages(run_dir, 3), "three stages", 2 * LIMIT_S)
        shown = run_cli(["status", run], cluster.env, tmp_path).stdout
        assert "scaled_up" in shown or "joined" in shown
        told(run_dir, lambda c: c.stop("seen enough"))

    background = beside(run_dir, ask)
    config = emulated(100_000)
    config["model"]["args"]["num_layers"] = 12
    result = train(cluster, run_dir, config, "2")
    background.result(LIMIT_S)
    assert result.status == "stopped", result
    assert "is not running: stopped" in refused(["scale", str(run_dir), "--workers", "2"])
    assert "is not running: stopped" in refused(["drain", str(run_dir), "--node", "x"])
