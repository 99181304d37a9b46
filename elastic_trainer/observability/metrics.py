"""What a run tells Prometheus: facts in, series out, over HTTP.

Together with `series` the only module that knows prometheus_client.
"""

import threading
from collections.abc import Collection, Iterable, Mapping
from http.server import HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from elastic_trainer.errors import ConfigError
from elastic_trainer.observability import series
from elastic_trainer.observability.changes import CAUSES, UNPLANNED, Change
from elastic_trainer.types import CheckpointInfo, Plan, StageReport


class RunMetrics:
    """What a run tells Prometheus."""

    def __init__(self, run: str, *, version: str) -> None:
        self._store = series.Store(run)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._store)
        self._server: tuple[HTTPServer, threading.Thread] | None = None
        self._store.set(series.BUILD_INFO, 1, version)
        for cause in CAUSES:  # else the first change of its kind would be no increase
            self._store.add(series.MEMBERSHIP_CHANGES, 0, str(cause))

    def observe_workers(self, counts: Mapping[str, int]) -> None:
        """How many workers are in which state (pending, starting, running, idle, leaving)."""
        self._store.replace(series.WORKERS, {(state,): n for state, n in counts.items()})

    def observe_loaders(self, counts: Mapping[str, int]) -> None:
        """How many loaders are in which state (starting, serving, idle)."""
        self._store.replace(series.LOADERS, {(state,): n for state, n in counts.items()})

    def observe_queue(self, stage: int, num_segments: int) -> None:
        """Segments that a stage was given and has not finished."""
        self._store.set(series.QUEUE_DEPTH, num_segments, str(stage))

    def observe_plan(
        self, plan: Plan, target_updates: int | None = None, reason: str = "start"
    ) -> None:
        """A plan was put into force; series of stages that it lacks go."""
        self._store.add(series.RECONFIGURATIONS, 1, reason)
        self._store.keep_stages(plan.num_stages)
        self._store.set(series.STAGES, plan.num_stages)
        self._store.set(series.GENERATION, plan.generation)
        self._store.set(series.PREDICTED_STEP, plan.predicted.step_s)
        self._store.set(series.PREDICTED_BUBBLE, plan.predicted.bubble_ratio)
        self._store.set(series.TARGET_UPDATES, target_updates)

    def observe_update(self, line: Mapping[str, Any], *, again: bool = False) -> None:
        """Count one committed update, given as its line of metrics.jsonl.

        Args:
            again: it was committed before, and lost: the counters have it.
        """
        store = self._store
        if not again:
            store.add(series.UPDATES, 1)
            store.add(series.SKIPPED, 1 if line.get("skipped") else 0)
            store.add(series.SAMPLES, line.get("samples") or 0, line.get("modality") or "text")
            store.add(series.TOKENS, line.get("tokens") or 0)
            store.add(series.UNREADABLE, line.get("unreadable") or 0)
        store.set(series.UPDATE, line["update"])
        store.set(series.LOSS, line.get("loss"))
        store.set(series.LEARNING_RATE, line.get("lr"))
        store.set(series.GRAD_NORM, line.get("grad_norm"))
        store.set(series.TOKENS_PER_SECOND, line.get("tokens_per_s"))
        if line.get("step_s") is not None and not again:
            store.observe(series.STEP_DURATION, line["step_s"])

    def observe_segment(self, reports: Iterable[StageReport]) -> None:
        """Count what the stages measured in one segment."""
        idle = wall = 0.0
        for report in reports:
            stage = str(report.stage)
            for phase, seconds in report.busy_s.items():
                self._store.add(series.BUSY, max(0.0, seconds), stage, phase)
            self._store.add(series.TRANSFER, report.sent_bytes, stage, "sent")
            self._store.add(series.TRANSFER, report.received_bytes, stage, "received")
            self._store.set(series.PEAK_LIVE, report.peak_live_activations, stage)
            self._store.set(series.PEAK_BYTES, report.peak_activation_bytes, stage)
            self._store.set(series.STALENESS, report.max_staleness, stage)
            self._store.set(series.BUSY_RATIO, busy_ratio(report.busy_s, report.wall_s), stage)
            idle += report.wall_s * (1 - busy_ratio(report.busy_s, report.wall_s))
            wall += report.wall_s
        self._store.set(series.BUBBLE, idle / wall if wall else None)

    def observe_evaluation(self, loss: float) -> None:
        """Count one evaluation."""
        self._store.add(series.EVALUATIONS, 1)
        self._store.set(series.EVAL_LOSS, loss)

    def observe_checkpoint(self, info: CheckpointInfo, duration_s: float) -> None:
        """Count one complete checkpoint."""
        self._store.add(series.CHECKPOINTS, 1)
        self._store.observe(series.CHECKPOINT_DURATION, duration_s)
        self._store.set(series.CHECKPOINT_UPDATE, info.update)
        self._store.set(series.CHECKPOINT_BYTES, info.num_bytes)
        self._store.set(series.CHECKPOINT_TIME, info.created_at)

    def observe_checkpoint_failure(self) -> None:
        """Count one checkpoint that could not be written."""
        self._store.add(series.CHECKPOINT_FAILURES, 1)

    def observe_change(self, change: Change) -> None:
        """Count a change of the membership as soon as it is known."""
        self._store.add(series.MEMBERSHIP_CHANGES, 1, change.cause)
        self._store.set(series.LAST_CHANGE_TIME, change.time)
        if change.cause in UNPLANNED and change.worker:
            named: series.Labels = (change.worker, change.node, change.cause)
            self._store.replace(series.LAST_LOSS, {named: 1})

    def observe_departed(self, stages: Collection[int]) -> None:
        """The workers of these stages are gone: so are their gauges."""
        self._store.drop_stages(stages)

    def observe_moved(self, num_bytes: Mapping[str, int], pause_s: float) -> None:
        """Count what a generation took over from where, and for how long training stood still."""
        for source, amount in num_bytes.items():
            self._store.add(series.MOVED, amount, source)
        self._store.observe(series.PAUSE_DURATION, pause_s)

    def observe_recovery(self, seconds: float, updates: int, samples: int) -> None:
        """Count a loss that is made good: an update is committed again."""
        self._store.observe(series.RECOVERY_DURATION, seconds)
        self._store.add(series.REPLAYED, updates)
        self._store.add(series.REREAD, samples)

    def observe_snapshot(self, update: int, cost_s: float) -> None:
        """Count one snapshot that stands at two places."""
        self._store.add(series.SNAPSHOTS, 1)
        self._store.add(series.SNAPSHOT_SECONDS, cost_s)
        self._store.set(series.SNAPSHOT_UPDATE, update)

    def observe_leases(self, limit_s: float, ages_s: Mapping[int, float]) -> None:
        """For how long each stage's worker has given no sign of life."""
        self._store.set(series.LEASE_LIMIT, limit_s)
        self._store.replace(series.LEASE_AGE, {(str(s),): age for s, age in ages_s.items()})

    def observe_budgets(self, left: Mapping[str, int | None]) -> None:
        """What is left of each budget (failures, preemptions); None: it has no end."""
        known = {name: n for name, n in left.items() if n is not None}
        self._store.replace(series.BUDGET_LEFT, {(name,): n for name, n in known.items()})

    def observe_waiting(self, waits: bool) -> None:
        """Whether training waits for workers."""
        self._store.set(series.WAITING, float(waits))

    def state(self) -> dict[str, Any]:
        """Counters, JSON-able, for the coordinator's journal."""
        return self._store.counters()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on counting where `state` was taken."""
        self._store.restore(state)

    def text(self) -> str:
        """What /metrics answers."""
        return generate_latest(self._registry).decode()

    def serve(self, host: str, port: int) -> tuple[str, int]:
        """Serve /metrics from a thread; the address with the port that was bound."""
        assert self._server is None, "served already"
        try:
            self._server = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"Cannot serve metrics on {host}:{port}: {error.strerror or error}",
                "Choose another metrics.port (0: any free one) or metrics.host.",
            ) from error
        return host, int(self._server[0].server_port)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None


def busy_ratio(busy_s: Mapping[str, float], wall_s: float) -> float:
    """Share of a stage's time that it computed."""
    computing = sum(busy_s.get(phase, 0.0) for phase in series.COMPUTE_PHASES)
    return min(1.0, computing / wall_s) if wall_s > 0 else 0.0
