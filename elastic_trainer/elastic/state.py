"""The elastic core: what happens next, decided purely.

`State.handle(event, now)` returns instructions; it reads no clock, does no I/O and knows no Ray.

    STARTING ──enough workers──▶ PLANNING ──planned──▶ RESTORING ──configured──▶ RUNNING
    RUNNING ──change is worth it──▶ DRAINING ──commit point, stock taken──▶ RESTORING
    any of these with a generation ──loss──▶ RECOVERING ──planned, stock taken──▶ RESTORING
    DRAINING, RECOVERING ──fewer than MIN──▶ WAITING ──enough workers──▶ RECOVERING
    RUNNING ──limit, stop or end of data──▶ FINISHING ──saved, evaluated──▶ FINISHED
    any ──budget used up, or nothing would help──▶ FAILED
"""

from collections.abc import Mapping, Sequence

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.course import Course
from elastic_trainer.elastic.generations import Generations
from elastic_trainer.elastic.goal import Goal
from elastic_trainer.elastic.phase import GATHERING, WORKING, Phase
from elastic_trainer.elastic.policies import worth_it
from elastic_trainer.elastic.work import Work
from elastic_trainer.types import Plan, WorkerId

__all__ = ["Goal", "Phase", "State"]


class State(Course):
    """The state machine of one run."""

    def __init__(self, goal: Goal) -> None:
        """A run that begins."""
        work = Work(goal, committed=goal.start_update, saved=goal.start_update)
        super().__init__(goal, work, Generations())

    @classmethod
    def resumed(
        cls,
        goal: Goal,
        *,
        generation: int,
        workers: Sequence[WorkerId],
        plan: Plan | None,
        committed: int,
        saved: int,
        segment_updates: int,
        evaluated: int = -1,
        spent: Mapping[str, Sequence[int]] | None = None,
    ) -> "State":
        """The state of a run whose coordinator was replaced.

        Args:
            goal: as it was, with the limits in force.
            generation: the highest number given out so far.
            workers: those that were found alive.
            plan: the newest that was configured, None if there was none.
            committed: newest update known to be committed.
            saved: update of the newest complete checkpoint.
            segment_updates: as planned last.
            evaluated: the newest update evaluated.
            spent: of the budgets, as `State.spent` was.
        """
        state = cls(goal)
        state._staff.inherit(spent or {})
        state._gens = Generations(generation, plan)
        state._work = Work(goal, committed=committed, saved=saved, evaluated=evaluated)
        state._work.generation, state._work.segment_updates = generation, segment_updates
        for worker in workers:
            state._members.join(worker, "", float("-inf"))
        if plan is not None:
            state.phase = Phase.RECOVERING
        return state

    @property
    def idle(self) -> list[WorkerId]:
        """Those that hold no stage."""
        return [w for w in self.workers if w not in self._gens.holders]

    @property
    def draining(self) -> list[WorkerId]:
        """Those that are about to leave."""
        return list(self._members.leaving)

    @property
    def counts(self) -> dict[str, int]:
        """What was spent of each budget."""
        return self._staff.counts

    @property
    def spent(self) -> dict[str, tuple[int, int]]:
        """What a state that goes on in this one's place must know of the budgets."""
        return self._staff.spent

    @property
    def saved(self) -> int:
        return self._work.saved

    @property
    def evaluated(self) -> int:
        return self._work.evaluated

    def start(self) -> list[do.Instruction]:
        """The first instructions."""
        out = self._staff.ask(f"the run needs {self._staff.wanted} workers")
        if self.phase is Phase.RECOVERING:
            out += self._recover("the coordinator was replaced", 0.0)
        return out

    def handle(self, event: ev.Event, now: float) -> list[do.Instruction]:
        """Take in one fact and say what to do.

        Args:
            event: what happened.
            now: seconds on any clock that never goes back.
        """
        if self.done:
            return []
        return self._take(event, now) + self._keep_house()

    def _take(self, event: ev.Event, now: float) -> list[do.Instruction]:
        match event:
            case ev.WorkerLost():
                return self._on_lost(event, now)
            case ev.LoaderLost(worker=loader, node=node):
                name = f"{loader} (node {node})" if node else loader
                return self._disturbed(f"{name} was lost: {event.detail}", now)
            case ev.WorkersDraining():
                return self._on_draining(event, now)
            case ev.StopRequested():
                return self._end_run("stopped", event.reason, now)
            case ev.Planned():
                return self._on_planned(event, now)
            case ev.NotPlanned():
                return self._on_not_planned(event, now)
            case ev.CheckpointFailed():
                return self._on_save_failed(event, now)
            case ev.WorkerJoined():
                self._members.join(event.worker, event.node, now)
            case ev.ScaleRequested():
                gathering = self.phase in GATHERING
                self._staff.scale(event, None if gathering else len(self._gens.holders))
            case ev.CheckpointWritten():
                self._work.checkpoint_written(event.update)
            case ev.Tick():
                pass
            case _ if getattr(event, "generation", None) != self.generation:
                return []  # a fact of another generation
            case _:
                return self._take_current(event, now)
        return self._advance(now)

    def _take_current(self, event: ev.Event, now: float) -> list[do.Instruction]:
        """Facts of the generation that is entered."""
        work, working = self._work, self.phase in WORKING
        match event:
            case ev.Failed():
                return self._fail(event.reason)
            case ev.Disturbed():
                return self._disturbed(event.reason, now)
            case ev.StockTaken() if self._gens.stock_taken(event):
                return self._configure()
            case ev.Configured() if self.phase is Phase.RESTORING:
                change = self._gens.configured()
                self.phase, self.reason = Phase.RUNNING, ""
                self._staff.stands(len(change.workers))
                work.begin(self.generation, self._gens.holders, change.segment_updates)
            case ev.SegmentDone() if working and work.segment_done(event.last_update):
                self._staff.refill(work.reached)
            case ev.DataEnded() if working:
                if work.end_at(event.update, "completed", "all updates are done"):
                    self.reason = "the last epoch is over"
            case ev.EvaluationDone() if working:
                work.evaluation_done(event.update)
            case ev.SnapshotStored() if working:
                work.pace.stored(event.update, event.cost_s + event.behind_s, event.segment_s)
            case _:
                return []
        return self._advance(now)

    # Losses and announcements.

    def _on_lost(self, event: ev.WorkerLost, now: float) -> list[do.Instruction]:
        worker = event.worker
        why = f"worker {self._name(worker)} was lost at update {self.committed}: {event.detail}"
        announced = worker in self._members.leaving or event.cause is ev.Cause.SCALED_DOWN
        needed = self.phase not in GATHERING and self._gens.needs(worker)
        node = self._members.nodes.get(worker, "")
        if not self._members.remove(worker):
            return []
        self._staff.recount()
        if event.cause is ev.Cause.PREEMPTED:
            budget = "preemptions" if needed else None
        else:
            budget = "failures" if needed else "idle"
        if budget is not None and not announced:
            spent = self._staff.spend(budget, self._work.reached, now, node)
            stands_still = self.phase in GATHERING and not self._staff.enough
            if spent is not None and (needed or stands_still):
                return self._fail(f"{why}{spent}")
        if needed:
            return self._recover(why, now)
        if self._gens.entered:
            return self._configure()  # its stock may have been the last that was missing
        self._reconsider_first(worker)
        return self._advance(now)

    def _name(self, worker: WorkerId) -> str:
        stages = self.plan.stages if self.plan is not None else ()
        place = [f"stage {s.stage}" for s in stages if s.worker == worker]
        if node := self._members.nodes.get(worker):
            place.append(f"node {node}")
        return f"{worker} ({', '.join(place)})" if place else worker

    def _disturbed(self, why: str, now: float) -> list[do.Instruction]:
        """The work broke off, though nobody is known to be lost."""
        spent = self._staff.spend("failures", self._work.reached, now, "")
        if spent is not None:
            return self._fail(f"{why}{spent}")
        if self.phase not in GATHERING:
            return self._recover(f"{why} (at update {self.committed})", now)
        self._reconsider_first(None)
        return self._advance(now)

    def _reconsider_first(self, worker: WorkerId | None) -> None:
        """Before the first generation: plan anew if this worker, or whoever it was, is gone."""
        change = self._gens.change
        if self.phase is Phase.PLANNING and change is not None:
            if worker is None or worker in change.workers:
                self._gens.drop()
                self.phase = Phase.STARTING

    def _on_draining(self, event: ev.WorkersDraining, now: float) -> list[do.Instruction]:
        by = None if event.deadline_s is None else now + event.deadline_s
        new = self._members.announce(event.workers, by, event.reason)
        for worker in new:
            self._reconsider_first(worker)
        if self.phase not in GATHERING and set(new) & set(self._gens.holders):
            spent = self._staff.spend("preemptions", self._work.reached, now, "")
            if spent is not None:
                return self._end_run("failed", f"{event.reason}{spent}", now)
        return self._advance(now)

    # Plans and checkpoints.

    def _on_planned(self, event: ev.Planned, now: float) -> list[do.Instruction]:
        change = self._gens.planned(event)
        if change is None:
            return []
        if self.phase is Phase.RECOVERING:
            return self._configure()
        if self.phase is Phase.PLANNING:
            if change.workers != self._members.lineup(None, self._staff.most):
                return self._plan_first()  # others have joined; the profile is known by now
            return self._restore(self._gens.first_configuration(event.plan, self._work.committed))
        assert self.plan is not None
        worth, figures = worth_it(self.plan, event.plan)
        if not worth and not change.compulsory:
            return self._refuse(figures, now)
        change.reason = change.reason if change.compulsory else f"{change.reason}: {figures}"
        self.phase, self.reason = Phase.DRAINING, change.reason
        return self._advance(now)

    def _on_not_planned(self, event: ev.NotPlanned, now: float) -> list[do.Instruction]:
        if not self._gens.not_planned(event):
            return []
        if self.phase is Phase.RUNNING:
            return self._refuse(event.reason, now)
        change = self._gens.refuse()
        if len(change.workers) >= self._staff.most:
            return self._fail(event.reason)
        out = self._wait(event.reason, now)
        self._gens.refused.add(change.workers)
        return out

    def _refuse(self, why: str, now: float) -> list[do.Instruction]:
        refused = self._gens.refuse().workers
        idle = [w for w in refused if w not in self._gens.holders]
        what = f"{', '.join(idle)} not put to use" if idle else f"no plan for {', '.join(refused)}"
        return [do.Note(reason=f"{what}: {why}"), *self._advance(now)]

    def _on_save_failed(self, event: ev.CheckpointFailed, now: float) -> list[do.Instruction]:
        finishing = self.phase is Phase.FINISHING
        if self._work.checkpoint_failed(event.update, now, finishing):
            return self._fail(
                f"training reached update {self.committed}, but its checkpoint could not be "
                f"written: {event.reason}; the newest complete checkpoint is of update {self.saved}"
            )
        return self._advance(now)
