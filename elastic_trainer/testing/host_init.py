"""What runs inside a host lab: PID 1 of each host, the lab's switch, and the way into a host.

Run by path, isolated and without site-packages, to be there in milliseconds: standard library only.

    host NAME PROCS HOSTS LOG   the first process of a host
    switch PREFIX CGROUPS       keeps the lab's network and folder; the last to leave cleans up
    enter PID PROCS COMMAND…    run a command on the host whose `unshare` has this PID
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

NAMESPACES = ("net", "uts", "ipc", "pid_for_children", "mnt")  # this order: paths change with mnt
STARTED = b"Ray runtime started"
PR_SET_PDEATHSIG = 1
CLEAN_S = 30.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def say(*words: object) -> None:
    """Tell the lab, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{' '.join(map(str, words))}\n".encode())


def serve_as_host(name: str, procs: str, hosts: str, log: str) -> None:
    """Obey the lab's lines on standard input, reap orphans, and end when the lab does.

    The end of this process is the end of all processes on the host: the kernel sees to it.
    """
    Path(procs).write_text("0")
    socket.sethostname(name)
    for command in (
        ["mount", "-t", "tmpfs", "-o", "size=256m", "shm", "/dev/shm"],
        ["mount", "--bind", hosts, "/etc/hosts"],
    ):
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=CLEAN_S)
    say("up")
    ray: list[subprocess.Popen[bytes]] = []

    def obey() -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if order == "stop":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ray[-1].pid, signal.SIGTERM)
            else:
                ray.append(start_ray(order["argv"], order["env"], log))
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    reap(lambda: ray[-1].pid if ray else -1)


def start_ray(argv: Sequence[str], env: Mapping[str, str], log: str) -> subprocess.Popen[bytes]:
    """Start `ray start --block`, and say when the node is up."""
    process = subprocess.Popen(
        argv,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def follow() -> None:
        assert process.stdout is not None
        with open(log, "ab", buffering=0) as file:
            for line in process.stdout:
                file.write(line)
                if STARTED in line:
                    say("started")

    threading.Thread(target=follow, daemon=True).start()
    return process


def reap(ray_pid: Callable[[], int]) -> None:
    """Wait for whatever ends, for ever; say when Ray has."""
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            time.sleep(0.1)  # no process at all yet, or any more
            continue
        if pid == ray_pid():
            say("ended", os.waitstatus_to_exitcode(status))


def serve_as_switch(prefix: str, cgroups: str) -> None:
    """Make the lab's folder; once the lab has ended, however, end what is left and remove it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # nothing but the end of the lab ends its switch
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))  # Ray's sockets need short paths
    say("up", folder)
    sys.stdin.read()
    for group in Path(cgroups).glob(f"{folder.name}-*"):
        remove_cgroup(group)
    shutil.rmtree(folder, ignore_errors=True)


def remove_cgroup(group: Path) -> None:
    """Kill the processes of a cgroup until there is none, and remove it."""
    deadline = time.monotonic() + CLEAN_S
    while group.exists() and time.monotonic() < deadline:
        kill_all(group)
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.01)  # killed processes take a moment to be gone


def kill_all(group: Path) -> bool:
    """SIGKILL all processes of a cgroup; whether there was one."""
    pids = group.joinpath("cgroup.procs").read_text().split()
    for pid in map(int, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def enter(pid: str, procs: str, *command: str) -> None:
    """Run a command on a host: it gets this process's signals, which ends as the command does."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = os.getcwd()
    try:
        Path(procs).write_text("0")
        opened = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
    except OSError as error:
        sys.exit(f"{command[0]}: this host of the lab is dead: {error.strerror}")
    for handle in opened:
        if libc.setns(handle, 0) != 0:
            sys.exit(f"{command[0]}: no way into the host: {os.strerror(ctypes.get_errno())}")
        os.close(handle)
    os.chdir(folder)  # a change of the mount namespace leads to its root
    signals = {*_FORWARDED, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)  # whoever signals this process's group means the command once, not twice
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores, and exec keeps
        try:
            os.execvp(command[0], command)
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)
    end_like(wait_for(child, signals))


def wait_for(child: int, signals: set[signal.Signals]) -> int:
    """Hand signals on to the child until it ends; its status."""
    while True:
        received = signal.sigwait(signals)
        if received != signal.SIGCHLD:
            os.kill(child, received)
            continue
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status


def end_like(status: int) -> None:
    """End as the process with this status did, by its signal too."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    ROLES: dict[str, Callable[..., None]] = {
        "host": serve_as_host,
        "switch": serve_as_switch,
        "enter": enter,
    }
    ROLES[sys.argv[1]](*sys.argv[2:])
