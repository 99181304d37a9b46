"""The coordinator: carries out what the elastic core decides, and reports facts back to it.

A plain class; `handles.py` makes it a named actor. It holds no tensors.
"""

import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elastic_trainer.actors.dispatch import Dispatch, Order
from elastic_trainer.actors.faults import full_name, one_line
from elastic_trainer.actors.pending import Pending, wait_any
from elastic_trainer.actors.planning import (
    Schedules,
    load_profile,
    plan_for,
    profile_key,
    routes,
    segment_updates,
    store_profile,
)
from elastic_trainer.actors.priority import yield_to_compute
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.saving import Saving
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.workers import Crew, private_folder
from elastic_trainer.config import Config
from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import Goal, State
from elastic_trainer.errors import ElasticTrainerError, WorkerLostError
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import CheckpointInfo, Cursor, Plan, RunResult

SETTLE_S = 5.0  # how long the end waits for a storage's answer to say which checkpoint is newest
POLL_S = 0.5  # how soon a stop request is seen while nothing else happens
Then = Callable[[Any], None]  # what to do with a call's result
EVAL_KEYS = 1 << 40  # keys of held-out batches, far from any update


class Coordinator:
    """Runs one training run from start to finish."""

    def __init__(self, run: str, config: Config, run_dir: str, start: Mapping[str, Any]) -> None:
        """
        Args:
            run: name of the run.
            config: the resolved configuration.
            run_dir: folder of the run, on this node.
            start: `update`, `cursor` and `checkpoint` (its root folder, or None) to start from.
        """
        self.config = config
        self._start = start
        train = config.train
        self.state = State(
            Goal(
                num_workers=config.cluster.num_workers,
                max_steps=train.max_steps,
                eval_steps=train.eval_steps if train.eval_batches else 0,
                save_steps=config.checkpoint.every_steps,
                start_update=start["update"],
                final_eval=train.eval_batches > 0,
            )
        )
        self.recorder = Recorder(run, config, run_dir, start["update"])
        self.saving = Saving(config, run_dir, start["update"], start["cursor"])
        self.crew = Crew(config, private_folder(run_dir))
        self._facts: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self._pending: dict[Pending[Any], Then] = {}
        self._dispatch = Dispatch(self._send)
        self._vigil = Vigil(config)
        self._turned = time.monotonic()
        self._after_loader: Callable[[], None] | None = None
        self._descriptions: dict[str, Mapping[str, Any]] = {}
        self._plan: Plan | None = None
        self._segment_index = 0
        self._queued: dict[int, int] = {}
        self._schedules: Schedules | None = None
        self._eval_key = EVAL_KEYS
        self._stopping = False
        self._summary: RunResult | None = None

    # What others may call while `run` runs.

    def ping(self) -> float:
        """For how many seconds the run has stood at one thing; few, while all is well."""
        return time.monotonic() - self._turned

    def stop(self, reason: str) -> None:
        """End at the next commit point, with a checkpoint."""
        self._stopping = True
        self._facts.put(ev.StopRequested(reason=reason))

    def run(self) -> RunResult:
        """Train to the end. Never raises for a failure of the run: the summary says so."""
        yield_to_compute()
        try:
            self.recorder.begin()
            self._execute(self.state.start())
            while self._summary is None:
                self._step()
        except Exception as error:  # noqa: BLE001 - whatever it is, the run must end recorded
            self._crash(error)
        finally:
            self.crew.dismiss(timeout_s=5.0)
            self.saving.close(self.config.elastic.stall_limit_s)
        assert self._summary is not None
        self.recorder.finish(self._summary)
        return self._summary

    def _step(self) -> None:
        """Collect facts, decide, act."""
        self._turned = time.monotonic()
        for pending in wait_any(list(self._pending), POLL_S / (10 if self.saving.busy else 1)):
            self._resolve(pending)
        self.saving.deliver()
        if not self._pending:
            time.sleep(POLL_S / 10)  # only while a failed checkpoint waits for its next try
        self._check_pulse()
        self._facts.put(ev.Tick())
        while self._summary is None and not self._facts.empty():
            self._execute(self.state.handle(self._facts.get(), time.monotonic()))
        self.recorder.heartbeat(self.state)

    def _resolve(self, pending: Pending[Any]) -> None:
        """Hand a finished call's result to whoever waits for it; turn its error into a fact."""
        then = self._pending.pop(pending)
        self._vigil.returned(pending)
        try:
            value = pending.get(self.config.elastic.stall_limit_s)
        except WorkerLostError as error:
            self._facts.put(ev.WorkerLost(worker=self._name(pending.worker), cause=error.what))
        except ElasticTrainerError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - a fault of ours on a worker: show where
            self.recorder.event("traceback", str(error))
            self._fail(one_line(error, self._name(pending.worker)))
        else:
            then(value)

    def _check_pulse(self) -> None:
        """Ask every actor now and then; who does not answer in time, or stands still, is named."""
        due = self._vigil.due()
        for member in self.crew.members():
            if member.worker in due:
                self._ask(member.ping(), partial(self._vigil.told, member.worker, member.line))
        for worker, cause in self._vigil.silent():
            self._facts.put(ev.WorkerLost(worker=self._name(worker), cause=cause))
        if (stalled := self._vigil.stalled(self._name)) is not None:
            self._fail(stalled)

    def _ask(self, pending: Pending[Any], then: Then, limit_s: float | None = None) -> None:
        """Await a call that is answered at once, within `limit_s` or the stall limit."""
        self._pending[pending] = then
        self._vigil.asked(pending, limit_s)

    def _when(self, pending: Pending[Any], then: Then, limit_s: float | None = None) -> None:
        """Await a call that takes as long as it needs while its work moves on."""
        self._pending[pending] = then
        self._vigil.sent(pending, limit_s)

    def _name(self, worker: str) -> str:
        return full_name(worker, self._plan, self._descriptions.get(worker, {}).get("node_ip"))

    def _fail(self, reason: str) -> None:
        self._facts.put(ev.Failed(generation=self.state.generation, reason=reason))

    # Instructions.

    def _execute(self, instructions: list[do.Instruction]) -> None:
        for instruction in instructions:
            self._turned = time.monotonic()
            self.recorder.instruction(instruction)
            try:
                self._carry_out(instruction)
            except ElasticTrainerError as error:
                self._fail(str(error))
                return

    def _carry_out(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.StartWorkers():
                self._start_workers()
            case do.MakePlan():
                self._make_plan(instruction)
            case do.Configure():
                self._configure(instruction)
            case do.RunSegment():
                self._order_segment(instruction)
            case do.Evaluate():
                self._order_evaluation(instruction)
            case do.SaveCheckpoint(generation=generation, update=update):
                self._dispatch.add(Order(kind="checkpoint", generation=generation, update=update))
            case do.Abort():
                self._abort(instruction.reason)
            case do.Finish(status=status, update=update, reason=reason):
                self._finish(status, update, reason)

    def _start_workers(self) -> None:
        self.crew.start_loader()
        wanted = self.crew.reserve(lambda: self._stopping)
        self.crew.start_stages(wanted)
        for member in self.crew.members():
            joined = partial(self._joined, member.worker)
            self._ask(member.describe(), joined, self._vigil.start_limit_s)

    def _joined(self, worker: str, description: Mapping[str, Any]) -> None:
        self._vigil.answered(worker)
        self._descriptions[worker] = description
        if self._after_loader is not None and worker not in self.crew.stages:
            self._after_loader()
        if worker in self.crew.stages:
            self.recorder.joined(worker, description)
            self._facts.put(ev.WorkerJoined(worker=worker))

    def _make_plan(self, instruction: do.MakePlan) -> None:
        workers = list(instruction.workers)

        def planned(profile: Any) -> None:
            plan = plan_for(
                self.config, profile, workers, instruction.generation, self._descriptions
            )
            updates = segment_updates(self.config, plan)
            self._facts.put(ev.Planned(plan=plan, segment_updates=updates))

        def profiled(key: str, profile: Any) -> None:
            store_profile(key, profile)
            planned(profile)

        def sampled(sample: Any) -> None:
            key = profile_key(self.config, self._descriptions[workers[0]], sample)
            if (known := load_profile(key)) is not None:
                planned(known)
                return
            call = self.crew.stages[workers[0]].profile(sample)
            self._when(call, partial(profiled, key), self._vigil.start_limit_s)

        assert self.crew.loader is not None
        self._when(self.crew.loader.sample(), sampled, self._vigil.start_limit_s)

    def _configure(self, instruction: do.Configure) -> None:
        loader = self.crew.loader
        assert loader is not None
        if loader.worker not in self._descriptions:  # it may be slower to start than the stages
            self._after_loader = partial(self._configure, instruction)
            return
        plan = self._plan = instruction.plan
        self._vigil.planned(plan)
        first = self._descriptions[plan.stages[0].worker]
        self._schedules = Schedules(self.config, plan, first["ties"])
        self.recorder.planned(plan)
        workers = [s.worker for s in plan.stages]
        waiting = {*workers, loader.worker}

        def configured(worker: str, _: Any) -> None:
            waiting.discard(worker)
            if not waiting:
                done = ev.Configured(generation=plan.generation, update=instruction.update)
                self._facts.put(done)

        for worker in workers:
            peers = {w: d for w, d in self._descriptions.items() if w != worker}
            root = self._start["checkpoint"]
            restore = (root, instruction.update) if instruction.update else None
            call = self.crew.stages[worker].configure(plan, peers, restore)
            self._when(call, partial(configured, worker), self._vigil.start_limit_s)
        cursor: Cursor = self._start["cursor"]
        peers = {w: self._descriptions[w] for w in workers}
        serve = loader.configure(plan.generation, peers, routes(plan, self._descriptions), cursor)
        self._when(serve, partial(configured, loader.worker), self._vigil.start_limit_s)

    def _order_segment(self, instruction: do.RunSegment) -> None:
        order = Order(
            kind="segment", generation=instruction.generation, update=instruction.last_update
        )
        first, last = instruction.first_update, instruction.last_update

        def prepared(batches: list[Any]) -> None:
            order.batches = batches
            end = first + len(batches) - 1
            if end < last:
                order.update = end
                self._dispatch.truncate(end)
                self._facts.put(ev.DataEnded(generation=order.generation, update=end))
            self.saving.note(batches)
            self._dispatch.pump()

        assert self.crew.loader is not None
        self._when(self.crew.loader.prepare(first, last - first + 1), prepared)
        self._dispatch.add(order)

    def _order_evaluation(self, instruction: do.Evaluate) -> None:
        order = Order(
            kind="evaluation", generation=instruction.generation, update=instruction.update
        )

        def prepared(batches: list[Any]) -> None:
            order.batches = batches
            self._dispatch.pump()

        assert self.crew.loader is not None
        self._when(self.crew.loader.prepare_eval(self._eval_key), prepared)
        self._eval_key += self.config.train.eval_batches
        self._dispatch.add(order)

    # Orders whose turn has come.

    def _send(self, order: Order) -> None:
        if order.generation != self.state.generation:
            return
        order.started_at = time.time()
        if order.kind == "checkpoint":
            self._send_save(order)
        elif order.batches:
            self._send_segment(order)
        elif order.kind == "evaluation":  # no held-out data: nothing to measure
            self._facts.put(ev.EvaluationDone(generation=order.generation, update=order.update))

    def _send_segment(self, order: Order) -> None:
        plan, schedules, batches = self._plan, self._schedules, order.batches
        assert plan is not None and schedules is not None and batches is not None
        train = order.kind == "segment"
        groups = [len(b.microbatches) for b in batches]
        segment = Segment(
            generation=order.generation,
            index=self._segment_index,
            kind="train" if train else "eval",
            batches=tuple(batches),
            schedule=plan.schedule,
            actions=schedules.train(groups) if train else schedules.evaluate(groups),
        )
        self._segment_index += 1
        for stage in plan.stages:
            call = self.crew.stages[stage.worker].run_segment(segment)
            self._when(call, partial(self._collect, order, segment))
            self._queued[stage.stage] = self._queued.get(stage.stage, 0) + 1
            self.recorder.queued(stage.stage, self._queued[stage.stage])

    def _collect(self, order: Order, segment: Segment, report: Any) -> None:
        order.reports[report.stage] = report
        self._queued[report.stage] -= 1
        self.recorder.queued(report.stage, self._queued[report.stage])
        assert self._plan is not None
        if len(order.reports) < self._plan.num_stages:
            return
        reports = [order.reports[s] for s in sorted(order.reports)]
        if order.kind == "segment":
            self.recorder.segment(segment, reports, self._plan)
            self._facts.put(ev.SegmentDone(generation=order.generation, last_update=order.update))
        else:
            total = sum(r.eval_loss_sum for r in reports)
            self.recorder.evaluated(order.update, total, sum(r.eval_num_valid for r in reports))
            self._facts.put(ev.EvaluationDone(generation=order.generation, update=order.update))

    def _send_save(self, order: Order) -> None:
        assert self._plan is not None

        def saved(info: CheckpointInfo) -> None:
            self.recorder.checkpoint(info, time.time() - order.started_at)
            self._facts.put(ev.CheckpointWritten(update=order.update))

        def failed(reason: str) -> None:
            self.recorder.checkpoint_failed(order.update, reason)
            self._facts.put(ev.CheckpointFailed(update=order.update, reason=reason))

        stages, warn = self.crew.stages, partial(self.recorder.event, "warning")
        self.saving.start(order.update, self._plan, stages, self._when, saved, failed, warn)

    def _abort(self, reason: str) -> None:
        self._dispatch.clear()
        self._pending.clear()
        self._vigil.clear()
        for handle in self.crew.stages.values():
            handle.abort(reason)

    def _finish(self, status: str, update: int, reason: str) -> None:
        # A commit may be under way; it counts if it is quick.
        self.saving.deliver(min(SETTLE_S, self.config.elastic.stall_limit_s))
        newest = self.saving.newest
        # One that could not be restored is no good checkpoint.
        restoring = self._plan is not None and self._segment_index == 0
        if status == "failed" and newest is not None and not restoring:
            line, *picture = reason.splitlines()
            line += f". Last good checkpoint: update {newest.update} at {newest.path}"
            reason = "\n".join([line, *picture])
        self._summary = self.recorder.result(
            status, reason, update, newest.path if newest else None
        )

    def _crash(self, error: Exception) -> None:
        """A fault of the coordinator itself: recorded like any other end."""
        self.recorder.event("traceback", traceback.format_exc())
        ours = isinstance(error, ElasticTrainerError)
        reason = str(error) if ours else f"coordinator (pid {os.getpid()}): {one_line(error)}"
        self._finish("failed", self.state.committed, reason)
