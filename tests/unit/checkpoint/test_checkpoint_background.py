"""Saving behind training's back; what happens when the disk is full."""

import errno
import pickle
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from elastic_trainer.checkpoint.layers import BackgroundSaver, SaveResult, read_layer
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.resume import resolve_resume
from elastic_trainer.checkpoint.storage import Buffer
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import Cursor

LAYERS = ("a", "b", "c", "d")
KIB = 1024
WAIT_S = 30


def states(value: float, kib: int = 1) -> dict[str, dict[str, Tensor]]:
    return {name: {"param/w": torch.full((kib * KIB // 4,), value)} for name in LAYERS}


def values(store: CheckpointStore, update: int, name: str) -> set[float]:
    """The values in a layer's weight as saved."""
    return set(read_layer(store, store.manifest(update), name)["param/w"].tolist())


def finished(saver: BackgroundSaver) -> SaveResult:
    result = saver.wait(WAIT_S)
    assert result is not None
    return result


class Gate:
    """Stands in front of the storage's `write`: holds writers back, or breaks the n-th call."""

    def __init__(self, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.break_at: int | None = None
        self.error: BaseException = OSError(errno.EIO, "made up")
        self.num_calls = 0
        self._write = store.storage.write
        monkeypatch.setattr(store.storage, "write", self.write)

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        self.num_calls += 1
        self.reached.set()
        assert self.open.wait(WAIT_S)
        if self.num_calls == self.break_at:
            raise self.error
        self._write(name, chunks)


@pytest.fixture
def gate(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(store, monkeypatch)


def test_training_goes_on_while_its_snapshot_is_written(store: CheckpointStore, gate: Gate) -> None:
    results: list[SaveResult] = []
    saver = BackgroundSaver(store, LAYERS, results.append)
    live = states(1.0)
    gate.open.clear()
    assert saver.save(5, live)
    assert saver.busy and saver.result is None
    for tensors in live.values():
        tensors["param/w"].fill_(2.0)
    assert not saver.save(6, live)
    assert saver.wait(0.0) is None
    gate.open.set()
    result = finished(saver)
    assert result.ok and result.update == 5
    assert results == [result]
    store.commit(5, result.files, cursor=Cursor())
    for name in LAYERS:
        assert values(store, 5, name) == {1.0}
    assert saver.save(6, live) and finished(saver).update == 6


def test_a_worker_writes_only_its_layers_under_their_places_in_the_model(
    store: CheckpointStore,
) -> None:
    own = {name: tensors for name, tensors in states(1.0).items() if name in "bd"}
    saver = BackgroundSaver(store, LAYERS)
    saver.save(1, own)
    assert [(file.index, file.name) for file in finished(saver).files] == [(1, "b"), (3, "d")]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.EIO, "made up"), "cannot write layer 'c' to .*layer-0002.*Input/output"),
        (OSError(errno.ENOSPC, "made up"), "cannot write layer 'c' to .*no space left"),
        (RuntimeError("odd"), "cannot save update 5: RuntimeError: odd"),
    ],
)
def test_errors_are_reported_and_a_retry_writes_only_the_rest(
    store: CheckpointStore, gate: Gate, error: Exception, message: str
) -> None:
    saver = BackgroundSaver(store, LAYERS)
    gate.break_at, gate.error = 3, error
    saver.save(5, states(1.0))
    result = finished(saver)
    assert not result.ok and [file.name for file in result.files] == ["a", "b"]
    assert str(pickle.loads(pickle.dumps(result)).error) == str(result.error)  # goes over Ray
    with pytest.raises(CheckpointError, match=message):
        assert result.error is not None
        raise result.error
    assert saver.retry()
    assert finished(saver).ok
    assert gate.num_calls == 5  # a, b, the broken c; then c and d
    store.commit(5, finished(saver).files, cursor=Cursor())
    assert not saver.retry()


def test_a_save_that_gets_on_is_asked_again_and_one_that_is_stuck_is_told(
    store: CheckpointStore, gate: Gate
) -> None:
    patient, hasty = BackgroundSaver(store, LAYERS), BackgroundSaver(store, LAYERS, stuck_s=0.0)
    gate.open.clear()
    patient.save(5, states(1.0))
    assert patient.progress(5, 0.0) == SaveProgress(writing=True)
    hasty.save(5, states(1.0))
    assert gate.reached.wait(WAIT_S)
    told = hasty.progress(5, 0.05)  # a kibibyte of a layer may take a millisecond
    assert told.writing and told.problem is not None
    assert "layer 'a' of update 5: the storage has not answered" in told.problem
    gate.open.set()
    for saver in (patient, hasty):
        told = saver.progress(5, WAIT_S)
        assert not told.writing and told.problem is None
        assert [file.name for file in told.files] == list(LAYERS)
        assert saver.progress(6, 0.0).problem is not None


def test_whole_files_that_came_to_nothing_are_cleared_by_the_next_save(
    store: CheckpointStore,
) -> None:
    """Another worker failed, so no manifest lists them."""
    saver = BackgroundSaver(store, LAYERS)
    saver.save(5, states(1.0))
    assert finished(saver).ok
    saver.save(6, states(2.0))
    store.commit(6, finished(saver).files, cursor=Cursor())
    saver.save(7, states(3.0))
    assert finished(saver).ok
    assert list((Path(store.root) / "step-00000005").iterdir()) == []
    assert values(store, 6, "a") == {2.0}, "the complete one stays"


def test_a_failed_save_that_is_not_retried_is_cleared_by_the_next(
    store: CheckpointStore, gate: Gate
) -> None:
    saver = BackgroundSaver(store, LAYERS)
    gate.break_at = 3
    saver.save(5, states(1.0))
    assert not finished(saver).ok
    saver.save(6, states(2.0))
    assert finished(saver).ok
    assert list((Path(store.root) / "step-00000005").iterdir()) == []
    assert len(list((Path(store.root) / "step-00000006").iterdir())) == 4


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mounted)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield mounted
    finally:
        subprocess.run(["umount", str(mounted)], check=True, timeout=30)


def used(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_is_reported_and_a_retry_works_once_there_is_space(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    saver = BackgroundSaver(store, LAYERS)
    assert saver.save(1, states(1.0, kib=20))
    store.commit(1, finished(saver).files, cursor=Cursor(row=1))
    blocker = small_disk / "other"
    blocker.write_bytes(bytes(100 * KIB))

    assert saver.save(2, states(2.0, kib=20))
    result = finished(saver)
    assert result.error is not None
    assert "no space left on the device" in str(result.error)
    assert "cannot write layer" in str(result.error)
    assert not saver.retry() or not finished(saver).ok  # still full: fails again, quietly
    # No partial file takes space, and the older checkpoint is untouched.
    assert not [name for name in used(small_disk) if ".writing-" in name]
    for name in LAYERS:
        assert values(store, 1, name) == {1.0}
    point = resolve_resume(store, "auto")
    assert point is not None and point.manifest.update == 1

    blocker.unlink()
    assert saver.retry()
    result = finished(saver)
    assert result.ok and [file.name for file in result.files] == list(LAYERS)
    store.commit(2, result.files, cursor=Cursor(row=2))
    for update in (1, 2):
        for name in LAYERS:
            assert values(store, update, name) == {float(update)}


def test_a_full_disk_at_the_manifest_leaves_the_older_checkpoint(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    saver = BackgroundSaver(store, LAYERS)
    saver.save(1, states(1.0))
    store.commit(1, finished(saver).files, cursor=Cursor())
    saver.save(2, states(2.0))
    files = finished(saver).files
    blocker = small_disk / "other"
    with blocker.open("wb", buffering=0) as stream, pytest.raises(OSError):
        while True:
            stream.write(bytes(KIB))
    with pytest.raises(CheckpointError, match="cannot write .*manifest.json: no space left"):
        store.commit(2, files, cursor=Cursor())
    assert [info.update for info in store.list()] == [1]
    blocker.unlink()
    store.commit(2, files, cursor=Cursor())
    assert [info.update for info in store.list()] == [1, 2]


def test_what_a_given_up_save_left_does_not_keep_the_disk_full(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints")
    saver = BackgroundSaver(store, LAYERS)
    blocker = small_disk / "other"
    blocker.write_bytes(bytes(180 * KIB))
    saver.save(1, states(1.0, kib=30))
    assert not finished(saver).ok
    assert any("step" in str(path) for path in small_disk.rglob("*.safetensors"))
    blocker.write_bytes(bytes(100 * KIB))
    # 156 KiB are free only without what update 1 has left.
    saver.save(2, states(2.0, kib=30))
    assert finished(saver).ok


def test_errors_while_the_disk_is_full_do_not_depend_on_a_mount(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same promise where no disk can be mounted: the sync to the disk finds it full."""

    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with monkeypatch.context() as patched:
        patched.setattr("elastic_trainer.checkpoint.storage._sync", full)
        saver = BackgroundSaver(store, LAYERS)
        saver.save(1, states(1.0))
        result = finished(saver)
    assert result.error is not None and "no space left" in str(result.error)
    assert used(Path(store.root)) == set()
    assert saver.retry() and finished(saver).ok
