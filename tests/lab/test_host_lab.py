"""Each thing that a host lab can do, seen from inside: by Ray, by sockets, by clocks.

The tests share one lab and run in order; the last ones use its hosts up.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_trainer.testing.host_kernel import cgroup_root
from elastic_trainer.testing.host_lab import Host, HostLab, HostLabUnavailable
from elastic_trainer.testing.processes import LIMIT_S, marked, wait_for

if TYPE_CHECKING:
    from tests.lab.conftest import Watcher
else:
    Watcher = Any

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

REFUSED = "111"  # ECONNREFUSED: somebody is there and says no
RAY_NOTICES_S = 60.0

WHERE = """
import json, ray, socket
ray.init(logging_level=40, log_to_driver=False)
@ray.remote(num_cpus=0)
def where():
    return [socket.gethostname(), ray.util.get_node_ip_address()]
here = [f"10.77.0.{n}" for n in (1, 2, 3)]
print(json.dumps(ray.get([where.options(resources={f"node:{ip}": 0.01}).remote() for ip in here])))
"""
BURN = """
import time
end = time.monotonic() + 1
while time.monotonic() < end: pass
print(time.process_time())
"""
SERVE = "import socket; socket.create_server(('', 8000)).accept()[0].sendall(bytes(2 << 20))"
FETCH = """
import socket, time
s = socket.socket()
while s.connect_ex(("{ip}", 8000)): s.close(); s = socket.socket()
began, got = time.monotonic(), 0
while block := s.recv(65536): got += len(block)
print(8 * got / 1e6 / (time.monotonic() - began))
"""
KNOCK = """
import socket
s = socket.socket()
s.settimeout(1)
print(s.connect_ex(("{ip}", 9)))
"""
ECHO = """
import socket
s = socket.create_server(("", 8001)).accept()[0]
while block := s.recv(100): s.sendall(block)
"""
TALK = """
import socket, sys
s = socket.socket()
while s.connect_ex(("{ip}", 8001)): s.close(); s = socket.socket()
for line in sys.stdin:
    s.settimeout(float(line))
    s.sendall(b"x")
    try: print(len(s.recv(100)), flush=True)
    except TimeoutError: print("silence", flush=True)
