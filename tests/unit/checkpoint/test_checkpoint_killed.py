"""Killed while saving, at every point: the newest complete checkpoint is used (case C20)."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_trainer.checkpoint.layers import read_layer, write_layer
from elastic_trainer.checkpoint.resume import resolve_resume
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.types import Cursor

SCRIPT = str(Path(__file__).with_name("killed_saver.py"))
LAYERS = ("embed", "blocks.0", "head")


def save(store: CheckpointStore, update: int) -> None:
    files = [
        write_layer(store, update, index, name, {"param/w": torch.full((4,), float(update))})
        for index, name in enumerate(LAYERS)
    ]
    store.commit(update, files, cursor=Cursor(row=update))


def resumed_update(store: CheckpointStore) -> int:
    """The update that a run would go on from, every byte of it checked."""
    point = resolve_resume(store, "auto")
    assert point is not None
    assert point.passed_over == ()
    update = point.manifest.update
    assert point.manifest.cursor == Cursor(row=update)
    for name in LAYERS:
        tensors = read_layer(point.store, point.manifest, name)
        assert torch.equal(tensors["param/w"], torch.full((4,), float(update)))
    return update


def assert_cleaned_by_the_next_save(store: CheckpointStore, update: int) -> None:
    save(store, update)
    store.prune(1)
    assert resumed_update(store) == update
    root = Path(store.root)
    assert [path.name for path in root.iterdir()] == [f"step-{update:08d}"]
    assert len(list(root.rglob("*.*"))) == len(LAYERS) + 1


def test_killed_at_each_line_that_a_save_executes(tmp_path: Path) -> None:
    root = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, SCRIPT, "sweep", str(root)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
        check=True,
    )
    outcomes = [line.split() for line in done.stdout.splitlines()]
    assert outcomes[-1][1] == "0" and all(status == "-9" for _, status in outcomes[:-1])
    resumed = []
    for line, _ in outcomes:
        store = CheckpointStore(f"{root}-{line}")
        resumed.append(resumed_update(store))
        assert_cleaned_by_the_next_save(store, 3)
    # First always the old one, then, from one line on, always the new one.
    assert resumed == sorted(resumed)
    assert resumed[0] == 1 and resumed[-1] == 2
    assert resumed.count(1) > 50 and resumed.count(2) > 5


@pytest.mark.parametrize("files_before", [1, 3])
def test_killed_from_outside_between_files(tmp_path: Path, files_before: int) -> None:
    """1: between the first layer and the second; 3: all layers written, no manifest."""
    store = CheckpointStore(tmp_path / "run")
    save(store, 1)
    with subprocess.Popen(
        [sys.executable, SCRIPT, "pause", store.root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as saver:
        assert saver.stdin is not None and saver.stdout is not None
        for _ in range(files_before):
            assert ".safetensors" in saver.stdout.readline()
            saver.stdin.write("\n")
        last = saver.stdout.readline()
        assert ("manifest.json" in last) == (files_before == 3)
        saver.kill()
    assert saver.returncode == -9
    assert resumed_update(store) == 1
    store.prune(1)  # nothing complete is newer: the torn one stays
    assert len(list((tmp_path / "run").glob("step-00000002/*"))) == files_before
    assert_cleaned_by_the_next_save(store, 3)


def test_an_update_killed_while_it_is_saved_again_keeps_its_first_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    save(store, 2)
    # Another run of update 2 with other content, cut off before its manifest.
    write_layer(store, 2, 0, "embed", {"param/w": torch.zeros(4)})
    assert resumed_update(store) == 2
    assert_cleaned_by_the_next_save(store, 3)
