"""What the coordinator writes down: run folder, metrics, the line of each update."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_trainer.config import Config, fewest_workers, to_yaml
from elastic_trainer.elastic.instructions import Instruction
from elastic_trainer.elastic.state import Phase, State
from elastic_trainer.observability.lines import full_disk_tolerated
from elastic_trainer.observability.metrics import RunMetrics
from elastic_trainer.observability.progress import phase_shares
from elastic_trainer.observability.record import TARGETS_FILE, RunRecord
from elastic_trainer.observability.targets import clear_targets, write_targets
from elastic_trainer.pipeline.lr import lr_at
from elastic_trainer.schedule.build import is_asynchronous
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import CheckpointInfo, Plan, RunResult, StageReport, UpdateReport
from elastic_trainer.version import __version__

HEARTBEAT_S = 5.0  # how often the status is written while nothing changes
TEXT_FORMATS = ("text", "tokens", "media")  # elsewhere e to the power of the loss means nothing
MODALITIES = {"columns": "tensor", "media": "media", "synthetic": "synthetic"}
WORKER_STATES = ("starting", "running", "idle", "leaving")
LOADER_STATES = ("starting", "serving", "idle")
ROUTINE = ("RunSegment",)  # instructions too frequent for the log of events
STATE_NAMES = {
    Phase.STARTING: "starting",
    Phase.PLANNING: "starting",
    Phase.RESTORING: "recovering",  # "starting" until something has been trained
    Phase.RUNNING: "running",
    Phase.DRAINING: "running",
    Phase.RECOVERING: "recovering",
    Phase.WAITING: "waiting",
    Phase.FINISHING: "stopping",
}


class Recorder:
    """The run's record and metrics, fed by the coordinator.

    Args:
        run: name of the run.
        config: the resolved configuration.
        run_dir: folder of the run.
        start_update: where the run starts; what is recorded of later updates is dropped.
        goes_on: whether this coordinator takes the place of one that died: nothing is dropped.
    """

    def __init__(
        self,
        run: str,
        config: Config,
        run_dir: str,
        start_update: int,
        *,
        goes_on: bool = False,
    ) -> None:
        self.config = config
        self._run, self._run_dir = run, run_dir
        self.record = RunRecord(run_dir)
        if not goes_on:
            self.record.truncate_after(start_update)
        self.metrics = RunMetrics(run, version=__version__)
        self._previous_end: float | None = None
        self._line: dict[str, Any] = {}
        self._eval_loss: float | None = None
        self._beat = 0.0
        self._shown: tuple[str | None, str] = (None, "")
        self._members: dict[str, Any] = {}
        self._resumed = start_update > 0
        self._goes_on = self._has_trained = goes_on
        self._counted = start_update  # updates up to here are in the counters

    def begin(self, ray_address: str) -> None:
        """The run starts, or goes on, on this cluster: configuration, metrics server, targets."""
        self.record.write_config(to_yaml(self.config))
        address = None
        if self.config.metrics.enabled:
            host, port = self.metrics.serve(self.config.metrics.host, self.config.metrics.port)
            write_targets(self.record.path / TARGETS_FILE, (host, port), self._run)
            address = f"{host}:{port}"
        facts = {
            "metrics_address": address,
            "ray_address": ray_address,
        }
        if self._goes_on:
            self.record.write_status({**facts, "state": "recovering"})
            self.event("start", "another coordinator has taken over")
            return
        self.record.write_status(
            {
                **facts,
                "state": "starting",
                "reason": "",
                "warning": None,
                "generation": None,
                "total_updates": self.config.train.max_steps,
                "started_at": time.time(),
                "num_workers": self.config.cluster.num_workers,
                "min_workers": fewest_workers(self.config),
                "workers": {},
                "loaders": {},
            }
        )
        self.event("start", f"run {self._run} starts")

    def event(self, kind: str, message: str, **fields: Any) -> None:
        """One line in the run's story."""
        self.record.log_event(kind, message, **fields)

    def instruction(self, instruction: Instruction) -> None:
        """What the elastic core decided, and why."""
        name = type(instruction).__name__
        if name not in ROUTINE:
            self.event("decision", f"{name}: {instruction.reason}")

    def joined(self, worker: str, description: Mapping[str, Any]) -> None:
        """A worker has started."""
        facts = {k: description[k] for k in ("node_ip", "pid", "device_class")}
        self.event("worker", f"{worker} joined", worker=worker, **facts)

    def loader_joined(self, loader: str, description: Mapping[str, Any]) -> None:
        """A loader has started."""
        facts = {k: description[k] for k in ("node_ip", "pid")}
        self.event("loader", f"{loader} joined", worker=loader, **facts)

    def lost(self, worker: str, detail: str, cause: str) -> None:
        """A worker, or a loader, has been lost; `worker` is its name in words."""
        self.event("lost", f"{worker} was lost: {detail}", cause=cause)

    def members(
        self,
        facts: Mapping[str, Mapping[str, Any]],
        num_pending: int,
        loaders: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Who is there, with node, stage and state, and how many rooms are asked for."""
        shown = {
            "workers": {w: dict(f) for w, f in facts.items()},
            "pending_workers": num_pending,
            "loaders": {w: dict(f) for w, f in loaders.items()},
        }
        if shown == self._members:
            return
        self._members = shown
        states = Counter(f["state"] for f in facts.values())
        self.metrics.observe_workers(
            {"pending": num_pending, **{state: states[state] for state in WORKER_STATES}}
        )
        at_loaders = Counter(f["state"] for f in loaders.values())
        self.metrics.observe_loaders({state: at_loaders[state] for state in LOADER_STATES})
        self.record.write_status(shown)

    def limits(self, fewest: int, most: int) -> None:
        """Somebody has changed how many workers there are to be."""
        self.record.write_status({"min_workers": fewest, "num_workers": most})

    def planned(self, plan: Plan, update: int, reason: str) -> None:
        """A plan is put into force, from the state after `update`: later lines are void."""
        self.record.truncate_after(update)
        self._previous_end = None
        self.record.write_plan(plan)
        cause = "resume" if self._resumed else "start"
        if plan.generation > 1:
            cause = "membership"
        self.metrics.observe_plan(plan, self.config.train.max_steps, cause)
        self.record.write_status({"generation": plan.generation})
        self.event("plan", "; ".join((reason, *plan.reasons)), generation=plan.generation)

    def segment(self, segment: Segment, reports: Sequence[StageReport], plan: Plan) -> None:
        """A committed segment: a line per update."""
        self._has_trained = True
        begin = min(r.updates[-1].finished_at - r.wall_s for r in reports)
        previous = max(self._previous_end or begin, begin - 1.0)
        for batch, *of_stages in zip(segment.batches, *(r.updates for r in reports), strict=True):
            of_last = of_stages[-1]
            end = max(of_stages[0].finished_at, of_last.finished_at)
            step_s = max(end - previous, 1e-9)
            previous = end
            self._line = {
                "update": batch.update,
                "loss": of_last.loss,
                "lr": lr_at(batch.update, self.config.optim, self.config.train.max_steps),
                "grad_norm": grad_norm(of_stages, plan.schedule),
                "tokens_per_s": batch.num_tokens / step_s,
                "step_s": step_s,
                "tokens": batch.num_tokens,
                "samples": batch.num_samples,
                "unreadable": len(batch.skipped),
                "epoch": batch.end.epoch,
                "skipped": of_last.skipped,
                "modality": MODALITIES.get(self.config.data.format, "text"),
                "time": end,
                "segment": segment.index,
                "generation": segment.generation,
            }
            samples = [m.sample_ids for m in batch.microbatches]
            self.record.append_update(self._line, samples, batch.skipped)
            for sample, why in batch.skipped:
                self.event("skipped", f"sample {sample} was skipped: {why}", update=batch.update)
            self.metrics.observe_update(self._line, again=batch.update <= self._counted)
            self._counted = max(self._counted, batch.update)
        self._previous_end = previous
        self.metrics.observe_segment(reports)
        self._write_progress(reports, plan)

    def queued(self, stage: int, num_segments: int) -> None:
        """A stage was given a segment, or has finished one."""
        self.metrics.observe_queue(stage, num_segments)

    def evaluated(self, update: int, loss_sum: float, num_valid: int) -> None:
        """The held-out loss is known."""
        self._previous_end = None  # the next update did not start where the last one ended
        loss = self._eval_loss = loss_sum / max(num_valid, 1)
        self.metrics.observe_evaluation(loss)
        facts = {"eval_loss": loss, "perplexity": perplexity(loss, self.config.data.format)}
        self.record.write_status(facts)
        self.event("evaluation", f"held-out loss {loss:.4f}", update=update, **facts)

    def checkpoint(self, info: CheckpointInfo, duration_s: float) -> None:
        """A checkpoint is complete."""
        self.metrics.observe_checkpoint(info, duration_s)
        self.record.write_status({"checkpoint": info.path, "checkpoint_update": info.update})
        self.event("checkpoint", f"update {info.update} saved", update=info.update, path=info.path)

    def checkpoint_failed(self, update: int, reason: str) -> None:
        """A checkpoint could not be written; training goes on."""
        self.metrics.observe_checkpoint_failure()
        self.record.write_status({"warning": f"checkpoint of update {update} failed: {reason}"})
        self.event("checkpoint_failed", reason, update=update)

    def heartbeat(self, state: State) -> bool:
        """Where the run stands, now and then; whether it was written."""
        now = time.monotonic()
        name = STATE_NAMES.get(state.phase)
        if state.phase is Phase.RESTORING and not self._has_trained:
            name = "starting"
        shown = (name, state.reason)
        if name is None or (now - self._beat < HEARTBEAT_S and shown == self._shown):
            return False
        self._beat, self._shown = now, shown
        self.record.write_status({"state": name, "reason": state.reason, "update": state.committed})
        return True

    def facts(self) -> dict[str, Any]:
        """What another coordinator must know to go on recording, JSON-able."""
        return {
            "counted": self._counted,
            "eval_loss": self._eval_loss,
            "line": self._line,
            "metrics": self.metrics.state(),
        }

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on where another coordinator's `facts` were taken."""
        self._counted = facts["counted"]
        self._eval_loss = facts["eval_loss"]
        self._line = dict(facts["line"])
        self.metrics.restore(facts["metrics"])

    def result(self, status: str, reason: str, update: int, checkpoint: str | None) -> RunResult:
        """How the run ended."""
        loss = self._eval_loss
        return RunResult(
            name=self._run,
            status=status,
            reason=reason,
            run_dir=str(self.record.path),
            update=update,
            loss=self._line.get("loss"),
            eval_loss=loss,
            perplexity=perplexity(loss, self.config.data.format),
            checkpoint=checkpoint,
            metrics={k: v for k, v in self._line.items() if isinstance(v, float)},
        )

    def finish(self, result: RunResult) -> None:
        """The run is over: last words, lock released."""
        self.record.write_status(
            {
                "state": result.status,
                "reason": result.reason,
                "update": result.update,
                "checkpoint": result.checkpoint,
                "metrics_address": None,
                "workers": {},
                "loaders": {},
            }
        )
        self.event("end", f"{result.status}: {result.reason}", update=result.update)
        self.metrics.close()
        with full_disk_tolerated():
            clear_targets(self.record.path / TARGETS_FILE)
        self.record.close()

    def _write_progress(self, reports: Sequence[StageReport], plan: Plan) -> None:
        self.record.write_status(
            {
                "state": "running",
                "update": self._line["update"],
                "loss": self._line["loss"],
                "tokens_per_s": self._line["tokens_per_s"],
                "stage_busy": [phase_shares(r.busy_s, r.wall_s) for r in reports],
                "predicted_step_s": plan.predicted.step_s,
            }
        )


def grad_norm(of_stages: Sequence[UpdateReport], schedule: str) -> float | None:
    """The norm over all stages: agreed on when synchronous, else put together from their own."""
    norms = [report.grad_norm for report in of_stages]
    if not is_asynchronous(schedule):
        return norms[-1]
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if len(known) == len(norms) else None


def perplexity(loss: float | None, data_format: str) -> float | None:
    """Of a mean loss per token, infinite where it overflows; None for what is not text."""
    if loss is None or data_format not in TEXT_FORMATS:
        return None
    return math.exp(loss) if loss < 700 else math.inf