"""


def python(lab: HostLab, host: Host, code: str, **values: str) -> str:
    for name, value in values.items():
        code = code.replace(f"{{{name}}}", value)
    return lab.exec(host, [sys.executable, "-c", code], LIMIT_S).strip()


def ask(process: "subprocess.Popen[str]", line: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def bystander_on(lab: HostLab, host: Host) -> "subprocess.Popen[str]":
    """A process on the host that does nothing; it runs on return."""
    process = lab.popen(host, ["sh", "-c", "echo here; exec sleep 62"], stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    return process


def traces(folder: Path) -> list[object]:
    """What is there of the lab with this folder."""
    groups = list(cgroup_root().glob(f"{folder.name}-*"))
    return [*groups, *([folder] if folder.exists() else []), *marked(str(folder))]


def test_ray_spans_hosts_with_addresses_of_their_own(lab: HostLab, watcher: Watcher) -> None:
    assert watcher.alive() == [lab.head.ip, *(host.ip for host in lab.hosts)]
    found = python(lab, lab.head, WHERE)
    assert found == ('[["host-0", "10.77.0.1"], ["host-1", "10.77.0.2"], ["host-2", "10.77.0.3"]]')


def test_a_host_sees_its_own_processes_and_memory_only(lab: HostLab) -> None:
    first, second = lab.hosts
    with lab.popen(first, ["sleep", "60"]) as sleeper:
        wait_for(lambda: "sleep" in lab.exec(first, ["ps", "-eo", "comm="]), "the sleeper is seen")
        assert "sleep" not in lab.exec(second, ["ps", "-eo", "comm="])
        sleeper.kill()
    lab.exec(first, ["sh", "-c", "echo mine > /dev/shm/note"])
    assert lab.exec(first, ["cat", "/dev/shm/note"]) == "mine\n"
    assert "note" not in lab.exec(second, ["ls", "/dev/shm"])
    assert not Path("/dev/shm/note").exists()


def test_the_token_is_private_and_said_nowhere(lab: HostLab) -> None:
    file = lab.folder / "token"
    assert (file.stat().st_mode & 0o777, lab.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    token = file.read_text()
    assert len(token) == 64
    told = [log.read_text() for log in lab.folder.glob("*.log")]
    told += [lab.exec(host, ["ps", "-eo", "args="]) for host in (lab.head, *lab.hosts)]
    told += list(lab.env.values())
    assert not [text for text in told if token in text]


def test_commands_get_signals_and_tell_their_end(lab: HostLab, tmp_path: Path) -> None:
    host = lab.hosts[0]
    shell = "trap 'echo told; exit 7' TERM; pwd; while :; do sleep 0.02; done"
    with lab.popen(host, ["sh", "-c", shell], stdout=-1, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == str(tmp_path)
        process.terminate()
        assert process.wait(LIMIT_S) == 7
        assert process.stdout.read() == "told\n"
    with lab.popen(host, ["sh", "-c", "kill -s SEGV $$"]) as process:
        assert process.wait(LIMIT_S) == -signal.SIGSEGV
    with lab.popen(host, ["sleep", "61"]) as process:
        wait_for(lambda: "sleep 61" in lab.exec(host, ["ps", "-eo", "args="]), "it runs")
        process.kill()
    wait_for(lambda: "sleep 61" not in lab.exec(host, ["ps", "-eo", "args="]), "it is killed")
    with lab.popen(host, ["no-such-command"], stderr=-1, text=True) as process:
        _, said = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, said) == (127, "no-such-command: No such file or directory\n")
    with pytest.raises(subprocess.CalledProcessError):
        lab.exec(host, ["false"])


def test_cpu_quota(lab: HostLab) -> None:
    host = lab.hosts[0]

    def throttled() -> int:
        """In how many periods the host has used up its quota."""
        stat = host.cgroup.path.joinpath("cpu.stat").read_text()
        return int(stat.partition("nr_throttled ")[2].split()[0])

    try:
        lab.set_cpu_quota(host, 0.05)
    except HostLabUnavailable as error:
        pytest.skip(str(error))
    before = throttled()
    assert float(python(lab, host, BURN)) < 0.2
    limited = throttled()
    assert limited > before
    lab.set_cpu_quota(host, None)
    python(lab, host, BURN)
    assert throttled() <= limited + 1  # the period in which the quota was lifted


def test_rate_limit(lab: HostLab) -> None:
    host = lab.hosts[0]
    lab.set_rate(host, 20)
    with lab.popen(host, [sys.executable, "-c", SERVE]):
        assert float(python(lab, lab.head, FETCH, ip=host.ip)) < 22
    lab.set_rate(host, None)
    with lab.popen(host, [sys.executable, "-c", SERVE]):
        assert float(python(lab, lab.head, FETCH, ip=host.ip)) > 25


def test_freeze_and_thaw(lab: HostLab, tmp_path: Path) -> None:
    host, file = lab.hosts[0], tmp_path / "ticks"
    with lab.popen(host, ["sh", "-c", f"while :; do echo >> {file}; sleep 0.01; done"]) as ticker:
        wait_for(lambda: file.exists(), "the first tick")
        lab.freeze(host)
        states = lab.exec(host, ["ps", "-eo", "stat="]).split()
        assert len([state for state in states if state.startswith("T")]) >= 4  # Ray's, and ours
        before = file.stat().st_size
        time.sleep(0.3)
        assert file.stat().st_size == before
        assert python(lab, lab.head, KNOCK, ip=host.ip) == REFUSED  # its kernel goes on
        lab.thaw(host)
        wait_for(lambda: file.stat().st_size > before, "it goes on")
        ticker.kill()


def test_link_down_and_up(lab: HostLab) -> None:
    """Nothing passes, nobody is told, and an open connection goes on afterwards."""
    host = lab.hosts[0]
    with (
        lab.popen(host, [sys.executable, "-c", ECHO]),
        lab.popen(
            lab.head,
            [sys.executable, "-c", TALK.replace("{ip}", host.ip)],
            stdin=-1,
            stdout=-1,
            text=True,
        ) as talker,
    ):
        assert ask(talker, "10") == "1"
        lab.link_down(host)
        assert ask(talker, "0.5") == "silence"
        assert python(lab, lab.head, KNOCK, ip=host.ip) != REFUSED
        assert python(lab, lab.head, KNOCK, ip=lab.hosts[1].ip) == REFUSED
        lab.link_up(host)
        assert ask(talker, "20") in ("1", "2")
        assert python(lab, lab.head, KNOCK, ip=host.ip) == REFUSED
        talker.kill()


def test_add_and_remove(lab: HostLab, watcher: Watcher) -> None:
    added = lab.add_host(resources={"late": 1})
    assert lab.hosts[-1] is added and added.ip in watcher.alive()
    lab.remove_host(added)
    assert added not in lab.hosts
    watcher.wait_for(lambda ips: added.ip not in ips, "the host has left", RAY_NOTICES_S)


def test_kill_raylet(lab: HostLab, watcher: Watcher) -> None:
    host = lab.hosts[0]
    with bystander_on(lab, host) as bystander:
        lab.kill_raylet(host)
        watcher.wait_for(lambda ips: host.ip not in ips, "Ray misses the raylet", RAY_NOTICES_S)
        assert bystander.poll() is None
        bystander.kill()


def test_kill_host(lab: HostLab, watcher: Watcher) -> None:
    host = lab.hosts[1]
    with bystander_on(lab, host) as bystander:
        lab.kill_host(host)
        assert bystander.wait(LIMIT_S) == -signal.SIGKILL
    with lab.popen(host, ["true"], stderr=-1, text=True) as late:
        _, said = late.communicate(timeout=LIMIT_S)
    assert late.returncode == 1 and said.startswith("true: this host of the lab is dead")
    assert host not in lab.hosts and host.cgroup.pids() == []
    assert python(lab, lab.head, KNOCK, ip=host.ip) == REFUSED
    watcher.wait_for(lambda ips: ips == [lab.head.ip], "Ray misses the host", RAY_NOTICES_S)


OWNER = """
import signal, sys
from elastic_trainer.testing.host_lab import HostLab
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
with HostLab(0) as lab:
    lab.popen(lab.head, ["sleep", "100"])
    print(lab.folder, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_lab_whose_owner_is(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, text=True
    )
    with owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert folder.name.startswith("hlab-") and len(traces(folder)) > 5
        os.kill(owner.pid, number)
        wait_for(lambda: not traces(folder), f"no trace of {folder}")


def test_without_root_it_says_so() -> None:
    code = """
import os
from elastic_trainer.testing.host_lab import HostLab
os.seteuid(65534)
HostLab(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    reason = done.stderr.strip().splitlines()[-1]
    assert reason.endswith("HostLabUnavailable: a host lab needs root, and this is user 65534")
