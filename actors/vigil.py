"""No wait of the coordinator without a deadline: who is silent, and whose work stands still."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from elastic_trainer.actors.planning import longest_action_s
from elastic_trainer.actors.pulse import ASKS_PER_LIMIT, Pulse
from elastic_trainer.actors.watch import Mark, Watch
from elastic_trainer.config import Config
from elastic_trainer.types import Plan, WorkerId


class Call(Protocol):
    """A remote call, as `handles.Pending` is one."""

    worker: WorkerId
    line: str


class Vigil:
    """Keeps the deadlines of all calls and actors of one run.

    `start_limit_s` is for calls that import, open storage or build layers for the first time: the
    start-up time of the cluster and the stall limit. A call without a limit of its own gets
    `work_limit_s`: longer than waits on the workers by the time in which their progress becomes
    known, so that a worker's own error, which knows more, comes first.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        stall_s = config.elastic.stall_limit_s
        self.start_limit_s = config.cluster.start_timeout_s + stall_s
        self.work_limit_s = stall_s + stall_s / ASKS_PER_LIMIT
        self._pulse = Pulse(stall_s)
        self._watch: Watch[Call] = Watch()
        self._clock = clock

    def planned(self, plan: Plan) -> None:
        """Work now has actions, the longest of which must not look like standing still."""
        self.work_limit_s += longest_action_s(plan)

    def sent(self, call: Call, limit_s: float | None = None) -> None:
        """A call was sent; fails the run once its line of work stands still for `limit_s`."""
        limit_s = self.work_limit_s if limit_s is None else limit_s
        self._watch.begin(call, call.line, limit_s, self._clock())

    def returned(self, call: Call) -> None:
        self._watch.end(call, self._clock())

    def asked(self, call: Call, limit_s: float | None = None) -> None:
        """A call was sent that its worker answers at once, whatever else it does."""
        self._pulse.ask(call.worker, self._clock(), limit_s)
        self._watch.begin(call, call.line, math.inf, self._clock())  # the pulse has its deadline

    def answered(self, worker: WorkerId) -> None:
        self._pulse.answered(worker, self._clock())

    def told(self, worker: WorkerId, line: str, mark: Mark) -> None:
        """A worker has answered and says how far it is."""
        self.answered(worker)
        self._watch.mark(worker, line, mark, self._clock())

    def due(self) -> set[WorkerId]:
        """Whom to ask now."""
        return set(self._pulse.due(self._clock()))

    def silent(self) -> Iterable[tuple[WorkerId, str]]:
        """Who is lost, and why."""
        for worker, silent_s in self._pulse.silent(self._clock()).items():
            yield worker, f"it has not answered for {silent_s:.0f} s; is it stopped or overloaded?"

    def stalled(self, name: Callable[[WorkerId], str]) -> str | None:
        """Why the run must end although every process answers; None while all is well."""
        overdue = self._watch.overdue(self._clock())
        if not overdue:
            return None
        workers = list(dict.fromkeys(call.worker for call in overdue))
        places = (f"{name(w)}, at {self._watch.place(w) or 'its start'}" for w in workers)
        return (
            f"no progress for {max(overdue.values()):.0f} s: {'; '.join(places)}. Does the storage "
            "answer, does a layer hang? elastic.stall_limit_s sets the limit"
        )

    def overdue(self) -> dict[Call, float]:
        """Calls whose work stands still beyond its limit, and for how many seconds it does."""
        return self._watch.overdue(self._clock())

    def latest(self, worker: WorkerId) -> Mark | None:
        """How far a worker was when it last said so."""
        return self._watch.latest(worker)

    def dropped(self, call: Call) -> None:
        """Nobody waits for this call any more."""
        self._watch.drop(call)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, or dismissed."""
        self._pulse.forget(worker)
        self._watch.forget(worker)

    def clear(self) -> None:
        """Nobody waits for any call any more."""
        self._watch.clear()
