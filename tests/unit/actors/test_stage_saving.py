"""A worker's saves, and the end of a run, when the storage is slow or gone. Without Ray."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_trainer.actors import stage_worker
from elastic_trainer.actors.coordinator import Coordinator
from elastic_trainer.actors.stage_worker import StageWorker
from elastic_trainer.checkpoint.storage import Storage
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import CheckpointError, FencedError
from elastic_trainer.observability.runs import read_status
from elastic_trainer.testing.fake_site import FakeSite
from elastic_trainer.transport.in_process import InProcessNetwork
from elastic_trainer.types import Cursor

WAIT_S = 20.0


def config(**sections: Mapping[str, Any]) -> Config:
    base: dict[str, Mapping[str, Any]] = {
        "model": {"name": "emulated", "args": {"num_layers": 1}},
        "data": {"format": "synthetic"},
        "train": {"max_steps": 4},
        "elastic": {"stall_limit_s": 1},
    }
    return load_config(base | sections)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageWorker]:
    """A worker that holds one layer, in the state after update 2."""
    monkeypatch.setattr(stage_worker, "open_channels", lambda *_: {})
    network = InProcessNetwork()
    monkeypatch.setattr(stage_worker, "open_state_channel", lambda name, *_: network.channel(name))
    monkeypatch.setattr(stage_worker, "_own_device", lambda: torch.device("cpu"))
    # Its watchdog would end this process, in which nobody calls it every second.
    monkeypatch.setattr(stage_worker, "leave", lambda *_: None)
    made = StageWorker("stage-0", config(), str(tmp_path))
    runtime: Any = SimpleNamespace(
        committed=2,
        layer_states=lambda: {"layer": {"param/w": torch.ones(2)}},
        scaler_state=None,
        at_commit_point=True,
    )
    plan: Any = SimpleNamespace(layers=("layer",), generation=0)
    made._runtime, made._plan = runtime, plan
    yield made
    made._watchdog.stop()


def test_writing_that_takes_longer_than_the_stall_limit(
    worker: StageWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_, write = threading.Event(), Storage.write

    def slow(storage: Storage, name: str, chunks: Sequence[Any]) -> None:
        assert open_.wait(WAIT_S)
        write(storage, name, chunks)

    monkeypatch.setattr(Storage, "write", slow)
    assert worker.save(0, 2, str(tmp_path)) == {"scaler": None}
    for _ in range(6):  # each waits a quarter of the limit
        told = worker.saved(2)
        assert told.writing and told.problem is None
    assert worker.save(0, 2, str(tmp_path)) == "stage-0 is still writing an earlier checkpoint"
    open_.set()
    while (told := worker.saved(2)).writing:
        assert told.problem is None
    assert [file.name for file in told.files] == ["layer"]


def test_a_state_that_belongs_to_no_update_is_not_saved(
    worker: StageWorker, tmp_path: Path
) -> None:
    runtime: Any = worker._runtime
    runtime.at_commit_point = False
    with pytest.raises(FencedError, match="does not hold the state after update 2"):
        worker.save(0, 2, str(tmp_path))


def test_a_storage_that_cannot_be_used_is_told_by_the_worker(worker: StageWorker) -> None:
    told = worker.save(0, 2, "nosuch://bucket")
    assert isinstance(told, str) and told.startswith("stage-0: cannot use nosuch://bucket")


def test_a_run_ends_recorded_though_its_storage_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    store = CheckpointStore(run_dir / "checkpoints")
    store.commit(3, [store.write_layer_file(3, 0, "layer", [b"x"])], cursor=Cursor(row=3))
    start = {
        "update": 3,
        "cursor": Cursor(row=3),
        "checkpoint": store.root,
        "launch": "one",
        "num_layers": 1,
    }
    site = FakeSite(str(tmp_path), ["layer"], places=1)
    coordinator = Coordinator("run", config(), str(run_dir), start, site=site)

    def gone(*_: Any, **__: Any) -> None:
        raise CheckpointError("cannot list the checkpoints: no answer")

    def fault(*_: Any) -> None:
        raise RuntimeError("made up")

    coordinator.orders.num_segments = 1  # so the checkpoint was restored, and is good
    monkeypatch.setattr(Storage, "entries", gone)
    monkeypatch.setattr(coordinator.recorder, "begin", fault)
    result = coordinator.run()
    assert result.status == "failed" and "made up" in result.reason
    assert "Last good checkpoint: update 3" in result.reason
    status = read_status(run_dir)
    assert status["state"] == "failed" and status["checkpoint"] == result.checkpoint
