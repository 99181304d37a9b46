"""Running, watching and ending runs for real: signals, detached runs, tokens, Ray jobs. Nothing is
left running and nothing is lost."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.cli.main import run as command
from elastic_trainer.observability.runs import read_events, read_status, read_updates
from elastic_trainer.testing.processes import (
    CLI,
    LIMIT_S,
    Cluster,
    Terminal,
    config_file,
    has_updates,
    marked,
    one_line,
    processes,
    run_cli,
    tiny_run,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


@pytest.fixture
def local_env(tmp_path: Path) -> dict[str, str]:
    """Environment without a cluster; `TEST_MARK` finds every process that comes of it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return env | {"TEST_MARK": str(tmp_path), "HOME": str(tmp_path)}


@pytest.fixture
def terminal(
    tmp_path: Path, local_env: dict[str, str]
) -> Iterator[Callable[[dict[str, Any]], Terminal]]:
    """Starts `train --address local` on a terminal, with the run folder `run`."""
    opened: list[Terminal] = []

    def start(config: dict[str, Any]) -> Terminal:
        file = config_file(tmp_path, config)
        run_dir = str(tmp_path / "run")
        arguments = ["train", file, "--address", "local", "--run-dir", run_dir]
        opened.append(Terminal(arguments, local_env, tmp_path))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
    for pid, _, env in processes():
        if str(tmp_path).encode() in env:
            os.kill(pid, signal.SIGKILL)


def nothing_left(mark: Path) -> None:
    wait_for(lambda: not marked(str(mark)), f"nothing is left: {marked(str(mark))}", 20.0)


