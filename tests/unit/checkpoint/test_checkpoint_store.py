"""Manifests, completeness, retention."""

import errno
import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile
from elastic_trainer.errors import CheckpointError, ConfigError
from elastic_trainer.types import CheckpointInfo, Cursor

Save = Callable[..., CheckpointInfo]


def folder(store: CheckpointStore, update: int) -> Path:
    return Path(store.root) / f"step-{update:08d}"


def names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()}


def raw_layer(store: CheckpointStore, update: int, content: bytes = b"abc") -> LayerFile:
    return store.write_layer_file(update, 0, "only", [content])


def rewrite_manifest(path: Path, **changes: object) -> None:
    """Change a manifest and give it the digest that belongs to it."""
    body = json.loads(path.read_text()) | changes
    del body["digest"]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps(body | {"digest": hashlib.sha256(text.encode()).hexdigest()}))


def test_the_store_needs_no_torch() -> None:
    code = (
        "import sys, elastic_trainer.checkpoint.store, elastic_trainer.checkpoint.resume\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_committed_checkpoint_reads_back(store: CheckpointStore, save: Save) -> None:
    info = save(store, 100)
    assert info == CheckpointInfo(
        update=100,
        path=str(folder(store, 100)),
        num_bytes=sum(f.stat().st_size for f in folder(store, 100).glob("*.safetensors")),
        created_at=1.0,
    )
    assert list(store.list()) == [info]
    assert store.newest() == info
    manifest = store.manifest(100)
    assert manifest.cursor == Cursor(epoch=1, row=100, offset=7)
    assert manifest.extra == {"loss": 0.5}
    assert [layer.name for layer in manifest.layers] == ["embed", "blocks.0", "head"]
    assert [layer.index for layer in manifest.layers] == [0, 1, 2]


def test_an_empty_store_has_nothing(store: CheckpointStore) -> None:
    assert list(store.list()) == []
    assert store.newest() is None
    assert list(store.prune(2)) == []
    with pytest.raises(CheckpointError, match="no complete checkpoint of update 3 .*: none"):
        store.manifest(3)


def test_extra_survives_unusual_values(store: CheckpointStore) -> None:
    extra = {"scale": float("inf"), "by_stage": {2: [0.1, None], 10: "ü"}, "pair": (1, 2)}
    store.commit(1, [raw_layer(store, 1)], cursor=Cursor(), extra=extra)
    assert store.manifest(1).extra == {
        "scale": float("inf"),
        "by_stage": {"2": [0.1, None], "10": "ü"},
        "pair": [1, 2],
    }


def test_folders_without_a_manifest_and_other_names_are_ignored(
    store: CheckpointStore, save: Save
) -> None:
    save(store, 5)
    raw_layer(store, 9)
    for other in ("step-x", "step-5", "notes"):
        (Path(store.root) / other).mkdir()
    assert [info.update for info in store.list()] == [5]
    newest = store.newest()
    assert newest is not None and newest.update == 5


@pytest.mark.parametrize("indices", [[], [1], [0, 2], [0, 0]])
def test_commit_refuses_missing_and_double_layers(
    store: CheckpointStore, indices: list[int]
) -> None:
    files = [store.write_layer_file(1, i, f"l{i}", [b"x"]) for i in indices]
    with pytest.raises(CheckpointError, match="update 1 is not complete"):
        store.commit(1, files, cursor=Cursor())
    assert store.newest() is None


def test_commit_refuses_a_file_that_is_not_there(store: CheckpointStore) -> None:
    file = raw_layer(store, 1)
    (folder(store, 1) / file.file).unlink()
    with pytest.raises(CheckpointError, match=f"not complete: layer 'only' in .*{file.file} is mi"):
        store.commit(1, [file], cursor=Cursor())
    assert store.newest() is None


def test_saving_an_update_again_keeps_the_old_one_whole_until_the_manifest_changes(
    store: CheckpointStore,
) -> None:
    store.commit(4, [raw_layer(store, 4, b"old")], cursor=Cursor(row=1))
    again = raw_layer(store, 4, b"new!")
    assert store.read_layer_file(store.manifest(4), "only") == b"old"
    store.commit(4, [again], cursor=Cursor(row=2))
    assert store.read_layer_file(store.manifest(4), "only") == b"new!"
    assert store.manifest(4).cursor == Cursor(row=2)
    assert [info.update for info in store.list()] == [4]


def test_a_newer_format_is_refused_everywhere(store: CheckpointStore, save: Save) -> None:
    save(store, 1)
    save(store, 2)
    rewrite_manifest(folder(store, 2) / "manifest.json", format_version=2)
    for call in (store.list, store.newest, lambda: store.manifest(2), lambda: store.prune(1)):
        with pytest.raises(CheckpointError, match=r"format version 2; this program reads up to 1"):
            call()
    assert folder(store, 1).exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"row": 2', '"row": 3'),
        lambda text: '{"some": "json"}',
    ],
)
def test_a_damaged_manifest_makes_no_checkpoint(
    store: CheckpointStore,
    save: Save,
    damage: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    save(store, 1)
    save(store, 2)
    path = folder(store, 2) / "manifest.json"
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest is not None and newest.update == 1
    assert "step-00000002" in caplog.text
    with pytest.raises(CheckpointError, match=r"step-00000002/manifest.json is damaged"):
        store.manifest(2)


@pytest.mark.parametrize("file", ["../step-00000002/x", "/etc/passwd", "..", "", "a\\b"])
def test_a_manifest_cannot_name_files_outside_its_folder(
    store: CheckpointStore, save: Save, file: str
) -> None:
    save(store, 1, ["only"])
    path = folder(store, 1) / "manifest.json"
    [layer] = json.loads(path.read_text())["layers"]
    rewrite_manifest(path, layers=[layer | {"file": file}])
    with pytest.raises(CheckpointError, match="outside its folder"):
        store.manifest(1)


@pytest.mark.parametrize("num_to_keep", [1, 2, 3, 9])
def test_prune_keeps_the_newest(store: CheckpointStore, save: Save, num_to_keep: int) -> None:
    updates = [10, 20, 30, 100_000_000]
    for update in updates:
        save(store, update)
    assert list(store.prune(num_to_keep)) == updates[: max(0, len(updates) - num_to_keep)]
    assert [info.update for info in store.list()] == updates[-num_to_keep:]
    for info in store.list():
        manifest = store.manifest(info.update)
        assert [len(read_layer(store, manifest, layer.name)) for layer in manifest.layers] == [
            3
        ] * 3


def test_prune_refuses_to_keep_nothing(store: CheckpointStore, save: Save) -> None:
    save(store, 1)
    with pytest.raises(ConfigError, match="num_to_keep is 0"):
        store.prune(0)
    assert store.newest() is not None


def test_prune_cleans_what_killed_saves_left_but_not_a_save_in_progress(
    store: CheckpointStore, save: Save
) -> None:
    raw_layer(store, 1)
    save(store, 2)
    raw_layer(store, 2, b"of an earlier try")
    save(store, 3)
    raw_layer(store, 4)
    store.prune(2)
    assert names(Path(store.root)) == {"step-00000002", "step-00000003", "step-00000004"}
    listed = {layer.file for layer in store.manifest(2).layers}
    assert names(folder(store, 2)) == listed | {"manifest.json"}


def test_prune_without_a_complete_checkpoint_deletes_nothing(store: CheckpointStore) -> None:
    raw_layer(store, 1)
    assert list(store.prune(1)) == []
    assert folder(store, 1).exists()


def test_a_deletion_that_is_cut_off_leaves_nothing_that_looks_complete(
    store: CheckpointStore, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    save(store, 2)

    def cut_off(name: str) -> None:
        raise OSError(errno.EIO, "made up")

    with monkeypatch.context() as patched:
        patched.setattr(store.storage, "delete_folder", cut_off)
        with pytest.raises(CheckpointError, match="cannot delete .*step-00000001: Input/output"):
            store.prune(1)
    assert [info.update for info in store.list()] == [2]
    assert list(store.prune(1)) == [1]
    assert names(Path(store.root)) == {"step-00000002"}


def test_discard_deletes_only_incomplete_checkpoints(store: CheckpointStore, save: Save) -> None:
    save(store, 1)
    raw_layer(store, 2)
    for update in (1, 2, 3):
        store.discard(update)
    assert names(Path(store.root)) == {"step-00000001"}
    assert store.newest() is not None


def test_files_that_a_manifest_lists_are_not_deleted(store: CheckpointStore) -> None:
    kept = raw_layer(store, 1, b"kept")
    other = raw_layer(store, 1, b"given up")
    store.commit(1, [kept], cursor=Cursor())
    store.delete_layer_files(1, [kept, other])
    assert names(folder(store, 1)) == {kept.file, "manifest.json"}


def test_superseded_checkpoints_do_not_count_and_go_when_passed(
    store: CheckpointStore, save: Save
) -> None:
    for update in (1, 2, 3):
        save(store, update)
    assert list(store.supersede_after(1)) == [2, 3]
    assert [info.update for info in store.list()] == [1]
    assert list(store.prune(1)) == []
    save(store, 4)
    assert list(store.prune(1)) == [1, 2, 3]
    assert names(Path(store.root)) == {"step-00000004"}


def test_an_unusable_uri_and_place_are_clear(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot use nosuch://bucket/x as storage"):
        CheckpointStore("nosuch://bucket/x?key=secret")
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = CheckpointStore(blocked / "below")
    with pytest.raises(CheckpointError, match=r"cannot write layer 'only' to .*file/below/step-"):
        raw_layer(store, 1)
