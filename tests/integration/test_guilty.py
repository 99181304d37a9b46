"""Who is guilty of a standstill is named alike in the log, the metrics and the exit report."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.observability.record import EXIT_REPORT_FILE, EXIT_REPORT_TEXT_FILE
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
    config_file,
    has_updates,
    run_cli,
    tiny_run,
    wait_for,
    worker_pids,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

STALL_S, LEASE_S = 5.0, 4.0


@pytest.fixture
def run_dir(cluster: Cluster, cli_env: dict[str, str], tmp_path: Path) -> Iterator[Path]:
    """A run of three workers that trains until the test is over, and its exit report."""
    layers = {"num_layers": 6, "forward_s": 0.002, "backward_s": 0.004, "activation_bytes": 64}
    elastic = {"stall_limit_s": STALL_S, "lease_limit_s": LEASE_S}
    settings = tiny_run(model={"name": "emulated", "args": layers}, elastic=elastic)
    settings["train"] = {**settings["train"], "max_grad_norm": 1.0}  # so that there is a REDUCE
    folder = tmp_path / "run"
    command = [str(CLI), "train", config_file(tmp_path, settings), "--workers", "3"]
    with (tmp_path / "train.log").open("wb") as log:
        trainer = subprocess.Popen(
            [*command, "--run-dir", str(folder)], env=cli_env, cwd=tmp_path, stdout=log, stderr=log
        )
    try:
        wait_for(has_updates(folder, 5), "five updates")
        yield folder
    finally:
        trainer.terminate()
        try:
            trainer.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            trainer.kill()
            trainer.wait(LIMIT_S)


def holder(run_dir: Path, stage: int) -> tuple[str, str]:
    """Worker and node of a stage."""
    workers = read_status(run_dir)["workers"]
    return next((w, f["node"]) for w, f in workers.items() if f["stage"] == stage)


def the_loss(run_dir: Path, cause: str) -> dict[str, Any]:
    """The one change with this cause, once an update is committed after it."""
    found: list[dict[str, Any]] = []

    def settled() -> bool:
        found[:] = [c for c in read_membership(run_dir) if c["cause"] == cause]
        return bool(found)

    wait_for(settled, f"{cause} in the history")
    assert len(found) == 1
    return found[0]


def metrics_of(run_dir: Path) -> str:
    address = read_status(run_dir)["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
        return text


def check_named(run_dir: Path, loss: Mapping[str, Any], worker: str, stage: int) -> None:
    """The history, the log and the metrics name this worker, and nobody else for this cause."""
    assert (loss["worker"], loss["stage"], loss["outcome"]) == (worker, stage, "committed")
    told = [e["message"] for e in read_events(run_dir) if e.get("cause") == loss["cause"]]
    assert len(told) == 1 and told[0].startswith(f"{worker} (stage {stage}, ")
    text = metrics_of(run_dir)
    (named,) = [line for line in text.splitlines() if "last_loss_info{" in line]
    assert f'worker="{worker}"' in named and f'reason="{loss["cause"]}"' in named


@pytest.mark.soak
def test_a_worker_that_hangs_and_one_that_is_stopped(
    run_dir: Path, cli_env: dict[str, str]
) -> None:
    hung, _ = holder(run_dir, 1)
    done = run_cli(
        ["chaos", str(run_dir), "--hang", "stage=1 action=REDUCE", "--limit", "40"],
        cli_env,
        run_dir.parent,
        timeout_s=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    loss = the_loss(run_dir, "wedged")
    check_named(run_dir, loss, hung, 1)
    assert "1REDUCE" in loss["reason"] and "no progress for" in loss["reason"]
    assert loss["detect_s"] >= STALL_S, "it answered all the time, but did nothing"

    stopped, _ = holder(run_dir, 2)
    began = time.time()
    os.kill(worker_pids(run_dir)[stopped], signal.SIGSTOP)
    loss = the_loss(run_dir, "lease_expired")
    check_named(run_dir, loss, stopped, 2)
    assert loss["time"] - began < LEASE_S + 2 and LEASE_S <= loss["detect_s"] < LEASE_S + 2
    assert loss["updates_replayed"] > 0 and loss["samples_reread"] > 0

    wait_for(has_updates(run_dir, len(read_updates(run_dir)) + 5), "training goes on")
    stop = run_cli(["stop", str(run_dir)], cli_env, run_dir.parent)
    assert stop.returncode == 0, stop.stderr
    wait_for(lambda: not read_status(run_dir)["alive"], "the end")
    report = json.loads((run_dir / EXIT_REPORT_FILE).read_text())
    guilty = [(c["cause"], c["worker"]) for c in report["changes"] if c["stage"] is not None]
    assert guilty == [("wedged", hung), ("lease_expired", stopped)]
    assert report["status"] == "stopped" and report["budgets"]["failures"]["spent"] == 2
    assert report["totals"]["recoveries"] == 2
    text = (run_dir / EXIT_REPORT_TEXT_FILE).read_text()
    shown = run_cli(["status", str(run_dir)], cli_env, run_dir.parent).stdout
    for told in (text, shown):
        assert f"wedged {hung} (stage 1, node " in told
        assert f"lease_expired {stopped} (stage 2, node " in told
