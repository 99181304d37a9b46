"""The metrics of a run: each name once, few series, counters that survive a restart.

Values are kept in plain dicts and turned into Prometheus families when scraped, so that a scrape
sees one consistent state, a departed stage's series go at once, and the coordinator can put the
counters into its journal. Labels are `run` and a few bounded ones; never a step, a sample, a
process or a path. This is the only module that knows prometheus_client.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from elastic_trainer.errors import ConfigError
from elastic_trainer.types import CheckpointInfo, Plan, StageReport

PREFIX = "elastictrainer_"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A metric: its name without the prefix, what kind it is and what tells its series apart."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _counter(name: str, text: str, *labels: str) -> Spec:
    return Spec(name=name, kind="counter", help=text, labels=labels)


def _gauge(name: str, text: str, *labels: str) -> Spec:
    return Spec(name=name, kind="gauge", help=text, labels=labels)


def _histogram(name: str, text: str) -> Spec:
    return Spec(name=name, kind="histogram", help=text)


UPDATES = _counter("updates_total", "Committed optimizer steps.")
SKIPPED = _counter("skipped_updates_total", "Updates skipped because a gradient overflowed.")
SAMPLES = _counter("samples_total", "Samples of committed updates.", "modality")
TOKENS = _counter("tokens_total", "Tokens (positions) of committed updates.")
BUSY = _counter("stage_busy_seconds_total", "Time of each stage by what it did.", "stage", "phase")
TRANSFER = _counter(
    "activation_bytes_total",
    "Bytes of activations and gradients that each stage sent and received.",
    "stage",
    "direction",
)
RECONFIGURATIONS = _counter("reconfigurations_total", "Plans put into force.", "reason")
EVALUATIONS = _counter("evaluations_total", "Evaluations on held-out data.")
CHECKPOINTS = _counter("checkpoints_total", "Checkpoints completed.")
CHECKPOINT_FAILURES = _counter("checkpoint_failures_total", "Checkpoints that failed.")
UPDATE = _gauge("update", "Newest committed update.")
TARGET_UPDATES = _gauge("target_updates", "Update at which training ends.")
LOSS = _gauge("loss", "Training loss per valid token of the newest update.")
EVAL_LOSS = _gauge("eval_loss", "Loss per valid token on held-out data.")
LEARNING_RATE = _gauge("learning_rate", "Learning rate of the newest update.")
GRAD_NORM = _gauge("grad_norm", "Global gradient norm before clipping.")
TOKENS_PER_SECOND = _gauge("tokens_per_second", "Training speed of the newest segment.")
BUBBLE = _gauge("pipeline_bubble_ratio", "Idle share of all stage time in the newest segment.")
PREDICTED_BUBBLE = _gauge("predicted_bubble_ratio", "Idle share that the planner expected.")
PREDICTED_STEP = _gauge("predicted_step_seconds", "Step time that the planner expected.")
STAGES = _gauge("stages", "Stages of the pipeline.")
BUSY_RATIO = _gauge("stage_busy_ratio", "Computing share of the newest segment.", "stage")
PEAK_LIVE = _gauge("stage_peak_activations", "Most microbatches alive at once.", "stage")
PEAK_BYTES = _gauge("stage_peak_activation_bytes", "Most bytes of live activations.", "stage")
QUEUE_DEPTH = _gauge("stage_queue_depth", "Segments handed out and not yet done.", "stage")
WORKERS = _gauge("workers", "Workers of the run.", "state")
STALENESS = _gauge("stage_staleness_updates", "Updates by which gradients were late.", "stage")
CHECKPOINT_UPDATE = _gauge("checkpoint_last_update", "Update of the newest checkpoint.")
CHECKPOINT_BYTES = _gauge("checkpoint_last_bytes", "Size of the newest checkpoint.")
CHECKPOINT_TIME = _gauge(
    "checkpoint_last_success_timestamp_seconds", "When the newest checkpoint was completed."
)
BUILD_INFO = _gauge("build_info", "Version of elastic-trainer; always 1.", "version")
STEP_DURATION = _histogram("step_duration_seconds", "Wall time of one update.")
CHECKPOINT_DURATION = _histogram("checkpoint_duration_seconds", "Time to write a checkpoint.")

CATALOG: tuple[Spec, ...] = tuple(value for value in globals().values() if isinstance(value, Spec))
COMPUTE_PHASES = ("forward", "backward", "optimizer")

Labels = tuple[str, ...]


class _Store(Collector):
    """The values of all metrics of one run, as Prometheus reads them."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._values: dict[Spec, dict[Labels, float]] = {}
        self._histograms: dict[Spec, tuple[list[int], float]] = {}

    def add(self, spec: Spec, amount: float, *labels: str) -> None:
        assert spec.kind == "counter" and amount >= 0 and len(labels) == len(spec.labels), spec
        with self._lock:
            series = self._values.setdefault(spec, {})
            series[labels] = series.get(labels, 0.0) + amount

    def set(self, spec: Spec, value: float | None, *labels: str) -> None:
        """Set a gauge; None takes the series away, since no value is not zero."""
        assert spec.kind == "gauge" and len(labels) == len(spec.labels), spec
        with self._lock:
            series = self._values.setdefault(spec, {})
            if value is None:
                series.pop(labels, None)
            else:
                series[labels] = value

    def observe(self, spec: Spec, value: float) -> None:
        assert spec.kind == "histogram", spec
        with self._lock:
            counts, total = self._histograms.get(spec, ([0] * (len(SECONDS) + 1), 0.0))
            counts[bisect_left(SECONDS, value)] += 1
            self._histograms[spec] = (counts, total + value)

    def keep_stages(self, num_stages: int) -> None:
        """Take away the series of stages that are no more."""
        with self._lock:
            for spec, series in self._values.items():
                if "stage" in spec.labels:
                    at = spec.labels.index("stage")
                    for labels in [key for key in series if int(key[at]) >= num_stages]:
                        del series[labels]

    def counters(self) -> dict[str, Any]:
        """Counters and histograms as JSON-able values."""
        with self._lock:
            return {
                "counters": {
                    spec.name: [[list(labels), value] for labels, value in series.items()]
                    for spec, series in self._values.items()
                    if spec.kind == "counter"
                },
                "histograms": {
                    spec.name: [list(counts), total]
                    for spec, (counts, total) in self._histograms.items()
                },
            }

    def restore(self, state: Mapping[str, Any]) -> None:
        specs = {spec.name: spec for spec in CATALOG}
        with self._lock:
            for name, series in state["counters"].items():
                self._values[specs[name]] = {tuple(labels): value for labels, value in series}
            for name, (counts, total) in state["histograms"].items():
                self._histograms[specs[name]] = (list(counts), total)

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            values = {spec: dict(series) for spec, series in self._values.items()}
            histograms = {spec: (list(c), total) for spec, (c, total) in self._histograms.items()}
        for spec in CATALOG:
            if spec in histograms:
                yield self._histogram_family(spec, *histograms[spec])
            elif values.get(spec):
                yield self._family(spec, values[spec])

    def _family(self, spec: Spec, series: Mapping[Labels, float]) -> Metric:
        kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
        family = kind(spec.full_name, spec.help, labels=("run", *spec.labels))
        for labels, value in sorted(series.items()):
            family.add_metric((self._run, *labels), value)
        return family

    def _histogram_family(self, spec: Spec, counts: Sequence[int], total: float) -> Metric:
        family = HistogramMetricFamily(spec.full_name, spec.help, labels=("run",))
        buckets, seen = [], 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), counts, strict=True):
            seen += count
            buckets.append((bound, float(seen)))
        family.add_metric((self._run,), buckets, total)
        return family


