"""Whatever is wrong with a run's input is said before anything starts, and nothing is lost."""

import fcntl
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from elastic_trainer import fit
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile
from elastic_trainer.config import Config, load_config, to_yaml
from elastic_trainer.data.tokenizer import train_bpe
from elastic_trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ElasticTrainerError,
    ModelError,
    PlanError,
    RunError,
)
from elastic_trainer.observability.record import RunRecord
from elastic_trainer.run import launch
from elastic_trainer.run.prepare import prepare
from elastic_trainer.run.results import checkpoints
from elastic_trainer.types import Cursor

SYNTHETIC: Any = {
    "model": {"name": "emulated", "args": {"num_layers": 3}},
    "data": {"format": "synthetic", "sequence_length": 4},
    "train": {"global_batch_size": 8, "max_steps": 2, "eval_batches": 0},
}
COLUMNS = ("data.format=columns", "data.input_columns=[x]", "data.label_columns=[y]")
MLP = ("model.name=mlp", "model.args={input_dim: 2, output_dim: 1}")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, and a Ray that must not be reached."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def started(*_: Any, **__: Any) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(launch, "connected", started)
    monkeypatch.setattr(ray, "init", started)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, and what it holds; Python's caches apart."""
    files = (f for f in folder.rglob("*") if f.is_file() and "__pycache__" not in f.parts)
    return {str(file): file.read_bytes() for file in files}


def refused(
    kind: type[ElasticTrainerError],
    parts: Sequence[str],
    source: Any = SYNTHETIC,
    *overrides: str,
    **options: Any,
) -> None:
    """`fit` raises this error with all parts on one line; no file appears, changes or goes."""
    before = everything(Path.cwd())
    with pytest.raises(kind) as caught:
        fit(source, *overrides, display=False, **options)
    text = str(caught.value)
    for part in parts:
        assert part in text
    assert "\n" not in text
    assert everything(Path.cwd()) == before
    assert not Path("runs").exists()


def write_module(name: str, text: str) -> None:
    """A user's module in the working folder, imported anew."""
    Path(f"{name}.py").write_text(text)
    sys.modules.pop(name, None)


def write_texts(column: str = "text", rows: Any = ("one two", "three four")) -> Path:
    file = Path("texts.parquet").absolute()
    pq.write_table(pa.table({column: pa.array(rows)}), str(file))
    Path("tokenizer.json").write_text(train_bpe(["one two three four"], 270).to_json())
    return file


def test_what_is_prepared(folder: Path) -> None:
    made = prepare(SYNTHETIC, ["run.name=first"], workers=3)
    assert made.name == "first"
    assert made.run_dir == folder / "runs" / "first"
    assert (made.update, made.checkpoint, made.notes) == (0, None, ())
    assert made.config.cluster.num_workers == 3
    assert not everything(folder), "checking leaves no trace"


def test_a_name_is_made_up(folder: Path) -> None:
    assert prepare(SYNTHETIC, []).name.endswith("-emulated")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.max_step=3"], ["train.max_step", "train.max_steps"]),
        (["per_device_train_batch_size=8"], ["per_device_train_batch_size", "microbatch_size"]),
        (["train.per_device_train_batch_size=8"], ["pipeline.microbatch_size"]),
        (["train.max_steps=many"], ["train.max_steps", "many"]),
        (["pipeline.microbatch_size=3"], ["train.global_batch_size", "does not divide", "=6 or 9"]),
        (["pipeline.schedule=zigzag"], ["zigzag", "gpipe, 1f1b, async_1f1b"]),
        (["pipeline.num_stages=3"], ["pipeline.num_stages", "cluster.num_workers"]),
    ],
)
def test_settings(overrides: Sequence[str], parts: Sequence[str]) -> None:
    refused(ConfigError, parts, SYNTHETIC, *overrides)


def test_configuration_that_is_not_there() -> None:
    refused(ConfigError, ["There is no configuration `gtp`", "recipe `gpt`"], "gtp")


def test_more_stages_than_layers() -> None:
    refused(PlanError, ["4 stages", "only 3 layers", "at most 3"], SYNTHETIC, workers=4)


@pytest.mark.parametrize("workers", [0, "0", "3:2", "many", "2:"])
def test_numbers_of_workers(workers: int | str) -> None:
    refused(ConfigError, [f"`--workers` is {workers!r}"], SYNTHETIC, workers=workers)


def test_a_range_of_workers() -> None:
    made = prepare(SYNTHETIC, [], workers="2:8")
    assert (made.config.elastic.min_workers, made.config.cluster.num_workers) == (2, 8)
    refused(PlanError, ["4 stages", "only 3 layers"], SYNTHETIC, workers="4:8")


def test_layers_are_counted_by_the_workers_on_a_cluster() -> None:
    prepare(SYNTHETIC, [], workers=4, address="10.0.0.1:6379")


