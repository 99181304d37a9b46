"""Which generation an actor works for: older ones are refused, and so is one that was ended."""

import threading
from collections.abc import Callable

from elastic_trainer.errors import FencedError
from elastic_trainer.types import WorkerId


class Fence:
    """Decides between calls of the compute thread and an `end` that may come at any moment.

    An `end` that comes late, when the next generation has already begun, must not harm it.
    """

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._ended = -1
        self.generation = 0

    def enter(self, generation: int, begin: Callable[[], None]) -> None:
        """Work for `generation` from now on; `begin` leaves the older one behind.

        Raises:
            FencedError: a newer one has begun, or this one was ended before it began.
        """
        with self._lock:
            if generation < self.generation:
                raise FencedError(
                    f"{self._worker} works for generation {self.generation}, not {generation}"
                )
            self._refuse_ended(generation)
            begin()
            self.generation = generation

    def end(self, generation: int, reason: str, interrupt: Callable[[Exception], None]) -> None:
        """Make `generation` and older ones over; `interrupt` wakes what waits, unless a newer one
        has begun.
        """
        with self._lock:
            if generation < self.generation:
                return
            self._ended = max(self._ended, generation)
            interrupt(FencedError(f"the coordinator ended generation {generation}: {reason}"))

    def check(self, generation: int) -> None:
        """Refuse work of another generation than the present one.

        Raises:
            FencedError: it is that of another one, or of one that was ended.
        """
        with self._lock:
            if generation != self.generation:
                raise FencedError(
                    f"{self._worker} works for generation {self.generation}, not {generation}"
                )
            self._refuse_ended(generation)

    def _refuse_ended(self, generation: int) -> None:
        if generation <= self._ended:
            raise FencedError(f"{self._worker}: generation {generation} was ended")
