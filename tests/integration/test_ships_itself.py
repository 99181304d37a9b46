"""A cluster that has never heard of this package trains: it is sent the package and the model."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastic_trainer.observability.runs import read_status, read_updates
from elastic_trainer.testing.processes import marked, run_cli, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

# In a package without `__init__.py`, and a module that lies alone.
MODEL = """
import os, sys
from pathlib import Path

import elastic_trainer
from own_nets.width import WIDTH
from torch import nn

def make():
    seen = Path("{seen}") / str(os.getpid())
    seen.write_text("\\n".join([sys.executable, elastic_trainer.__file__, __file__]))
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
"""
LOSS = """
def squares(output, labels):
    return (output.squeeze(1) - labels["sum"]).square().sum()
"""


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A cluster whose Python has Ray and torch, but not this package."""

    address: str
    python: Path
    folder: Path
    env: dict[str, str]


def bare_python(folder: Path) -> Path:
    """A Python that finds what is installed here, but nothing that is installed editable.

    Folders that a .pth file names are searched, but .pth files in them are not read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


def can_import(python: Path, name: str, folder: Path, env: dict[str, str]) -> bool:
    command = [str(python), "-c", f"import {name}"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Foreign]:
    folder = Path(tempfile.mkdtemp(prefix="etf-", dir="/tmp"))  # sockets need short paths
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON"))}
    env = kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_enable_worker_prestart": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    python, port = bare_python(tmp_path / "foreign"), free_port()
    options = [f"--temp-dir={folder}", f"--port={port}", "--node-ip-address=127.0.0.1"]
    options += ["--num-cpus=4", "--include-dashboard=false", "--object-store-memory=200000000"]
    options += [f"--ray-client-server-port={free_port()}"]
    options += [f"--dashboard-agent-listen-port={free_port()}"]
    with (folder / "start.log").open("wb") as log:
        process = subprocess.Popen(
            [str(python), "-m", "ray.scripts.scripts", "start", "--head", "--block", *options],
            env=env,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        started = (folder / "start.log").read_bytes
        wait_for(
            lambda: process.poll() is not None or b"Ray runtime started" in started(), "ray start"
        )
        assert process.poll() is None, started().decode()
        yield Foreign(address=f"127.0.0.1:{port}", python=python, folder=folder, env=env)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30.0)
        shutil.rmtree(folder, ignore_errors=True)
    wait_for(lambda: not marked(str(folder)), "the end of the cluster", timeout_s=30.0)


def test_a_cluster_without_the_package_trains_a_users_own_model(
    foreign: Foreign, tmp_path: Path
) -> None:
    assert can_import(foreign.python, "ray, torch", foreign.folder, foreign.env)
    assert not can_import(foreign.python, "elastic_trainer", foreign.folder, foreign.env)

    work, seen, run_dir = tmp_path / "work", tmp_path / "seen", tmp_path / "run"
    (work / "own_nets").mkdir(parents=True)
    seen.mkdir()
    (work / "own_nets" / "nets.py").write_text(MODEL.format(seen=seen))
    (work / "own_nets" / "width.py").write_text("WIDTH = 8\n")
    (work / "own_loss.py").write_text(LOSS)
    rows = [[i / 8, (i % 3) / 3] for i in range(8)]
    table = pa.table({"x": rows, "sum": pa.array([a + b for a, b in rows], pa.float32())})
    pq.write_table(table, work / "rows.parquet")

    settings = {
        "model.target": "own_nets.nets:make",
        "loss.target": "own_loss:squares",
        "data.format": "columns",
        "data.path": work / "rows.parquet",
        "data.input_columns": "[x]",
        "data.label_columns": "[sum]",
        "train.global_batch_size": 4,
        "train.max_steps": 4,
        "train.eval_batches": 0,
        "pipeline.microbatch_size": 2,
    }
    arguments = [f"{key}={value}" for key, value in settings.items()]
    options = ["--address", foreign.address, "--workers", "2", "--run-dir", str(run_dir)]
    # Ray lets workers search the current folder first, which on one machine hides what was sent.
    env = foreign.env | {"PYTHONPATH": str(work)}
    done = run_cli(["train", *arguments, *options], env, seen, timeout_s=240.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_status(run_dir)["state"] == "completed"
    losses = [line["loss"] for line in read_updates(run_dir)]
    assert len(losses) == 4 and losses[-1] < losses[0]

    places = [file.read_text().splitlines() for file in seen.iterdir()]
    assert len(places) >= 2, "one worker per stage"
    for python, package, model in places:
        assert Path(python).parents[1] == foreign.python.parents[1]
        assert Path(package).is_relative_to(foreign.folder), "the package that was sent"
        assert Path(model).is_relative_to(foreign.folder), "the model that was sent"
