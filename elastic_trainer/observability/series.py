"""The metrics by name, each once, and the values of one run's series.

Values are kept in plain dicts and turned into Prometheus families when scraped, so that a scrape
sees one consistent state, a departed stage's series go at once, and the coordinator can put the
counters into its journal. Labels are `run` and a few bounded ones; never a step, a sample, a
process or a path.
"""

import threading
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

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
UNREADABLE = _counter(
    "unreadable_samples_total", "Samples of committed updates skipped because they were damaged."
)
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
LOADERS = _gauge("loaders", "Loaders of the run.", "state")
STALENESS = _gauge("stage_staleness_updates", "Updates by which gradients were late.", "stage")
CHECKPOINT_UPDATE = _gauge("checkpoint_last_update", "Update of the newest checkpoint.")
CHECKPOINT_BYTES = _gauge("checkpoint_last_bytes", "Size of the newest checkpoint.")
CHECKPOINT_TIME = _gauge(
    "checkpoint_last_success_timestamp_seconds", "When the newest checkpoint was completed."
)
MEMBERSHIP_CHANGES = _counter("membership_changes_total", "Changes of the membership.", "reason")
REPLAYED = _counter("replayed_updates_total", "Updates that were trained again after a loss.")
REREAD = _counter("reread_samples_total", "Samples that were read again after a loss.")
MOVED = _counter(
    "moved_bytes_total",
    "Bytes of layer state taken over at membership changes, by where they were.",
    "source",
)
SNAPSHOTS = _counter("snapshots_total", "Snapshots that stand at two places.")
SNAPSHOT_SECONDS = _counter(
    "snapshot_seconds_total", "Time in which training stood still to take snapshots."
)
SNAPSHOT_UPDATE = _gauge("snapshot_last_update", "Update of the newest complete snapshot.")
GENERATION = _gauge("generation", "Number of the membership that is at work.")
WAITING = _gauge("waiting", "1 while training waits for workers, else 0.")
LEASE_LIMIT = _gauge("lease_limit_seconds", "After so long without an answer a worker is lost.")
LEASE_AGE = _gauge(
    "stage_lease_age_seconds", "Time since the stage's worker last gave a sign of life.", "stage"
)
BUDGET_LEFT = _gauge(
    "budget_left", "Disturbances that the run still survives; absent: any number.", "budget"
)
LAST_LOSS = _gauge(
    "last_loss_info", "The worker that was lost last; always 1.", "worker", "node", "reason"
)
LAST_CHANGE_TIME = _gauge(
    "membership_last_change_timestamp_seconds", "When the membership changed last."
)
BUILD_INFO = _gauge("build_info", "Version of elastic-trainer; always 1.", "version")
STEP_DURATION = _histogram("step_duration_seconds", "Wall time of one update.")
CHECKPOINT_DURATION = _histogram("checkpoint_duration_seconds", "Time to write a checkpoint.")
RECOVERY_DURATION = _histogram(
    "recovery_duration_seconds", "Time from a loss being known to the next committed update."
)
PAUSE_DURATION = _histogram(
    "pause_duration_seconds", "Time in which training stood still for a change of plan."
)

CATALOG: tuple[Spec, ...] = tuple(value for value in globals().values() if isinstance(value, Spec))
COMPUTE_PHASES = ("forward", "backward", "optimizer")

Labels = tuple[str, ...]


class Store(Collector):
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

    def replace(self, spec: Spec, values: Mapping[Labels, float]) -> None:
        """Set all series of a gauge; others of it go."""
        assert spec.kind == "gauge" and all(len(at) == len(spec.labels) for at in values), spec
        with self._lock:
            self._values[spec] = dict(values)

    def drop_stages(self, stages: Collection[int]) -> None:
        """Take away the gauges of stages that nobody holds now; their counters go on later."""
        with self._lock:
            for spec, series in self._values.items():
                if spec.kind == "gauge" and "stage" in spec.labels:
                    at = spec.labels.index("stage")
                    for labels in [key for key in series if int(key[at]) in stages]:
                        del series[labels]

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
        """Go on from what `counters` gave; what this version does not know is left out."""
        specs = {spec.name: spec for spec in CATALOG}
        with self._lock:
            for name, series in state["counters"].items():
                if name in specs:
                    self._values[specs[name]] = {tuple(labels): value for labels, value in series}
            for name, (counts, total) in state["histograms"].items():
                if name in specs and len(counts) == len(SECONDS) + 1:
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
