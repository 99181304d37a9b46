"""The elastic core: what happens next, decided purely.

`State.handle(event, now)` returns instructions; it reads no clock, does no I/O and knows no Ray.
Instructions of one generation are carried out in the order in which they were given: a checkpoint
that follows a segment saves the state at that segment's commit point.

    STARTING ──all joined──▶ PLANNING ──planned──▶ RESTORING ──configured──▶ RUNNING
    RUNNING ──limit, stop or end of data──▶ FINISHING ──saved, evaluated──▶ FINISHED
    before RUNNING ──stop──▶ FINISHED
    any ──worker lost, failure──▶ FAILED

Membership is fixed: a lost worker fails the run, which `--resume auto` continues.
"""

from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do

CHECKPOINT_RETRY_S = 5.0  # first pause before a failed checkpoint is tried again; then doubled
MAX_FINAL_CHECKPOINT_TRIES = 4
MAX_SEGMENTS_IN_FLIGHT = 2  # one runs, the next is queued behind it, so stages never wait


class Phase(StrEnum):
    """Where the run stands."""

    STARTING = "starting"
    PLANNING = "planning"
    RESTORING = "restoring"
    RUNNING = "running"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What the run is to reach. Periods count updates, 0 means never.

    `start_update` is the state to restore, 0 for a new run.
    """

    num_workers: int
    max_steps: int | None
    eval_steps: int
    save_steps: int
    start_update: int = 0
    final_eval: bool = True


class State:
    """The state machine of one run."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.phase = Phase.STARTING
        self.generation = 0
        self.workers: list[str] = []
        self.committed = goal.start_update
        self.saved = goal.start_update
        self.evaluated = -1
        self.reason = "waiting for workers"
        self._issued = goal.start_update
        self._in_flight: list[int] = []  # last updates of the segments that were handed out
        self._end = goal.max_steps  # the last update; moves closer on stop and end of data
        self._end_status = "completed"
        self._segment_updates = 1
        self._saving: int | None = None
        self._save_tries = 0
        self._retry_at: float | None = None
        self._final_eval_issued = False

    @property
    def done(self) -> bool:
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    def start(self) -> list[do.Instruction]:
        """The first instruction of a run."""
        count = self.goal.num_workers
        return [do.StartWorkers(num_workers=count, reason=f"the run needs {count} workers")]

    def handle(self, event: ev.Event, now: float) -> list[do.Instruction]:
        """Take in one fact and say what to do.

        Args:
            event: what happened.
            now: seconds on any clock that never goes back.
        """
        if self.done:
            return []
        match event:
            case ev.WorkerJoined():
                return self._on_joined(event)
            case ev.Planned():
                return self._on_planned(event)
            case ev.WorkerLost():
                return self._fail(
                    f"worker {event.worker} was lost at update {self.committed}: {event.cause}"
                )
            case ev.Failed(generation=g) if g == self.generation:
                return self._fail(event.reason)
            case ev.Configured(generation=g) if g == self.generation:
                self.phase, self.reason = Phase.RUNNING, ""
                self.committed = self._issued = event.update
                return self._advance(now)
            case ev.SegmentDone(generation=g) if g == self.generation:
                return self._on_segment_done(event, now)
            case ev.DataEnded(generation=g) if g == self.generation:
                return self._end_at(event.update, "completed", now)
            case ev.EvaluationDone(generation=g) if g == self.generation:
                self.evaluated = max(self.evaluated, event.update)
                return self._advance(now)
            case ev.CheckpointWritten():
                return self._on_saved(event, now)
            case ev.CheckpointFailed():
                return self._on_save_failed(event, now)
            case ev.StopRequested():
                return self._on_stop(event, now)
            case ev.Tick():
                return self._advance(now)
        return []  # a fact of an older generation

    def _on_joined(self, event: ev.WorkerJoined) -> list[do.Instruction]:
        if event.worker not in self.workers:
            self.workers.append(event.worker)
        if self.phase is not Phase.STARTING or len(self.workers) < self.goal.num_workers:
            return []
        self.phase, self.reason = Phase.PLANNING, "all workers are there"
        self.generation += 1
        workers = tuple(sorted(self.workers, key=lambda w: (len(w), w)))
        return [do.MakePlan(generation=self.generation, workers=workers, reason=self.reason)]

    def _on_planned(self, event: ev.Planned) -> list[do.Instruction]:
        if self.phase is not Phase.PLANNING or event.plan.generation != self.generation:
            return []
        start = self.goal.start_update
        self.phase = Phase.RESTORING
        self.reason = f"restoring update {start}" if start else "initial weights"
        self._segment_updates = max(1, event.segment_updates)
        return [do.Configure(plan=event.plan, update=start, reason=self.reason)]

    def _on_segment_done(self, event: ev.SegmentDone, now: float) -> list[do.Instruction]:
        self.committed = event.last_update
        self._in_flight = [last for last in self._in_flight if last > event.last_update]
        return self._advance(now)

    def _on_stop(self, event: ev.StopRequested, now: float) -> list[do.Instruction]:
        if self.phase in (Phase.STARTING, Phase.PLANNING, Phase.RESTORING):
            self.phase, self.reason = Phase.FINISHED, event.reason
            return [do.Finish(status="stopped", update=self.committed, reason=event.reason)]
        return self._end_at(self._issued, "stopped", now, event.reason)

    def _end_at(
        self, update: int, status: str, now: float, reason: str = "the last epoch is over"
    ) -> list[do.Instruction]:
        if self._end is None or update < self._end:
            self._end, self._end_status, self.reason = update, status, reason
            # Segments that the data cannot fill end early: what was issued beyond will not come.
            self._issued = min(self._issued, update)
            self._in_flight = sorted({min(last, update) for last in self._in_flight})
            self._in_flight = [last for last in self._in_flight if last > self.committed]
            if self._saving is not None and self._saving > update:
                self._saving = None
        return self._advance(now)

    def _on_saved(self, event: ev.CheckpointWritten, now: float) -> list[do.Instruction]:
        self.saved = max(self.saved, event.update)
        self._saving, self._retry_at, self._save_tries = None, None, 0
        return self._advance(now)

    def _on_save_failed(self, event: ev.CheckpointFailed, now: float) -> list[do.Instruction]:
        self._saving = None
        if self.phase is Phase.FINISHING and event.update < self.committed:
            return self._advance(now)  # it was begun before the end: the last state gets its tries
        self._save_tries += 1
        if self.phase is Phase.FINISHING and self._save_tries >= MAX_FINAL_CHECKPOINT_TRIES:
            return self._fail(
                f"training reached update {self.committed}, but its checkpoint could not be "
                f"written: {event.reason}; the newest complete checkpoint is of update {self.saved}"
            )
        self._retry_at = now + CHECKPOINT_RETRY_S * 2 ** min(self._save_tries - 1, 6)
        return []

    def _at_end(self) -> bool:
        return self._end is not None and self.committed >= self._end

    def _advance(self, now: float) -> list[do.Instruction]:
        """Hand out as much as may be in flight, and finish when everything is done."""
        if self.phase not in (Phase.RUNNING, Phase.FINISHING):
            return []
        out: list[do.Instruction] = []
        while (segment := self._next_segment()) is not None:
            out.append(segment)
            out.extend(self._after_segment(segment.last_update))
        at_end = self._at_end() and not self._in_flight
        if at_end and self.phase is Phase.RUNNING:
            # The last state is saved at once, and with all its tries, whatever failed before.
            self.phase, self._save_tries, self._retry_at = Phase.FINISHING, 0, None
        out.extend(self._retry_save(now))
        if at_end:
            out.extend(self._finish())
        return out

    def _next_segment(self) -> do.RunSegment | None:
        if len(self._in_flight) >= MAX_SEGMENTS_IN_FLIGHT:
            return None
        if self._end is not None and self._issued >= self._end:
            return None
        first = self._issued + 1
        last = self._issued + self._segment_updates
        for period in (self.goal.eval_steps, self.goal.save_steps):
            if period:  # commit points must fall on what is asked for at them
                last = min(last, (self._issued // period + 1) * period)
        if self._end is not None:
            last = min(last, self._end)
        self._issued = last
        self._in_flight.append(last)
        return do.RunSegment(
            generation=self.generation, first_update=first, last_update=last, reason="next updates"
        )

    def _after_segment(self, update: int) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        if self._end is not None and update >= self._end:
            return out  # _finish evaluates and saves the last state
        if self.goal.eval_steps and update % self.goal.eval_steps == 0:
            out.append(self._evaluate(update, f"every {self.goal.eval_steps} updates"))
        due = self.goal.save_steps and update % self.goal.save_steps == 0
        if due and self._saving is None and self._retry_at is None:
            out.append(self._save(update, f"every {self.goal.save_steps} updates"))
        return out

    def _retry_save(self, now: float) -> list[do.Instruction]:
        """A failed checkpoint is tried again with the newest state, at a commit point."""
        if self._retry_at is None or now < self._retry_at or self._saving is not None:
            return []
        self._retry_at = None
        return [self._save(self._issued, f"try {self._save_tries + 1} after a failure")]

    def _evaluate(self, update: int, reason: str) -> do.Evaluate:
        return do.Evaluate(generation=self.generation, update=update, reason=reason)

    def _save(self, update: int, reason: str) -> do.SaveCheckpoint:
        self._saving = update
        return do.SaveCheckpoint(generation=self.generation, update=update, reason=reason)

    def _finish(self) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        wants_eval = self.goal.final_eval and self._end_status == "completed"
        if wants_eval and not self._final_eval_issued:
            self._final_eval_issued = True
            out.append(self._evaluate(self.committed, "the last state"))
        unsaved = self.committed > self.saved
        if unsaved and self._saving is None and self._retry_at is None:
            out.append(self._save(self.committed, "the last state"))
        evaluated = not wants_eval or self.evaluated >= self.committed
        if not unsaved and self._saving is None and evaluated:
            self.phase = Phase.FINISHED
            reason = self.reason if self._end_status == "stopped" else "all updates are done"
            out.append(do.Finish(status=self._end_status, update=self.committed, reason=reason))
        return out

    def _fail(self, reason: str) -> list[do.Instruction]:
        self.phase, self.reason = Phase.FAILED, reason
        return [
            do.Abort(generation=self.generation, reason=reason),
            do.Finish(status="failed", update=self.committed, reason=reason),
        ]
