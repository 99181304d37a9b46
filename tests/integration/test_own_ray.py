"""A Ray of our own starts no process that nobody would ask anything."""

import os
from pathlib import Path

import pytest
import ray

from elastic_trainer.config import load_config
from elastic_trainer.run.cluster import connected

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120)]


def children() -> dict[int, str]:
    """Command lines of all processes that this one has started, and those that they have."""
    parents, commands = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: commands[pid] for pid in found - {os.getpid()}}


@ray.remote
def variable(name: str) -> str | None:
    return os.environ.get(name)


def test_only_what_runs_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    config = load_config(
        None, ["data.format=synthetic", "train.max_steps=1", "cluster.address=local"]
    )
    before = children()  # of other tests' clusters
    with connected(config):
        assert ray.get(variable.remote("PYTHONPATH"), timeout=60) == "/somewhere"
        commands = [command for pid, command in children().items() if pid not in before]
    for needed in ("gcs_server", "raylet"):
        assert any(needed in command for command in commands), commands
    for helper in ("dashboard.py", "monitor.py", "log_monitor.py"):
        assert not any(helper in command for command in commands), helper
    assert os.environ["PYTHONPATH"] == "/somewhere"
