"""Memory that a stage on CPUs uses again and again stays with its process.

torch takes activations from the C library's heap, which hands big blocks back to the system when
they are free. The next microbatch gets new pages, and each costs a fault and a page of zeros.
"""

import ctypes
from typing import Any

# Parameters of mallopt, as glibc numbers them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
MAPPED_BYTES = 32 << 20  # the most that glibc allows: bigger blocks are mapped by themselves
FREE_BYTES = 1 << 30  # so much may lie unused at the heap's end
GROWTH_BYTES = 64 << 20  # the size of a thread's heap, which thus stays when it is empty


def keep(device_type: str) -> bool:
    """Let free memory stay with a process that computes on CPUs.

    Returns:
        False where the device is another one, or the C library is not glibc.
    """
    library = _glibc()
    if library is None or device_type != "cpu":
        return False
    wanted = (
        (_MMAP_THRESHOLD, MAPPED_BYTES),
        (_TRIM_THRESHOLD, FREE_BYTES),
        (_TOP_PAD, GROWTH_BYTES),
    )
    return all([library.mallopt(name, value) == 1 for name, value in wanted])


def give_back() -> None:
    """Return what is free to the system: another stage will need other memory."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if hasattr(library, "gnu_get_libc_version") else None
    except (OSError, TypeError):  # TypeError: Windows has no such handle
        return None
