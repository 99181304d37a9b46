"""Work ahead in a thread: a bounded queue between an iterator and its reader."""

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")
_POLL_S = 0.2  # how soon a closed prefetcher's thread notices


class Prefetcher(Generic[T]):
    """Iterates like the iterator it is given, which runs up to `depth` items ahead.

    An error of the iterator is raised to the reader in its turn, after the items before it.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
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
        item, error = self._queue.get()
        if error is not None:
            self._ended = True
            raise error
        assert item is not None
        return item

    def close(self) -> None:
        """End the thread; items that were not read are dropped."""
        self._closed.set()
        self._thread.join()

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