class RunMetrics:
    """What a run tells Prometheus."""

    def __init__(self, run: str, *, version: str) -> None:
        self._store = _Store(run)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self._store)
        self._server: tuple[HTTPServer, threading.Thread] | None = None
        self._store.set(BUILD_INFO, 1, version)

    def observe_workers(self, counts: Mapping[str, int]) -> None:
        """How many workers are in which state (starting, running)."""
        for state, count in counts.items():
            self._store.set(WORKERS, count, state)

    def observe_queue(self, stage: int, num_segments: int) -> None:
        """Segments that a stage was given and has not finished."""
        self._store.set(QUEUE_DEPTH, num_segments, str(stage))

    def observe_plan(
        self, plan: Plan, target_updates: int | None = None, reason: str = "start"
    ) -> None:
        """A plan was put into force; series of stages that it lacks go."""
        self._store.add(RECONFIGURATIONS, 1, reason)
        self._store.keep_stages(plan.num_stages)
        self._store.set(STAGES, plan.num_stages)
        self._store.set(PREDICTED_STEP, plan.predicted.step_s)
        self._store.set(PREDICTED_BUBBLE, plan.predicted.bubble_ratio)
        self._store.set(TARGET_UPDATES, target_updates)

    def observe_update(self, line: Mapping[str, Any]) -> None:
        """Count one committed update, given as its line of metrics.jsonl."""
        store = self._store
        store.add(UPDATES, 1)
        store.add(SKIPPED, 1 if line.get("skipped") else 0)
        store.add(SAMPLES, line.get("samples") or 0, line.get("modality") or "text")
        store.add(TOKENS, line.get("tokens") or 0)
        store.set(UPDATE, line["update"])
        store.set(LOSS, line.get("loss"))
        store.set(LEARNING_RATE, line.get("lr"))
        store.set(GRAD_NORM, line.get("grad_norm"))
        store.set(TOKENS_PER_SECOND, line.get("tokens_per_s"))
        if line.get("step_s") is not None:
            store.observe(STEP_DURATION, line["step_s"])

    def observe_segment(self, reports: Iterable[StageReport]) -> None:
        """Count what the stages measured in one segment."""
        idle = wall = 0.0
        for report in reports:
            stage = str(report.stage)
            for phase, seconds in report.busy_s.items():
                self._store.add(BUSY, max(0.0, seconds), stage, phase)
            self._store.add(TRANSFER, report.sent_bytes, stage, "sent")
            self._store.add(TRANSFER, report.received_bytes, stage, "received")
            self._store.set(PEAK_LIVE, report.peak_live_activations, stage)
            self._store.set(PEAK_BYTES, report.peak_activation_bytes, stage)
            self._store.set(STALENESS, report.max_staleness, stage)
            self._store.set(BUSY_RATIO, busy_ratio(report.busy_s, report.wall_s), stage)
            idle += report.wall_s * (1 - busy_ratio(report.busy_s, report.wall_s))
            wall += report.wall_s
        self._store.set(BUBBLE, idle / wall if wall else None)

    def observe_evaluation(self, loss: float) -> None:
        """Count one evaluation."""
        self._store.add(EVALUATIONS, 1)
        self._store.set(EVAL_LOSS, loss)

    def observe_checkpoint(self, info: CheckpointInfo, duration_s: float) -> None:
        """Count one complete checkpoint."""
        self._store.add(CHECKPOINTS, 1)
        self._store.observe(CHECKPOINT_DURATION, duration_s)
        self._store.set(CHECKPOINT_UPDATE, info.update)
        self._store.set(CHECKPOINT_BYTES, info.num_bytes)
        self._store.set(CHECKPOINT_TIME, info.created_at)

    def observe_checkpoint_failure(self) -> None:
        """Count one checkpoint that could not be written."""
        self._store.add(CHECKPOINT_FAILURES, 1)

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
    computing = sum(busy_s.get(phase, 0.0) for phase in COMPUTE_PHASES)
    return min(1.0, computing / wall_s) if wall_s > 0 else 0.0
