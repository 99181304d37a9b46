"""Several real Ray hosts on one Linux machine, for tests of membership; needs root.

    with HostLab(2, resources={"stage": 1}) as lab:
        driver = lab.popen(lab.head, [sys.executable, "train.py"])  # ray.init() finds the cluster
        lab.kill_host(lab.hosts[0])

Each host, the head included, has its own network address, process tree, host name and /dev/shm; all
share the file system. The network ends at the lab's switch: nothing outside reaches in, so drivers
run on a host, too. Namespaces have no names, and live as long as a process or an open file of the
lab: nothing can be left behind, even by a test that is killed. Its switch then ends what is left
and removes the lab's folder and cgroups.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic_trainer.testing.host_kernel import (
    COMMAND_S,
    UNSHARE_HOST,
    Cgroup,
    HostLabUnavailable,
    Keeper,
    Network,
    cgroup_root,
    check_available,
    init_command,
)

__all__ = ["Host", "HostLab", "HostLabUnavailable", "check_available"]

PREFIX = "hlab-"
SUBNET = "10.77.0"  # of every lab: they do not see each other
PORT = 6379
MOST_HOSTS = 200
SETUP_S = 60.0
START_S = 150
LEAVE_S = 60.0
_ALL_BUT_PID_1 = ["sh", "-c", "kill -s STOP -- -1"]


@dataclass(eq=False, kw_only=True)
class Host:
    """One machine of a lab. Ray gives it a resource `node:IP`, to pin an actor there."""

    index: int
    ip: str
    keeper: Keeper
    network: Network
    cgroup: Cgroup
    log: Path  # what `ray start` printed
    alive: bool = field(default=True)

    @property
    def name(self) -> str:
        return f"host-{self.index}"

    @property
    def port(self) -> str:
        """Its end of the cable on the switch."""
        return f"port{self.index}"


class HostLab:
    """A Ray head, and hosts that have joined it.

    Args:
        num_hosts: hosts beside the head.
        num_cpus: of each host, as Ray counts them.
        head_cpus: of the head.
        resources: of each host.
        ray_env: more environment for every process, such as RAY_health_check_timeout_ms.
        object_store_mb: of each host; its /dev/shm has 256.
        dashboard: whether the head serves Ray's dashboard, which `ray job` needs.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        num_cpus: int = 1,
        head_cpus: int = 1,
        resources: Mapping[str, float] | None = None,
        ray_env: Mapping[str, str] | None = None,
        object_store_mb: int = 80,
        dashboard: bool = False,
    ) -> None:
        check_available()
        self.hosts: list[Host] = []  # those that run, without the head
        self.address = f"{SUBNET}.1:{PORT}"
        self._num_hosts = num_hosts
        self._num_cpus = num_cpus
        self._head_cpus = head_cpus
        self._resources = dict(resources or {})
        self._ray_env = dict(ray_env or {})
        self._object_store_mb = object_store_mb
        self._dashboard = dashboard
        self._started: list[Host] = []  # every host so far, the head first

    def __enter__(self) -> Self:
        self._switch = Keeper(["--net"], init_command("switch", PREFIX, cgroup_root()))
        try:
            self.folder = Path(self._switch.expect("up", SETUP_S))
            self._wire = Network(self._switch.process.pid)
            self._wire.sh("ip link add switch type bridge", "ip link set switch up")
            self._write_files()
            head = ["--head", f"--port={PORT}", f"--include-dashboard={self._dashboard}"]
            head.append(f"--dashboard-host={SUBNET}.1")
            self.head = self._start(self._head_cpus, {}, head)
            self._wait_started(self.head)
            self.add_hosts(self._num_hosts)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every host and leave no trace; Ctrl-C and SIGTERM wait until that is done."""
        late = {signal.SIGINT, signal.SIGTERM}
        old = signal.pthread_sigmask(signal.SIG_BLOCK, late)
        try:
            with contextlib.ExitStack() as steps:  # each is taken, whatever becomes of the others
                steps.callback(self._switch.close)
                for host in self._started:
                    steps.callback(host.network.close)
                    steps.callback(self.kill_host, host)
                self._started.clear()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)

    # Membership.

    def add_host(
        self, num_cpus: int | None = None, resources: Mapping[str, float] | None = None
    ) -> Host:
        """One more host; it has joined the cluster on return."""
        return self.add_hosts(1, num_cpus, resources)[0]

    def add_hosts(
        self,
        count: int,
        num_cpus: int | None = None,
        resources: Mapping[str, float] | None = None,
    ) -> list[Host]:
        """More hosts, started together; they have joined the cluster on return."""
        cpus = self._num_cpus if num_cpus is None else num_cpus
        wanted = self._resources if resources is None else resources
        join = [f"--address={self.address}"]
        added = [self._start(cpus, wanted, join) for _ in range(count)]
        for host in added:
            self._wait_started(host)
            self.hosts.append(host)
        return added

    def remove_host(self, host: Host, timeout_s: float = LEAVE_S) -> None:
        """Let a host leave: Ray drains the node, and stops when it is idle or that takes too long
        (30 s; the environment variable RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S says otherwise)."""
        host.keeper.tell("stop")
        host.keeper.expect("ended", timeout_s)
        self.kill_host(host)

    def kill_host(self, host: Host) -> None:
        """SIGKILL every process on the host.

        Its network goes on refusing connections, as after a crash of Ray. For the loss of a whole
        machine call `link_down` first.
        """
        self.hosts = [other for other in self.hosts if other is not host]
        if host.alive:
            host.alive = False
            host.keeper.kill()
            host.cgroup.remove()

    def kill_raylet(self, host: Host) -> None:
        """SIGKILL the host's raylet; its other processes live on until they notice."""
        raylets = [pid for pid in host.cgroup.pids() if _program(pid) == "raylet"]
        if len(raylets) != 1:
            raise RuntimeError(f"{host.name} has {len(raylets)} raylets")
        os.kill(raylets[0], signal.SIGKILL)

    # Faults.

    def freeze(self, host: Host) -> None:
        """SIGSTOP every process on the host. Its kernel still accepts and acknowledges."""
        self.exec(host, _ALL_BUT_PID_1)

    def thaw(self, host: Host) -> None:
        """Let a frozen host go on."""
        for pid in host.cgroup.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def link_down(self, host: Host) -> None:
        """Pull the cable: packets vanish both ways, and no connection is reset."""
        self._wire.sh(f"ip link set {host.port} down")

    def link_up(self, host: Host) -> None:
        """Plug the cable in again."""
        self._wire.sh(f"ip link set {host.port} up")

    def set_rate(self, host: Host, mbit: float | None) -> None:
        """Limit the host's link to so many Mbit/s each way; None: no limit."""
        self._wire.limit_rate(host.port, mbit)
        host.network.limit_rate("eth0", mbit)

    def set_cpu_quota(self, host: Host, fraction: float | None) -> None:
        """Let all processes of the host together have `fraction` of one core; None: no limit.

        Raises:
            HostLabUnavailable: cgroups do not control the CPU on this machine.
        """
        host.cgroup.limit_cpu(fraction)

    # Commands.

    @property
    def env(self) -> dict[str, str]:
        """Environment of a process that talks to the cluster, on any of its hosts."""
        outer = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        return {
            **outer,
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # its absence is a FutureWarning
            "RAY_enable_worker_prestart": "0",  # idle workers would only load the machine
            # All hosts start at once, on the cores of one: Ray's 30 s have been too few.
            "RAY_raylet_start_wait_time_s": str(START_S - 30),
            **self._ray_env,
        }

    def popen(
        self,
        host: Host,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command on the host; it dies with the host.

        Args:
            env: added to the lab's environment.
            options: of subprocess.Popen.

        Returns:
            A process that hands signals on to the command, and ends as the command does.
        """
        command = init_command("enter", host.keeper.process.pid, host.cgroup.procs, *argv)
        return subprocess.Popen(command, env={**self.env, **(env or {})}, **options)

    def exec(self, host: Host, argv: Sequence[str], timeout_s: float = COMMAND_S) -> str:
        """Run a command on the host; what it printed.

        Raises:
            subprocess.CalledProcessError: it failed.
            subprocess.TimeoutExpired: it took longer.
        """
        process = self.popen(host, argv, stdin=subprocess.DEVNULL, stdout=-1, text=True)
        with process:
            try:
                printed, _ = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        if process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, list(argv), printed)
        return str(printed)

    # Starting.

    def _write_files(self) -> None:
        token = os.open(self.folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(token, "w") as file:
            file.write(os.urandom(32).hex())
        names = [f"{SUBNET}.{index + 1} host-{index}" for index in range(MOST_HOSTS)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def _start(self, num_cpus: int, resources: Mapping[str, float], options: Sequence[str]) -> Host:
        index = len(self._started)
        if index == MOST_HOSTS:
            raise RuntimeError(f"a lab has room for {MOST_HOSTS} hosts in all its life")
        cgroup = Cgroup.make(f"{self.folder.name}-{index}")
        log = self.folder / f"host-{index}.log"
        role = init_command("host", f"host-{index}", cgroup.procs, self.folder / "hosts", log)
        keeper = Keeper(UNSHARE_HOST, role)
        try:
            keeper.expect("up", SETUP_S)
        except BaseException:
            keeper.kill()
            raise
        host = Host(
            index=index,
            ip=f"{SUBNET}.{index + 1}",
            keeper=keeper,
            network=Network(keeper.process.pid),
            cgroup=cgroup,
            log=log,
        )
        self._started.append(host)
        self._plug_in(host)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        ray += [f"--node-ip-address={host.ip}", f"--num-cpus={num_cpus}"]
        ray += [f"--resources={json.dumps(dict(resources))}"]
        ray += [f"--object-store-memory={self._object_store_mb << 20}"]
        ray += [f"--temp-dir={self.folder / str(index)}", *options]
        keeper.tell({"argv": ray, "env": self.env})
        return host

    def _plug_in(self, host: Host) -> None:
        """Lay a cable from the switch to the host."""
        self._wire.sh(
            f"ip link add {host.port} type veth peer name eth0 netns {host.keeper.process.pid}",
            f"ip link set {host.port} master switch up",
        )
        host.network.sh(
            f"ip addr add {host.ip}/24 dev eth0",
            "ip link set eth0 up",
            "ip link set lo up",
            "ip route add default dev eth0",
        )

    def _wait_started(self, host: Host) -> None:
        try:
            host.keeper.expect("started", START_S)
        except (RuntimeError, TimeoutError) as error:
            printed = host.log.read_text(errors="replace")[-2000:] if host.log.exists() else ""
            raise RuntimeError(f"{host.name} did not join: {error}\n{printed}") from error


def _program(pid: int) -> str:
    """Name of the program that a process runs; empty if it has ended."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return Path(command.split(b"\0")[0].decode(errors="replace")).name
