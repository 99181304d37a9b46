"""Checkpoints as the coordinator sees them, with stages and storages that fail or take long."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.actors import saving as saving_module
from elastic_trainer.actors.background import Background
from elastic_trainer.actors.saving import Saving, check_same_data, checkpoint_root
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import BatchInfo, CheckpointInfo, Cursor, Plan, Prediction, StagePlan

WAIT_S = 20.0
BUSY = SaveProgress(writing=True)


def config(*overrides: str) -> Config:
    return load_config({"data": {"format": "synthetic"}, "train": {"max_steps": 4}}, overrides)


def plan() -> Plan:
    return Plan(
        generation=1,
        schedule="1f1b",
        num_microbatches=4,
        layers=("layer0", "layer1"),
        stages=tuple(
            StagePlan(stage=s, first=s, stop=s + 1, worker=f"stage-{s}") for s in range(2)
        ),
        predicted=Prediction(
            step_s=0.1, bubble_ratio=0.0, stage_busy_s=(0.1, 0.1), stage_memory_bytes=(1, 1)
        ),
        reasons=("balanced",),
    )


class FakeCall:
    """A remote call whose result is there at once."""

    def __init__(self, result: Any) -> None:
        self.result = result


class FakeStage:
    """A stage worker that writes one layer, after the answers of `first`."""

    def __init__(
        self,
        store: CheckpointStore | None,
        index: int,
        first: list[SaveProgress] | None = None,
        refusal: str | None = None,
    ) -> None:
        self.store, self.index = store, index
        self.first, self.refusal = first or [], refusal

    def save(self, generation: int, update: int, root: str) -> FakeCall:
        facts: Mapping[str, Any] = {"scaler": {"scale": 2.0}}
        return FakeCall(self.refusal or facts)

    def saved(self, update: int) -> FakeCall:
        return FakeCall(self.first.pop(0) if self.first else self._write(update))

    def _write(self, update: int) -> SaveProgress:
        assert self.store is not None
        written = self.store.write_layer_file(update, self.index, f"layer{self.index}", [b"x"])
        return SaveProgress(files=(written,))


def broken(text: str, *, writing: bool = False) -> list[SaveProgress]:
    return [SaveProgress(problem=text, writing=writing)]


@dataclass
class Told:
    """What a save reported."""

    saved: list[CheckpointInfo] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)


class FakeCalls:  # stands in for `Calls`
    """Hands results on at once, while `open`."""

    def __init__(self, *, open: bool = True) -> None:
        self.open = open
        self.held: list[tuple[Any, Callable[[Any], None], Callable[[str], None]]] = []

    def when(self, call: Any, then: Callable[[Any], None], *, generation: int, failed: Any) -> None:
        if self.open:
            then(call.result)
        else:
            self.held.append((call, then, failed))


def start(saving: Saving, stages: Mapping[str, Any], update: int, calls: Any = None) -> Told:
    told = Told()

    saving.positions.note(
        [BatchInfo(update=update, microbatches=(), end=Cursor(epoch=1, row=update))]
    )
    through: Any = calls or FakeCalls()
    saving.start(1, update, plan(), stages, through, told.saved.append, told.failed.append)
    return told


def save(saving: Saving, stages: Mapping[str, Any], update: int) -> Told:
    told = start(saving, stages, update)
    assert saving.deliver(WAIT_S)
    if told.saved:
        saving.rely_on(update, told.warned.append)
        assert saving.deliver(WAIT_S)
    return told


def new_saving(run_dir: Path, *overrides: str, update: int = 0) -> Saving:
    return Saving(config(*overrides), str(run_dir), update, Cursor())


def good_stages(saving: Saving) -> dict[str, Any]:
    store = CheckpointStore(saving.root)
    return {f"stage-{i}": FakeStage(store, i) for i in range(2)}


def kept(saving: Saving) -> list[int]:
    return [info.update for info in CheckpointStore(saving.root).list()]


def files(saving: Saving, update: int) -> list[str]:
    return sorted(p.name for p in Path(saving.root).glob(f"step-{update:08d}/*"))


def test_a_checkpoint_is_committed_when_all_stages_have_written(tmp_path: Path) -> None:
    saving = new_saving(tmp_path, "checkpoint.num_to_keep=1")
    told = save(saving, good_stages(saving), 3)
    assert told.failed == [] and told.saved[0].update == 3
    manifest = CheckpointStore(saving.root).manifest(3)
    assert manifest.cursor == Cursor(epoch=1, row=3)
    assert manifest.extra["scaler"] == {"scale": 2.0} and manifest.extra["num_stages"] == 2
    save(saving, good_stages(saving), 4)
    assert kept(saving) == [4]


def test_a_stage_that_cannot_write_fails_the_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    """What the other stage has written would fill the disk, try by try."""
    saving = new_saving(tmp_path)
    save(saving, good_stages(saving), 1)
    store = CheckpointStore(saving.root)
    bad = {"stage-0": FakeStage(store, 0), "stage-1": FakeStage(store, 1, broken("disk full"))}
    told = save(saving, bad, 2)
    assert told.saved == [] and told.failed == ["disk full"]
    assert saving.newest is not None and saving.newest.update == 1
    assert files(saving, 2) == [] and kept(saving) == [1]
    assert save(saving, good_stages(saving), 2).saved, "the same update can be tried again"


def test_a_layer_that_is_missing_fails_the_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    """As on a node that writes to a disk of its own."""
    saving = new_saving(tmp_path)
    elsewhere = CheckpointStore(tmp_path / "elsewhere")
    told = save(saving, good_stages(saving) | {"stage-1": FakeStage(elsewhere, 1)}, 2)
    assert "is not complete" in told.failed[0]
    assert files(saving, 2) == []


def test_writing_may_take_as_long_as_it_gets_on(tmp_path: Path) -> None:
    saving = new_saving(tmp_path)
    store = CheckpointStore(saving.root)
    slow = good_stages(saving) | {"stage-1": FakeStage(store, 1, [BUSY] * 50)}
    told = save(saving, slow, 2)
    assert told.failed == [] and told.saved[0].update == 2
    assert [layer.name for layer in store.manifest(2).layers] == ["layer0", "layer1"]


def test_a_checkpoint_without_its_last_layer_is_none(tmp_path: Path) -> None:
    saving = new_saving(tmp_path)
    told = save(saving, good_stages(saving) | {"stage-1": FakeStage(None, 1, [SaveProgress()])}, 2)
    assert told.failed == ["no worker has written layer1 of update 2"]
    assert files(saving, 2) == []


def test_a_busy_worker_is_a_failed_try(tmp_path: Path) -> None:
    saving = new_saving(tmp_path)
    store = CheckpointStore(saving.root)
    busy = good_stages(saving) | {"stage-1": FakeStage(store, 1, refusal="still writing")}
    told = save(saving, busy, 2)
    assert told.failed == ["still writing"] and files(saving, 2) == []


def test_files_stay_while_somebody_may_be_writing_them(tmp_path: Path) -> None:
    saving = new_saving(tmp_path)
    store = CheckpointStore(saving.root)
    stuck = FakeStage(store, 1, broken("no answer", writing=True))
    told = save(saving, good_stages(saving) | {"stage-1": stuck}, 2)
    assert told.failed == ["no answer"]
    assert len(files(saving, 2)) == 1, "the other stage's"
    stuck.refusal = "still writing"
    save(saving, good_stages(saving) | {"stage-1": stuck}, 3)
    assert len(files(saving, 2)) == 1 and files(saving, 3) == []
    stuck.refusal, stuck.first = None, broken("disk full")  # it takes a new save: the old one ended
    save(saving, good_stages(saving) | {"stage-1": stuck}, 4)
    assert files(saving, 2) == files(saving, 4) == []


def test_a_worker_that_is_lost_while_it_writes_fails_the_checkpoint(tmp_path: Path) -> None:
    saving, calls = new_saving(tmp_path), FakeCalls(open=False)
    told = start(saving, good_stages(saving), 2, calls)
    (first, copied, _), (_, _, lost) = calls.held
    lost("stage-1 is gone")
    calls.open = True
    copied(first.result)
    assert saving.deliver(WAIT_S)
    assert told.saved == [] and told.failed == ["stage-1 is gone"]
    assert files(saving, 2) == []


def test_an_abandoned_checkpoint_is_not_heard_of_again(tmp_path: Path) -> None:
    saving, calls = new_saving(tmp_path), FakeCalls(open=False)
    told = start(saving, good_stages(saving), 2, calls)
    saving.abandon(0)
    saving.abandon(1)
    for call, copied, failed in calls.held[:2]:
        copied(call.result)
        failed("the generation is over")
    assert len(calls.held) == 2, "nobody asks how far it is"
    assert saving.deliver(WAIT_S) and told == Told()
    told = save(saving, good_stages(saving), 2)
    assert told.saved[0].update == 2, "the same update can be saved again"


def test_the_end_clears_what_was_not_completed(tmp_path: Path) -> None:
    saving = new_saving(tmp_path)
    save(saving, good_stages(saving), 1)
    store = CheckpointStore(saving.root)
    stuck = FakeStage(store, 1, broken("no answer", writing=True))
    save(saving, good_stages(saving) | {"stage-1": stuck}, 2)
    saving.close(WAIT_S)
    assert files(saving, 2) == [] and kept(saving) == [1]


def test_a_prune_that_fails_is_no_failed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prune(self: CheckpointStore, num_to_keep: int) -> None:
        raise CheckpointError("cannot delete step-00000001: permission denied")

    monkeypatch.setattr(CheckpointStore, "prune", prune)
    saving = new_saving(tmp_path)
    told = save(saving, good_stages(saving), 2)
    assert told.failed == [] and told.saved[0].update == 2
    assert "permission denied" in told.warned[0]
    assert saving.newest is not None and saving.newest.update == 2


class Held:
    """Holds one method of the storage back, in whichever thread it is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        method = getattr(CheckpointStore, name)

        def held(store: CheckpointStore, *args: Any, **options: Any) -> Any:
            self.reached.set()
            assert self.open.wait(WAIT_S)
            return method(store, *args, **options)

        monkeypatch.setattr(CheckpointStore, name, held)