def test_dataset_missing() -> None:
    refused(
        DataError,
        ["there is no dataset at", "none/here", "make-dataset"],
        None,
        "data.path=none/here",
    )


def test_dataset_empty(folder: Path) -> None:
    file = write_texts(rows=pa.array([], pa.string()))
    refused(DataError, ["is empty", str(file)], None, f"data.path={file}")


def test_parquet_cut_short() -> None:
    file = write_texts()
    file.write_bytes(file.read_bytes()[:-9])
    refused(DataError, [file.name, "cut short", "build it again"], None, f"data.path={file}")


def test_no_text_column() -> None:
    file = write_texts(column="texts")
    refused(DataError, ["no column 'text'", "Did you mean texts?"], None, f"data.path={file}")


def test_tokenizer_missing() -> None:
    file = write_texts()
    Path("tokenizer.json").unlink()
    refused(DataError, ["no tokenizer.json beside"], None, f"data.path={file}")


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("nowhere.models:make", ["there is no module 'nowhere'"]),
        ("mine:make", ["'mine' imports, but has no 'make'", "nearest: made"]),
        ("mine", ["package.module:function"]),
        ("mine:made", ["returned no layers", "Return at least one"]),
        ("mine:nothing", ["returned no layers but None", "return statement"]),
        ("mine:single", ["returned one Linear, not layers"]),
        ("mine:broken", ["mine:broken failed: ZeroDivisionError"]),
        ("mine:needy", ["needs the argument 'width'", "model.args.width"]),
        ("half:make", ["half", "needs module 'not_installed_anywhere'"]),
        ("wrong:make", ["wrong", "does not import", "SyntaxError"]),
    ],
)
def test_model(target: str, parts: Sequence[str]) -> None:
    write_module(
        "mine",
        "from torch import nn\n"
        "def made(): return []\n"
        "def nothing(): pass\n"
        "def single(): return nn.Linear(1, 1)\n"
        "def broken(): return 1 / 0\n"
        "def needy(width): return [nn.Linear(width, 1)]\n",
    )
    write_module("half", "import not_installed_anywhere\n")
    write_module("wrong", "def make(:\n")
    refused(ModelError, parts, SYNTHETIC, f"model.target={target}")


def test_loss_that_does_not_import() -> None:
    refused(ModelError, ["loss.target", "no module 'nowhere'"], SYNTHETIC, "loss.target=nowhere:f")


def test_modules_of_a_cluster_are_not_looked_for_here() -> None:
    settings = ["model.target=only.on.the.nodes:make"]
    assert prepare(SYNTHETIC, settings, address="auto").config.model.target


def test_wrong_arguments_of_a_shipped_model() -> None:
    wrong = "model.args={num_layer: 3}"
    refused(ModelError, ["no argument 'num_layer'", "nearest: num_layers"], SYNTHETIC, wrong)


def test_run_folder_that_holds_a_run(folder: Path) -> None:
    with RunRecord(folder / "old") as record:
        record.append_update({"update": 1, "loss": 1.0})
        record.write_status({"state": "completed"})
    parts = ["old already holds a run", "--resume auto", "--run-dir"]
    refused(RunError, parts, SYNTHETIC, run_dir=folder / "old")


@pytest.mark.parametrize("resume", [None, "auto"])
def test_run_folder_in_use(folder: Path, resume: str | None) -> None:
    with RunRecord(folder / "old") as record:
        record.write_status({"state": "running"})
        parts = ["already running in", "old", "elastic-trainer stop"]
        refused(RunError, parts, SYNTHETIC, run_dir=folder / "old", resume=resume)
    assert prepare(SYNTHETIC, [], run_dir=folder / "old", resume="auto").update == 0


