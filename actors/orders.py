"""Segments, evaluations and checkpoints: from an order of the elastic core to the reports of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.costing import SampleCosting
from elastic_trainer.actors.dispatch import Dispatch, Order
from elastic_trainer.actors.handles import LoaderHandle
from elastic_trainer.actors.loaders import Feeding, agreed
from elastic_trainer.actors.pending import Pending
from elastic_trainer.actors.planning import Schedules
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.saving import Saving
from elastic_trainer.actors.snapshots import Snapshots
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config
from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.errors import DataError
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import BatchInfo, CheckpointInfo, Plan, StageReport, WorkerId

EVAL_KEYS = 1 << 40  # keys of held-out batches, far from any update


@dataclass(frozen=True, kw_only=True)
class _Course:
    """What one generation trains with."""

    plan: Plan
    schedules: Schedules
    feeding: Feeding


class Orders:
    """Hands out the work of the present generation, in order, and collects its results."""

    def __init__(
        self,
        config: Config,
        calls: Calls,
        crew: Crew,
        vigil: Vigil,
        saving: Saving,
        recorder: Recorder,
        report: Callable[[ev.Event], None],
        start_update: int,
    ) -> None:
        self.snapshots = Snapshots(report)
        self.costing = SampleCosting(config, recorder.event)
        self.num_segments = 0
        self.newest = start_update  # the last update that stages were given to train
        self._config = config
        self._calls = calls
        self._crew = crew
        self._vigil = vigil
        self._saving = saving
        self._recorder = recorder
        self._report = report
        self._dispatch = Dispatch(self._send)
        self._course: _Course | None = None
        self._queued: dict[int, int] = {}
        self._eval_key = EVAL_KEYS

    @property
    def serving(self) -> list[WorkerId]:
        """Loaders that feed stages now."""
        return [] if self._course is None else self._course.feeding.serving

    def begin(self, plan: Plan, schedules: Schedules, feeding: Feeding) -> None:
        """A generation with this plan is being configured."""
        self._drop()
        self._course = _Course(plan=plan, schedules=schedules, feeding=feeding)
        self.snapshots.begin(plan)

    def clear(self, generation: int) -> None:
        """This generation broke off: nothing of it, or of any before, is sent or collected."""
        self._drop()
        self._saving.abandon(generation)
        if self._course is not None and self._course.plan.generation <= generation:
            self._course = None

    def _drop(self) -> None:
        self._dispatch.clear()
        for stage in self._queued:
            self._recorder.queued(stage, 0)
        self._queued.clear()

    def segment(self, instruction: do.RunSegment) -> None:
        """Have loaders send the batches; the stages follow when all have told what those hold."""
        first, last = instruction.first_update, instruction.last_update
        order = Order(
            kind="segment",
            generation=instruction.generation,
            update=last,
            snapshot=instruction.snapshot,
        )

        def prepared(batches: list[BatchInfo]) -> None:
            end = first + len(batches) - 1
            if end < last:
                order.update = end
                self._dispatch.truncate(end)
                self._report(ev.DataEnded(generation=order.generation, update=end))
            self._saving.positions.note(batches, snapshot=order.snapshot)

        count = last - first + 1
        rates = self.costing.news(first)  # the same for all loaders
        self._prepare(
            order, lambda loader: loader.prepare(order.generation, first, count, rates), prepared
        )

    def evaluation(self, instruction: do.Evaluate) -> None:
        """Measure the held-out loss after what was ordered so far."""
        order = Order(
            kind="evaluation", generation=instruction.generation, update=instruction.update
        )
        key = self._eval_key
        self._eval_key += self._config.train.eval_batches
        self._prepare(order, lambda loader: loader.prepare_eval(order.generation, key))

    def checkpoint(self, instruction: do.SaveCheckpoint) -> None:
        """Save the state after what was ordered so far."""
        generation, update = instruction.generation, instruction.update
        self._dispatch.add(Order(kind="checkpoint", generation=generation, update=update))

    def _prepare(
        self,
        order: Order,
        ask: Callable[[LoaderHandle], Pending[list[BatchInfo]]],
        prepared: Callable[[list[BatchInfo]], None] = lambda _: None,
    ) -> None:
        """Queue an order that can be sent when all loaders have sent their parts of its batches."""
        handles, answers = self._crew.loaders.handles, dict[WorkerId, list[BatchInfo]]()
        serving = self.serving

        def answered(loader: WorkerId, batches: list[BatchInfo]) -> None:
            answers[loader] = batches
            if len(answers) < len(serving):
                return
            try:
                order.batches = agreed({w: answers[w] for w in serving})
            except DataError as error:
                self._report(ev.Failed(generation=order.generation, reason=str(error)))
                return
            prepared(order.batches)
            self._dispatch.pump()

        for loader in serving:
            if loader in handles:  # else it was lost just now, which ends the generation
                then = partial(answered, loader)
                self._calls.when(ask(handles[loader]), then, generation=order.generation)
        self._dispatch.add(order)

    # Orders whose turn has come.

    def _send(self, order: Order) -> None:
        course = self._course
        if course is None or order.generation != course.plan.generation:
            return
        order.started_at = time.time()
        if order.kind == "checkpoint":
            self._send_save(order, course.plan)
        elif order.batches:
            self._send_segment(order, course)
        elif order.kind == "evaluation":  # no held-out data: nothing to measure
            self._report(ev.EvaluationDone(generation=order.generation, update=order.update))

    def _send_segment(self, order: Order, course: _Course) -> None:
        plan, batches = course.plan, order.batches
        assert batches is not None
        train = order.kind == "segment"
        groups = [len(b.microbatches) for b in batches]
        actions = course.schedules.train(groups) if train else course.schedules.evaluate(groups)
        segment = Segment(
            generation=order.generation,
            index=self.num_segments,
            kind="train" if train else "eval",
            batches=tuple(batches),
            schedule=plan.schedule,
            actions=actions,
            snapshot=order.snapshot,
        )
        self.num_segments += 1
        if train:
            self.newest = segment.last_update
        workers = [stage.worker for stage in plan.stages]
        loader_of = course.feeding.loader_of
        self._vigil.handed_out(segment, workers, [loader_of.get(w, "") for w in workers])
        self.snapshots.sent(segment)
        stages = self._crew.stages
        for stage in plan.stages:
            if stage.worker not in stages:
                continue  # lost just now, which ends the generation
            call = stages[stage.worker].run_segment(segment)
            collect = partial(self._collect, order, segment, plan)
            self._calls.when(call, collect, generation=order.generation)
            self._queued[stage.stage] = self._queued.get(stage.stage, 0) + 1
            self._recorder.queued(stage.stage, self._queued[stage.stage])

    def _collect(self, order: Order, segment: Segment, plan: Plan, report: StageReport) -> None:
        order.reports[report.stage] = report
        self._vigil.reported(segment, report.worker)
        self._queued[report.stage] -= 1
        self._recorder.queued(report.stage, self._queued[report.stage])
        if len(order.reports) < plan.num_stages:
            return
        reports = [order.reports[s] for s in sorted(order.reports)]
        if order.kind == "evaluation":
            self._evaluated(order, reports)
            return
        self._recorder.segment(segment, reports, plan)
        self.costing.observe(segment.batches, reports)
        self._report(ev.SegmentDone(generation=order.generation, last_update=order.update))
        self.snapshots.reported(segment, reports)

    def _evaluated(self, order: Order, reports: Sequence[StageReport]) -> None:
        total = sum(r.eval_loss_sum for r in reports)
        self._recorder.evaluated(order.update, total, sum(r.eval_num_valid for r in reports))
        self._report(ev.EvaluationDone(generation=order.generation, update=order.update))

    def _send_save(self, order: Order, plan: Plan) -> None:
        def saved(info: CheckpointInfo) -> None:
            self._recorder.checkpoint(info, time.time() - order.started_at)
            self._report(ev.CheckpointWritten(update=order.update))

        def failed(reason: str) -> None:
            self._recorder.checkpoint_failed(order.update, reason)
            self._report(ev.CheckpointFailed(update=order.update, reason=reason))

        holders = {s.worker for s in plan.stages}
        writers = {w: h for w, h in self._crew.stages.items() if w in holders}
        self._saving.start(
            order.generation, order.update, plan, writers, self._calls, saved, failed
        )
