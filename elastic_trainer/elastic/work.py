"""What has been handed out and what is still to do: segments, evaluations, checkpoints, the end.

Instructions of one generation are carried out in the order in which they were given: a checkpoint
that follows a segment saves the state at that segment's commit point.
"""

from dataclasses import dataclass

from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.goal import Goal
from elastic_trainer.elastic.policies import SnapshotPace
from elastic_trainer.types import WorkerId

CHECKPOINT_RETRY_S = 5.0  # first pause before a failed checkpoint is tried again; then doubled
MAX_FINAL_CHECKPOINT_TRIES = 4
MAX_SEGMENTS_IN_FLIGHT = 2  # one runs, the next is queued behind it, so stages never wait
SAVE_GRACE_S = 30.0  # how long a checkpoint may still be written after its generation has ended


@dataclass(kw_only=True)
class Saving:
    """A checkpoint under way, and who writes it. `until` limits it once its generation is over."""

    update: int
    workers: tuple[WorkerId, ...]
    until: float | None = None


class Work:
    """The ledger of one run. `reached` is the highest update ever committed."""

    def __init__(self, goal: Goal, *, committed: int, saved: int, evaluated: int = -1) -> None:
        self._goal = goal
        self.generation = 0
        self.committed = self.reached = committed
        self.saved = saved
        self.evaluated = evaluated
        self.end = goal.max_steps  # the last update; moves closer on stop and end of data
        self.end_status = "completed"
        self.end_reason = "all updates are done"
        self.saving: Saving | None = None
        self.evaluating: set[int] = set()
        self.in_flight: list[int] = []  # last updates of the segments that were handed out
        self.segment_updates = 1
        self.pace = SnapshotPace(goal.snapshot_every)
        self._workers: tuple[WorkerId, ...] = ()
        self._issued = committed
        self._short = False
        self._save_tries = 0
        self._retry_at: float | None = None
        self._final_eval_issued = False

    @property
    def idle(self) -> bool:
        """A commit point: nothing that was handed out is unfinished, checkpoints apart."""
        return not self.in_flight and not self.evaluating

    @property
    def at_end(self) -> bool:
        return self.end is not None and self.committed >= self.end and not self.in_flight

    @property
    def all_issued(self) -> bool:
        return self.end is not None and self._issued >= self.end

    # From one generation to the next.

    def leave(self, now: float) -> None:
        """The generation ends at a commit point; a checkpoint may go on being written."""
        if self.saving is not None and self.saving.until is None:
            self.saving.until = now + SAVE_GRACE_S

    def drop(self, now: float) -> None:
        """The generation broke off: what it had under way has failed."""
        self.in_flight, self.evaluating = [], set()
        self._final_eval_issued = False
        if self.saving is not None:
            self.saving, self._retry_at = None, now + CHECKPOINT_RETRY_S
        if self.end_status != "completed" and self.end is not None:
            self.end = min(self.end, self.reached)  # asked to end: only regain what was committed

    def rewind(self, update: int) -> None:
        """Go on after `update`, which is being restored."""
        self.committed = self._issued = update
        self.reached = max(self.reached, update)

    def begin(self, generation: int, workers: tuple[WorkerId, ...], segment_updates: int) -> None:
        """A generation is ready. Unless it is the first, something is committed soon."""
        self._short = self.generation > 0 and not self._goal.grid
        self.generation, self._workers = generation, workers
        self.segment_updates = max(1, segment_updates)
        self.in_flight, self.evaluating = [], set()
        self._final_eval_issued = False
        self.pace.restart()

    # Handing out.

    def issue(self) -> list[do.Instruction]:
        """As much as may be in flight, with what is due behind it."""
        out = self._owed_evaluation()
        while (segment := self._next_segment()) is not None:
            out.append(segment)
            out.extend(self._after_segment(segment.last_update))
        return out

    def _owed_evaluation(self) -> list[do.Instruction]:
        """One that was asked for, and lost with its generation."""
        period, update = self._goal.eval_steps, self.committed
        owed = period and self._issued == update and update % period == 0
        done = max(self.evaluated, self._goal.start_update)
        if not owed or update <= done or update in self.evaluating or self.all_issued:
            return []
        return [self._evaluate(update, "it was interrupted")]

    def _next_segment(self) -> do.RunSegment | None:
        if len(self.in_flight) >= MAX_SEGMENTS_IN_FLIGHT or self.all_issued:
            return None
        first, length = self._issued + 1, self.segment_updates
        if self._goal.grid:
            last = (self._issued // length + 1) * length
        else:
            last = self._issued + (1 if self._short else length)
        for period in (self._goal.eval_steps, self._goal.save_steps):
            if period:  # commit points must fall on what is asked for at them
                last = min(last, (self._issued // period + 1) * period)
        if self.end is not None:
            last = min(last, self.end)
        self._issued, self._short = last, False
        self.in_flight.append(last)
        return do.RunSegment(
            generation=self.generation,
            first_update=first,
            last_update=last,
            snapshot=self.pace.choose(first, last),
            reason="next updates",
        )

    def _after_segment(self, update: int) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        if self.all_issued:
            return out  # `finish` evaluates and saves the last state
        evals, saves = self._goal.eval_steps, self._goal.save_steps
        if evals and update % evals == 0 and update > self.evaluated:
            out.append(self._evaluate(update, f"every {evals} updates"))
        due = saves and update % saves == 0 and update > self.saved
        if due and self.saving is None and self._retry_at is None:
            out.append(self._save(update, f"every {saves} updates"))
        return out

    def retry_save(self, now: float) -> list[do.Instruction]:
        """A failed checkpoint is tried again with the newest state, at a commit point."""
        if self.saving is not None and self.saving.until is not None and now >= self.saving.until:
            self.saving, self._retry_at = None, now
        wanted = self._retry_at is not None and now >= self._retry_at
        if not wanted or self.saving is not None or self._issued <= self.saved:
            return []
        self._retry_at = None
        return [self._save(self._issued, f"try {self._save_tries + 1} after a failure")]

    def save_now(self, now: float, reason: str) -> list[do.Instruction]:
        """Save the commit point at which the run stands, unless that is under way or done."""
        if self.saving is not None or self._retry_at is not None:
            return self.retry_save(now)
        return [self._save(self.committed, reason)] if self.committed > self.saved else []

    def _evaluate(self, update: int, reason: str) -> do.Evaluate:
        self.evaluating.add(update)
        return do.Evaluate(generation=self.generation, update=update, reason=reason)

    def _save(self, update: int, reason: str) -> do.SaveCheckpoint:
        self.saving = Saving(update=update, workers=self._workers)
        return do.SaveCheckpoint(generation=self.generation, update=update, reason=reason)

    # The end.

    def end_at(self, update: int, status: str, reason: str) -> bool:
        """Let the run end after `update`; False if it ends no later anyway."""
        if self.end is not None and update >= self.end:
            return False
        self.end, self.end_status, self.end_reason = max(update, self.committed), status, reason
        # Segments that the data cannot fill end early: what was issued beyond will not come.
        self._issued = min(self._issued, self.end)
        self.in_flight = sorted({min(last, self.end) for last in self.in_flight})
        self.in_flight = [last for last in self.in_flight if last > self.committed]
        self.evaluating = {u for u in self.evaluating if u <= self.end}
        if self.saving is not None and self.saving.update > self.end:
            self.saving = None
        return True

    @property
    def issued(self) -> int:
        return self._issued

    def last_state(self) -> None:
        """The last state is saved at once, and with all its tries, whatever failed before."""
        self._save_tries, self._retry_at = 0, None

    def finish(self) -> tuple[list[do.Instruction], bool]:
        """What is still to be done with the last state, and whether all of it is done."""
        out: list[do.Instruction] = []
        wants_eval = self._goal.final_eval and self.end_status == "completed"
        if wants_eval and not self._final_eval_issued and self.evaluated < self.committed:
            self._final_eval_issued = True
            out.append(self._evaluate(self.committed, "the last state"))
        unsaved = self.committed > self.saved
        if unsaved and self.saving is None and self._retry_at is None:
            out.append(self._save(self.committed, "the last state"))
        evaluated = not wants_eval or self.evaluated >= self.committed
        return out, not unsaved and self.saving is None and evaluated

    # Facts.

    def segment_done(self, last: int) -> bool:
        """False if that was known."""
        if last <= self.committed or last > self._issued:
            return False
        self.committed = last
        self.reached = max(self.reached, last)
        self.in_flight = [u for u in self.in_flight if u > last]
        return True

    def evaluation_done(self, update: int) -> None:
        self.evaluating.discard(update)
        self.evaluated = max(self.evaluated, update)

    def checkpoint_written(self, update: int) -> None:
        """Counts only for what is committed: not if its generation broke off before it ended."""
        if self.saving is not None and self.saving.update == update:
            self.saving = None
        if not self.saved < update <= self.committed:
            return
        self.saved = update
        if self.saving is None:
            self._retry_at, self._save_tries = None, 0

    def checkpoint_failed(self, update: int, now: float, finishing: bool) -> bool:
        """Returns whether there are no more tries. Only that of the last state must succeed."""
        if self.saving is None or self.saving.update != update:
            return False
        self.saving = None
        if finishing and update < self.committed:
            return False  # it was begun before the end: the last state gets its tries
        self._save_tries += 1
        if finishing and self._save_tries >= MAX_FINAL_CHECKPOINT_TRIES:
            return True
        self._retry_at = now + CHECKPOINT_RETRY_S * 2 ** min(self._save_tries - 1, 6)
        return False
