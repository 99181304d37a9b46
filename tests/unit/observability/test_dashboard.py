"""The dashboard and the alerts speak of metrics that exist, with labels that they have."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_trainer.observability.dashboard import dashboard, dashboard_json
from elastic_trainer.observability.series import CATALOG

ROOT = Path(__file__).parents[3]
SUFFIXES = ("", "_bucket", "_sum", "_count")
EXPORTED = {
    spec.full_name + suffix: {"run", *spec.labels, *(["le"] if suffix == "_bucket" else [])}
    for spec in CATALOG
    for suffix in (SUFFIXES[1:] if spec.kind == "histogram" else SUFFIXES[:1])
}


def names(expression: str) -> set[str]:
    return set(re.findall(r"elastictrainer_\w+", expression))


def alerts() -> list[dict[str, Any]]:
    text = (ROOT / "configs" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def queries() -> list[tuple[str, str]]:
    return [
        (target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]


def test_the_file_is_up_to_date() -> None:
    text = (ROOT / "configs" / "grafana" / "elastic-trainer.json").read_text(encoding="utf-8")
    assert text == dashboard_json(), (
        "python -m elastic_trainer.observability.dashboard > configs/grafana/elastic-trainer.json"
    )
    assert json.loads(text) == dashboard()


@pytest.mark.parametrize(("expression", "legend"), queries())
def test_each_query_uses_metrics_that_exist(expression: str, legend: str) -> None:
    used = names(expression)
    assert used and used <= set(EXPORTED)
    available = set.union(*(EXPORTED[name] for name in used))
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= available
    assert 'run=~"$run"' in expression


def test_panels_do_not_overlap_and_have_names_of_their_own() -> None:
    panels = dashboard()["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (place["x"] + dx, place["y"] + dy)
            for dx in range(place["w"])
            for dy in range(place["h"])
        }
        assert not own & cells and place["x"] + place["w"] <= 24
        cells |= own
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: str(rule["alert"]))
def test_each_alert_uses_metrics_that_exist(rule: dict[str, Any]) -> None:
    used = names(rule["expr"])
    assert used <= set(EXPORTED)
    assert used or rule["expr"].startswith('up{job="elastic-trainer"}')
    assert rule["annotations"]["description"].endswith((".", "?"))
