"""Which checkpoint a run goes on from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.resume import resolve_resume
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import CheckpointInfo

Save = Callable[..., CheckpointInfo]


def chosen(store: CheckpointStore, resume: str | int) -> int:
    point = resolve_resume(store, resume)
    assert point is not None
    assert point.passed_over == ()
    return point.manifest.update


def damage(info: CheckpointInfo) -> str:
    path = sorted(Path(info.path).glob("layer-0001-*"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    return path.name


def test_auto_takes_the_newest_and_nothing_where_there_is_none(
    store: CheckpointStore, save: Save
) -> None:
    assert resolve_resume(store, "auto") is None
    save(store, 9)
    save(store, 10)
    assert chosen(store, "auto") == 10


def test_an_update(store: CheckpointStore, save: Save) -> None:
    save(store, 9)
    save(store, 10)
    assert chosen(store, 9) == 9
    assert chosen(store, "9") == 9
    with pytest.raises(CheckpointError, match="no complete checkpoint of update 8 .*: 9, 10"):
        resolve_resume(store, 8)


def test_a_path_may_be_a_checkpoint_a_folder_of_them_or_a_run(
    store: CheckpointStore, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save(store, 9)
    save(store, 10)
    other = CheckpointStore(tmp_path / "another")
    assert chosen(other, old.path) == 9
    assert chosen(other, old.path + "/") == 9
    assert chosen(other, store.root) == 10
    assert chosen(other, str(tmp_path)) == 10
    assert chosen(other, Path(old.path).as_uri()) == 9
    monkeypatch.chdir(store.root)
    assert chosen(other, "step-00000009") == 9
    assert chosen(other, ".") == 10


def test_a_path_with_nothing_says_so(store: CheckpointStore, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no complete checkpoint in {tmp_path}/nowhere"):
        resolve_resume(store, str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match="no complete checkpoint of update 3"):
        resolve_resume(store, str(tmp_path / "checkpoints" / "step-00000003"))


def test_auto_passes_over_a_damaged_checkpoint_and_says_so(
    store: CheckpointStore, save: Save
) -> None:
    save(store, 9)
    file = damage(save(store, 10))
    point = resolve_resume(store, "auto")
    assert point is not None and point.manifest.update == 9
    [reason] = point.passed_over
    assert reason.startswith("update 10: layer 'blocks.0'") and file in reason
    assert str(point) == f"resuming from update 9 in {store.root}; passed over {reason}"


def test_content_that_does_not_match_names_what_can_be_resumed(
    store: CheckpointStore, save: Save
) -> None:
    """Sizes are checked when a checkpoint is chosen, content when it is read."""

    def alter(info: CheckpointInfo) -> None:
        path = sorted(Path(info.path).glob("layer-0001-*"))[0]
        path.write_bytes(path.read_bytes()[:-1] + b"!")

    save(store, 7)
    alter(save(store, 8))
    damage(save(store, 9))
    alter(save(store, 10))
    assert chosen(store, "auto") == 10
    with pytest.raises(CheckpointError, match="step-00000010.* digest.*`--resume 8`; .*: 7, 8$"):
        read_layer(store, store.manifest(10), "blocks.0")
    with pytest.raises(CheckpointError, match="step-00000008.* digest.*`--resume 7`; .*: 7$"):
        read_layer(store, store.manifest(8), "blocks.0")
    alter(CheckpointInfo(update=7, path=f"{store.root}/step-00000007", num_bytes=0, created_at=0.0))
    with pytest.raises(CheckpointError, match="no older complete checkpoint"):
        read_layer(store, store.manifest(7), "blocks.0")


def test_a_damaged_checkpoint_asked_for_by_name_is_refused(
    store: CheckpointStore, save: Save
) -> None:
    save(store, 9)
    info = save(store, 10)
    damage(info)
    for resume in (10, info.path):
        with pytest.raises(CheckpointError, match="update 10 is damaged: layer 'blocks.0'"):
            resolve_resume(store, resume)


def test_auto_never_starts_over_when_all_are_damaged(store: CheckpointStore, save: Save) -> None:
    damage(save(store, 9))
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole: update 9: layer"):
        resolve_resume(store, "auto")
