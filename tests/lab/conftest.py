"""A lab of real hosts, where this machine can have one; elsewhere its tests skip and say why."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic_trainer.testing.host_lab import HostLab, HostLabUnavailable, check_available
from elastic_trainer.testing.processes import wait_for

# Answers each line of its input with the addresses of the nodes that Ray thinks alive.
_NODES = """
import ray, sys
ray.init(logging_level=40, log_to_driver=False)
for line in sys.stdin:
    print(*sorted(n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]), flush=True)
"""


@pytest.fixture(autouse=True, scope="session")
def needs_a_lab() -> None:
    """Every test of this folder runs in a lab."""
    try:
        check_available()
    except HostLabUnavailable as error:
        pytest.skip(str(error))


class Watcher:
    """A driver on the head that says which nodes live."""

    def __init__(self, lab: HostLab) -> None:
        self._process: subprocess.Popen[str] = lab.popen(
            lab.head,
            [sys.executable, "-c", _NODES],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def alive(self) -> list[str]:
        """Addresses of the living nodes."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        return self._process.stdout.readline().split()

    def wait_for(self, condition: Callable[[list[str]], Any], what: str, timeout_s: float) -> None:
        wait_for(lambda: condition(self.alive()), what, timeout_s)

    def close(self) -> None:
        with self._process:
            self._process.kill()


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    """A head and two hosts, for all tests of a file."""
    # Ray asks five times at its own pace before it believes that a host is dead: 15 s.
    quick = {"RAY_health_check_period_ms": "1000"}
    with HostLab(2, resources={"stage": 1}, ray_env=quick) as made:
        yield made


@pytest.fixture(scope="module")
def watcher(lab: HostLab) -> Iterator[Watcher]:
    watching = Watcher(lab)
    yield watching
    watching.close()
