"""Which remote calls stand still.

The pulse tells of processes that do not answer. A process may answer although the thread that works
hangs: in storage, in a reader, in a layer. So each call carries a limit, and the clock of a call
starts anew whenever its line of work moves on: slow work is not failed, work that stands still is.
Calls of one line wait for each other (all stages of a pipeline are one line), so that a stage that
waits for a slow one is not blamed.
"""

from typing import Generic, NamedTuple, TypeVar

from elastic_trainer.types import WorkerId

K = TypeVar("K")


class Standing(NamedTuple):
    """Where a stage stands in a segment: how many of its actions are done, and for whose message it
    waits (a stage's, or `schedule.culprit.LOADER`'s), if it does.
    """

    generation: int
    segment: int
    done: int
    waits_for: int | None = None


class Mark(NamedTuple):
    """How far a worker is: `at` changes with every piece of work, `place` says it in words.

    `snapshot_update`: the newest update whose snapshot stands at two places, -1 if there is none.
    `standing`: None outside of segments.
    """

    at: tuple[int, int]
    place: str
    snapshot_update: int = -1
    standing: Standing | None = None


class Watch(Generic[K]):
    """Keeps the time of calls and of the lines of work that they belong to.

    Times are seconds on any clock that never goes back.
    """

    def __init__(self) -> None:
        self._calls: dict[K, tuple[str, float, float]] = {}  # line, begin, limit
        self._moved: dict[str, float] = {}
        self._marks: dict[WorkerId, Mark] = {}
        self._standings: dict[WorkerId, Standing] = {}
        self._changed: dict[WorkerId, float] = {}

    def begin(self, call: K, line: str, limit_s: float, now: float) -> None:
        """A call was sent; its line may stand still for `limit_s`."""
        self._calls[call] = line, now, limit_s

    def end(self, call: K, now: float) -> None:
        """The call has returned, which moves its line on."""
        if (known := self._calls.pop(call, None)) is not None:
            self._moved[known[0]] = now

    def drop(self, call: K) -> None:
        """Nobody waits for the call any more."""
        self._calls.pop(call, None)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for known in (self._marks, self._standings, self._changed):
            known.pop(worker, None)
        for line in [line for line in self._moved if line.split()[0] == worker]:
            del self._moved[line]  # of this worker alone, like its control calls

    def latest(self, worker: WorkerId) -> Mark | None:
        """What the worker said last."""
        return self._marks.get(worker)

    def mark(self, worker: WorkerId, line: str, mark: Mark, now: float) -> None:
        """A worker of the line says how far it is."""
        before = self._marks.get(worker)
        if before is None or before.at != mark.at:
            self._moved[line] = self._changed[worker] = now
        self._marks[worker] = mark
        if mark.standing is not None:
            self._standings[worker] = mark.standing

    def place(self, worker: WorkerId) -> str:
        """Where the worker was when it last said so; may be empty."""
        mark = self._marks.get(worker)
        return mark.place if mark is not None else ""

    def standing(self, worker: WorkerId) -> Standing | None:
        """Where the worker was in the newest segment of which it said so."""
        return self._standings.get(worker)

    def still_s(self, worker: WorkerId, now: float) -> float:
        """For how long the worker has said the same."""
        return now - self._changed.get(worker, now)

    def overdue(self, now: float) -> dict[K, float]:
        """Calls whose lines stand still beyond their limits, and for how long they do."""
        still = {
            call: (now - max(begun, self._moved.get(line, begun)), limit)
            for call, (line, begun, limit) in self._calls.items()
        }
        return {call: waited for call, (waited, limit) in still.items() if waited > limit}

    def clear(self) -> None:
        """Forget all calls."""
        self._calls.clear()
