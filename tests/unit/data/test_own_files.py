"""The user's own files as datasets: folders, archives, lists, and what may be wrong with them."""

import gzip
import json
import lzma
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from elastic_trainer.data.make_dataset import make_dataset
from elastic_trainer.data.publish import DatasetInfo
from elastic_trainer.errors import DataError

Files = dict[str, bytes]
Picture = Callable[..., bytes]


@pytest.fixture
def samples(picture: Picture, sound: Callable[..., bytes]) -> Files:
    """Six samples of a picture and a caption; every second one has a sound, too."""
    files: Files = {}
    for n in range(6):
        files[f"part{n % 2}/{n:03}.jpg"] = picture(10 + n, 8, kind="JPEG")
        files[f"part{n % 2}/{n:03}.txt"] = f"Caption {n}\n".encode()
        if n % 2:
            files[f"part{n % 2}/{n:03}.flac"] = sound(100 * n, 48000, "FLAC")
    return files


def lay_out(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def build(tmp_path: Path, *files: Path | str, **changes: Any) -> DatasetInfo:
    arguments: dict[str, Any] = {"vocab_size": 260, "eval_fraction": 0.3, "overwrite": True}
    return make_dataset(
        "from", tmp_path / "out", files=list(map(str, files)), **arguments | changes
    )


def rows(tmp_path: Path) -> dict[str, dict[str, Any]]:
    tables = [pq.read_table(str(file)) for file in (tmp_path / "out" / "data").iterdir()]
    table: Any = pa.concat_tables(tables)
    return {row["id"]: row for row in table.to_pylist()}


def refused(match: str, tmp_path: Path, *files: Path | str, **changes: Any) -> None:
    with pytest.raises(DataError, match=match):
        build(tmp_path, *files, **changes)


def test_folder(tmp_path: Path, samples: Files) -> None:
    folder = lay_out(tmp_path / "photos", {**samples, "README": b"x", ".hidden/a.jpg": b""})
    info = build(tmp_path, folder, licence="CC0")
    assert info.rows_with == {"image": 6, "audio": 3, "text": 6}
    assert (info.source.package, info.source.licence) == ("photos", "CC0")
    row = rows(tmp_path)["part1/003"]
    assert row["text"] == "Caption 3" and row["image_width"] == 13
    assert (row["audio_samples"], row["audio_rate"]) == (300, 48000)
    assert row["image"] == {"bytes": samples["part1/003.jpg"], "path": "part1/003.jpg"}
    assert rows(tmp_path)["part0/002"]["audio"] is None
    assert rows(tmp_path)["part0/002"]["audio_samples"] == 0


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archive_is_read_like_the_folder(
    tmp_path: Path, samples: Files, tar: Callable[..., bytes], mode: str
) -> None:
    path = tmp_path / ("a.tar" if mode == "w" else "a.tar.gz")
    tar(path, samples, mode)
    build(tmp_path, path)
    from_tar = rows(tmp_path)
    build(tmp_path, lay_out(tmp_path / "photos", samples))
    from_folder = rows(tmp_path)
    assert from_tar.keys() == from_folder.keys()
    for name, row in from_tar.items():
        assert row["image"]["bytes"] == from_folder[name]["image"]["bytes"]
        assert row["text"] == from_folder[name]["text"]


def test_archives_together(tmp_path: Path, picture: Picture, tar: Callable[..., bytes]) -> None:
    for shard in range(2):
        members = {}
        for n in range(3):
            members[f"./{n}.left.png"] = picture(4, 4)
            members[f"./{n}.right.png"] = picture(6, 4)
            members[f"./{n}.json"] = json.dumps({"caption": f"Pair {shard}.{n}"}).encode()
        tar(tmp_path / f"s-{shard}.tar", members)
    info = build(tmp_path, str(tmp_path / "s-*.tar"))
    row = rows(tmp_path)["s-1.tar/2"]
    assert row["text"] == "Pair 1.2" and row["image_width"] == [4, 6]
    assert [one["path"] for one in row["image"]] == ["s-1.tar/2.left.png", "s-1.tar/2.right.png"]
    assert [source.package for source in (info.source, *info.more_sources)] == [
        "s-0.tar",
        "s-1.tar",
    ]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "s-1.tar").write_bytes((tmp_path / "s-1.tar").read_bytes())
    refused(
        "two samples are called s-1.tar/0",
        tmp_path,
        tmp_path / "s-1.tar",
        tmp_path / "other/s-1.tar",
    )


