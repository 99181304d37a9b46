"""Messages between a loader and the processes that decode for it: pickles, arrays beside them.

Both ends are processes of one user that share a socket nobody else can reach.
"""

import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_HEAD = struct.Struct("<QQ")  # bytes of the pickle, number of arrays
_MOST_PARTS = 512  # per call; the kernel takes 1024


def send(sock: socket.socket, thing: object) -> None:
    """Send one thing.

    Raises:
        OSError: nobody is there any more, or takes it in time.
    """
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(thing, protocol=5, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    lengths = struct.pack(f"<{len(views)}Q", *map(len, views))
    head = _HEAD.pack(len(body), len(views))
    _through(sock.sendmsg, [memoryview(head), memoryview(lengths), memoryview(body), *views])


def receive(sock: socket.socket) -> Any:
    """Wait for one thing. Its arrays may be written to.

    Raises:
        EOFError: the other end is closed.
        OSError: nothing comes in time.
    """
    head = bytearray(_HEAD.size)
    _fill(sock, [memoryview(head)])
    num_bytes, num_arrays = _HEAD.unpack(head)
    lengths, body = bytearray(8 * num_arrays), bytearray(num_bytes)
    _fill(sock, [memoryview(lengths), memoryview(body)])
    arrays = [np.empty(length, np.uint8) for length in struct.unpack(f"<{num_arrays}Q", lengths)]
    _fill(sock, [array.data for array in arrays])
    return pickle.loads(body, buffers=arrays)


def _fill(sock: socket.socket, views: Sequence[memoryview]) -> None:
    def receive(parts: Sequence[memoryview]) -> int:
        # All of it in one call, so that a thread which waits is woken once.
        return sock.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]

    _through(receive, views)


def _through(move: Any, views: Sequence[memoryview]) -> None:
    """Call `move` until it has moved all bytes of the views."""
    left = [view for view in views if len(view)]
    while left:
        moved = move(left[:_MOST_PARTS])
        if not moved:
            raise EOFError("the other end is closed")
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
