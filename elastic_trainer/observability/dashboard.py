"""Writes the Grafana dashboard: `python -m elastic_trainer.observability.dashboard`."""

import json
import sys
from typing import Any

from elastic_trainer.observability import series
from elastic_trainer.observability.series import Spec

GRID_WIDTH = 24
RUN = 'run=~"$run"'


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's JSON (schema of Grafana 9 and newer)."""
    rows = [
        [
            _stat("Update", _of(series.UPDATE), "none"),
            _stat("Loss", _of(series.LOSS), "none"),
            _stat("Tokens per second", _of(series.TOKENS_PER_SECOND), "short"),
            _stat("Stages", _of(series.STAGES), "none"),
            _stat("Failures left", _of(series.BUDGET_LEFT, 'budget="failures"'), "none"),
            _stat("Since the last checkpoint", f"time() - {_of(series.CHECKPOINT_TIME)}", "s"),
        ],
        [
            _graph(
                "Loss",
                "none",
                (_of(series.LOSS), "training {{run}}"),
                (_of(series.EVAL_LOSS), "held out {{run}}"),
            ),
            _graph("Tokens per second", "short", (_rate(series.TOKENS), "{{run}}")),
        ],
        [
            _graph(
                "Step time",
                "s",
                (_quantile(0.5, series.STEP_DURATION), "median {{run}}"),
                (_quantile(0.95, series.STEP_DURATION), "95% {{run}}"),
                (_of(series.PREDICTED_STEP), "planned {{run}}"),
            ),
            _graph(
                "Idle share of the pipeline",
                "percentunit",
                (_of(series.BUBBLE), "measured {{run}}"),
                (_of(series.PREDICTED_BUBBLE), "planned {{run}}"),
            ),
        ],
        [
            _graph(
                "What stages do with their time",
                "percentunit",
                (_rate(series.BUSY), "stage {{stage}} {{phase}}"),
                stacked=True,
            ),
            _graph("Busy share", "percentunit", (_of(series.BUSY_RATIO), "stage {{stage}}")),
        ],
        [
            _graph("Transfer", "Bps", (_rate(series.TRANSFER), "stage {{stage}} {{direction}}")),
            _graph("Live activations", "bytes", (_of(series.PEAK_BYTES), "stage {{stage}}")),
        ],
        [
            _graph(
                "Learning rate and gradient norm",
                "none",
                (_of(series.LEARNING_RATE), "learning rate {{run}}"),
                (_of(series.GRAD_NORM), "gradient norm {{run}}"),
            ),
            _graph("Staleness in updates", "none", (_of(series.STALENESS), "stage {{stage}}")),
        ],
        *_membership_rows(),
        [
            _graph(
                "Time to write a checkpoint",
                "s",
                (_quantile(0.95, series.CHECKPOINT_DURATION), "95% {{run}}"),
            ),
            _graph(
                "What went wrong",
                "none",
                (
                    f"increase({_of(series.CHECKPOINT_FAILURES)}[15m])",
                    "failed checkpoints {{run}}",
                ),
                (f"increase({_of(series.SKIPPED)}[15m])", "skipped updates {{run}}"),
            ),
        ],
    ]
    return {
        "title": "elastic-trainer",
        "uid": "elastic-trainer",
        "schemaVersion": 37,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_source_variable(), _run_variable()]},
        "panels": _place(rows),
    }


def _membership_rows() -> list[list[dict[str, Any]]]:
    """Who comes and goes, and what it costs."""
    return [
        [
            _graph("Workers", "none", (_of(series.WORKERS), "{{state}} {{run}}"), stacked=True),
            _graph(
                "Changes of the membership",
                "none",
                (f"increase({_of(series.MEMBERSHIP_CHANGES)}[15m])", "{{reason}} {{run}}"),
                (f"increase({_of(series.REPLAYED)}[15m])", "updates trained again {{run}}"),
            ),
        ],
        [
            _graph(
                "From a loss to the next update",
                "s",
                (_quantile(0.5, series.RECOVERY_DURATION), "median {{run}}"),
                (_quantile(0.95, series.RECOVERY_DURATION), "95% {{run}}"),
                (_quantile(0.95, series.PAUSE_DURATION), "95% of all pauses {{run}}"),
            ),
            _graph("Layer state taken over", "Bps", (_rate(series.MOVED), "{{source}} {{run}}")),
        ],
        [
            _graph(
                "Since the last sign of life",
                "s",
                (_of(series.LEASE_AGE), "stage {{stage}}"),
                (_of(series.LEASE_LIMIT), "limit {{run}}"),
            ),
            _graph(
                "Share of the time taken by snapshots",
                "percentunit",
                (_rate(series.SNAPSHOT_SECONDS), "{{run}}"),
            ),
        ],
    ]


def _of(spec: Spec, *labels: str) -> str:
    return f"{spec.full_name}{{{','.join((RUN, *labels))}}}"


def _rate(spec: Spec) -> str:
    return f"rate({_of(spec)}[$__rate_interval])"


def _quantile(quantile: float, spec: Spec) -> str:
    buckets = f"{spec.full_name}_bucket{{{RUN}}}"
    rates = f"sum by (le, run) (rate({buckets}[$__rate_interval]))"
    return f"histogram_quantile({quantile}, {rates})"


def _stat(title: str, expression: str, unit: str) -> dict[str, Any]:
    panel = _panel("stat", title, unit, [(expression, "{{run}}")])
    panel["options"] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    return panel


def _graph(
    title: str, unit: str, *queries: tuple[str, str], stacked: bool = False
) -> dict[str, Any]:
    panel = _panel("timeseries", title, unit, queries)
    if stacked:
        panel["fieldConfig"]["defaults"]["custom"] = {
            "fillOpacity": 60,
            "stacking": {"mode": "normal"},
        }
    return panel


def _panel(kind: str, title: str, unit: str, queries: Any) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "type": kind,
        "title": title,
        "datasource": source,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend}
            | {"datasource": source}
            for index, (query, legend) in enumerate(queries)
        ],
    }


def _place(rows: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Give panels their numbers and places, row by row over the whole width."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in rows:
        height = 4 if row[0]["type"] == "stat" else 8
        edges = [GRID_WIDTH * index // len(row) for index in range(len(row) + 1)]
        for panel, left, right in zip(row, edges, edges[1:], strict=False):
            place = {"x": left, "y": top, "w": right - left, "h": height}
            panels.append(panel | {"id": len(panels) + 1, "gridPos": place})
        top += height
    return panels


def _source_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }


def _run_variable() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": f"label_values({series.BUILD_INFO.full_name}, run)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }


def dashboard_json() -> str:
    """The text of configs/grafana/elastic-trainer.json."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    sys.stdout.write(dashboard_json())
