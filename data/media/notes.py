"""What a process that decodes is at, in memory that its loader reads when it is dead or silent."""

import mmap
import os
import struct
import time

_NOTE = struct.Struct("<qd")  # place of a sample, and when it was begun


class Notes:
    """One note, shared by two processes of a machine.

    Args:
        descriptor: of the file that holds it; None: a new one without a name.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            # Not a file on disk: to write where that is full would kill the process.
            descriptor = os.memfd_create("decoder-notes")
            os.truncate(descriptor, _NOTE.size)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _NOTE.size)

    def begin(self, place: int) -> None:
        """The sample at `place` is begun now."""
        _NOTE.pack_into(self._memory, 0, place, time.monotonic())

    def read(self) -> tuple[int, float]:
        """The place of the sample that was begun last, and for how many seconds it has been."""
        place, since = _NOTE.unpack_from(self._memory)
        return place, time.monotonic() - since

    def close(self) -> None:
        """Release memory and descriptor."""
        self._memory.close()
        os.close(self.descriptor)
