"""A worker whom nobody calls ends by itself; on a clock of the test's own."""

import os
import subprocess
import sys
import threading

from elastic_trainer.actors.watchdog import Watchdog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_leaves_only_after_the_whole_limit() -> None:
    clock, left = Clock(), list[float]()
    watchdog = Watchdog(120.0, lambda: left.append(clock.now), clock)
    for _ in range(5):
        clock.now += 119.0
        assert not watchdog.look()
        watchdog.heard()
    clock.now += 120.0
    assert not watchdog.look() and not left
    clock.now += 0.1
    assert watchdog.look() and left == [clock.now]


def test_its_thread_looks_and_stops() -> None:
    clock, left = Clock(), threading.Event()
    watchdog = Watchdog(0.1, left.set, clock)
    watchdog.start()
    assert not left.wait(0.3)
    clock.now += 1.0
    assert left.wait(20.0)
    again = threading.Event()
    stopped = Watchdog(0.1, again.set, clock)
    stopped.start()
    stopped.stop()
    clock.now += 1.0
    assert not again.wait(0.3)


def test_leaving_ends_the_process_though_threads_hang() -> None:
    program = (
        "import threading, time\n"
        "from elastic_trainer.actors.watchdog import leave\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "leave(lambda: time.sleep(600), 0.1)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, env=dict(os.environ))
    assert ended.returncode == 1
