"""No wait of the coordinator without a deadline: who is silent, and whose work stands still."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elastic_trainer.actors.planning import longest_action_s
from elastic_trainer.actors.pulse import ASKS_PER_LIMIT, Pulse
from elastic_trainer.actors.watch import Mark, Watch
from elastic_trainer.config import Config
from elastic_trainer.schedule.culprit import fed, find_culprits
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import Plan, WorkerId


class Call(Protocol):
    """A remote call, as `pending.Pending` is one."""

    worker: WorkerId
    line: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Standstill:
    """Work that has stood still for `still_s` seconds, and whose it is.

    `wedged`: the first of `workers` holds up all others, as the schedule says, and another one in
    its place would help. Otherwise these are the workers whose calls do not return.
    """

    workers: tuple[WorkerId, ...]
    reason: str
    still_s: float
    wedged: bool


@dataclass(frozen=True, slots=True)
class _HandedOut:
    """A segment, who works on each stage, who feeds each stage, and who has reported."""

    segment: Segment
    workers: tuple[WorkerId, ...]
    loaders: tuple[WorkerId, ...]
    reported: set[WorkerId] = field(default_factory=set)

    @property
    def missing(self) -> list[WorkerId]:
        return [worker for worker in self.workers if worker not in self.reported]

    def culprits(self, watch: Watch[Call]) -> list[WorkerId]:
        """Who holds up the others, the first cause first."""
        at = self.segment.generation, self.segment.index
        progress: list[int] = []
        waiting: dict[int, int] = {}
        for stage, worker in enumerate(self.workers):
            standing = watch.standing(worker)
            place = None if standing is None else (standing.generation, standing.segment)
            if worker in self.reported or (place is not None and place > at):
                progress.append(len(self.segment.actions[stage]))
            elif standing is None or place != at:
                progress.append(0)
            else:
                progress.append(standing.done)
                if standing.waits_for is not None:
                    waiting[stage] = standing.waits_for
        found = find_culprits(self.segment.actions, progress, waiting)
        named = (self.workers[s] if s >= 0 else self.loaders[fed(s)] for s in found)
        return list(dict.fromkeys(named)) or self.missing


class Vigil:
    """Keeps the deadlines of all calls and actors of one run.

    `start_limit_s` is for calls that import, open storage or build layers for the first time: the
    start-up time of the cluster and the stall limit. A call without a limit of its own gets
    `work_limit_s`: longer than waits on the workers by the time in which their progress becomes
    known, so that a worker's own error, which knows more, comes first.

    Whoever has answered once holds a lease. What is done for the first time may keep a process busy
    for longer: until a stage worker has run a segment, and always for a loader, the lease is
    suspended while a call with `start_limit_s` is under way.

    Look at least every `poll_s` seconds: time in which nobody looked extends all leases.
    """

    def __init__(self, config: Config, clock: Callable[[], float] = time.monotonic) -> None:
        self.stall_s = stall_s = config.elastic.stall_limit_s
        self.lease_s = min(config.elastic.lease_limit_s, stall_s)
        self.poll_s = self.lease_s / (2 * ASKS_PER_LIMIT)
        self.start_limit_s = config.cluster.start_timeout_s + stall_s
        self._base_limit_s = stall_s + self.lease_s
        self.work_limit_s = self._base_limit_s
        self._pulse = Pulse(stall_s, self.lease_s / ASKS_PER_LIMIT)
        self._watch: Watch[Call] = Watch()
        self._starting: dict[WorkerId, set[Call]] = {}
        self._handed_out: list[_HandedOut] = []
        self._clock = clock
        self._looked: float | None = None

    def planned(self, plan: Plan) -> None:
        """Work now has actions, the longest of which must not look like standing still."""
        self.work_limit_s = self._base_limit_s + longest_action_s(plan)

    def sent(self, call: Call, limit_s: float | None = None) -> None:
        """A call was sent; it is overdue once its line of work stands still for `limit_s`."""
        if limit_s is not None and limit_s >= self.start_limit_s:
            self._starting.setdefault(call.worker, set()).add(call)
            self._lease(call.worker)
        limit_s = self.work_limit_s if limit_s is None else limit_s
        self._watch.begin(call, call.line, limit_s, self._clock())

    def returned(self, call: Call) -> None:
        """The call has come back, with a result or an error."""
        self._watch.end(call, self._clock())
        self._pulse.seen(call.worker, self._clock())
        self._started(call)

    def dropped(self, call: Call) -> None:
        """Nobody waits for this call any more. Not for questions: their answers are the pulse."""
        self._watch.drop(call)
        self._started(call)

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
        self._lease(worker)

    def handed_out(
        self, segment: Segment, workers: Sequence[WorkerId], loaders: Sequence[WorkerId]
    ) -> None:
        """A segment was given to these workers, which these loaders feed, stage by stage."""
        self._handed_out.append(_HandedOut(segment, tuple(workers), tuple(loaders)))

    def reported(self, segment: Segment, worker: WorkerId) -> None:
        """A worker has done its part of a segment."""
        for given in self._handed_out:
            if given.segment is segment:
                given.reported.add(worker)
        self._handed_out = [given for given in self._handed_out if given.missing]

    def ended(self, generation: int) -> None:
        """This generation is over, and all before it: nobody works on their segments any more."""
        newer = [given for given in self._handed_out if given.segment.generation > generation]
        self._handed_out = newer

    def due(self) -> set[WorkerId]:
        """Whom to ask now."""
        return set(self._pulse.due(self._clock()))

    def silent(self) -> Iterable[tuple[WorkerId, str]]:
        """Who is lost, and why."""
        now = self._clock()
        if self._looked is not None and (absent_s := now - self._looked - 2 * self.poll_s) > 0:
            self._pulse.excuse(absent_s, now)
        self._looked = now
        for worker, silent_s in self._pulse.silent(now).items():
            yield worker, f"it has not answered for {silent_s:.0f} s; is it stopped or overloaded?"

    def silence_s(self, worker: WorkerId) -> float | None:
        """Seconds since the last sign of life of a worker; None if there never was one."""
        return self._pulse.silence(worker, self._clock())

    def still_s(self, worker: WorkerId) -> float:
        """For how many seconds a worker has said that it is at the same place."""
        return self._watch.still_s(worker, self._clock())

    def overdue(self) -> dict[Call, float]:
        """Calls whose work stands still beyond its limit, and for how many seconds it does."""
        return self._watch.overdue(self._clock())

    def latest(self, worker: WorkerId) -> Mark | None:
        """How far a worker was when it last said so."""
        return self._watch.latest(worker)

    def stalled(self, name: Callable[[WorkerId], str]) -> Standstill | None:
        """Work that stands still although every process answers; None while all is well.

        Args:
            name: a worker in words.
        """
        overdue = self.overdue()
        if not overdue:
            return None
        still_s = max(overdue.values())
        workers = list(dict.fromkeys(call.worker for call in overdue))
        for given in self._handed_out:
            if not set(workers).isdisjoint(given.workers):
                return self._standstill(given.culprits(self._watch), still_s, name, wedged=True)
        return self._standstill(workers, still_s, name, wedged=False)

    def blame(self, name: Callable[[WorkerId], str]) -> Standstill | None:
        """Who holds up the oldest segment that is out, when somebody gave up waiting; None: there
        is none. `still_s` is for how long that worker has not moved.

        Args:
            name: a worker in words.
        """
        if not self._handed_out:
            return None
        culprits = self._handed_out[0].culprits(self._watch)
        return self._standstill(culprits, self.still_s(culprits[0]), name, wedged=True)

    def forget(self, worker: WorkerId) -> None:
        """A worker is gone, or dismissed."""
        self._pulse.forget(worker)
        self._watch.forget(worker)
        self._starting.pop(worker, None)

    def clear(self) -> None:
        """Nobody waits for any call any more."""
        self._watch.clear()
        self._handed_out.clear()
        for worker in list(self._starting):
            self._starting.pop(worker)
            self._lease(worker)

    def _started(self, call: Call) -> None:
        calls = self._starting.get(call.worker, set())
        if call in calls:
            calls.discard(call)
            if not calls:
                del self._starting[call.worker]
            self._lease(call.worker)

    def _lease(self, worker: WorkerId) -> None:
        """Whether the worker's lease counts now."""
        latest = self._watch.latest(worker)
        if latest is None:
            return  # it has not said yet that it is there
        is_new = self._watch.standing(worker) is None
        suspended = is_new and bool(self._starting.get(worker))
        self._pulse.lease(worker, None if suspended else self.lease_s)

    def _standstill(
        self,
        workers: Sequence[WorkerId],
        still_s: float,
        name: Callable[[WorkerId], str],
        *,
        wedged: bool,
    ) -> Standstill:
        shown = workers[:1] if wedged else workers
        places = (f"{name(w)}, at {self._watch.place(w) or 'its start'}" for w in shown)
        reason = (
            f"no progress for {still_s:.0f} s: {'; '.join(places)}. Does the storage "
            "answer, does a layer hang? elastic.stall_limit_s sets the limit"
        )
        return Standstill(workers=tuple(workers), reason=reason, still_s=still_s, wedged=wedged)
