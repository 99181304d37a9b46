"""The kernel's side of a host lab: what it needs, namespaces to run in, cgroups to limit."""

import contextlib
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.testing import host_init

TOOLS = ("ip", "tc", "nsenter", "unshare", "mount")
COMMAND_S = 30.0
UNSHARE_HOST = ("--net", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "--ipc")
PERIOD_US = 100_000

# All that a lab does with links, in a network of its own that is gone with the command.
_TRIAL = """
ip link add trial type bridge
ip link add port type veth peer name eth0
ip link set port master trial up
tc qdisc replace dev port root tbf rate 1mbit latency 100ms burst 16000
"""


class HostLabUnavailable(RuntimeError):
    """No lab can run here; the message says why."""


@functools.cache
def check_available() -> None:
    """Find out whether this user can run a lab on this machine.

    Raises:
        HostLabUnavailable: it cannot.
    """
    if sys.platform != "linux":
        raise HostLabUnavailable(f"a host lab needs Linux, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise HostLabUnavailable(f"a host lab needs root, and this is user {os.geteuid()}")
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        raise HostLabUnavailable(
            f"a host lab needs {', '.join(missing)} on PATH (packages iproute2 and util-linux)"
        )
    if not os.access(cgroup_root(), os.W_OK):
        raise HostLabUnavailable(f"a host lab needs a writable {cgroup_root()}")
    trial = subprocess.run(
        ["unshare", *UNSHARE_HOST, "sh", "-ec", _TRIAL],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    if trial.returncode != 0:
        said = trial.stderr.strip().splitlines() or ["no message"]
        raise HostLabUnavailable(
            f"a host lab needs permission to make namespaces, links and rates: {said[-1]}"
        )


def cgroup_root() -> Path:
    """Where cgroups that limit CPU time are made: of the first version if there are any."""
    first = Path("/sys/fs/cgroup/cpu")
    return first if first.exists() else Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Cgroup:
    """The processes of one host, with their share of the CPU."""

    path: Path

    @staticmethod
    def make(name: str) -> "Cgroup":
        path = cgroup_root() / name
        path.mkdir()
        return Cgroup(path)

    @property
    def procs(self) -> Path:
        """The file that a process writes 0 to, to join."""
        return self.path / "cgroup.procs"

    def pids(self) -> list[int]:
        """Process ids as this process sees them; none once the cgroup is removed."""
        try:
            return [int(pid) for pid in self.procs.read_text().split()]
        except FileNotFoundError:
            return []

    def limit_cpu(self, fraction: float | None) -> None:
        """Let all its processes together have `fraction` of one core; None: no limit.

        Raises:
            HostLabUnavailable: cgroups of the second version do not control the CPU here.
        """
        quota = None if fraction is None else max(1000, round(fraction * PERIOD_US))
        first, second = self.path / "cpu.cfs_quota_us", self.path / "cpu.max"
        if first.exists():
            first.with_name("cpu.cfs_period_us").write_text(str(PERIOD_US))
            first.write_text(str(-1 if quota is None else quota))
        elif second.exists():
            second.write_text(f"{'max' if quota is None else quota} {PERIOD_US}")
        else:
            raise HostLabUnavailable(
                f"CPU limits need `cpu` in {self.path.parent}/cgroup.subtree_control"
            )

    def remove(self) -> None:
        """Kill what is left in it, and remove it."""
        host_init.remove_cgroup(self.path)


class Network:
    """A network namespace, kept alive by this process while no other one is in it."""

    def __init__(self, pid: int) -> None:
        """That of process `pid`."""
        self._handle = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._handle}"

    def sh(self, *commands: str) -> str:
        """Run shell commands in it; what they printed.

        Raises:
            RuntimeError: one of them failed.
        """
        argv = ["nsenter", f"--net={self.path}", "sh", "-ec", "\n".join(commands)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S)
        if done.returncode != 0:
            raise RuntimeError(f"{'; '.join(commands)}: {done.stderr.strip()}")
        return done.stdout

    def limit_rate(self, device: str, mbit: float | None) -> None:
        """Limit what leaves by `device`; None: no limit."""
        if mbit is None:
            if "tbf" in self.sh(f"tc qdisc show dev {device}"):
                self.sh(f"tc qdisc del dev {device} root")
            return
        burst = max(16_000, round(mbit * 1250))  # what flows in 10 ms
        rate = f"rate {round(mbit * 1000)}kbit latency 100ms burst {burst}"
        self.sh(f"tc qdisc replace dev {device} root tbf {rate}")

    def close(self) -> None:
        os.close(self._handle)


def init_command(role: str, *arguments: object) -> list[str]:
    """The command line of `host_init.py`."""
    return [sys.executable, "-I", "-S", host_init.__file__, role, *map(str, arguments)]


class Keeper:
    """A process of `host_init.py` in new namespaces. It ends when this one closes its input, which
    the kernel does if nobody else.
    """

    def __init__(self, unshare: Sequence[str], command: Sequence[str]) -> None:
        self.process = subprocess.Popen(
            ["unshare", *unshare, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the lab alone
        )
        self._unread = b""

    def tell(self, order: object) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")

    def expect(self, word: str, timeout_s: float) -> str:
        """Wait until it says `word`; what it says with it.

        Raises:
            RuntimeError: it said something else, or ended; the message has its words.
            TimeoutError: it said nothing in time.
        """
        deadline = time.monotonic() + timeout_s
        line = self._line(deadline)
        said, _, rest = line.partition(" ")
        if said != word:
            lines = [line] if line else []
            with contextlib.suppress(TimeoutError):
                while more := self._line(min(deadline, time.monotonic() + 1.0)):
                    lines.append(more)
            raise RuntimeError(f"waited for {word!r}: {' / '.join(lines) or 'it has ended'}")
        return rest

    def _line(self, deadline: float) -> str:
        """The next line; empty at the end."""
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            left_s = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                if self._unread:
                    break
                raise TimeoutError(f"{self.process.args!r} said nothing in time")
            block = os.read(self.process.stdout.fileno(), 65536)
            if not block:
                break
            self._unread += block
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def close(self, timeout_s: float = COMMAND_S) -> None:
        """Let it end, and wait for that."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout_s)
        finally:
            self.process.stdout.close()

    def kill(self) -> None:
        """SIGKILL, and with it all that runs in its process namespace."""
        self.process.kill()
        self.close()
