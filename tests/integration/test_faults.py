"""What goes wrong while a run runs: killed and wedged processes, NaN, bad data, no room, full disk.
It is said in a line, nothing is left running and the last good checkpoint stays."""

import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from elastic_trainer import RunResult, fit
from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.data.tokenizer import train_bpe
from elastic_trainer.observability.runs import read_events, read_status, read_updates
from elastic_trainer.testing.processes import (
    LIMIT_S,
    STEP_S,
    Cluster,
    has_updates,
    is_alive,
    once_started,
    processes,
    tiny_run,
    wait_for,
    worker_pids,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def train(cluster: Cluster, run_dir: Path, config: dict[str, Any], **options: Any) -> RunResult:
    return fit(config, address=cluster.address, run_dir=run_dir, display=False, **options)


def test_a_killed_stage_worker(cluster: Cluster, tmp_path: Path) -> None:
    """Where no loss is to be survived, the run ends, and can be resumed."""
    run_dir = tmp_path / "run"
    config = tiny_run(checkpoint={"every_steps": 4}, elastic={"max_failures": 0})

    def kill() -> None:
        wait_for(lambda: read_status(run_dir).get("checkpoint_update"), "a checkpoint")
        os.kill(worker_pids(run_dir)["stage-1"], signal.SIGKILL)

    killed = once_started(run_dir, kill)
    result = train(cluster, run_dir, config)
    killed.result(0)
    assert result.status == "failed"
    newest = CheckpointStore(run_dir / "checkpoints").newest()
    assert newest is not None
    assert result.checkpoint == newest.path
    assert "\n" not in result.reason
    for part in ("stage-1 (stage 1", "SIGKILL", f"Last good checkpoint: update {newest.update}"):
        assert part in result.reason
    pids = worker_pids(run_dir).values()
    wait_for(lambda: not any(map(is_alive, pids)), "all actors are gone")

    config["train"]["max_steps"] = newest.update + 4
    resumed = train(cluster, run_dir, config, resume="auto")
    assert (resumed.status, resumed.update) == ("completed", newest.update + 4)
    numbers = [line["update"] for line in read_updates(run_dir)]
    assert numbers == list(range(1, newest.update + 5)), "no update is missing or done twice"


@pytest.mark.parametrize("culprit", ["stage-1", "loader-0"])
def test_a_wedged_worker(cluster: Cluster, tmp_path: Path, culprit: str) -> None:
    """A process that stands still is found out by its lease, or, before it has one, by the limit on
    waiting. It is named, and ended."""
    run_dir, stopped_at = tmp_path / "run", 0.0

    def wedge() -> None:
        nonlocal stopped_at
        wait_for(has_updates(run_dir), "an update")
        pid = worker_pids(run_dir).get(culprit) or loader_pid(cluster)
        stopped_at = time.monotonic()
        os.kill(pid, signal.SIGSTOP)

    wedged = once_started(run_dir, wedge)
    limits = {"stall_limit_s": 5.0, "max_failures": 0}
    result = train(cluster, run_dir, tiny_run(elastic=limits))
    took_s = time.monotonic() - stopped_at
    wedged.result(0)
    assert result.status == "failed"
    assert took_s < 5.0 + 15.0, "the limit, and a few seconds to clear away"
    told = {
        "stage-1": r"worker stage-1 \(stage 1, node .*\) was lost .* has not answered for [345] s",
        "loader-0": r"loader-0 \(node .*\) was lost: it has not answered for [345] s",
    }[culprit]
    assert re.search(told, result.reason.splitlines()[0])


def test_a_worker_wedged_while_nobody_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    """A stage without neighbours holds up no peer: only asking it tells."""
    run_dir = tmp_path / "run"
    args = {"num_layers": 1, "forward_s": STEP_S, "backward_s": STEP_S, "activation_bytes": 64}
    config = tiny_run(
        model={"name": "emulated", "args": args},
        cluster={"num_workers": 1},
        elastic={"stall_limit_s": 5.0, "max_failures": 0},
    )

    def wedge() -> None:
        wait_for(has_updates(run_dir), "an update")
        os.kill(worker_pids(run_dir)["stage-0"], signal.SIGSTOP)

    wedged = once_started(run_dir, wedge, num_workers=1)
    result = train(cluster, run_dir, config)
    wedged.result(0)
    assert result.status == "failed"
    assert re.search(r"worker stage-0 \(stage 0.* was lost .* has not answered", result.reason)


def loader_pid(cluster: Cluster) -> int:
    """Process of the only loader on the cluster."""
    mark = str(cluster.folder).encode()
    found = [pid for pid, line, env in processes() if mark in env and b"ray::Loader" in line]
    assert len(found) == 1
    return found[0]


TROUBLE = '''
import torch
from torch import nn


class Scale(nn.Module):
    """Hands on what comes, times a weight of one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


class Trap(Scale):
    """NaN as soon as a sample is marked by a huge number."""

    def forward(self, x):
        return super().forward(torch.where(x > 1e8, torch.nan, x))


def trap():
    return [("first", Scale()), ("second", Scale()), ("trap", Trap()), ("head", nn.Linear(2, 1))]


def empty():
    return []
'''


@pytest.fixture
def trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A user's model that yields NaN in update 13, and the data that makes it do so."""
    (tmp_path / "trouble_model.py").write_text(TROUBLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = [[float(i % 3), 1.0] for i in range(60)]
    rows[12 * 4 + 1] = [1e9, 1.0]  # the thirteenth batch of four
    table = pa.table({"x": pa.array(rows, pa.list_(pa.float32())), "y": [1.0] * len(rows)})
    pq.write_table(table, str(tmp_path / "rows.parquet"))
    return {
        "model": {"target": "trouble_model:trap"},
        "data": {
            "path": str(tmp_path / "rows.parquet"),
            "format": "columns",
            "input_columns": ["x"],
            "label_columns": ["y"],
            "shuffle": False,
        },
        "train": {"global_batch_size": 4, "max_steps": 15, "eval_batches": 0},
        "pipeline": {"microbatch_size": 2, "segment_updates": 2, "cuts": [2]},
        "checkpoint": {"every_steps": 2},
    }


def test_a_loss_that_is_not_a_number(
    cluster: Cluster, tmp_path: Path, trouble: dict[str, Any]
) -> None:
    run_dir = tmp_path / "run"
    result = train(cluster, run_dir, trouble)
    assert (result.status, result.update) == ("failed", 12)
    assert [line["update"] for line in read_updates(run_dir)] == list(range(1, 13))
    store = CheckpointStore(run_dir / "checkpoints")
    newest = store.newest()
    assert newest is not None and newest.path == result.checkpoint
    assert "\n" not in result.reason
    named = (
        "NaN",
        "update 13",
        "'trap'",
        "stage 1",
        f"Last good checkpoint: update {newest.update}",
    )
    assert all(part in result.reason for part in named), result.reason
    for layer in ("first", "second", "trap", "head"):
        tensors = read_layer(store, store.manifest(newest.update), layer)
        assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point())


def test_a_model_without_layers_is_named_by_the_workers(
    cluster: Cluster, tmp_path: Path, trouble: dict[str, Any]
) -> None:
    """On a cluster the model may exist on the nodes only: they refuse it, in the same words."""
    trouble["model"] = {"target": "trouble_model:empty"}
    trouble["pipeline"]["cuts"] = []
    result = train(cluster, tmp_path / "run", trouble)
    assert result.status == "failed"
    expected = "model.target trouble_model:empty returned no layers. Return at least one"
    assert result.reason == expected


def test_text_that_is_not_utf8(cluster: Cluster, tmp_path: Path) -> None:
    """Rows are read when their turn comes; the run then ends with the row's place."""
    good = pa.array([b"some text " * 20] * 7 + [b"caf\xe9"], pa.binary())
    rows = pa.Array.from_buffers(pa.string(), len(good), good.buffers())
    pq.write_table(pa.table({"text": rows}), str(tmp_path / "texts.parquet"))
    (tmp_path / "tokenizer.json").write_text(train_bpe(["some text"], 270).to_json())
    config = {
        "model": {"args": {"num_layers": 1, "dim": 8, "num_heads": 1}},
        "data": {"path": str(tmp_path / "texts.parquet"), "sequence_length": 8, "shuffle": False},
        "train": {"global_batch_size": 2, "max_steps": 100, "eval_batches": 0},
        "pipeline": {"microbatch_size": 2},
    }
    result = train(cluster, tmp_path / "run", config)
    assert result.status == "failed" and "\n" not in result.reason
    assert "not UTF-8" in result.reason and "row 7" in result.reason


def test_no_room(cluster: Cluster, tmp_path: Path) -> None:
    asked = {"num_workers": 2, "start_timeout_s": 1.0, "resources_per_worker": {"CPU": 1000}}
    result = train(cluster, tmp_path / "run", tiny_run(cluster=asked))
    assert result.status == "failed"
    assert re.search(
        r"no room for 2 workers after 1 s: asked for CPU 2000; there is CPU \S+ free of \d",
        result.reason,
    )
    assert "fewer --workers" in result.reason


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, timeout=30).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)


