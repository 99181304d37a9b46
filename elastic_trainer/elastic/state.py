"""The elastic core: what happens next, decided purely.

`State.handle(event, now)` returns instructions; it reads no clock, does no I/O and knows no Ray.

    STARTING ──enough workers──▶ PLANNING ──planned──▶ RESTORING ──configured──▶ RUNNING
    RUNNING ──planned change──▶ DRAINING ──commit point, stock taken──▶ RESTORING
    RUNNING, DRAINING, RESTORING, FINISHING ──loss──▶ RECOVERING ──planned, stock taken──▶ RESTORING
    DRAINING, RECOVERING ──fewer than MIN workers──▶ WAITING ──enough again──▶ RECOVERING
    RUNNING ──limit, stop or end of data──▶ FINISHING ──saved, evaluated──▶ FINISHED
    any ──budget used up, or what no other workers would repair──▶ FAILED

A generation is entered by `TakeStock` (the first one by `Configure`) and configured once at most.
Every plan that is asked for has a number of its own, so an outdated one is known by it.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.changes import (
    Change,
    configuration,
    first_configuration,
    still_fits,
    wish,
)
from elastic_trainer.elastic.goal import Goal
from elastic_trainer.elastic.members import holders
from elastic_trainer.elastic.policies import worth_it
from elastic_trainer.elastic.staff import Staff
from elastic_trainer.elastic.work import Work
from elastic_trainer.types import Plan, WorkerId

__all__ = ["Goal", "Phase", "State"]

LEAVE_MARGIN_S = 10.0  # so long before a departure that leaves too few workers, training pauses


class Phase(StrEnum):
    """Where the run stands."""

    STARTING = "starting"
    PLANNING = "planning"
    RESTORING = "restoring"
    RUNNING = "running"
    DRAINING = "draining"
    RECOVERING = "recovering"
    WAITING = "waiting"
    FINISHING = "finishing"
    FINISHED = "finished"
    FAILED = "failed"


class State:
    """The state machine of one run."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.phase = Phase.STARTING
        self.generation = 0
        self.reason = "waiting for workers"
        self.plan: Plan | None = None  # the newest one that workers were configured with
        self.work = Work(goal, committed=goal.start_update, saved=goal.start_update)
        self.staff = Staff(goal)
        self._last_generation = 0  # the highest number given out
        self._change: Change | None = None
        self._refused: set[tuple[WorkerId, ...]] = set()  # would not be faster than the plan
        self._sources: frozenset[str] = frozenset()

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
        """
        state = cls(goal)
        state.generation = state._last_generation = generation
        state.plan = plan
        state.work = Work(goal, committed=committed, saved=saved, evaluated=evaluated)
        state.work.segment_updates = segment_updates
        state.work.generation = generation
        for worker in workers:
            state.staff.members.join(worker, "", float("-inf"))
        if plan is not None:
            state.phase = Phase.RECOVERING
        return state

    @property
    def done(self) -> bool:
        return self.phase in (Phase.FINISHED, Phase.FAILED)

    @property
    def workers(self) -> list[WorkerId]:
        """All that live, in the order in which they came."""
        return list(self.staff.members.nodes)

    @property
    def idle(self) -> list[WorkerId]:
        """Those that hold no stage."""
        held = holders(self.plan)
        return [w for w in self.workers if w not in held]

    @property
    def draining(self) -> list[WorkerId]:
        """Those that are about to leave."""
        return list(self.staff.members.leaving)

    @property
    def counts(self) -> dict[str, int]:
        """What was spent of each budget."""
        return self.staff.counts

    @property
    def committed(self) -> int:
        return self.work.committed

    @property
    def saved(self) -> int:
        return self.work.saved

    @property
    def evaluated(self) -> int:
        return self.work.evaluated

    def start(self) -> list[do.Instruction]:
        """The first instructions."""
        out = self.staff.ask(f"the run needs {self.staff.wanted} workers")
        if self.phase is Phase.RECOVERING:
            out += self._recover("the coordinator was replaced", 0.0, abort=False)
        return out

    def handle(self, event: ev.Event, now: float) -> list[do.Instruction]:
        """Take in one fact and say what to do.

        Args:
            event: what happened.
            now: seconds on any clock that never goes back.
        """
        if self.done:
            return []
        return self._take(event, now) + self._keep_house(now)

    def _take(self, event: ev.Event, now: float) -> list[do.Instruction]:
        stale = getattr(event, "generation", self.generation) != self.generation
        match event:
            case ev.WorkerJoined():
                self.staff.members.join(event.worker, event.node, now)
            case ev.WorkerLost():
                return self._on_lost(event, now)
            case ev.WorkersDraining():
                return self._on_draining(event, now)
            case ev.ScaleRequested():
                self.staff.scale(event, training=self.phase not in (Phase.STARTING, Phase.WAITING))
            case ev.StopRequested():
                return self._end_run("stopped", event.reason, now)
            case ev.LoaderLost():
                return self._disturbed(f"the loader was lost: {event.detail}", now)
            case ev.Planned():
                return self._on_planned(event, now)
            case ev.NotPlanned():
                return self._on_not_planned(event, now)
            case ev.CheckpointWritten():
                self.work.checkpoint_written(event.update)
            case ev.CheckpointFailed():
                return self._on_save_failed(event, now)
            case ev.Tick():
                pass
            case _ if stale:
                return []  # a fact of another generation
            case ev.Failed():
                return self._fail(event.reason)
            case ev.Disturbed():
                return self._disturbed(event.reason, now)
            case ev.StockTaken():
                return self._on_stock(event, now)
            case ev.Configured():
                return self._on_configured(event, now)
            case _:
                return self._on_progress(event, now)
        return self._advance(now)

    def _on_progress(self, event: ev.Event, now: float) -> list[do.Instruction]:
        if self.phase not in (Phase.RUNNING, Phase.DRAINING, Phase.FINISHING):
            return []
        match event:
            case ev.SegmentDone() if self.work.segment_done(event.last_update):
                self.staff.refill(self.work.reached)
            case ev.DataEnded():
                self.work.end_at(event.update, "completed", "the last epoch is over")
            case ev.EvaluationDone():
                self.work.evaluation_done(event.update)
            case ev.SnapshotStored():
                self.work.pace.stored(event.update, event.cost_s, event.segment_s)
        return self._advance(now)

    # Losses and announcements.

    def _on_lost(self, event: ev.WorkerLost, now: float) -> list[do.Instruction]:
        worker, members = event.worker, self.staff.members
        name, node = self._name(worker), members.nodes.get(worker, "")
        announced = worker in members.leaving or event.cause is ev.Cause.SCALED_DOWN
        needed = self._is_needed(worker)
        if not members.remove(worker):
            return []
        self.staff.lost()
        why = f"worker {name} was lost at update {self.committed}: {event.detail}"
        if announced:
            spent = None
        elif event.cause is ev.Cause.PREEMPTED:
            spent = self.staff.spend("preemptions", self.work.reached, now, node)
        else:
            spent = self.staff.spend("failures" if needed else "idle", self.work.reached, now, node)
        if spent is not None and (needed or self._stands_still):
            return self._fail(f"{why}{spent}")
        if needed:
            return self._recover(why, now)
        if self.phase is Phase.PLANNING and self._change and worker in self._change.workers:
            self._change, self.phase = None, Phase.STARTING
        if self.phase is Phase.RECOVERING:
            return self._configure()  # its stock may have been the last that was missing
        return self._advance(now)

    @property
    def _stands_still(self) -> bool:
        """No training until somebody joins."""
        waits = self.phase in (Phase.STARTING, Phase.PLANNING, Phase.WAITING)
        return waits and len(self.staff.members.usable) < self.staff.floor

    def _is_needed(self, worker: WorkerId) -> bool:
        """Whether the generation cannot go on without it."""
        change = self._change
        if self.phase in (Phase.STARTING, Phase.PLANNING, Phase.WAITING):
            return False
        if self.phase is Phase.RECOVERING:
            return change is not None and worker in change.workers
        if change is not None and change.asked and worker in holders(change.plan):
            return True
        return worker in holders(self.plan) or worker in self._sources

    def _name(self, worker: WorkerId) -> str:
        place = [
            f"stage {s.stage}"
            for s in (self.plan.stages if self.plan else ())
            if s.worker == worker
        ]
        if node := self.staff.members.nodes.get(worker):
            place.append(f"node {node}")
        return f"{worker} ({', '.join(place)})" if place else worker

    def _disturbed(self, why: str, now: float) -> list[do.Instruction]:
        why = f"{why} (at update {self.committed})"
        spent = self.staff.spend("failures", self.work.reached, now, "")
        if spent is not None:
            return self._fail(f"{why}{spent}")
        if self.phase is Phase.PLANNING:
            self._change, self.phase = None, Phase.STARTING
        if self.phase in (Phase.STARTING, Phase.WAITING):
            return self._advance(now)
        return self._recover(why, now)

    def _on_draining(self, event: ev.WorkersDraining, now: float) -> list[do.Instruction]:
        by = None if event.deadline_s is None else now + event.deadline_s
        new = self.staff.members.announce(event.workers, by, event.reason)
        out: list[do.Instruction] = []
        if set(new) & set(holders(self.plan)):
            spent = self.staff.spend("preemptions", self.work.reached, now, "")
            if spent is not None:
                return self._end_run("failed", f"{event.reason}{spent}", now)
        if self.phase is Phase.PLANNING and self._change and set(new) & set(self._change.workers):
            self._change, self.phase = None, Phase.STARTING
        return out + self._advance(now)

    def _end_run(self, status: str, reason: str, now: float) -> list[do.Instruction]:
        """End at the next commit point, or at once where there is none to come."""
        work = self.work
        if self.phase in (Phase.RUNNING, Phase.DRAINING, Phase.FINISHING):
            work.end_at(work.issued, status, reason)
            return self._advance(now)
        if work.saved >= work.reached:
            return self._finish(status, work.saved, reason)
        if self.phase is Phase.WAITING:
            lost = work.reached - work.saved
            return self._finish(
                status,
                work.saved,
                f"{reason}; with too few workers to save them, the {lost} "
                f"updates after {work.saved} will be trained again",
            )
        work.end_at(work.reached, status, reason)  # regain what was committed, and save it
        return self._advance(now)

    # Recovery.

    def _recover(self, why: str, now: float, *, abort: bool = True) -> list[do.Instruction]:
        """The generation is over: go back to the newest state that is left."""
        out: list[do.Instruction] = []
        if abort:
            out.append(do.Abort(generation=self.generation, reason=why))
        self.work.drop(now)
        self._change, self._sources = None, frozenset()
        if len(self.staff.members.usable) < self.staff.floor:
            return out + self._wait(why)
        return out + self._regroup(why, max(len(holders(self.plan)), self.staff.floor))

    def _wait(self, why: str) -> list[do.Instruction]:
        there = len(self.staff.members.usable)
        self.phase = Phase.WAITING
        self.reason = f"{there} of {self.staff.floor} workers: waiting for room ({why})"
        return [do.Wait(reason=self.reason)]

    def _regroup(self, why: str, most: int) -> list[do.Instruction]:
        """Enter a new generation: ask what everybody holds, and for a plan."""
        members = self.staff.members
        workers = members.lineup(self.plan, min(most, self.staff.most))
        self._change = change = Change(
            generation=self._number(), workers=workers, reason=why, asked=tuple(members.nodes)
        )
        self.generation, self.phase, self.reason = change.generation, Phase.RECOVERING, why
        out: list[do.Instruction] = [
            do.TakeStock(generation=change.generation, workers=change.asked, reason=why)
        ]
        if self.plan is not None and holders(self.plan) == workers:
            change.plan = replace(self.plan, generation=change.generation)
            change.segment_updates = self.work.segment_updates
        else:
            out.append(do.MakePlan(generation=change.generation, workers=workers, reason=why))
        return out

    def _number(self) -> int:
        self._last_generation += 1
        return self._last_generation

    def _on_stock(self, event: ev.StockTaken, now: float) -> list[do.Instruction]:
        if self._change is None or not self._change.asked or self._change.stock is not None:
            return []
        self._change.stock = event
        return self._configure()

    def _configure(self) -> list[do.Instruction]:
        """Configure, once the plan is there and everybody who lives has said what it holds."""
        assert self._change is not None
        made = configuration(
            self._change, self.staff, saved=self.work.saved, newest=self.work.committed
        )
        return [] if made is None else self._restore(made)

    def _restore(self, made: do.Configure) -> list[do.Instruction]:
        self.phase, self.plan, self.reason = Phase.RESTORING, made.plan, made.reason
        self.generation = made.plan.generation
        self._sources = frozenset(made.sources.values())
        self.work.rewind(made.update)
        return [made]

    def _on_configured(self, event: ev.Configured, now: float) -> list[do.Instruction]:
        if self.phase is not Phase.RESTORING or self._change is None or self.plan is None:
            return []
        change, self._change = self._change, None
        self.phase, self.reason = Phase.RUNNING, ""
        self._refused, self._sources = {change.workers}, frozenset()
        self.work.begin(self.generation, holders(self.plan), change.segment_updates)
        return self._advance(now)

    # Plans.

    def _on_planned(self, event: ev.Planned, now: float) -> list[do.Instruction]:
        change = self._change
        if change is None or change.plan is not None or event.plan.generation != change.generation:
            return []
        change.plan, change.segment_updates = event.plan, event.segment_updates
        if self.phase is Phase.RECOVERING:
            return self._configure()
        if self.phase is Phase.PLANNING:
            if change.workers != self.staff.members.lineup(None, self.staff.most):
                return self._plan_first()  # others have joined; the profile is known by now
            return self._restore(first_configuration(event.plan, self.work.committed))
        assert self.plan is not None
        worth, figures = (True, "") if change.compulsory else worth_it(self.plan, event.plan)
        if worth:
            self.phase = Phase.DRAINING
            self.reason = change.reason = (
                f"{change.reason}: {figures}" if figures else change.reason
            )
            return self._advance(now)
        return self._refuse(change, figures, now)

    def _refuse(self, change: Change, why: str, now: float) -> list[do.Instruction]:
        self._change = None
        self._refused.add(change.workers)
        idle = [w for w in change.workers if w not in holders(self.plan)]
        note = do.Note(reason=f"{', '.join(idle) or 'the plan'} is not put to use: {why}")
        return [note, *self._advance(now)]

    def _on_not_planned(self, event: ev.NotPlanned, now: float) -> list[do.Instruction]:
        change = self._change
        if change is None or change.plan is not None or event.generation != change.generation:
            return []
        if self.phase in (Phase.RUNNING, Phase.DRAINING):
            return self._refuse(change, event.reason, now)
        if len(self.staff.members.usable) >= self.staff.most:
            return self._fail(event.reason)
        self._change = None
        self._refused.add(change.workers)
        return self._wait(event.reason)

    def _plan_first(self) -> list[do.Instruction]:
        workers = self.staff.members.lineup(None, self.staff.most)
        all_there = len(workers) >= self.staff.most
        self.reason = "all workers are there" if all_there else f"{len(workers)} workers are there"
        change = self._change = Change(
            generation=self._number(), workers=workers, reason=self.reason
        )
        self.phase, self.generation = Phase.PLANNING, change.generation
        return [do.MakePlan(generation=change.generation, workers=workers, reason=self.reason)]

    # What follows from where the run stands.

    def _advance(self, now: float) -> list[do.Instruction]:
        """Do what can be done now."""
        out: list[do.Instruction] = []
        if self.phase in (Phase.STARTING, Phase.WAITING):
            return self._begin(now)
        if self.phase is Phase.RUNNING:
            out.extend(self._consider(now))
        if self.phase is Phase.DRAINING:
            out.extend(self._drain(now))
        if self.phase not in (Phase.RUNNING, Phase.FINISHING):
            return out
        out.extend(self.work.issue())
        if self.work.at_end and self.phase is Phase.RUNNING:
            self.phase, self._change = Phase.FINISHING, None
            self.work.last_state()
        out.extend(self.work.retry_save(now))
        if self.phase is Phase.FINISHING:
            orders, done = self.work.finish()
            out.extend(orders)
            if done:
                work = self.work
                out.extend(self._finish(work.end_status, work.committed, work.end_reason))
        return out

    def _begin(self, now: float) -> list[do.Instruction]:
        """Begin, or go on, once enough workers are there and no more are about to come."""
        staff, first = self.staff, self.phase is Phase.STARTING
        there = len(staff.members.usable)
        if there >= staff.floor and staff.settled(now):
            if first:
                return self._plan_first()
            if staff.members.lineup(self.plan, staff.most) not in self._refused:
                return self._regroup(f"{there} workers are there again", staff.most)
        return []

    def _consider(self, now: float) -> list[do.Instruction]:
        """Prepare the change that is wanted, while training goes on."""
        assert self.plan is not None
        members, change = self.staff.members, self._change
        by = [members.leaving[w].by for w in holders(self.plan) if w in members.leaving]
        if by and len(members.usable) < self.staff.floor and not self.work.all_issued:
            self._change = None
            if any(b is None or now >= b - LEAVE_MARGIN_S for b in by):
                self.phase, self.reason = Phase.DRAINING, "too few workers will be left"
            return []
        wanted = None if self.work.all_issued else wish(self.plan, self.staff, self._refused, now)
        if wanted is None:
            self._change = None
            return []
        if change is not None and change.workers == wanted.workers:
            return []
        self._change = Change(
            generation=self._number(),
            workers=wanted.workers,
            reason=wanted.reason,
            compulsory=wanted.compulsory,
        )
        return [
            do.MakePlan(
                generation=self._change.generation, workers=wanted.workers, reason=wanted.reason
            )
        ]

    def _drain(self, now: float) -> list[do.Instruction]:
        """Reach a commit point, and enter the next generation there."""
        change, members = self._change, self.staff.members
        if change is not None and change.asked:
            return []  # waiting for the stock
        pausing = change is None
        left = set(holders(self.plan)) & set(members.leaving)
        obsolete = (
            not left or len(members.usable) >= self.staff.floor
            if change is None
            else not still_fits(change, self.staff)
        )
        if obsolete or self.work.at_end or self.work.end_status != "completed":
            self.phase, self._change, self.reason = Phase.RUNNING, None, ""
            return []
        if not self.work.idle:
            return []
        if pausing:
            if self.work.committed > self.work.saved:
                return self.work.save_now(now, "training is about to pause")
            return self._wait(self.reason)
        assert change is not None
        self.work.leave(now)
        change.asked = tuple(dict.fromkeys([*holders(self.plan), *change.workers]))
        self.generation = change.generation
        return [
            do.TakeStock(generation=change.generation, workers=change.asked, reason=change.reason)
        ]

    def _keep_house(self, now: float) -> list[do.Instruction]:
        """Dismiss who is not needed any more, and ask for who is missing."""
        if self.done or self.phase is Phase.FINISHING or self.work.end_status != "completed":
            return []
        self.staff.raise_floor()
        out: list[do.Instruction] = []
        if self.phase in (Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.WAITING):
            out = self.staff.dismiss(self._in_use())
        return out + self.staff.ask("workers have come or gone")

    def _in_use(self) -> set[WorkerId]:
        """Workers that hold something, or are about to."""
        used = set[WorkerId]()
        if (change := self._change) is not None:
            used |= {*change.workers, *change.asked}
        if self.work.saving is not None:
            used |= set(self.work.saving.workers)
        if self.phase in (Phase.RUNNING, Phase.DRAINING) or self.work.saved < self.work.committed:
            used |= set(holders(self.plan))
        return used

    # The end.

    def _on_save_failed(self, event: ev.CheckpointFailed, now: float) -> list[do.Instruction]:
        finishing = self.phase is Phase.FINISHING
        if self.work.checkpoint_failed(event.update, now, finishing):
            return self._fail(
                f"training reached update {self.committed}, but its checkpoint could not be "
                f"written: {event.reason}; the newest complete checkpoint is of update {self.saved}"
            )
        return self._advance(now)

    def _finish(self, status: str, update: int, reason: str) -> list[do.Instruction]:
        self.phase = Phase.FAILED if status == "failed" else Phase.FINISHED
        self.reason = reason
        return [do.Finish(status=status, update=update, reason=reason)]

    def _fail(self, reason: str) -> list[do.Instruction]:
        abort = do.Abort(generation=self.generation, reason=reason)
        return [abort, *self._finish("failed", self.committed, reason)]
