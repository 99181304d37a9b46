"""Batches that were read a short while ago, kept for the case that they are trained again."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_trainer.types import BatchInfo, Cursor

Fields = Mapping[str, "np.ndarray[Any, Any]"]
Batch = tuple[BatchInfo, Sequence[Fields]]
MAX_BYTES = 64 << 20
MAX_BATCHES = 4096


class Window:
    """Iterates like `batches`, and can go back: neither storage nor tokeniser are asked again.

    Args:
        batches: batches from `start` on.
        start: position in the data.
        max_bytes: how much to keep of what was read.
    """

    def __init__(self, batches: Iterator[Batch], start: Cursor, max_bytes: int = MAX_BYTES) -> None:
        self._batches = batches
        self._start = start  # of the oldest batch that is kept
        self._kept: deque[Batch] = deque()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._next = 0  # index in what is kept; behind its end: the next one is read

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next == len(self._kept):
            batch = next(self._batches)
            self._kept.append(batch)
            self._num_bytes += _size(batch)
        batch = self._kept[self._next]
        self._next += 1
        while self._next and (self._num_bytes > self._max_bytes or len(self._kept) > MAX_BATCHES):
            oldest = self._kept.popleft()
            self._start = oldest[0].end
            self._num_bytes -= _size(oldest)
            self._next -= 1
        return batch

    def seek(self, cursor: Cursor) -> bool:
        """Go on from `cursor`; False, with nothing changed, if that is not kept."""
        ends = [self._start, *(info.end for info, _ in self._kept)]
        if cursor not in ends:
            return False
        self._next = ends.index(cursor)
        return True


def _size(batch: Batch) -> int:
    return sum(array.nbytes for fields in batch[1] for array in fields.values())