@pytest.mark.parametrize("method", ["commit", "prune"])
def test_the_coordinator_does_not_wait_for_the_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    held = Held(monkeypatch, method)
    saving = new_saving(tmp_path)
    told = start(saving, good_stages(saving), 2)
    if method == "prune":
        assert saving.deliver(WAIT_S)
        saving.rely_on(2, told.warned.append)
    saving.deliver(0.0)
    assert held.reached.wait(WAIT_S) and saving.busy
    assert (told.saved == []) is (method == "commit")
    held.open.set()
    assert saving.deliver(WAIT_S) and told.saved[0].update == 2 and not saving.busy


def test_a_checkpoint_goes_when_training_relies_on_another(tmp_path: Path) -> None:
    """Not as soon as the other is there: it may belong to a generation that has broken off."""
    saving = new_saving(tmp_path, "checkpoint.num_to_keep=1")
    save(saving, good_stages(saving), 1)
    told = start(saving, good_stages(saving), 2)
    assert saving.deliver(WAIT_S) and told.saved
    assert kept(saving) == [1, 2] and 1 in saving.positions
    saving.rely_on(2, told.warned.append)
    assert saving.deliver(WAIT_S) and kept(saving) == [2]


def test_a_storage_that_hangs_fails_the_checkpoint_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving_module, "COMMIT_LIMIT_S", 0.05)
    held = Held(monkeypatch, "commit")
    saving = new_saving(tmp_path)
    told = start(saving, good_stages(saving), 2)
    assert saving.deliver(WAIT_S)
    assert "the storage has not answered" in told.failed[0]
    assert "the storage has not answered" in save(saving, good_stages(saving), 3).failed[0]
    assert saving.newest is None
    saving.close(0.1)
    held.open.set()


