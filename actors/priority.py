"""Who runs first where stages and control share cores."""

import ctypes
import os
import platform
import struct
import threading

CONTROL_NICENESS = 5
SLICE_MS = 30

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # the system call's number
# size, policy, flags, niceness, priority, then runtime, deadline and period in nanoseconds
_ATTRIBUTES = struct.Struct("IIQiIQQQ")


def yield_to_compute() -> None:
    """Let stages on this node run first: control fits into the time in which they wait."""
    os.nice(CONTROL_NICENESS)


def compute_in_long_slices(device_type: str) -> bool:
    """Let a thread that computes on CPUs, once it has a core, keep it for longer than usual.

    Stages that outnumber the cores otherwise push each other off every few milliseconds, and each
    finds its data gone from the core's cache. Whoever has little to do still comes in between.

    Returns:
        False where the device is another one, or the system does not let us. Linux before 6.12
        only lets a stage that wakes up wait for its turn.
    """
    if device_type != "cpu":
        return False
    if os.sched_getscheduler(0) == os.SCHED_BATCH:
        return True
    number = _SCHED_SETATTR.get(platform.machine())
    if number is None:
        return False
    niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    wanted = (_ATTRIBUTES.size, os.SCHED_BATCH, 0, niceness, 0, SLICE_MS * 1_000_000, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, 0, _ATTRIBUTES.pack(*wanted), 0) == 0)
