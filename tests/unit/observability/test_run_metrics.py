"""Metrics: bounded series, departed stages gone, counters that survive, exact values."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_trainer.errors import ConfigError
from elastic_trainer.observability.metrics import RunMetrics
from elastic_trainer.observability.series import CATALOG
from elastic_trainer.observability.targets import clear_targets, write_targets
from elastic_trainer.types import CheckpointInfo, Plan, Prediction, StagePlan, StageReport

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def series(metrics: RunMetrics) -> Series:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }


def value(metrics: RunMetrics, name: str, **labels: str) -> float | None:
    return series(metrics).get(
        (f"elastictrainer_{name}", frozenset({"run": "r", **labels}.items()))
    )


def make_plan(num_stages: int) -> Plan:
    ones = (1.0,) * num_stages
    return Plan(
        generation=1,
        schedule="1f1b",
        num_microbatches=4,
        layers=tuple(f"l{index}" for index in range(num_stages)),
        stages=tuple(
            StagePlan(stage=s, first=s, stop=s + 1, worker=f"stage-{s}") for s in range(num_stages)
        ),
        predicted=Prediction(
            step_s=0.5, bubble_ratio=0.25, stage_busy_s=ones, stage_memory_bytes=(1,) * num_stages
        ),
        reasons=(),
    )


def make_report(stage: int, forward_s: float = 1.0) -> StageReport:
    return StageReport(
        stage=stage,
        worker=f"stage-{stage}",
        generation=1,
        segment=1,
        updates=(),
        busy_s={"forward": forward_s, "backward": 2.0, "optimizer": 0.0, "recv": 1.0, "idle": 0.5},
        wall_s=5.0,
        peak_live_activations=2,
        peak_activation_bytes=64,
        stash_copies=0,
        max_staleness=stage,
        sent_bytes=100,
        received_bytes=50,
    )


def observe(metrics: RunMetrics, num_stages: int, updates: int, first: int = 1) -> None:
    metrics.observe_plan(make_plan(num_stages), 10)
    metrics.observe_segment([make_report(stage) for stage in range(num_stages)])
    for update in range(first, first + updates):
        metrics.observe_update(
            {"update": update, "loss": 2.0, "lr": 0.1, "grad_norm": None, "samples": 4}
            | {"tokens": 32, "tokens_per_s": 64.0, "step_s": 0.2}
        )


@pytest.fixture
def metrics() -> RunMetrics:
    return RunMetrics("r", version="1.2.3")


def test_values_are_exact(metrics: RunMetrics) -> None:
    observe(metrics, 2, 3)
    for step_s in (0.2, 0.9):
        metrics.observe_update({"update": 4, "loss": 2.0, "step_s": step_s, "skipped": True})
    assert value(metrics, "updates_total") == 5
    assert value(metrics, "skipped_updates_total") == 2
    assert value(metrics, "samples_total", modality="text") == 12
    assert value(metrics, "tokens_total") == 96
    assert value(metrics, "step_duration_seconds_count") == 5
    assert value(metrics, "step_duration_seconds_sum") == pytest.approx(1.7, abs=1e-12)
    assert value(metrics, "step_duration_seconds_bucket", le="0.1") == 0
    assert value(metrics, "step_duration_seconds_bucket", le="0.25") == 4
    assert value(metrics, "step_duration_seconds_bucket", le="+Inf") == 5
    assert value(metrics, "stage_busy_seconds_total", stage="1", phase="forward") == 1.0
    assert value(metrics, "activation_bytes_total", stage="0", direction="sent") == 100
    assert value(metrics, "stage_busy_ratio", stage="0") == pytest.approx(0.6)
    assert value(metrics, "pipeline_bubble_ratio") == pytest.approx(0.4)
    assert value(metrics, "build_info", version="1.2.3") == 1


def test_there_is_one_loss_whoever_computes_it(metrics: RunMetrics) -> None:
    observe(metrics, 4, 2)
    losses = [key for key in series(metrics) if key[0] == "elastictrainer_loss"]
    assert losses == [("elastictrainer_loss", frozenset({("run", "r")}))]
    assert value(metrics, "loss") == 2.0


def test_what_was_not_measured_has_no_value(metrics: RunMetrics) -> None:
    metrics.observe_update({"update": 1, "loss": 1.0, "grad_norm": 3.0})
    assert value(metrics, "grad_norm") == 3.0
    metrics.observe_update({"update": 2, "loss": 1.0, "grad_norm": None})
    assert value(metrics, "grad_norm") is None
    assert value(metrics, "eval_loss") is None


def test_series_of_departed_stages_go_at_once(metrics: RunMetrics) -> None:
    observe(metrics, 4, 1)
    before = {dict(labels).get("stage") for _, labels in series(metrics)}
    assert before == {None, "0", "1", "2", "3"}
    metrics.observe_plan(make_plan(2), 10)
    after = {dict(labels).get("stage") for _, labels in series(metrics)}
    assert after == {None, "0", "1"}
    assert value(metrics, "stages") == 2


def test_gauges_of_a_stage_whose_worker_is_lost_go_at_once(metrics: RunMetrics) -> None:
    observe(metrics, 3, 1)
    metrics.observe_leases(3.0, {0: 0.25, 1: 0.5, 2: 0.75})
    metrics.observe_queue(1, 2)
    metrics.observe_departed([1])
    for name in ("stage_lease_age_seconds", "stage_busy_ratio", "stage_queue_depth"):
        assert value(metrics, name, stage="1") is None
    assert value(metrics, "stage_lease_age_seconds", stage="2") == 0.75
    assert value(metrics, "stage_busy_seconds_total", stage="1", phase="forward") == 1.0, (
        "what was done is done"
    )
    metrics.observe_leases(3.0, {0: 0.25})
    assert value(metrics, "stage_lease_age_seconds", stage="2") is None
    assert value(metrics, "lease_limit_seconds") == 3.0


def test_states_that_no_worker_is_in_have_no_series(metrics: RunMetrics) -> None:
    metrics.observe_workers({"starting": 2, "running": 1})
    metrics.observe_workers({"running": 3})
    assert value(metrics, "workers", state="running") == 3
    assert value(metrics, "workers", state="starting") is None


def test_budgets_without_an_end_have_no_value(metrics: RunMetrics) -> None:
    metrics.observe_budgets({"failures": 2, "preemptions": None})
    assert value(metrics, "budget_left", budget="failures") == 2
    assert value(metrics, "budget_left", budget="preemptions") is None


def test_snapshots_and_waiting(metrics: RunMetrics) -> None:
    metrics.observe_snapshot(40, 0.25)
    metrics.observe_snapshot(60, 0.5)
    metrics.observe_waiting(True)
    assert value(metrics, "snapshots_total") == 2
    assert value(metrics, "snapshot_seconds_total") == 0.75
    assert value(metrics, "snapshot_last_update") == 60
    assert value(metrics, "waiting") == 1
    metrics.observe_waiting(False)
    assert value(metrics, "waiting") == 0


def test_counters_of_another_version_are_left_out(metrics: RunMetrics) -> None:
    observe(metrics, 2, 3)
    saved = metrics.state()
    saved["counters"]["unheard_of_total"] = [[[], 3.0]]
    saved["histograms"]["step_duration_seconds"] = [[1, 2], 3.0]
    restarted = RunMetrics("r", version="1.2.4")
    restarted.restore(saved)
    assert value(restarted, "updates_total") == 3
    assert "unheard_of" not in restarted.text() and "step_duration" not in restarted.text()


def test_the_number_of_series_does_not_grow(metrics: RunMetrics) -> None:
    observe(metrics, 4, 1)
    num_series = len(series(metrics))
    for round_ in range(20):
        observe(metrics, 1 + round_ % 4, 5, first=2 + 5 * round_)
    assert len(series(metrics)) == num_series


def test_counters_survive_a_restart_and_gauges_are_told_anew(metrics: RunMetrics) -> None:
    observe(metrics, 2, 3)
    metrics.observe_checkpoint(
        CheckpointInfo(update=3, path="p", num_bytes=7, created_at=9.0), duration_s=0.3
    )
    metrics.observe_checkpoint_failure()
    metrics.observe_evaluation(1.5)
    saved = json.loads(json.dumps(metrics.state()))
    restarted = RunMetrics("r", version="1.2.3")
    restarted.restore(saved)
    counted = re.compile("_total$|_bucket$|_sum$|_count$")
    expected = {key: count for key, count in series(metrics).items() if counted.search(key[0])}
    got = {key: count for key, count in series(restarted).items() if counted.search(key[0])}
    assert got == expected and len(expected) > 20
    observe(restarted, 2, 2, first=4)
    assert value(restarted, "updates_total") == 5
    assert value(restarted, "step_duration_seconds_count") == 5
    assert value(metrics, "updates_total") == 3, "the saved state is not shared"


# Each has few values whatever the run does; a step, a sample or a process is never among them.
BOUNDED_LABELS = {"stage", "phase", "direction", "version", "modality", "reason", "state"}
BOUNDED_LABELS |= {"source", "budget"}
ONE_SERIES = {"last_loss_info"}  # the next one takes the place of the one before


def test_names_follow_the_conventions() -> None:
    names = [spec.full_name for spec in CATALOG]
    assert len(names) == len(set(names))
    for spec in CATALOG:
        assert re.fullmatch(r"elastictrainer_[a-z_]+", spec.full_name)
        assert (spec.kind == "counter") == spec.name.endswith("_total"), spec.name
        assert spec.help.endswith(".")
        assert set(spec.labels) <= BOUNDED_LABELS or spec.name in ONE_SERIES, spec.name


def test_metrics_are_served_and_the_port_is_let_go(metrics: RunMetrics) -> None:
    host, port = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=10) as answer:
        assert b'elastictrainer_build_info{run="r",version="1.2.3"} 1.0' in answer.read()
    other = RunMetrics("other", version="1")
    with pytest.raises(ConfigError, match=f"Cannot serve metrics on 127.0.0.1:{port}") as caught:
        other.serve("127.0.0.1", port)
    assert "metrics.port" in str(caught.value)
    metrics.close()
    other.serve("127.0.0.1", port)
    other.close()
    other.close()


def test_targets_are_file_sd(tmp_path: Path) -> None:
    path = tmp_path / "prometheus" / "targets.json"
    write_targets(path, ("127.0.0.1", 9000), "r")
    assert json.loads(path.read_text()) == [
        {"labels": {"job": "elastic-trainer", "run": "r"}, "targets": ["127.0.0.1:9000"]}
    ]
    write_targets(path, ("::1", 9000), "r")
    assert json.loads(path.read_text())[0]["targets"] == ["[::1]:9000"]
    write_targets(path, ("0.0.0.0", 9000), "r")
    assert not json.loads(path.read_text())[0]["targets"][0].startswith("0.0.0.0")
    clear_targets(path)
    assert json.loads(path.read_text()) == []
    assert [file.name for file in path.parent.iterdir()] == ["targets.json"]


def test_runs_register_in_the_shared_folder_where_there_is_one(tmp_path: Path) -> None:
    path = tmp_path / "r" / "prometheus" / "targets.json"
    write_targets(path, ("127.0.0.1", 9000), "r")
    assert [folder.name for folder in tmp_path.iterdir()] == ["r"]
    shared = tmp_path / "prometheus" / "r.json"
    shared.parent.mkdir()
    write_targets(path, ("127.0.0.1", 9000), "r")
    assert shared.read_text() == path.read_text()
    clear_targets(path)
    assert not shared.exists() and path.read_text() == "[]\n"
