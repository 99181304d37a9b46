"""A run in a process of its own, watched through its folder while it is disturbed."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from common import log
from timeline import Commit

from elastic_trainer.observability.lines import Follower
from elastic_trainer.observability.record import METRICS_FILE
from elastic_trainer.observability.runs import is_run, read_events, read_membership, read_status
from elastic_trainer.testing.host_lab import Host, HostLab

POLL_S = 0.01
LIMIT_S = 90.0  # for anything that must happen at all
END_S = 20.0
PHASES = ("detect_s", "plan_s", "wait_s", "transfer_s", "first_commit_s")

T = TypeVar("T")


def own_token(folder: Path) -> dict[str, str]:
    """Environment of a Ray with a token of its own, whatever else runs on the machine."""
    file = folder / "token"
    file.touch(mode=0o600)
    file.write_text(secrets.token_hex(32))
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(file)}


class LiveRun:
    """`elastic-trainer train` beside this process, in a lab's head or on a Ray of its own.

    Args:
        folder: scratch folder; the run's folder is made in it.
        config: of the run.
        workers: as the command takes them.
        lab: whose head it runs on.
    """

    def __init__(
        self, folder: Path, config: dict[str, Any], workers: str, lab: HostLab | None = None
    ) -> None:
        self.run_dir = folder / "run"
        self.commits: list[Commit] = []
        self._follower = Follower(self.run_dir / METRICS_FILE)
        file = folder / "config.yaml"
        file.write_text(json.dumps(config))  # JSON is YAML
        address = lab.address if lab else "local"
        words = ["train", str(file), "--address", address, "--workers", workers]
        command = [sys.executable, "-m", "elastic_trainer.cli", *words]
        command += ["--run-dir", str(self.run_dir)]
        self._log = folder / "trainer.log"
        self._env = os.environ | own_token(folder)
        with self._log.open("wb") as out:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            if lab:
                self._process = lab.popen(lab.head, command, **options)
            else:
                self._process = subprocess.Popen(
                    command, start_new_session=True, env=self._env, **options
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End it at once: nobody needs its checkpoint."""
        if self._process.poll() is None:
            for _ in range(2):
                self._process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(1.0)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(END_S)

    def wait_for(self, what: str, condition: Callable[[], T | None], limit_s: float = LIMIT_S) -> T:
        """Look at the run until the condition gives something.

        Raises:
            RuntimeError: the run ended, or that took too long.
        """
        deadline = time.monotonic() + limit_s
        while True:
            self._look()
            found = condition()
            if found:
                return found
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                why = f"not within {limit_s:.0f} s" if ended is None else f"it ended with {ended}"
                tail = self._log.read_text(errors="replace")[-1000:]
                raise RuntimeError(f"waiting for {what}: {why}\n{tail}\n{self.events()}")
            time.sleep(POLL_S)

    def updates(self, count: int, generation: int = 0) -> None:
        """Wait for so many updates of this generation or later ones, from now on."""
        known = len(self.commits)
        self.wait_for(
            f"{count} updates",
            lambda: sum(c.generation >= generation for c in self.commits[known:]) >= count,
        )

    def _look(self) -> None:
        anew, lines = self._follower.look()
        now = time.time()
        known = {(c.update, c.generation) for c in self.commits} if anew else set()
        self.commits += [
            Commit(
                update=line["update"],
                generation=line["generation"],
                time=line["time"],
                seen_at=now,
            )
            for line in lines
            if (line["update"], line["generation"]) not in known
        ]

    def events(self) -> str:
        """The newest of what happened, for a message."""
        events = read_events(self.run_dir)[-5:] if is_run(self.run_dir) else []
        return "\n".join(f"{e['kind']}: {e['message']}" for e in events)

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.run_dir) if is_run(self.run_dir) else {}

    def holders(self) -> dict[int, str]:
        """Who holds which stage."""
        workers = self.status.get("workers", {})
        return {w["stage"]: name for name, w in workers.items() if w["stage"] is not None}

    def ready(self, num_stages: int, num_idle: int = 0) -> None:
        """Wait until so many workers train, and so many are there beside them."""

        def there() -> bool:
            workers = self.status.get("workers", {}).values()
            holders = sum(w["stage"] is not None for w in workers)
            idle = sum(w["stage"] is None and w["state"] == "idle" for w in workers)
            return holders == num_stages and idle >= num_idle and bool(self.commits)

        self.wait_for(f"{num_stages} stages, {num_idle} spares", there)

    def kill(self, stage: int) -> float:
        """SIGKILL the worker of a stage; when."""
        worker = self.holders()[stage]
        pids = {e["worker"]: e["pid"] for e in read_events(self.run_dir) if e["kind"] == "worker"}
        at = time.time()
        os.kill(pids[worker], signal.SIGKILL)
        return at

    def command(self, name: str, *options: str) -> None:
        """Call elastic-trainer on the run, as its user does; not for one in a lab."""
        command = [sys.executable, "-m", "elastic_trainer.cli", name, str(self.run_dir), *options]
        out = subprocess.DEVNULL
        subprocess.run(command, env=self._env, stdout=out, timeout=LIMIT_S, check=True)

    def cut_off(self, lab: HostLab, stage: int) -> tuple[float, Host]:
        """Take a stage's host off the network; when, and which."""
        node = self.status["workers"][self.holders()[stage]]["node"]
        host = next(host for host in lab.hosts if host.ip == node)
        at = time.time()
        lab.link_down(host)
        return at, host

    def counter(self, name: str) -> float:
        """A counter of the run's metrics; 0 before it counts."""
        with urllib.request.urlopen(
            f"http://{self.status['metrics_address']}/metrics", timeout=10
        ) as answer:
            lines = answer.read().decode().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(name + "{")]
        return sum(values)

    def log_changes(self) -> None:
        """What each change of the membership took, as the run itself says."""
        for change in self._changes():
            phases = {name[:-2]: round(change[name], 2) for name in PHASES if change[name]}
            before, after = change["workers_before"], change["workers_after"]
            replayed, num_bytes = change["updates_replayed"], change["moved_bytes"]
            log(
                f"  {change['cause']} {before}→{after} {change['outcome']}: {phases}, "
                f"{replayed} replayed from {change['restored_update']}, {num_bytes}"
            )

    def _changes(self) -> Iterator[dict[str, Any]]:
        changes = read_membership(self.run_dir)
        return (c for c in changes if c["cause"] != "start")
