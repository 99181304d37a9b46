"""Looking into a dataset: what is counted, measured and predicted, and how it is shown."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elastic_trainer.cli import sizes
from elastic_trainer.cli.main import run
from elastic_trainer.config import DataConfig
from elastic_trainer.data.make_dataset import make_dataset
from elastic_trainer.data.media.balance import predict_balance
from elastic_trainer.data.media.histogram import histogram
from elastic_trainer.data.media.inspect import inspect_dataset
from elastic_trainer.errors import DataError
from elastic_trainer.planner.sample_costs import analytic_cost
from elastic_trainer.planner.sizes import ItemSize


@pytest.fixture
def dataset(tmp_path: Path, picture: Callable[..., bytes], sound: Callable[..., bytes]) -> Path:
    """Sixteen rows: pictures of growing size, every fourth with a sound."""
    folder = tmp_path / "files"
    folder.mkdir()
    for n in range(16):
        (folder / f"{n:02}.png").write_bytes(picture(32 * (n + 1), 32))
        (folder / f"{n:02}.txt").write_text("ab" * (n + 1))
        if n % 4 == 0:
            (folder / f"{n:02}.wav").write_bytes(sound(8000 * (1 + n), 8000))
    make_dataset("from", tmp_path / "set", files=[str(folder)], vocab_size=260)
    return tmp_path / "set"


def test_what_is_found(dataset: Path) -> None:
    found = inspect_dataset(str(dataset), DataConfig())
    assert sum(found.num_rows.values()) == 16 and found.num_rows["eval"] >= 1
    assert found.rows_with == {"image": 16, "audio": 4, "text": 16}
    assert sorted(found.sizes["pixels of a picture"]) == [1024 * (n + 1) for n in range(16)]
    assert sorted(found.sizes["seconds of a sound"]) == [1, 5, 9, 13]
    assert sorted(found.sizes["characters of a text"]) == [2 * (n + 1) for n in range(16)]
    assert found.vocab_size is not None and found.vocab_size <= 260
    assert len(found.items) == found.num_rows["train"] and found.num_damaged == 0
    patches = {item.image_patches[0] for item in found.items}
    assert patches <= {4 * (n + 1) for n in range(16)}, "32 by 32 pixels are 4 patches"


def test_the_loader_sees_the_same_sizes(dataset: Path, config: Callable[..., Any]) -> None:
    from elastic_trainer.data.dataset import Dataset
    from elastic_trainer.types import Cursor

    settings = config(dataset, format="media", shuffle=False)
    reader = Dataset(settings).reader("train")
    items = inspect_dataset(str(dataset), settings.data).items
    for row, item in enumerate(items):
        assert reader.next(Cursor(row=row)).size == item


def test_without_size_columns_the_heads_are_read(
    tmp_path: Path, picture: Callable[..., bytes], sound: Callable[..., bytes]
) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pictures: Any = pa.array(
        [{"bytes": picture(7, 5), "path": "a"}, {"bytes": b"", "path": "b"}, None], kind
    )
    table = pa.table(
        {"img": pictures, "snd": [sound(800), b"x", None], "caption": ["a", "b", None]}
    )
    pq.write_table(table, str(tmp_path / "a.parquet"))
    names = {"image": "img", "audio": "snd", "text": "caption"}
    found = inspect_dataset(str(tmp_path / "a.parquet"), DataConfig(columns=names))
    assert found.num_rows == {"train": 3, "eval": 0}
    assert found.sizes["pixels of a picture"] == [35.0]
    assert found.sizes["seconds of a sound"] == [0.1]
    assert found.num_damaged == 2 and found.vocab_size is None
    assert found.rows_with == {"image": 1, "audio": 1, "text": 2}


def test_columns_named_otherwise(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    pq.write_table(pa.table({"picture": [b"x"], "words": ["y"]}), path)
    with pytest.raises(DataError, match="no column image, audio, text; its columns are picture, w"):
        inspect_dataset(path, DataConfig())
    with pytest.raises(DataError, match="no column 'pic' for image. Its columns are picture"):
        inspect_dataset(path, DataConfig(columns={"image": "pic"}))
    with pytest.raises(DataError, match="names 'colour'.*It reads image"):
        inspect_dataset(path, DataConfig(columns={"colour": "x"}))
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="the dataset .* is empty"):
        inspect_dataset(path, DataConfig())
    Path(path).write_bytes(Path(path).read_bytes()[:50])
    with pytest.raises(DataError, match="cannot read .*a.parquet"):
        inspect_dataset(path, DataConfig())


def test_text_alone_can_be_inspected(text_dataset: Path) -> None:
    found = inspect_dataset(str(text_dataset), DataConfig())
    assert found.num_rows == {"train": 8, "eval": 4}
    assert found.rows_with == {"image": 0, "audio": 0, "text": 12}
    assert "pixels of a picture" not in found.sizes


def test_balanced_is_best() -> None:
    draw = np.random.default_rng(0)
    items = [
        ItemSize((int(n),), (int(m),), 20)
        for n, m in draw.lognormal(4, 1, (256, 2)).astype(int) + 1
    ]
    balance = predict_balance(
        items, analytic_cost(), num_stages=4, batch_size=64, num_microbatches=8, seed=0
    )
    ratios = balance.largest_over_mean
    assert 1 <= ratios["balanced"] < ratios["random"] < ratios["length-sorted"]
    assert balance.num_batches == 4
    even = predict_balance(
        [ItemSize((8,), (), 4)] * 9,
        analytic_cost(),
        num_stages=2,
        batch_size=64,
        num_microbatches=3,
        seed=0,
    )
    assert even.largest_over_mean == pytest.approx(dict.fromkeys(ratios, 1.0))
    assert (even.batch_size, even.num_batches) == (9, 1)
    few = predict_balance(
        [ItemSize()] * 3, analytic_cost(), num_stages=1, batch_size=64, num_microbatches=8, seed=0
    )
    assert (few.batch_size, few.num_microbatches) == (3, 3)


def test_histogram() -> None:
    shown = histogram([1, 10, 10, 100, 1000])
    assert len(shown.counts) == 12 and sum(shown.counts) == 5
    assert (shown.edges[0], shown.edges[-1]) == (1, 1000)
    assert (shown.smallest, shown.median, shown.largest) == (1, 10, 1000)
    assert histogram([3.0, 3.0]).counts == (2,)
    lines = sizes.bars(histogram([1, 10, 10, 100, 1000], num_bins=3))
    assert lines[1] == f"{10:>5} – {100:>5}  " + "█" * 40 + " 2"
    assert lines[0].split() == ["1", "–", "10", "█" * 20, "1"]


def test_command(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--batch-size", "8", "--microbatches", "2", "--stages", "2"]
    png = tmp_path / "sizes.png"
    assert run(["data", "inspect", str(dataset), *small, "--png", str(png)]) == 0
    out = capsys.readouterr().out
    assert "image  in 16 rows (100%)" in out and "audio  in 4 rows (25%)" in out
    assert "pixels of a picture: 1.02k to 16.4k" in out and "█" in out
    assert "of 2 microbatches, 2 stages (1 batches of 8)" in out
    with Image.open(png) as drawn:
        assert drawn.format == "PNG" and drawn.size == (1280, 1024)
        colours = drawn.convert("RGB").getcolors(1 << 20)
    assert colours is not None and len(colours) > 2
    assert run(["data", "inspect", str(dataset), *small, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["rows_with"] == {"image": 16, "audio": 4, "text": 16}
    assert set(facts["largest_over_mean"]) == {"random", "length-sorted", "balanced"}
    assert sum(facts["sizes"]["pixels of a picture"]["counts"]) == 16
    assert run(["data", "inspect", str(dataset), *small, "--png", "/nowhere/a.png"]) == 1
    assert "cannot write /nowhere/a.png" in capsys.readouterr().err
    assert run(["data", "inspect", str(tmp_path / "gone")]) == 1
    assert "there is no dataset at" in capsys.readouterr().err


def test_make_dataset_command(
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files" / "03.png").write_bytes(b"")
    made = ["make-dataset", "from", "files", "--vocab-size", "260"]
    assert run(made) == 1
    assert "03.png: the picture is empty: 0 bytes" in capsys.readouterr().err
    assert run([*made, "on_error=skip"]) == 0
    out = capsys.readouterr().out
    assert "Made " in out and "datasets/files: " in out
    assert "Rows with image in 15, audio in 4, text in 15; 0:28 of sound" in out
    assert "Left out: 1. The first of them:\n- 03.png" in out
    assert run([*made, "on_error=skip"]) == 0
    assert "Kept " in capsys.readouterr().out
    assert run(["make-dataset", "from", "--vocab-size", "260"]) == 1
    assert "no files are given" in capsys.readouterr().err
    assert run(["make-dataset", "captions", "a", "b"]) == 2
    assert "`a` is not an argument" in capsys.readouterr().err
    assert run(["make-dataset", "from", "gone", "colour=red"]) == 1
    assert "make-dataset from has no argument 'colour'" in capsys.readouterr().err