def test_ctrl_c_stops_at_the_next_commit_point(
    terminal: Callable[[dict[str, Any]], Terminal], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shown = terminal(tiny_run())
    wait_for(has_updates(run_dir, 3), "three updates")
    shown.press_ctrl_c()
    assert shown.wait() == 0, shown.output.decode()
    nothing_left(tmp_path)
    text = shown.output.decode()
    assert "SIGINT: stopping at the next commit point" in text
    assert "--resume auto" in text, "how to go on is said"
    status = read_status(run_dir)
    assert (status["state"], status["reason"]) == ("stopped", "SIGINT received")
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None
    assert newest.update == status["update"] == read_updates(run_dir)[-1]["update"]
    assert newest.update % 2 == 0, "segments of two updates end at even ones"


def test_ctrl_c_twice_stops_at_once(
    terminal: Callable[[dict[str, Any]], Terminal], tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shown = terminal(tiny_run(pipeline={"microbatch_size": 2, "segment_updates": 100_000}))
    wait_for(
        lambda: run_dir.exists() and any(e["kind"] == "plan" for e in read_events(run_dir)), "plan"
    )
    wait_for(lambda: read_status(run_dir)["state"] == "running", "the endless segment")
    shown.press_ctrl_c()
    wait_for(lambda: b"stopping at the next commit point" in shown.output, "the first is taken")
    assert shown.process.poll() is None
    shown.press_ctrl_c()
    assert shown.wait(30.0) == 130, shown.output.decode()
    nothing_left(tmp_path)
    assert "stopped at once" in shown.output.decode()
    assert not read_status(run_dir)["alive"]


def test_sigterm_stops_at_the_next_commit_point(cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = ["train", config_file(tmp_path, tiny_run()), "--address", cluster.address]
    process = subprocess.Popen(
        [str(CLI), *arguments, "--run-dir", str(run_dir)],
        env=cluster.env,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(has_updates(run_dir), "an update")
        process.terminate()
        output, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.wait(LIMIT_S)
    assert process.returncode == 0, output
    assert read_status(run_dir)["reason"] == "SIGTERM received"
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None and newest.update == read_updates(run_dir)[-1]["update"]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints; it must succeed."""
    assert command(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_detached_run(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, config = (
        tmp_path / "runs",
        tiny_run(run={"name": "away"}, checkpoint={"every_steps": 4}),
    )
    run_dir = storage / "away"
    config["run"]["storage_path"] = str(storage)
    arguments = ["train", config_file(tmp_path, config), "--address", cluster.address, "--detach"]
    done = run_cli(arguments, cluster.env, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "run away goes on in the background" in done.stdout
    wait_for(lambda: read_status(run_dir).get("checkpoint_update"), "a checkpoint")

    shown = json.loads(printed(capsys, "status", str(run_dir), "--json"))
    assert shown["state"] == "running" and shown["alive"]
    assert "away" in printed(capsys, "runs", "--storage", str(storage))
    saved = json.loads(printed(capsys, "checkpoints", str(run_dir), "--json"))
    assert saved and saved[-1]["update"] % 4 == 0
    check_metrics(run_dir, shown["metrics_address"])

    stopped = run_cli(["stop", str(run_dir)], cluster.env, tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "away stops after its next commit point" in stopped.stdout
    wait_for(lambda: not read_status(run_dir)["alive"], "the end of the run")
    status = read_status(run_dir)
    assert (status["state"], status["reason"]) == ("stopped", "stop requested")
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None and newest.update == status["update"]
    assert json.loads((run_dir / "prometheus" / "targets.json").read_text()) == []
    again = run_cli(["stop", str(run_dir)], cluster.env, tmp_path)
    assert again.returncode == 1 and "away is not running: stopped" in one_line(again.stderr)
    wait_for(lambda: not marked(f"{run_dir}"), "the end of the detached process")


def check_metrics(run_dir: Path, address: str) -> None:
    """The target file points at the server, and its series carry the run's name and move."""
    targets = json.loads((run_dir / "prometheus" / "targets.json").read_text())
    assert targets[0]["targets"] == [address] and targets[0]["labels"]["run"] == "away"

    def scrape() -> dict[str, float]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        ours = [line for line in lines if line.startswith("elastictrainer_")]
        assert ours and all('run="away"' in line for line in ours)
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in ours}

    counter = 'elastictrainer_updates_total{run="away"}'
    before = scrape()[counter]
    wait_for(lambda: scrape()[counter] > before, "the counter of updates goes up")
    stages = [s for s in scrape() if "stage=" in s]
    assert {m for s in stages for m in re.findall(r'stage="(\d+)"', s)} == {"0", "1"}


@pytest.mark.parametrize("token", ["wrong", "missing"])
def test_token(cluster: Cluster, tmp_path: Path, token: str) -> None:
    """Without the cluster's token nothing starts, and no token is printed."""
    file = tmp_path / "token"
    if token == "wrong":
        file.write_text("0123456789abcdef" * 4)
    env = cluster.env | {"RAY_AUTH_TOKEN_PATH": str(file), "HOME": str(tmp_path)}
    run_dir = str(tmp_path / "run")
    arguments = ["train", config_file(tmp_path, tiny_run()), "--address", cluster.address]
    done = run_cli([*arguments, "--run-dir", run_dir], env, tmp_path)
    assert done.returncode == 1, done.stdout
    reason = one_line(done.stderr)
    assert "token" in reason and "RAY_AUTH_TOKEN_PATH" in reason
    for secret in ("0123456789abcdef", cluster.token.read_text()):
        assert secret not in done.stdout + done.stderr
    assert not Path(run_dir).exists()


@pytest.mark.parametrize(("setting", "succeeds"), [("train.max_steps=4", True), ("oops=1", False)])
def test_inside_a_ray_job(cluster: Cluster, tmp_path: Path, setting: str, succeeds: bool) -> None:
    """The same command, without an address: the job's cluster is found, its status passed on."""
    run_dir = tmp_path / "run"
    ray = [str(CLI.parent / "ray"), "job", "submit", "--address", cluster.dashboard, "--"]
    train_it = [str(CLI), "train", config_file(tmp_path, tiny_run()), setting]
    done = subprocess.run(
        [*ray, *train_it, "--run-dir", str(run_dir)],
        env=cluster.env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT_S,
    )
    assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
    if succeeds:
        status = read_status(run_dir)
        assert (status["state"], status["update"]) == ("completed", 4)
        assert status["ray_address"].rpartition(":")[2] == cluster.address.rpartition(":")[2]
    else:
        assert "oops" in done.stdout
        assert not run_dir.exists()
