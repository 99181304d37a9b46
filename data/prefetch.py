"""Work ahead in a thread: a bounded queue between an iterator and its reader."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from elastic_trainer.errors import StallError

T = TypeVar("T")
_POLL_S = 0.2  # how soon a closed prefetcher's thread notices


class Prefetcher(Generic[T]):
    """Iterates like the iterator it is given, which runs up to `depth` items ahead.

    An error of the iterator is raised to the reader in its turn, after the items before it.

    Args:
        items: what to run ahead.
        depth: how far.
        timeout_s: how long the reader waits for an item, and `close` for the thread.
    """

    def __init__(self, items: Iterator[T], depth: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=self._fill, args=(items,), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        try:
            item, error = self._queue.get(timeout=self._timeout_s)
        except queue.Empty:
            raise StallError(
                f"the loader got no data within {self._timeout_s:.1f} s",
                "See whether the storage of data.path answers; elastic.stall_limit_s is the limit.",
            ) from None
        if error is not None:
            self._ended = True
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        """End the thread; items that were not read are dropped.

        A thread that hangs in the iterator is left behind: it ends with the process.
        """
        self._closed.set()
        self._thread.join(self._timeout_s)

    def _fill(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, StopIteration()))
        except Exception as error:
            self._put((None, error))

    def _put(self, entry: tuple[T | None, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
