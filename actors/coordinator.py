"""The coordinator: carries out what the elastic core decides, and reports facts back to it.

A plain class; `handles.py` makes it a named actor. It holds no tensors and does not load torch.
"""

import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elastic_trainer.actors.dispatch import Dispatch, Order
from elastic_trainer.actors.handles import LoaderHandle, Pending, StageHandle, wait_any
from elastic_trainer.actors.planning import (
    Schedules,
    load_profile,
    plan_for,
    profile_key,
    routes,
    segment_updates,
    store_profile,
)
from elastic_trainer.actors.pulse import Pulse
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.saving import Saving
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
        self.run_name = run
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
        self._pending: dict[Pending[Any], Callable[[Any], None]] = {}
        self._dispatch = Dispatch(self._send)
        self._pulse = Pulse(config.elastic.stall_limit_s)
        self._descriptions: dict[str, Mapping[str, Any]] = {}
        self._plan: Plan | None = None
        self._segment_index = 0
        self._queued: dict[int, int] = {}
        self._schedules: Schedules | None = None
        self._eval_key = EVAL_KEYS
        self._stopping = False
        self._summary: RunResult | None = None

    # What others may call while `run` runs.

    def ping(self) -> str:
        """Phase of the run."""
        return str(self.state.phase)

    def stop(self, reason: str) -> None:
        """End at the next commit point, with a checkpoint."""
        self._stopping = True
        self._facts.put(ev.StopRequested(reason=reason))

    def run(self) -> RunResult:
        """Train to the end. Never raises for a failure of the run: the summary says so."""
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
        try:
            value = pending.get(self.config.elastic.stall_limit_s)
        except WorkerLostError as error:
            self._facts.put(ev.WorkerLost(worker=self._name(pending.worker), cause=error.what))
        except ElasticTrainerError as error:
            self._fail(str(error))
        except Exception as error:  # noqa: BLE001 - a fault of ours on a worker: show where
            self.recorder.event("traceback", str(error))
            self._fail(f"{self._name(pending.worker)}: {_last_line(error)}")
        else:
            then(value)

    def _check_pulse(self) -> None:
        """Ask every actor now and then; whoever does not answer in time is lost."""
        now = time.monotonic()
        due = set(self._pulse.due(now))
        for member in self.crew.members():
            if member.worker in due:
                self._pulse.ask(member.worker, now)
                self._when(member.ping(), partial(self._answered, member.worker))
        for worker, silent_s in self._pulse.silent(now).items():
            cause = f"it has not answered for {silent_s:.0f} s; is it stopped or overloaded?"
            self._facts.put(ev.WorkerLost(worker=self._name(worker), cause=cause))

    def _answered(self, worker: str, _: Any) -> None:
        self._pulse.answered(worker, time.monotonic())

    def _when(self, pending: Pending[Any], then: Callable[[Any], None]) -> None:
        self._pending[pending] = then

    def _name(self, worker: str) -> str:
        stages = self._plan.stages if self._plan else ()
        stage = next((s.stage for s in stages if s.worker == worker), None)
        node = self._descriptions.get(worker, {}).get("node_ip")
        place = [f"stage {stage}" if stage is not None else "", f"node {node}" if node else ""]
        inside = ", ".join(p for p in place if p)
        return f"{worker} ({inside})" if inside else worker

    def _fail(self, reason: str) -> None:
        self._facts.put(ev.Failed(generation=self.state.generation, reason=reason))

    # Instructions.

    def _execute(self, instructions: list[do.Instruction]) -> None:
        for instruction in instructions:
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
        loader = self.crew.start_loader()
        wanted = self.crew.reserve(lambda: self._stopping)
        stages = self.crew.start_stages(wanted)
        start_s = self.config.cluster.start_timeout_s + self.config.elastic.stall_limit_s
        members: list[StageHandle | LoaderHandle] = [loader, *stages]
        for handle in members:
            self._pulse.ask(handle.worker, time.monotonic(), start_s)
            self._when(handle.describe(), partial(self._joined, handle.worker))

    def _joined(self, worker: str, description: Mapping[str, Any]) -> None:
        self._answered(worker, None)
        self._descriptions[worker] = description
        if worker in self.crew.stages:
            self.recorder.joined(worker, description)
            self._facts.put(ev.WorkerJoined(worker=worker))

    def _make_plan(self, instruction: do.MakePlan) -> None:
        workers = list(instruction.workers)

        def planned(profile: Any) -> None:
            plan = plan_for(
                self.config, profile, workers, instruction.generation, self._descriptions
            )
            self._facts.put(
                ev.Planned(plan=plan, segment_updates=segment_updates(self.config, plan))
            )

        def profiled(key: str, profile: Any) -> None:
            store_profile(key, profile)
            planned(profile)

        def sampled(sample: Any) -> None:
            key = profile_key(self.config, self._descriptions[workers[0]], sample)
            if (known := load_profile(key)) is not None:
                planned(known)
                return
            call = self.crew.stages[workers[0]].profile(sample)
            self._when(call, partial(profiled, key))

        assert self.crew.loader is not None
        self._when(self.crew.loader.sample(), sampled)

    def _configure(self, instruction: do.Configure) -> None:
        plan = self._plan = instruction.plan
        ties = self._descriptions[plan.stages[0].worker]["ties"]
        self._schedules = Schedules(self.config, plan, ties)
        loader = self.crew.loader
        assert loader is not None
        if loader.worker not in self._descriptions:  # it may be slower to start than the stages
            self._descriptions[loader.worker] = loader.describe().get(
                self.config.cluster.start_timeout_s
            )
        self.recorder.planned(plan)
        workers = [s.worker for s in plan.stages]
        waiting = {*workers, loader.worker}

        def configured(worker: str, _: Any) -> None:
            waiting.discard(worker)
            if not waiting:
                self._facts.put(
                    ev.Configured(generation=plan.generation, update=instruction.update)
                )

        for worker in workers:
            peers = {w: d for w, d in self._descriptions.items() if w != worker}
            root = self._start["checkpoint"]
            restore = (root, instruction.update) if instruction.update else None
            call = self.crew.stages[worker].configure(plan, peers, restore)
            self._when(call, partial(configured, worker))
        cursor: Cursor = self._start["cursor"]
        peers = {w: self._descriptions[w] for w in workers}
        serve = loader.configure(plan.generation, peers, routes(plan, self._descriptions), cursor)
        self._when(serve, partial(configured, loader.worker))

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
        reason = str(error) if ours else f"coordinator (pid {os.getpid()}): {_last_line(error)}"
        self._finish("failed", self.state.committed, reason)


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
