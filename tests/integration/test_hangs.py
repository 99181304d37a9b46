"""Work that stands still while every process answers, faults of ours, and a frozen coordinator."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any, Protocol

import pytest

from elastic_trainer import RunResult, fit
from elastic_trainer.errors import ClusterError
from elastic_trainer.observability.runs import read_events, read_status
from elastic_trainer.testing.processes import (
    all_pids,
    has_updates,
    is_alive,
    once_started,
    tiny_run,
    wait_for,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

STALL_S = 4.0
MODEL = """
import time

import torch
from torch import nn


class Hangs(nn.Linear):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 60 and self.training:
            time.sleep(200.0)
        return super().forward(x)


class Faulty(torch.optim.SGD):
    def step(self, closure=None):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 5:
            raise KeyError("exp_avg")
        return super().step(closure)


def hangs():
    return [("one", Hangs(4, 4))]


def faulty():
    torch.optim.SGD = Faulty
    return [("one", nn.Linear(4, 4)), ("two", nn.Linear(4, 4))]
"""


class Cluster(Protocol):
    """What the fixture `ray_cluster` gives."""

    address: str


def run_of(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "hanging_model.py").write_text(MODEL)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = pa.array([[1.0, 2.0, 3.0, 4.0]] * 400, pa.list_(pa.float32()))
    pq.write_table(pa.table({"x": rows, "y": rows}), str(tmp_path / "rows.parquet"))
    return {
        "model": {"target": f"hanging_model:{target}"},
        "data": {
            "path": str(tmp_path / "rows.parquet"),
            "format": "columns",
            "input_columns": ["x"],
            "label_columns": ["y"],
        },
        "optim": {"name": "sgd"},
        "train": {"global_batch_size": 4, "max_steps": 100, "eval_batches": 0},
        "pipeline": {"microbatch_size": 2, "segment_updates": 2},
        "elastic": {"stall_limit_s": STALL_S, "max_failures": 0},
    }


def train(cluster: Cluster, run_dir: Path, config: dict[str, Any]) -> RunResult:
    return fit(config, address=cluster.address, run_dir=run_dir, display=False)


@pytest.mark.soak
def test_a_layer_that_hangs_on_the_only_stage(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_of("hangs", tmp_path, monkeypatch) | {"cluster": {"num_workers": 1}}
    began = time.monotonic()
    result = train(ray_cluster, tmp_path / "run", config)
    assert time.monotonic() - began < 60.0
    assert result.status == "failed" and result.update > 0
    told = (
        r"worker stage-0 \(stage 0, node \S+\) was lost at update \d+: no progress for \d+ s: "
        r"stage-0 \(stage 0, node .*\), at 0F\d, .* at update \d+\. Does"
    )
    assert re.match(told, result.reason), result.reason


def test_a_fault_in_the_optimizer_is_one_line(
    ray_cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    result = train(ray_cluster, run_dir, run_of("faulty", tmp_path, monkeypatch))
    assert result.status == "failed"
    told = r"KeyError: 'exp_avg' on stage-[01] \(stage [01], node .*\) at update 5"
    assert re.match(told, result.reason), result.reason
    assert "\n" not in result.reason
    traces = [e["message"] for e in read_events(run_dir) if e["kind"] == "traceback"]
    assert any("<-- HERE" in trace for trace in traces)


def test_a_frozen_coordinator(ray_cluster: Cluster, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    def freeze() -> None:
        wait_for(has_updates(run_dir), "an update")
        os.kill(read_status(run_dir)["pid"], signal.SIGSTOP)

    frozen = once_started(run_dir, freeze)
    with pytest.raises(ClusterError, match=r"coordinator \(process \d+\) has not answered for 4 s"):
        train(ray_cluster, run_dir, tiny_run(elastic={"stall_limit_s": STALL_S}))
    frozen.result(0)
    wait_for(lambda: not any(map(is_alive, all_pids(run_dir))), "all processes are gone")
