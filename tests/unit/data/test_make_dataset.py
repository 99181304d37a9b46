"""Building datasets: the standard library, the dictionary package, and what is refused."""

import base64
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from elastic_trainer.config import Config
from elastic_trainer.data import gcide, packages, stdlib_text
from elastic_trainer.data import make_dataset as module
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.make_dataset import make_dataset, sample_texts, split_documents
from elastic_trainer.data.publish import DatasetInfo
from elastic_trainer.data.raw import RawDocument
from elastic_trainer.errors import DataError


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small tree of Python files, as a standard library would have them."""
    root = tmp_path / "lib"
    for number in range(20):
        path = root / f"package{number % 3}" / f"module{number:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def answer_{number}():\n    return {number}\n" * (number + 1))
    (root / "latin.py").write_bytes("# coding: latin-1\nname = 'Müller'\r\n".encode("latin-1"))
    (root / "broken.py").write_bytes(b"name = '\xff'\n")
    (root / "empty.py").write_text("\n")
    (root / "notes.txt").write_text("not Python")
    for skipped in ("test", "package0/tests", "idlelib/idle_test", "site-packages/x"):
        (root / skipped).mkdir(parents=True)
        (root / skipped / "skipped.py").write_text("skipped = True\n")
    return root


def build(sources: Path, out: Path, **changes: Any) -> DatasetInfo:
    arguments = {"vocab_size": 300, "eval_fraction": 0.2, "root": str(sources), **changes}
    return make_dataset("stdlib-text", out, **arguments)


def files(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_layout_and_content(sources: Path, tmp_path: Path, config: Callable[..., Config]) -> None:
    info = build(sources, tmp_path / "out")
    assert sorted(files(tmp_path / "out")) == [
        "data/eval-00000-of-00001.parquet",
        "data/train-00000-of-00001.parquet",
        "dataset.json",
        "tokenizer.json",
    ]
    tables: dict[str, Any] = {
        split: pq.read_table(str(tmp_path / "out" / "data" / f"{split}-00000-of-00001.parquet"))
        for split in ("train", "eval")
    }
    names = [n for table in tables.values() for n in table.column("source").to_pylist()]
    texts = [t for table in tables.values() for t in table.column("text").to_pylist()]
    assert len(names) == 21 and len(set(names)) == 21, "one row per file, in one split only"
    assert not any("skipped" in name or "broken" in name for name in names)
    assert texts[names.index("latin.py")] == "# coding: latin-1\nname = 'Müller'\n"
    assert tables["eval"].num_rows == info.num_eval_rows >= 1
    assert info.num_chars == sum(map(len, texts))
    schema = tables["train"].schema
    features = json.loads(schema.metadata[b"huggingface"])["info"]["features"]
    assert set(features) == set(schema.names) == {"text", "source", "text_chars"}
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["digest"] == info.digest and facts["vocab_size"] == 300
    assert set(facts["source"]) == {"package", "version", "licence", "sha256"}
    settings = config(tmp_path / "out")
    assert describe(settings).num_rows == info.num_rows
    assert next(BatchStream(settings, "train", 4))[0].num_samples == 4


def test_same_call_same_bytes(sources: Path, tmp_path: Path) -> None:
    first, second = build(sources, tmp_path / "a"), build(sources, tmp_path / "b")
    assert first.digest == second.digest
    ours, theirs = files(tmp_path / "a"), files(tmp_path / "b")
    del ours["dataset.json"], theirs["dataset.json"]  # names its folder
    assert ours == theirs
    assert build(sources, tmp_path / "c", seed=1).digest != first.digest


def test_an_existing_dataset_is_reused_and_never_silently_replaced(
    sources: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert not build(sources, out).reused
    before = files(out)
    assert build(sources, out).reused
    with pytest.raises(DataError, match="differs.* in vocab_size.*overwrite"):
        build(sources, out, vocab_size=310)
    assert files(out) == before
    assert build(sources, out, vocab_size=310, overwrite=True).vocab_size == 310
    (sources / "latin.py").write_text("changed = 1\n")
    with pytest.raises(DataError, match="differs.* in source"):
        build(sources, out, vocab_size=310)
    assert build(sources, out, vocab_size=310, overwrite=True).num_rows > 0
    (out / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="differs.* in missing files"):
        build(sources, out, vocab_size=310)
    assert not build(sources, out, vocab_size=310, overwrite=True).reused
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_foreign_folder_is_left_alone(sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    for _ in range(2):
        with pytest.raises(DataError, match="not a dataset built here"):
            build(sources, out, overwrite=True)
        (out / "dataset.json").write_text("[]")
    assert (out / "letter.txt").read_text() == "dear"


def test_a_failed_build_leaves_nothing(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_shards", full)
    with pytest.raises(DataError, match="No space left on device. Check free space"):
        build(sources, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lib"]


def test_refused(sources: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dataset called 'shakespeare'.*stdlib-text, gcide"):
        make_dataset("shakespeare", tmp_path / "out")
    with pytest.raises(DataError, match="eval_fraction is 1.5"):
        build(sources, tmp_path / "out", eval_fraction=1.5)
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="no Python sources in"):
        build(tmp_path / "bare", tmp_path / "out")


def test_a_new_document_moves_no_other_between_splits() -> None:
    documents = [RawDocument(name=f"{n}", text="x") for n in range(200)]
    train, held_out = split_documents(documents, eval_fraction=0.1, seed=3)
    assert 8 < len(held_out) < 35 and len(train) + len(held_out) == 200
    more = [*documents, RawDocument(name="new", text="x")]
    again = split_documents(more, eval_fraction=0.1, seed=3)
    assert {d.name for d in held_out} == {d.name for d in again[1]} - {"new"}
    for fraction in (1e-9, 1 - 1e-9):
        sides = split_documents(documents[:2], eval_fraction=fraction, seed=0)
        assert [len(side) for side in sides] == [1, 1]
    with pytest.raises(DataError, match=r"1 document\(s\)"):
        split_documents(documents[:1], eval_fraction=0.5, seed=0)


def test_shards_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_BYTES", 10)
    monkeypatch.setattr(module, "ROW_GROUP_BYTES", 4)
    module.write_shards(
        tmp_path, "train", [RawDocument(name=f"{n}", text="abc"[: n % 4]) for n in range(12)]
    )
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    rows = [r for n in names for r in pq.read_table(str(tmp_path / n))["source"].to_pylist()]
    assert rows == [str(n) for n in range(12)]
    assert pq.ParquetFile(str(tmp_path / names[0])).num_row_groups > 1
    assert sample_texts(["aa"] * 10, limit=7) == ["aa"] * 4


def test_the_standard_library_is_there() -> None:
    provenance, documents = stdlib_text.build()
    names = {d.name for d in documents}
    assert {"os.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not any("site-packages" in n or n.startswith("test/") or "/tests/" in n for n in names)
    assert provenance.version == ".".join(map(str, sys.version_info[:3]))
    assert sum(len(d.text) for d in documents) > 5_000_000


# --- the dictionary ------------------------------------------------------------------------------

ENTRIES = ["00-database-info\n header", "Cat \\Cat\\, n.\n   An animal.", "Dog\n   Café."]


def digits(number: int) -> str:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    text = alphabet[number % 64]
    while number := number // 64:
        text = alphabet[number % 64] + text
    return text


@pytest.fixture
def make_deb(deb: Callable[..., Path]) -> Callable[[Path], Path]:
    """Makes a Debian package with a dictionary of two entries, one of them under two headwords."""
    content = "\n".join(ENTRIES).encode()
    index, at = "", 0
    for entry, words in zip(ENTRIES, (["00databaseinfo"], ["cat", "puss"], ["dog"]), strict=True):
        size = len(entry.encode())
        index += "".join(f"{word}\t{digits(at)}\t{digits(size)}\n" for word in words)
        at += size + 1
    members = {"usr/share/dictd/gcide.dict.dz": gzip.compress(content)}
    members["usr/share/dictd/gcide.index"] = index.encode()
    return lambda path: deb(path, members)


def executable(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


needs_dpkg = pytest.mark.skipif(
    subprocess.run(["sh", "-c", "command -v dpkg"], capture_output=True).returncode != 0,
    reason="unpacking a .deb needs dpkg",
)


@needs_dpkg
def test_dictionary_from_a_package_file(tmp_path: Path, make_deb: Callable[[Path], Path]) -> None:
    deb = make_deb(tmp_path / "dict-gcide_1.2_all.deb")
    out = tmp_path / "out"
    info = make_dataset(
        "gcide", out, vocab_size=280, deb=str(deb), cache_dir=str(tmp_path / "cache")
    )
    assert (info.num_rows, info.num_eval_rows) == (1, 1)
    assert (info.source.version, info.source.licence) == ("1.2", "GPL-2.0+")
    _, documents = gcide.build(str(deb), str(tmp_path / "cache"))
    assert [d.text for d in documents] == ENTRIES[1:]


@needs_dpkg
def test_dictionary_downloaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_deb: Callable[[Path], Path]
) -> None:
    deb = make_deb(tmp_path / "made.deb")
    bin_dir, cache = tmp_path / "bin", tmp_path / "cache"
    executable(
        bin_dir,
        "apt-get",
        f'[ "$*" = "download dict-gcide" ] && cp {deb} dict-gcide_1%3a1.2_all.deb'
        f" && echo x >> {tmp_path}/calls",
    )
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    provenance, documents = gcide.build(cache_dir=str(cache))
    assert provenance.version == "1:1.2" and len(documents) == 2
    gcide.build(cache_dir=str(cache))
    assert (tmp_path / "calls").read_text() == "x\n"
    monkeypatch.delenv("PATH")
    assert gcide.build(cache_dir=str(cache))[1] == documents, "an unpacked package needs no tools"


def test_no_apt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_deb: Callable[[Path], Path]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match=r"no apt-get.*copy the .deb here.*stdlib-text"):
        gcide.build(cache_dir=str(tmp_path / "cache"))
    deb = make_deb(tmp_path / "dict-gcide_1.2_all.deb")
    with pytest.raises(DataError, match="has no dpkg"):
        gcide.build(str(deb), str(tmp_path / "cache"))
    with pytest.raises(DataError, match="no package file .*lost.deb"):
        gcide.build(str(tmp_path / "lost.deb"), str(tmp_path / "cache"))


def test_apt_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    cache = str(tmp_path / "cache")
    executable(
        tmp_path / "bin",
        "apt-get",
        "echo 'W: no sandbox' >&2; echo 'E: Unable to locate package dict-gcide' >&2; exit 100",
    )
    with pytest.raises(DataError, match="Unable to locate package.*Run `apt-get update`"):
        gcide.build(cache_dir=cache)
    executable(tmp_path / "bin", "apt-get", "exit 0")
    with pytest.raises(DataError, match="left no dict-gcide_"):
        gcide.build(cache_dir=cache)
    executable(tmp_path / "bin", "apt-get", "exec sleep 60")
    monkeypatch.setattr(packages, "_DOWNLOAD_TIMEOUT_S", 0.2)
    with pytest.raises(DataError, match="no end within 0.2 s"):
        gcide.build(cache_dir=cache)


@needs_dpkg
def test_damaged_package(tmp_path: Path, make_deb: Callable[[Path], Path]) -> None:
    deb = make_deb(tmp_path / "dict-gcide_1.2_all.deb")
    deb.write_bytes(deb.read_bytes()[:200])
    with pytest.raises(DataError, match="cannot unpack"):
        gcide.build(str(deb), str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("unpacked*"))


def test_base64_numbers() -> None:
    assert gcide._number(digits(123456789)) == 123456789
    assert base64.b64encode(b"\x00\x10\x83").decode() == "ABCD"
    assert gcide._number("ABCD") == 0x001083
