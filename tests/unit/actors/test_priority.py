"""How a thread that computes asks Linux for its core."""

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from elastic_trainer.actors import priority

T = TypeVar("T")
_ATTRIBUTES = struct.Struct("IIQiIQQQ")


def in_a_thread(ask: Callable[[], T]) -> T:
    """What `ask` gives in a thread of its own, which may change how it is scheduled."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(ask()))
    thread.start()
    thread.join()
    return found[0]


def attributes() -> tuple[int, int, int]:
    """Policy, niceness and slice (ns) of the calling thread, as the kernel tells them."""
    number = {"x86_64": 315, "aarch64": 275}[platform.machine()]
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    assert ctypes.CDLL(None).syscall(number, 0, buffer, _ATTRIBUTES.size, 0) == 0
    _, policy, _, niceness, _, slice_ns, *_ = _ATTRIBUTES.unpack(buffer.raw)
    return policy, niceness, slice_ns


def test_a_computing_thread_keeps_its_core_for_longer() -> None:
    def ask() -> tuple[bool, tuple[int, int, int], bool]:
        os.nice(3)
        first = priority.compute_in_long_slices("cpu")
        return first, attributes(), priority.compute_in_long_slices("cpu")

    before = os.getpriority(os.PRIO_PROCESS, 0)
    first, (policy, niceness, slice_ns), again = in_a_thread(ask)
    assert first and again
    assert policy == os.SCHED_BATCH
    assert niceness == before + 3  # as Ray, or whoever runs the cluster, has set it
    # Kernels that know no slices of a thread's own tell none.
    if slice_ns:
        assert slice_ns == priority.SLICE_MS * 1_000_000
    assert os.sched_getscheduler(0) == os.SCHED_OTHER  # this thread's own


@pytest.mark.parametrize(("device", "machine"), [("cuda", "x86_64"), ("cpu", "unheard of")])
def test_others_are_left_alone(device: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)

    def ask() -> tuple[bool, int]:
        return priority.compute_in_long_slices(device), os.sched_getscheduler(0)

    assert in_a_thread(ask) == (False, os.SCHED_OTHER)


def test_a_system_that_refuses_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "_SCHED_SETATTR", {platform.machine(): -1})
    assert in_a_thread(lambda: priority.compute_in_long_slices("cpu")) is False
