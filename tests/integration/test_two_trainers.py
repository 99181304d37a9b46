"""Two trainers at once: of two in one folder the second is refused; two runs do not meet."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.observability.runs import read_status, read_updates
from elastic_trainer.testing.processes import (
    CLI,
    LIMIT_S,
    Cluster,
    config_file,
    has_updates,
    marked,
    one_line,
    processes,
    run_cli,
    tiny_run,
    wait_for,
)
from elastic_trainer.testing.runs import assert_same_as_undisturbed, causes

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REFUSALS = ("already running in", "is in use by", "already holds a run")
ELASTIC = {"stall_limit_s": 60.0, "lease_limit_s": 30.0}  # two cores may be shared by many


@pytest.fixture
def local_env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment of somebody who has never used Ray; nothing of theirs is left at the end."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    yield env | {"TEST_MARK": str(tmp_path), "HOME": str(tmp_path)}
    for pid, _, found in processes():
        if str(tmp_path).encode() in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Trainers:
    """`elastic-trainer train`, several times."""

    def __init__(self, folder: Path, address: str, env: dict[str, str]) -> None:
        self.folder, self.address, self.env = folder, address, env
        self.started: list[subprocess.Popen[str]] = []

    def start(self, run: str, config: dict[str, Any]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [str(CLI), *self.arguments(run, config)],
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def arguments(self, run: str, config: dict[str, Any]) -> list[str]:
        file = config_file(self.folder, config)
        return ["train", file, "--address", self.address, "--run-dir", str(self.folder / run)]

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=LIMIT_S)


@pytest.fixture(params=["cluster", pytest.param("local", marks=pytest.mark.soak)])
def trainers(
    request: pytest.FixtureRequest, tmp_path: Path, cluster: Cluster, local_env: dict[str, str]
) -> Iterator[Trainers]:
    """On one cluster, or each with a Ray of its own."""
    if request.param == "cluster":
        made = Trainers(tmp_path, cluster.address, cluster.env)
    else:
        made = Trainers(tmp_path, "local", local_env)
    yield made
    made.close()


def test_in_one_folder(trainers: Trainers, tmp_path: Path) -> None:
    """Of two that start together one is refused, and so are others later; one trains, unharmed."""
    run_dir, config = tmp_path / "run", tiny_run(elastic=ELASTIC)
    both = [trainers.start("run", config) for _ in range(2)]
    wait_for(has_updates(run_dir, 5), "updates")
    wait_for(lambda: any(p.poll() is not None for p in both), "one of them has ended")
    (late,) = [p for p in both if p.poll() is not None]
    (first,) = [p for p in both if p is not late]
    reason = one_line(late.communicate(timeout=LIMIT_S)[1])
    assert late.returncode == 1 and any(words in reason for words in REFUSALS), reason
    for resume in ([], ["--resume", "auto"]):
        refused = run_cli([*trainers.arguments("run", config), *resume], trainers.env, tmp_path)
        assert refused.returncode == 1, refused.stdout
        assert "a trainer is already running in" in one_line(refused.stderr)
    wait_for(has_updates(run_dir, len(read_updates(run_dir)) + 5), "the other one goes on")
    assert run_cli(["stop", str(run_dir)], trainers.env, tmp_path).returncode == 0
    assert first.wait(LIMIT_S) == 0
    status = read_status(run_dir)
    assert status["state"] == "stopped" and causes(run_dir) == ["start"]
    assert_same_as_undisturbed(run_dir, status["update"])


def test_commands_reach_local_runs(tmp_path: Path, local_env: dict[str, str]) -> None:
    """Two, started at once by a user without any token: each has a Ray that wants one."""
    trainers = Trainers(tmp_path, "local", local_env)
    try:
        both = [trainers.start(name, tiny_run(elastic=ELASTIC)) for name in ("one", "two")]
        for name in ("one", "two"):
            wait_for(has_updates(tmp_path / name, 3), f"updates of {name}")
        done = run_cli(["scale", str(tmp_path / "one"), "--workers", "1:2"], local_env, tmp_path)
        assert done.stdout == "one goes on with 1 to 2 workers (2 now).\n", done.stderr
        node = json.loads((tmp_path / "one" / "status.json").read_text())
        ip = next(iter(node["workers"].values()))["node"]
        done = run_cli(["drain", str(tmp_path / "two"), "--node", ip], local_env, tmp_path)
        assert done.returncode == 0, done.stderr
        for name in ("one", "two"):
            done = run_cli(["stop", str(tmp_path / name)], local_env, tmp_path)
            assert done.returncode == 0, done.stderr
        assert [process.wait(LIMIT_S) for process in both] == [0, 0]
    finally:
        trainers.close()
    wait_for(lambda: not marked(str(tmp_path)), "nothing is left")