def test_a_member_is_missing(tmp_path: Path, samples: Files, tar: Callable[..., bytes]) -> None:
    path = tmp_path / "a.tar"
    tar(path, {n: c for n, c in samples.items() if n != "part0/002.jpg"})
    what = (
        r"sample part0/002 of .*a.tar has neither a picture nor a sound; it has a.tar/part0/002.txt"
    )
    refused(rf"{what}\. .*on_error=skip", tmp_path, path)
    info = build(tmp_path, path, on_error="skip")
    assert info.num_skipped == 1 and len(rows(tmp_path)) == 5
    tar(path, {n: c for n, c in samples.items() if n != "part1/003.txt"})
    refused("sample part1/003 of .*a.tar has no caption .*; it has .*003.flac", tmp_path, path)
    tar(path, {n: c for n, c in samples.items() if n != "part1/003.flac"})
    assert build(tmp_path, path).rows_with["audio"] == 2
    refused("sample part0/000 of .* has no audio", tmp_path, path, require="image, audio")
    assert build(tmp_path, path, require="image,audio", on_error="skip").num_skipped == 4
    refused("require names 'smell'", tmp_path, path, require="smell")


def test_archives_cut_short(tmp_path: Path, samples: Files, tar: Callable[..., bytes]) -> None:
    path = tmp_path / "a.tar"
    content = tar(path, samples)
    path.write_bytes(content[: content.index(b"Caption 4") + 3])
    refused("a.tar is cut short or damaged", tmp_path, path, on_error="skip")
    path.write_bytes(b"")
    refused("a.tar is not a tar archive", tmp_path, path)
    path = tmp_path / "a.tar.gz"
    content = tar(path, samples, "w:gz")
    path.write_bytes(content[: len(content) // 2])
    refused("a.tar.gz is cut short or damaged", tmp_path, path)


def test_captions_missing(tmp_path: Path, samples: Files) -> None:
    samples["part0/002.txt"] = b" \n"
    folder = lay_out(tmp_path / "photos", samples)
    refused("sample part0/002 of .*photos has no caption", tmp_path, folder)
    (folder / "part0/002.txt").write_bytes(b"\xff\xff")
    refused("sample part0/002 of .*: cannot read part0/002.txt", tmp_path, folder)
    (folder / "part0/002.txt").unlink()
    assert build(tmp_path, folder, on_error="skip").num_skipped == 1
    (folder / "part0/002.json").write_text('{"text": "said otherwise"}')
    build(tmp_path, folder)
    assert rows(tmp_path)["part0/002"]["text"] == "said otherwise"
    (folder / "part0/002.json").write_text('{"text": ')
    refused("cannot read part0/002.json", tmp_path, folder)


def test_media_that_cannot_be_read(tmp_path: Path, samples: Files, sound: Any) -> None:
    bad = {
        "part0/000.jpg": (b"", "part0/000.jpg: the picture is empty: 0 bytes"),
        "part0/002.jpg": (b"GIF of sorts", "part0/002.jpg: the picture is of no format"),
        "part1/001.flac": (b"", "part1/001.flac: the sound is empty: 0 bytes"),
        "part1/003.flac": (samples["part1/003.flac"][:20], "part1/003.flac: the sound is damaged"),
        "part1/005.flac": (sound(0, 8000, "WAV"), "part1/005.flac: the sound has no samples"),
    }
    for name, (content, message) in bad.items():
        folder = lay_out(tmp_path / name.replace("/", "-"), {**samples, name: content})
        refused(message, tmp_path, folder)
    folder = lay_out(tmp_path / "all", {**samples, **{n: c for n, (c, _) in bad.items()}})
    refused("no row is left for the .* split: 5 of 6", tmp_path, folder, on_error="skip")
    good = {".jpg": samples["part0/004.jpg"], ".txt": b"Fine."}
    more = {f"more/{n}{suffix}": c for n in range(8) for suffix, c in good.items()}
    info = build(tmp_path, lay_out(tmp_path / "all", more), on_error="skip", eval_fraction=0.5)
    assert info.num_skipped == 5
    assert set(rows(tmp_path)) == {"part0/004", *(f"more/{n}" for n in range(8))}


def test_pictures_of_every_kind_are_kept_as_they_are(tmp_path: Path) -> None:
    """A huge one is measured, not decoded: how much is decoded is decided when training."""
    folder = tmp_path / "odd"
    folder.mkdir()
    frames = [Image.new("P", (30, 20), n) for n in range(3)]
    frames[0].save(folder / "moves.gif", save_all=True, append_images=frames[1:])
    Image.new("CMYK", (12, 8)).save(folder / "print.jpg")
    Image.new("I;16", (9, 9)).save(folder / "deep.png")
    Image.new("1", (12000, 9000)).save(folder / "huge.png")
    for name in ("moves", "print", "deep", "huge"):
        (folder / f"{name}.txt").write_text(name)
    build(tmp_path, folder)
    found = {n: (r["image_width"], r["image_height"]) for n, r in rows(tmp_path).items()}
    assert found == {
        "moves": (30, 20),
        "print": (12, 8),
        "deep": (9, 9),
        "huge": (12000, 9000),
    }


def write_list(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_list(tmp_path: Path, samples: Files) -> None:
    folder = lay_out(tmp_path / "set", samples)
    path = write_list(
        folder / "all.jsonl",
        {"id": "a", "image": "part0/000.jpg", "audio": "part1/001.flac", "text": "One"},
        "",
        {"id": "b", "image": ["part0/002.jpg", "part0/004.jpg"], "text": "Two"},
        {"text": "None", "image": None},
        {"id": "d", "image": "part0/000.jpg", "text": "Again"},
    )
    info = build(tmp_path, path)
    assert info.rows_with == {"image": 3, "audio": 1, "text": 4}
    found = rows(tmp_path)
    assert set(found) == {"a", "b", "d", "00000004"}
    assert found["b"]["image_width"] == [12, 14] and found["00000004"]["image"] == []
    assert found["a"]["audio"]["path"] == "part1/001.flac"
    sides = [
        set(pq.read_table(str(f))["id"].to_pylist()) for f in (tmp_path / "out/data").iterdir()
    ]
    assert any({"a", "d"} <= side for side in sides), "two texts of a picture stay together"


def test_keys_named_otherwise(tmp_path: Path, samples: Files) -> None:
    folder = lay_out(tmp_path / "set", samples)
    lines = [{"img": f"part0/{n:03}.jpg", "texts": f"No {n}"} for n in (0, 2, 4)]
    path = write_list(folder / "all.jsonl", *lines)
    refused(
        "line 1 of .*all.jsonl has no 'text'; its keys are img, texts.*text=texts", tmp_path, path
    )
    refused("names a picture or a sound.*are img, texts. .*image=KEY", tmp_path, path, text="texts")
    build(tmp_path, path, text="texts", image="img")
    assert {row["text"] for row in rows(tmp_path).values()} == {"No 0", "No 2", "No 4"}


def test_folder_with_the_list_that_hugging_face_expects(tmp_path: Path, samples: Files) -> None:
    folder = lay_out(tmp_path / "set", samples)
    names = ["part0/000.jpg", "part1/001.flac", "part0/002.jpg"]
    write_list(folder / "metadata.jsonl", *({"file_name": n, "text": n} for n in names))
    assert build(tmp_path, folder).rows_with == {"image": 2, "audio": 1, "text": 3}
    write_list(folder / "metadata.jsonl", {"file_name": "x.pdf", "text": "x"})
    refused("names x.pdf, neither a picture nor a sound", tmp_path, folder)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 of .* is not JSON"),
        ("[1]", "line 2 of .* is not an object"),
        ({"image": "gone.jpg", "text": "x"}, "line 2 of .* names gone.jpg, but there is no file"),
        ({"image": "part0/002.jpg", "text": None}, "line 2 of .* has no caption under 'text'"),
        ({"image": 3, "text": "x"}, "line 2 of .* has 3 under 'image'"),
        ({"image": "part0/002.jpg", "text": "x"}, "line 2 of .* has no audio"),
    ],
)
def test_bad_lines(tmp_path: Path, samples: Files, line: Any, message: str) -> None:
    folder = lay_out(tmp_path / "set", samples)
    good = {"image": "part0/000.jpg", "audio": "part1/001.flac", "text": "One"}
    other = {"image": "part0/004.jpg", "audio": "part1/005.flac", "text": "Three"}
    path = write_list(folder / "all.jsonl", good, line, other)
    require = "audio" if "no audio" in message else ""
    refused(message, tmp_path, path, require=require)
    info = build(tmp_path, path, require=require, on_error="skip")
    assert info.num_skipped == 1 and len(rows(tmp_path)) == 2


def test_inputs(tmp_path: Path, samples: Files) -> None:
    refused("no files are given.*make-dataset from FILES", tmp_path)
    refused("there is no file or folder .*gone", tmp_path, tmp_path / "gone")
    refused("s3://b/x is not a local file", tmp_path, "s3://b/x")
    (tmp_path / "a.zip").write_bytes(b"x")
    refused("a.zip is neither a folder nor an archive nor a list", tmp_path, tmp_path / "a.zip")
    (tmp_path / "empty").mkdir()
    refused("there are no samples in .*empty", tmp_path, tmp_path / "empty")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    refused("cannot read .*a.jsonl.*UTF-8", tmp_path, tmp_path / "a.jsonl")
    folder = lay_out(tmp_path / "photos", samples)
    assert not build(tmp_path, folder).reused
    assert build(tmp_path, folder, overwrite=False).reused
    (folder / "part0" / "000.txt").write_text("Changed")
    refused("differs from the one asked for in source", tmp_path, folder, overwrite=False)


def test_text_and_names_that_are_not_unicode(tmp_path: Path, samples: Files) -> None:
    half = b'{"text": "half of \\ud83d"}'
    texts = lay_out(tmp_path / "texts", {**samples, "z.png": samples["part0/000.jpg"]})
    (texts / "z.json").write_bytes(half)
    refused(r"sample z has a text .* not Unicode: 'half of \\ud83d'", tmp_path, texts)
    assert build(tmp_path, texts, on_error="skip").num_skipped == 1
    listed = [{"image": name, "text": "x", "id": name} for name in samples if name.endswith("g")]
    lines = [*map(json.dumps, listed), '{"image": "part0/000.jpg", "text": "x", "id": "\\udc00"}']
    (texts / "list.jsonl").write_text("\n".join(lines))
    refused(r"sample .*dc00 has a text or the name", tmp_path, texts / "list.jsonl")
    names = lay_out(tmp_path / "names", samples)
    for suffix, content in ((b".png", samples["part0/000.jpg"]), (b".txt", b"x")):
        Path(os.fsdecode(os.fsencode(names) + b"/z\xff" + suffix)).write_bytes(content)
    refused("the name of a file that is not Unicode", tmp_path, names)
    assert build(tmp_path, names, on_error="skip").num_skipped == 1


def test_nested_beyond_measure(tmp_path: Path, samples: Files) -> None:
    deep = b"[" * 100_000
    folder = lay_out(tmp_path / "deep", {**samples, "z.png": samples["part0/000.jpg"]})
    (folder / "z.json").write_bytes(deep)
    refused("sample z of .* cannot read z.json", tmp_path, folder)
    (folder / "list.jsonl").write_bytes(deep)
    refused("line 1 of .* is not JSON", tmp_path, folder / "list.jsonl")


def test_ids_that_are_null_and_names_that_are_too_long(tmp_path: Path, samples: Files) -> None:
    folder = lay_out(tmp_path / "photos", samples)
    facts = [{"image": f"part0/{n:03}.jpg", "text": "x", "id": None} for n in (0, 2, 4)]
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, facts)))
    build(tmp_path, folder / "list.jsonl")
    assert sorted(rows(tmp_path)) == ["00000001", "00000002", "00000003"]
    facts.append({"image": "data:" + "a" * 5000, "text": "x"})
    (folder / "list.jsonl").write_text("\n".join(map(json.dumps, facts)))
    refused("^line 4 of .* names data:a{55}: File name too long", tmp_path, folder / "list.jsonl")
    assert build(tmp_path, folder / "list.jsonl", on_error="skip").num_skipped == 1


@pytest.mark.parametrize("compress", [bytes, gzip.compress, lzma.compress])
def test_a_damaged_archive_loses_nothing_silently(
    tmp_path: Path, samples: Files, tar: Callable[..., bytes], compress: Callable[..., bytes]
) -> None:
    path = tmp_path / "a.tar"
    whole = tar(None, samples, "w")
    at = whole.index(b"part1/001.jpg")  # the head of a member, where another sample ends
    damaged = whole[:at] + b"?" * 512 + whole[at + 512 :]
    path.write_bytes(compress(whole))
    assert sum(build(tmp_path, path).rows_with.values()) == 15
    path.write_bytes(compress(damaged))
    refused(f"a.tar is cut short or damaged: no member begins at byte {at}", tmp_path, path)


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_damaged_compressed_archive_is_named(
    tmp_path: Path, samples: Files, tar: Callable[..., bytes], compress: Callable[..., bytes]
) -> None:
    path = tmp_path / "a.tar"
    data = bytearray(compress(tar(None, samples, "w")))
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    refused("a.tar.* (is cut short or damaged|is not a tar archive)", tmp_path, path)