def test_a_folder_that_two_take_at_once(folder: Path) -> None:
    """Between the check and the start another trainer may take the folder: the lock decides."""
    made = prepare(SYNTHETIC, [], run_dir=folder / "same")
    made.run_dir.mkdir()
    with open(made.run_dir / "trainer.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="is in use by"):
            RunRecord(made.run_dir)


def test_nothing_to_resume_from(folder: Path) -> None:
    made = prepare(SYNTHETIC, [], run_dir=folder / "new", resume="auto")
    assert made.update == 0
    assert made.notes == ("nothing to resume from: starting at update 0",)


@pytest.mark.parametrize("resume", ["7", "elsewhere", "elsewhere/step-00000003"])
def test_resume_from_what_is_not_there(folder: Path, resume: str) -> None:
    refused(CheckpointError, [], SYNTHETIC, run_dir=folder / "new", resume=resume)


def save(root: Path, update: int) -> None:
    """A checkpoint of one empty layer."""
    store = CheckpointStore(root)
    written = store.write_layer_file(update, 0, "layers.0", [b"content"])
    assert isinstance(written, LayerFile)
    store.commit(update, [written], cursor=Cursor(row=update), extra={})


def test_resume(folder: Path) -> None:
    for update in (2, 4):
        save(folder / "old" / "checkpoints", update)
    newest = prepare(SYNTHETIC, [], run_dir=folder / "old", resume="auto")
    assert (newest.update, newest.cursor) == (4, Cursor(row=4))
    assert newest.notes == ("resuming from update 4",)
    older = prepare(SYNTHETIC, [], run_dir=folder / "old", resume="2")
    assert older.update == 2
    other = prepare(SYNTHETIC, [], run_dir=folder / "new", resume=str(folder / "old"))
    assert other.checkpoint == str(folder / "old" / "checkpoints")


def test_damaged_checkpoints_are_passed_over_and_named(folder: Path) -> None:
    root = folder / "old" / "checkpoints"
    for update in (2, 4):
        save(root, update)
    next((root / "step-00000004").glob("layer-*")).unlink()
    made = prepare(SYNTHETIC, [], run_dir=folder / "old", resume="auto")
    assert made.update == 2
    assert "passed over: update 4" in made.notes[0] and "resuming from update 2" in made.notes[1]
    next((root / "step-00000002").glob("layer-*")).unlink()
    parts = ["no checkpoint in", "is whole", "update 4", "update 2"]
    refused(CheckpointError, parts, SYNTHETIC, run_dir=folder / "old", resume="auto")


def a_run(folder: Path, *overrides: str) -> Config:
    """A run folder as a trainer leaves it."""
    resolved = load_config(SYNTHETIC, overrides)
    with RunRecord(folder) as record:
        record.write_config(to_yaml(resolved))
    return resolved


@pytest.mark.parametrize("source", ["runs/x", "runs/x/config.yaml"])
def test_going_on_with_a_run_by_its_folder(folder: Path, source: str) -> None:
    a_run(folder / "runs" / "x")
    save(folder / "runs" / "x" / "checkpoints", 2)
    made = prepare(source, [], resume="auto")
    assert (made.run_dir, made.update) == (folder / "runs" / "x", 2)
    assert prepare(Path(source), ["train.max_steps=9"], resume="2").run_dir == made.run_dir
    # Another folder where one is asked for, and where nothing is to go on.
    assert prepare(source, ["run.name=y"], resume="auto").run_dir == folder / "runs" / "y"
    assert prepare(source, [], run_dir="z", resume="auto").run_dir == folder / "z"
    assert prepare(source, []).run_dir != made.run_dir


def test_checkpoints_at_a_common_place(folder: Path) -> None:
    place = f"checkpoint.storage_path={folder / 'all'}"
    a_run(folder / "runs" / "first", place)
    save(folder / "all" / "first", 6)
    made = prepare("runs/first", [place], resume="auto")
    assert (made.update, made.checkpoint) == (6, str(folder / "all" / "first"))
    assert [c.update for c in checkpoints("runs/first")] == [6]
    second = prepare(SYNTHETIC, [place, "run.name=second"], resume="auto")
    assert second.update == 0, "the first run's checkpoints are not its own"
    branched = prepare(SYNTHETIC, [place, "run.name=second"], resume="runs/first")
    assert (branched.update, branched.checkpoint) == (6, made.checkpoint)


@pytest.mark.parametrize("resume", [None, "runs/other"])
def test_a_run_of_the_same_name_is_not_overwritten(folder: Path, resume: str | None) -> None:
    """Run folders of one name may lie in different places and share the place of checkpoints."""
    place = f"checkpoint.storage_path={folder / 'all'}"
    save(folder / "all" / "first", 6)
    save(folder / "all" / "other", 2)
    Path("elsewhere").mkdir()
    a_run(folder / "kept" / "other", place)
    resume = resume and str(folder / "kept" / "other")
    refused(
        RunError,
        ["checkpoints of another run (update 6)", "--resume auto", "run.name"],
        SYNTHETIC,
        place,
        run_dir=folder / "elsewhere" / "first",
        resume=resume,
    )


def test_metrics_port_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        parts = [f"cannot serve metrics on 127.0.0.1:{port}", "in use", "metrics.port"]
        refused(ConfigError, parts, SYNTHETIC, f"metrics.port={port}")
        prepare(SYNTHETIC, [f"metrics.port={port}", "metrics.enabled=false"])
    prepare(SYNTHETIC, [f"metrics.port={port}"])


def test_columns_that_are_not_there() -> None:
    file = Path("numbers.parquet").absolute()
    pq.write_table(pa.table({"x": [[1.0, 2.0]] * 8, "z": [1.0] * 8}), str(file))
    settings = (*MLP, *COLUMNS, f"data.path={file}", "train.max_steps=1")
    refused(DataError, ["no column 'y'"], None, *settings)