def fill(file: Path) -> None:
    """Leave no byte free."""
    with open(file, "wb", buffering=0) as out:
        for size in (65536, 1):
            try:
                while True:
                    out.write(bytes(size))
            except OSError:
                continue


@pytest.mark.parametrize(
    "layout", ["checkpoints", pytest.param("everything", marks=pytest.mark.soak)]
)
def test_a_full_disk(cluster: Cluster, tmp_path: Path, small_disk: Path, layout: str) -> None:
    """Training goes on without a checkpoint, says so, and saves once there is room again."""
    run_dir = (tmp_path if layout == "checkpoints" else small_disk) / "run"
    filler = small_disk / "filler"
    config = tiny_run(max_steps=200, checkpoint={"every_steps": 10})
    if layout == "checkpoints":
        config["checkpoint"]["storage_path"] = str(small_disk / "saved")

    def trouble() -> None:
        wait_for(lambda: read_status(run_dir).get("checkpoint_update"), "a checkpoint")
        fill(filler)
        try:
            if layout == "checkpoints":
                wait_for(lambda: failures(run_dir), "a checkpoint that fails")
                count = len(read_updates(run_dir))
                wait_for(has_updates(run_dir, count + 4), "training goes on")
            else:
                address = read_status(run_dir)["metrics_address"]
                wait_for(lambda: scraped(address, "checkpoint_failures_total"), "a failure")
                before = scraped(address, "updates_total")
                wait_for(lambda: scraped(address, "updates_total") > before + 4, "going on")
        finally:
            filler.unlink()

    background = once_started(run_dir, trouble)
    result = train(cluster, run_dir, config)
    background.result(LIMIT_S)
    assert (result.status, result.update) == ("completed", 200)
    assert failures(run_dir), "it is in the run's story"
    assert "no space left" in failures(run_dir)[0]["message"]
    saved = [e["update"] for e in read_events(run_dir) if e["kind"] == "checkpoint"]
    assert saved[-1] == 200
    assert len(saved) > 1
    assert [line["update"] for line in read_updates(run_dir)] == list(range(1, 201))


def failures(run_dir: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(run_dir) if e["kind"] == "checkpoint_failed"]


def scraped(address: str, name: str) -> float:
    """A counter of the run behind this metrics server."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        found = re.search(rf"^elastictrainer_{name}\S* (\S+)$", answer.read().decode(), re.M)
    return float(found[1]) if found else 0.0
