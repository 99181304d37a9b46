"""Tells the history of the membership what happens: which change, by whom, and what it took."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import Phase, State
from elastic_trainer.observability import changes
from elastic_trainer.observability.membership import MembershipLog
from elastic_trainer.types import ConfigureReport, Plan, WorkerId


class Run(Protocol):
    """What is to be known of the run."""

    state: State

    @property
    def most_stages(self) -> int: ...
    def node(self, worker: WorkerId) -> str: ...


class Historian:
    """Follows facts and decisions as they pass.

    Args:
        run: the run.
        recorder: of the run; its metrics count, its folder keeps the history.
        limits: by budget (failures, preemptions), how many are survived; -1: any number.
    """

    def __init__(
        self,
        run: Run,
        recorder: Recorder,
        limits: Mapping[str, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = MembershipLog(recorder.record.path, recorder.metrics, time.time())
        self._run = run
        self._recorder = recorder
        self._limits = limits
        self._clock = clock
        self._plan: Plan | None = None  # in force, or broken off last
        self._committed = 0
        self._idle: set[WorkerId] = set()  # joined, not planned with yet

    def begin(self, cause: str, update: int, plan: Plan | None) -> None:
        """The run starts, is resumed from a checkpoint, or has another coordinator."""
        self._plan, self._committed = plan, update
        self._changed(cause, "")

    def detected(
        self, worker: WorkerId, detail: str, cause: ev.Cause, silent_s: float | None
    ) -> None:
        """A worker is lost; `silent_s` after its last sign of life, or of work."""
        state = self._run.state
        self._idle.discard(worker)
        if worker in state.draining:
            return  # its departure was recorded when it was announced
        self._changed(
            cause,
            detail,
            worker,
            detect_s=silent_s,
            concerns_plan=self._stage(worker) is not None,
        )

    def loader_lost(
        self, loader: WorkerId, detail: str, silent_s: float | None, *, concerns_plan: bool
    ) -> None:
        """A loader is lost, `silent_s` after its last sign of life."""
        self._changed(
            changes.LOADER_LOST, detail, loader, detect_s=silent_s, concerns_plan=concerns_plan
        )

    def event(self, event: ev.Event) -> None:
        """A fact, before the core hears of it."""
        state = self._run.state
        match event:
            case ev.WorkerJoined(worker=worker) if self._plan is not None:
                self._joined(worker)
            case ev.WorkersDraining(workers=workers, reason=reason):
                for worker in set(workers) - set(state.draining):
                    held = self._stage(worker) is not None
                    self._changed(ev.Cause.PREEMPTED, reason, worker, concerns_plan=held)
            case ev.ScaleRequested():
                self._scaled(event)
            case ev.Disturbed(generation=generation, reason=reason):
                if generation == state.generation:
                    self._changed(changes.DISTURBED, reason)
            case ev.Planned():
                self.log.planned(self._clock())
            case ev.SegmentDone(generation=generation, last_update=last):
                if generation == state.generation:
                    self._committed = last
                    self.log.committed(self._clock())

    def instruction(self, instruction: do.Instruction) -> None:
        """A decision of the core, before it is carried out."""
        match instruction:
            case do.MakePlan(workers=workers):
                self.log.planning(self._clock())
                self._use(workers, instruction.reason)
            case do.Abort() | do.TakeStock():
                self.log.stopped(self._clock())
            case do.Note(reason=reason):
                self.log.refused(reason)
            case do.Configure(plan=plan):
                self._plan = plan
                self._idle -= {stage.worker for stage in plan.stages}

    def configured(
        self,
        update: int,
        reports: Mapping[WorkerId, ConfigureReport],
        replayed: tuple[int, int],
    ) -> None:
        """A generation is ready; `replayed` are updates, and samples, that come again."""
        assert self._plan is not None
        self._committed = update
        self.log.configured(
            at=self._clock(),
            plan=self._plan,
            update=update,
            nodes={s.worker: self._run.node(s.worker) for s in self._plan.stages},
            reports=reports.values(),
            updates_replayed=replayed[0],
            samples_reread=replayed[1],
        )

    def heartbeat(self) -> None:
        """How much is left of the budgets, and whether training waits."""
        state, metrics = self._run.state, self._recorder.metrics
        left = {
            name: None if limit < 0 else max(0, limit - state.counts[name])
            for name, limit in self._limits.items()
        }
        metrics.observe_budgets(left)
        metrics.observe_waiting(state.phase is Phase.WAITING)

    def finish(self, status: str, reason: str, update: int) -> None:
        """The run is over."""
        counts = self._run.state.counts
        self.log.finish(
            time=time.time(),
            status=status,
            reason=reason,
            update=update,
            budgets={name: (counts[name], limit) for name, limit in self._limits.items()},
        )

    def facts(self) -> dict[str, Any]:
        """What another coordinator must know to go on, JSON-able."""
        return self.log.state()

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on where another coordinator's `facts` were taken."""
        self.log.restore(facts, at=self._clock(), time=time.time())

    def _joined(self, worker: WorkerId) -> None:
        if len(self._run.state.workers) < self._run.most_stages:
            self._idle.add(worker)  # recorded when it is planned with
            return
        self._changed(changes.JOINED, "a spare", worker, concerns_plan=False)

    def _use(self, workers: tuple[WorkerId, ...], reason: str) -> None:
        if self._run.state.phase not in (Phase.RUNNING, Phase.DRAINING):
            return  # who joins in a recovery belongs to it
        for worker in sorted(self._idle & set(workers)):
            self._idle.discard(worker)
            self._changed(changes.JOINED, reason, worker)

    def _scaled(self, event: ev.ScaleRequested) -> None:
        held = self._plan.num_stages if self._plan is not None else 0
        grows = event.min_workers > held
        shrinks = event.max_workers < held
        self._changed(
            ev.Cause.SCALED_DOWN if shrinks else changes.SCALED_UP,
            event.reason,
            concerns_plan=grows or shrinks,
        )

    def _stage(self, worker: WorkerId) -> int | None:
        stages = self._plan.stages if self._plan is not None else ()
        return next((s.stage for s in stages if s.worker == worker), None)

    def _changed(
        self,
        cause: str,
        reason: str,
        worker: WorkerId = "",
        *,
        detect_s: float | None = None,
        concerns_plan: bool = True,
    ) -> None:
        self.log.changed(
            at=self._clock(),
            time=time.time(),
            cause=cause,
            reason=reason,
            update=self._committed,
            workers=self._plan.num_stages if self._plan is not None else 0,
            worker=worker,
            stage=self._stage(worker),
            node=self._run.node(worker) if worker else "",
            detect_s=detect_s,
            concerns_plan=concerns_plan,
        )
