"""Whether every actor of a run still answers.

A dead process is reported by Ray at once. One that stands still (stopped, or holding Python's lock)
is not, and between segments no peer waits for it either: only asking tells.
"""

from elastic_trainer.types import WorkerId

ASKS_PER_LIMIT = 4


class Pulse:
    """Keeps the time of questions and answers; asking is the caller's.

    Times are seconds on any clock that never goes back.

    Args:
        limit_s: how long an answer may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._asked: dict[WorkerId, tuple[float, float]] = {}  # when, and the latest answer
        self._next: dict[WorkerId, float] = {}

    def ask(self, worker: WorkerId, now: float, limit_s: float | None = None) -> None:
        """A question was sent; its answer may take `limit_s` where that differs."""
        limit = self._limit_s if limit_s is None else limit_s
        self._asked[worker] = now, now + limit

    def answered(self, worker: WorkerId, now: float) -> None:
        """The answer has come."""
        self._asked.pop(worker, None)
        self._next[worker] = now + self._limit_s / ASKS_PER_LIMIT

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, or dismissed: neither ask it nor wait for it."""
        self._asked.pop(worker, None)
        self._next.pop(worker, None)

    def due(self, now: float) -> list[WorkerId]:
        """Whom to ask now: those who have answered before, and some time ago."""
        return [w for w, at in self._next.items() if now >= at and w not in self._asked]

    def silent(self, now: float) -> dict[WorkerId, float]:
        """Whose answer is overdue, and how long it has been waited for."""
        return {w: now - asked for w, (asked, latest) in self._asked.items() if now > latest}
