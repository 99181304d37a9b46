"""Runs as processes of their own, for tests: terminals, signals, waiting, who is alive."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from elastic_trainer.observability.runs import read_events, read_status, read_updates

CLI = Path(sys.executable).parent / "elastic-trainer"
LIMIT_S = 90.0  # for whatever must happen at all; far above what a quiet machine needs
STEP_S = 0.02  # about one update of the tiny run
ACTORS = re.compile(r"ray::(StageWorker|Loader|Coordinator)")


def tiny_run(max_steps: int = 100_000, **sections: dict[str, Any]) -> dict[str, Any]:
    """Two stages that sleep a little; endless unless told otherwise."""
    args = {"num_layers": 2, "forward_s": STEP_S / 4, "backward_s": STEP_S / 4}
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "emulated", "args": {**args, "activation_bytes": 64}},
        "data": {"format": "synthetic", "sequence_length": 4},
        "train": {
            "global_batch_size": 4,
            "max_steps": max_steps,
            "eval_batches": 0,
            "max_grad_norm": 0.0,
        },
        "optim": {"name": "sgd", "lr_schedule": "constant"},
        "pipeline": {"microbatch_size": 2, "segment_updates": 2},
    }
    return {key: base.get(key, {}) | sections.get(key, {}) for key in {**base, **sections}}


def config_file(folder: Path, config: dict[str, Any]) -> str:
    """`config` as a file that the command takes."""
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    return str(file)


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = LIMIT_S) -> None:
    """Poll a condition; a failed test when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.02)


def has_updates(run_dir: Path, count: int = 1) -> Callable[[], bool]:
    """A condition: so many updates are recorded."""
    return lambda: len(read_updates(run_dir)) >= count


def worker_pids(run_dir: Path) -> dict[str, int]:
    """Process of each stage worker, from the run's story."""
    events = [e for e in read_events(run_dir) if e["kind"] == "worker"]
    return {e["worker"]: e["pid"] for e in events}


def loader_pids(run_dir: Path) -> dict[str, int]:
    """Process of each loader, from the run's story."""
    events = [e for e in read_events(run_dir) if e["kind"] == "loader"]
    return {e["worker"]: e["pid"] for e in events}


def all_pids(run_dir: Path) -> list[int]:
    """The coordinator's process and the stage workers'."""
    return [read_status(run_dir)["pid"], *worker_pids(run_dir).values()]


def processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Living processes: id, command line, environment at their start."""
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and b") Z " not in (entry / "stat").read_bytes():
                yield (
                    int(entry.name),
                    (entry / "cmdline").read_bytes(),
                    (entry / "environ").read_bytes(),
                )
        except OSError:
            continue


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    return any(pid == other for other, _, _ in processes())


def marked(mark: str) -> list[str]:
    """Living processes that descend from one started with `mark` in its environment."""
    return [line.decode(errors="replace") for _, line, env in processes() if mark.encode() in env]


def one_line(stderr: str) -> str:
    """The reason a command failed with: the only thing on its standard error."""
    lines = stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("elastic-trainer: "), stderr
    assert "\x1b" not in lines[0]
    return lines[0]


def run_cli(
    arguments: list[str], env: dict[str, str], cwd: Path, timeout_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(CLI), *arguments],
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


class Terminal:
    """A command on a terminal of its own, as a user has it: Ctrl-C reaches its whole group."""

    # The child makes the terminal its own before it becomes the command.
    SHIM = (
        "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )

    def __init__(self, arguments: list[str], env: dict[str, str], cwd: Path) -> None:
        self._master, slave = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SHIM, str(CLI), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(slave)
        self.output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while block := os.read(self._master, 65536):
                self.output += block
        except OSError:  # how Linux says that the other side is closed
            return

    def press_ctrl_c(self) -> None:
        """What the key does: the terminal signals its foreground group."""
        os.write(self._master, b"\x03")

    def wait(self, timeout_s: float = LIMIT_S) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End whatever still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(LIMIT_S)
        self._reader.join(5.0)
        os.close(self._master)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Runs beside `fit`, which must have the main thread for nothing but itself."""
    future: Future[None] = Future()

    def body() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future


def once_started(run_dir: Path, work: Callable[[], None], num_workers: int = 2) -> Future[None]:
    """`work`, once the run folder holds a run with all its workers."""

    def body() -> None:
        wait_for(lambda: len(worker_pids(run_dir)) == num_workers, "all workers")
        work()

    return _in_background(body)


class Cluster(Protocol):
    """What the fixture `ray_cluster` gives."""

    address: str
    dashboard: str
    folder: Path
    token: Path
    env: dict[str, str]


def actors_on(folder: Path) -> list[str]:
    """Actors of runs that are alive on the Ray cluster with this folder."""
    mark = str(folder).encode()
    commands = [line.decode(errors="replace") for _, line, env in processes() if mark in env]
    return [line for line in commands if ACTORS.search(line)]