def test_the_newest_checkpoint_is_known_when_the_storage_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saving := new_saving(tmp_path), good_stages(saving), 2)
    resumed = new_saving(tmp_path, update=2)

    def gone(self: CheckpointStore, *_: Any, **__: Any) -> None:
        raise CheckpointError("cannot list: no answer")

    for name in ("newest", "list", "_updates", "commit", "discard"):
        monkeypatch.setattr(CheckpointStore, name, gone)
    for known in (saving, resumed):
        assert known.newest is not None and known.newest.update == 2
    assert save(resumed, good_stages(resumed), 3).failed == ["cannot list: no answer"]
    resumed.close(WAIT_S)


def test_faults_of_ours_in_the_background_are_told() -> None:
    background = Background("jobs", WAIT_S)
    told: list[Any] = []

    def fault() -> int:
        raise KeyError("x")

    background.submit(lambda: 1, told.append, told.append)
    background.submit(fault, told.append, told.append)
    background.submit(lambda: 2, told.append, told.append)
    assert background.deliver(WAIT_S)
    assert told == [1, "KeyError: 'x'", 2], "in order"


@pytest.mark.parametrize(
    ("place", "root"),
    [
        ("/mnt/all", "/mnt/all/first"),
        ("s3://bucket/all/?region=eu", "s3://bucket/all/first?region=eu"),
    ],
)
def test_each_run_has_its_folder_at_a_common_place(place: str, root: str) -> None:
    settings = config()
    settings = replace(settings, checkpoint=replace(settings.checkpoint, storage_path=place))
    assert checkpoint_root(settings, "runs/first") == root


def test_a_second_run_leaves_the_first_ones_checkpoints_alone(tmp_path: Path) -> None:
    place = f"checkpoint.storage_path={tmp_path}/all"
    first = new_saving(tmp_path / "first", place, "checkpoint.num_to_keep=1")
    save(first, good_stages(first), 7)
    second = new_saving(tmp_path / "second", place, "checkpoint.num_to_keep=1")
    save(second, good_stages(second), 3)
    assert kept(first) == [7] and kept(second) == [3]


def test_going_on_with_other_data_is_refused(tmp_path: Path) -> None:
    saving = new_saving(tmp_path)
    save(saving, good_stages(saving), 1)
    manifest = CheckpointStore(saving.root).manifest(1)
    check_same_data(config(), manifest)
    with pytest.raises(CheckpointError, match="other data"):
        check_same_data(config("train.seed=9"), manifest)
    check_same_data(config("train.seed=9"), replace(manifest, extra={}))
