"""One training run on the hosts of a lab: its driver on the head, its workers on the others."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic_trainer.observability.runs import (
    is_run,
    read_events,
    read_membership,
    read_status,
    read_updates,
)
from elastic_trainer.testing.host_lab import Host, HostLab
from elastic_trainer.testing.processes import CLI, LIMIT_S, config_file, wait_for
from elastic_trainer.testing.runs import holders
from elastic_trainer.types import WorkerId

GONE_S = 30.0


class LabRun:
    """`elastic-trainer train` on a lab's cluster. The head should have no CPUs for workers.

    Args:
        lab: the hosts.
        folder: for the run folder and what it prints; all hosts see it.
        config: of the run.
        workers: `N` or `MIN:MAX`.
        options: more of the command line.
    """

    def __init__(
        self, lab: HostLab, folder: Path, config: Mapping[str, Any], workers: str, *options: str
    ) -> None:
        self.lab = lab
        self.run_dir = folder / "run"
        self._folder = folder
        self._env = {"XDG_CACHE_HOME": str(folder / "cache")}
        arguments = ["train", config_file(folder, dict(config)), "--workers", workers]
        arguments += ["--address", lab.address, "--run-dir", str(self.run_dir)]
        arguments += options
        self.log = folder / "train.log"
        with self.log.open("wb") as out:
            self.driver = lab.popen(
                lab.head,
                [str(CLI), *arguments],
                env=self._env,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the driver, however it stands, and with it the run."""
        if self.driver.poll() is None:
            self.driver.send_signal(signal.SIGTERM)
            self.driver.send_signal(signal.SIGTERM)  # at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.driver.wait(GONE_S)
        if self.driver.poll() is None:
            self.driver.kill()
        self.driver.wait(LIMIT_S)

    # What can be seen.

    @property
    def status(self) -> dict[str, Any]:
        return read_status(self.run_dir) if is_run(self.run_dir) else {}

    @property
    def num_updates(self) -> int:
        """How many updates are committed."""
        return len(read_updates(self.run_dir)) if is_run(self.run_dir) else 0

    @property
    def stages(self) -> dict[int, WorkerId]:
        """Who holds which stage now."""
        return holders(self.run_dir) if is_run(self.run_dir) else {}

    def host_of(self, worker: WorkerId) -> Host:
        """Where a living worker is."""
        ip = self.status["workers"][worker]["node"]
        return next(host for host in self.lab.hosts if host.ip == ip)

    def workers_on(self, host: Host) -> list[WorkerId]:
        """Living workers on a host."""
        workers = self.status.get("workers", {})
        return [worker for worker, facts in workers.items() if facts["node"] == host.ip]

    def pid(self, worker: WorkerId) -> int:
        """Process of a worker, as its host counts."""
        events = read_events(self.run_dir)
        return next(int(e["pid"]) for e in events if e.get("worker") == worker and "pid" in e)

    def is_alive(self, host: Host, pid: int) -> bool:
        """Whether a process of a host is there and no zombie."""
        return any(_is_living(outer, pid) for outer in host.cgroup.pids())

    # What can be waited for.

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = LIMIT_S) -> None:
        """Poll a condition; fails at once when the driver has ended."""

        def look() -> bool:
            if condition():
                return True
            assert self.driver.poll() is None, f"{what}: {self.log.read_text()[-2000:]}"
            return False

        wait_for(look, what, timeout_s)

    def wait_update(self, count: int) -> None:
        """Until so many updates are committed."""
        self.wait_for(lambda: self.num_updates >= count, f"update {count}")

    def goes_on(self, count: int = 5) -> None:
        """So many more updates are committed."""
        self.wait_update(self.num_updates + count)

    def wait_stages(self, count: int) -> None:
        self.wait_for(lambda: len(self.stages) == count, f"{count} stages")

    def change(self, cause: str, worker: WorkerId = "") -> dict[str, Any]:
        """The newest change of the membership with this cause, once training went on after it."""
        found: list[dict[str, Any]] = []

        def settled() -> bool:
            found[:] = [
                c
                for c in read_membership(self.run_dir)
                if c["cause"] == cause and worker in ("", c["worker"])
            ]
            return bool(found)

        self.wait_for(settled, f"{cause} {worker} in the history")
        return found[-1]

    # What can be done.

    def command(self, *arguments: str) -> str:
        """A command of ours on the head, about this run; what it printed."""
        argv = [str(CLI), arguments[0], str(self.run_dir), *arguments[1:]]
        return self.lab.exec(self.lab.head, argv, LIMIT_S)

    def kill(self, host: Host, pid: int) -> None:
        """SIGKILL a process of a host."""
        self.lab.exec(host, ["kill", "-s", "KILL", str(pid)])

    def stop(self) -> int:
        """Stop at the next commit point; the number of updates."""
        self.driver.send_signal(signal.SIGTERM)
        return self.end("stopped")

    def end(self, state: str = "completed") -> int:
        """Wait for the end of the driver; the number of updates."""
        self.driver.wait(LIMIT_S)
        status = self.status
        assert (self.driver.returncode, status["state"]) == (0, state), self.log.read_text()
        return int(status["update"])


def _is_living(outer: int, pid: int) -> bool:
    """Whether this process is known as `pid` on its host, and no zombie."""
    try:
        lines = Path(f"/proc/{outer}/status").read_text().splitlines()
    except OSError:
        return False
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    return facts["NSpid"].split()[-1] == str(pid) and not facts["State"].strip().startswith("Z")
