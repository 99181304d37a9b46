"""Whether every actor of a run still answers.

A dead process is reported by Ray at once. One that stands still (stopped, or holding Python's lock)
is not, nor is a node that dropped off the network, and between segments no peer waits for either:
only asking tells. Every answer renews a lease; a worker whose lease has run out is lost.
"""

from elastic_trainer.types import WorkerId

ASKS_PER_LIMIT = 3


class Pulse:
    """Keeps the time of questions and answers; asking is the caller's.

    Times are seconds on any clock that never goes back.

    Args:
        limit_s: how long the answer of a worker without a lease may take.
        period_s: pause between two questions; a third of the limit where none is given.
    """

    def __init__(self, limit_s: float, period_s: float | None = None) -> None:
        self._limit_s = limit_s
        self._period_s = limit_s / ASKS_PER_LIMIT if period_s is None else period_s
        self._lease_s: dict[WorkerId, float] = {}
        self._asked: dict[WorkerId, tuple[float, float | None]] = {}  # when, and a limit of its own
        self._alive: dict[WorkerId, float] = {}  # the latest sign of life
        self._next: dict[WorkerId, float] = {}

    def lease(self, worker: WorkerId, limit_s: float | None) -> None:
        """For how long this worker may give no sign of life, from now on; None: it has no lease."""
        if limit_s is None:
            self._lease_s.pop(worker, None)
        else:
            self._lease_s[worker] = limit_s

    def ask(self, worker: WorkerId, now: float, limit_s: float | None = None) -> None:
        """A question was sent; its answer may take `limit_s` where that differs."""
        self._asked[worker] = now, limit_s

    def answered(self, worker: WorkerId, now: float) -> None:
        """The answer has come."""
        self._asked.pop(worker, None)
        self._alive[worker] = now
        self._next[worker] = now + self._period_s

    def seen(self, worker: WorkerId, now: float) -> None:
        """Something else came from it; what it was asked it still has to answer."""
        if worker in self._alive:
            self._alive[worker] = now

    def excuse(self, seconds: float, now: float) -> None:
        """The caller itself did not look for so long: that is nobody else's silence."""
        for worker, (at, limit) in self._asked.items():
            self._asked[worker] = min(now, at + seconds), limit
        for worker, at in self._alive.items():
            self._alive[worker] = min(now, at + seconds)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone, or dismissed: neither ask it nor wait for it."""
        self._lease_s.pop(worker, None)
        self._asked.pop(worker, None)
        self._alive.pop(worker, None)
        self._next.pop(worker, None)

    def due(self, now: float) -> list[WorkerId]:
        """Whom to ask now: those who have answered before, and some time ago."""
        return [w for w, at in self._next.items() if now >= at and w not in self._asked]

    def silent(self, now: float) -> dict[WorkerId, float]:
        """Whose answer is overdue or whose lease has run out, and how long it has been silent."""
        found = {}
        for worker, (asked, limit) in self._asked.items():
            since, latest = self._deadline(worker, asked, limit)
            if now > latest:
                found[worker] = now - since
        return found

    def silence(self, worker: WorkerId, now: float) -> float | None:
        """For how long nothing has come from a worker; None if nothing ever has."""
        return now - self._alive[worker] if worker in self._alive else None

    def _deadline(self, worker: WorkerId, asked: float, limit: float | None) -> tuple[float, float]:
        """Since when a worker is waited for, and until when.

        A lease ends so long after the latest sign of life, but never so soon after the question
        that nobody could have answered.
        """
        lease, alive = self._lease_s.get(worker), self._alive.get(worker)
        if limit is not None or lease is None or alive is None:
            return asked, asked + (self._limit_s if limit is None else limit)
        return alive, max(alive + lease, asked + lease * (1 - 1 / ASKS_PER_LIMIT))
