"""A real Ray cluster of one node, shared by the tests of a session.

It runs in a session of its own, with its own token and folder, so that stopping it ends nothing
else, and a process that outlives it is found by its folder.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from ray._private.authentication_test_utils import reset_auth_token_state

from elastic_trainer.testing.processes import actors_on, wait_for

NUM_CPUS = 8  # logical: more than a small machine has, so that four stages find room
START_S = 90.0
STOP_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A running cluster. `env` is the whole environment for subprocesses that talk to it."""

    address: str
    dashboard: str
    folder: Path
    token: Path
    env: dict[str, str]
    log: Path


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until `condition` holds; fail with `what` when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(0.05)


def processes_of(folder: Path) -> dict[int, str]:
    """Processes whose command line or initial environment names `folder`, this one excluded."""
    needle, found = str(folder).encode(), {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            zombie = b") Z " in (entry / "stat").read_bytes()
            if not zombie and (needle in command or needle in (entry / "environ").read_bytes()):
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile, or is another user's
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # its absence is a FutureWarning
        "RAY_enable_worker_prestart": "0",  # eight idle workers would only load the machine
        "XDG_CACHE_HOME": str(folder / "cache"),  # layer profiles of this session only
    }


def _start(folder: Path, env: dict[str, str], port: int, dashboard: int) -> subprocess.Popen[bytes]:
    ray = Path(sys.executable).parent / "ray"
    command = [str(ray), "start", "--head", "--block", f"--temp-dir={folder}"]
    command += [f"--port={port}", f"--num-cpus={NUM_CPUS}"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1"]
    command += [f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={free_port()}"]
    command += [f"--ray-client-server-port={free_port()}", "--object-store-memory=200000000"]
    with (folder / "start.log").open("wb") as log:
        return subprocess.Popen(
            command, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )


def _stop(process: subprocess.Popen[bytes], folder: Path) -> dict[int, str]:
    """End the cluster; gives the processes that did not end with it, which it kills, too."""
    # Nothing in it is worth the half minute that Ray takes to end by itself.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_S)
    deadline = time.monotonic() + STOP_S
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    survivors = processes_of(folder)
    for pid in survivors:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return survivors


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """The cluster, with everything about it; most tests need only its address."""
    folder = Path(tempfile.mkdtemp(prefix="etr-", dir="/tmp"))  # sockets need short paths
    settings = _environment(folder)
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | settings
    port, dashboard = free_port(), free_port()
    process = _start(folder, env, port, dashboard)
    log = folder / "start.log"
    try:
        wait_until(
            lambda: process.poll() is not None or b"Ray runtime started" in log.read_bytes(),
            START_S,
            "ray start",
        )
        assert process.poll() is None, log.read_text()
        with pytest.MonkeyPatch.context() as patch:
            for key in [k for k in os.environ if k.startswith("RAY_")]:
                patch.delenv(key)
            for key, value in settings.items():
                patch.setenv(key, value)
            reset_auth_token_state()  # Ray has read the environment when it was imported
            yield RayCluster(
                address=f"{ray.util.get_node_ip_address()}:{port}",  # type: ignore[no-untyped-call]
                dashboard=f"http://127.0.0.1:{dashboard}",
                folder=folder,
                token=folder / "token",
                env=env,
                log=log,
            )
    finally:
        survivors = _stop(process, folder)
        shutil.rmtree(folder, ignore_errors=True)
    assert not survivors, f"processes outlived the cluster: {survivors}"


@pytest.fixture(scope="session")
def ray_address(ray_cluster: RayCluster) -> str:
    """HOST:PORT of the cluster; this process's environment lets `fit` join it."""
    return ray_cluster.address


@pytest.fixture(scope="session")
def cli_env(ray_cluster: RayCluster) -> dict[str, str]:
    """Environment of a subprocess that joins the cluster."""
    return dict(ray_cluster.env)


@pytest.fixture
def cluster(ray_cluster: RayCluster) -> Iterator[RayCluster]:
    """The shared cluster; no actor of a run may be left on it."""
    yield ray_cluster
    wait_for(
        lambda: not actors_on(ray_cluster.folder),
        f"no actor is left: {actors_on(ray_cluster.folder)}",
    )
