"""Work ahead in a thread: a bounded queue between an iterator and its reader."""

import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from elastic_trainer.errors import StallError

T = TypeVar("T")
_LOOK_S = 1.0  # how often the thread looks whether anybody forgot to wake it


class Prefetcher(Generic[T]):
    """Iterates like the iterator it is given, which runs up to `depth` items ahead.

    An error of the iterator is raised to the reader in its turn, after the items before it, and
    from then on.

    Args:
        items: what to run ahead.
        depth: how far.
        timeout_s: how long the reader waits for an item, and `close` for the thread.
    """

    def __init__(self, items: Iterator[T], depth: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._depth = depth
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._end: Exception | None = None  # what comes behind the items that are ready
        self._interruption: Exception | None = None
        self._closed = False
        self._thread = threading.Thread(
            target=self._fill, args=(items,), name="prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(
                lambda: self._interruption or self._ready or self._end, self._timeout_s
            )
            if self._interruption is not None:
                raise self._interruption
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._end is not None:
                raise self._end
        raise StallError(
            f"the loader got no data within {self._timeout_s:.1f} s",
            "See whether the storage of data.path answers; elastic.stall_limit_s is the limit.",
        )

    @property
    def failed(self) -> bool:
        """Whether the iterator has ended with an error."""
        return self._end is not None and not isinstance(self._end, StopIteration)

    def interrupt(self, error: Exception) -> None:
        """Raise `error` to a reader that waits, and to later ones; from any thread. Nothing is
        lost: after `resume` the items come as they would have come.
        """
        with self._changed:
            self._interruption = error
            self._changed.notify_all()

    def resume(self) -> None:
        """Let readers read again."""
        with self._changed:
            self._interruption = None

    def close(self, wait_s: float | None = None) -> None:
        """End the thread; items that were not read are dropped.

        A thread that hangs in the iterator for longer than `wait_s` seconds is left behind: it ends
        once the iterator returns, or with the process.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(self._timeout_s if wait_s is None else wait_s)

    def _fill(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
            end: Exception = StopIteration()
        except Exception as error:
            end = error
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait(_LOOK_S)
            if self._closed:
                return False
            self._ready.append(item)
            self._changed.notify_all()
            return True
