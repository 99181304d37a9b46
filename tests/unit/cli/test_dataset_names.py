"""Where `make-dataset from` puts a dataset whose folder is not named."""

from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.cli import data, render
from elastic_trainer.errors import ConfigError


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that were asked for, from within a folder called photos.2024."""
    asked: list[Path] = []

    def build(kind: str, folder: Path, **_arguments: Any) -> None:
        asked.append(folder)

    monkeypatch.setattr("elastic_trainer.data.make_dataset.make_dataset", build)
    monkeypatch.setattr(render, "dataset", lambda info: None)
    folder = tmp_path / "photos.2024"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return asked


@pytest.mark.parametrize(
    ("file", "name"),
    [(".", "photos"), ("../photos.2024/", "photos"), ("a.tar.gz", "a"), (".hidden.tar", "hidden")],
)
def test_the_first_file_names_the_folder(made: list[Path], file: str, name: str) -> None:
    data.make_dataset("from", [file])
    assert made == [Path("datasets") / name]


@pytest.mark.parametrize("file", ["shards/*.tar", "/", "[ab].jsonl"])
def test_what_names_nothing_needs_a_folder(made: list[Path], file: str) -> None:
    with pytest.raises(ConfigError, match="no name. Name its folder by --out"):
        data.make_dataset("from", [file])
    data.make_dataset("from", [file], out=Path("here"))
    assert made == [Path("here")]


def test_a_package_gives_its_kind(made: list[Path]) -> None:
    data.make_dataset("digits")
    assert made == [Path("datasets/digits")]
