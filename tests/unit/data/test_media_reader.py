"""Format media: rows of pictures, sound and text become microbatches, a pure function of order."""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from elastic_trainer.config import Config, DataConfig, PipelineConfig, TrainConfig
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.media.collate import INPUT_FIELDS
from elastic_trainer.data.media.inspect import inspect_dataset
from elastic_trainer.data.media.reader import MediaSamples
from elastic_trainer.data.samples import Sample
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.data.tokenizer import Tokenizer
from elastic_trainer.errors import DataError, PackingError
from elastic_trainer.types import Cursor

FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SIZES = ("image_width", "image_height", "audio_samples", "audio_rate")
Row = dict[str, Any]


def png(width: int, height: int, color: int = 0) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("L", (width, height), color).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "a.png"}


def wav(num_samples: int, rate: int = 16000) -> dict[str, Any]:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(num_samples), rate, format="WAV")
    return {"bytes": file.getvalue(), "path": "a.wav"}


def row(number: int) -> Row:
    """Every fifth row has no picture, every third no sound."""
    width, height, samples = 20 + 10 * number, 50, 2000 * (1 + number)
    has_picture, has_sound = number % 5 != 0, number % 3 != 0
    return {
        "image": png(width, height) if has_picture else None,
        "audio": wav(samples) if has_sound else None,
        "text": f"row {number}",
        "id": f"name-{number}",
        "image_width": width if has_picture else 0,
        "image_height": height if has_picture else 0,
        "audio_samples": samples if has_sound else 0,
        "audio_rate": 16000 if has_sound else 0,
    }


def save(
    folder: Path, rows: Sequence[Row], tokenizer: Tokenizer, media: Any = FILE, name: str = "train"
) -> Path:
    kinds = {"image": media, "audio": media, "text": pa.string(), "id": pa.string()}
    schema = pa.schema([(n, kinds.get(n, pa.int64())) for n in rows[0]])
    (folder / "data").mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(table, folder / "data" / f"{name}-00000-of-00001.parquet", row_group_size=4)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    return folder


def settings(path: Path, batch: int = 4, microbatch: int = 2, **data: Any) -> Config:
    data.setdefault("max_patches", 64)
    return Config(
        data=DataConfig(path=str(path), format="media", **data),
        pipeline=PipelineConfig(microbatch_size=microbatch),
        train=TrainConfig(global_batch_size=batch),
    )


def batches(config: Config, **options: Any) -> list[Any]:
    batch = config.train.global_batch_size
    return list(BatchStream(config, "train", batch, num_epochs=1, **options))


def ids(found: Sequence[Any]) -> list[str]:
    return [i for info, _ in found for m in info.microbatches for i in m.sample_ids]


@pytest.fixture
def dataset(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    return save(tmp_path / "media", [row(number) for number in range(10)], tokenizer)


def test_every_row_comes_once_with_all_its_media(dataset: Path, tokenizer: Tokenizer) -> None:
    found = batches(settings(dataset))
    assert sorted(map(int, ids(found))) == list(range(10))
    for info, microbatches in found:
        for facts, fields in zip(info.microbatches, microbatches, strict=True):
            numbers = [int(i) for i in facts.sample_ids]
            assert len(fields["image_lengths"]) == sum(n % 5 != 0 for n in numbers)
            assert len(fields["clip_lengths"]) == sum(n % 3 != 0 for n in numbers)
            assert fields["patches"].dtype == np.uint8 and fields["frames"].dtype == np.float32
            assert len(fields["patches"]) == fields["image_lengths"].sum()
            assert len(fields["frames"]) == fields["clip_lengths"].sum()
            assert set(fields) == {*INPUT_FIELDS, "labels"}
            for place, number in enumerate(numbers):
                check_text(fields, place, tokenizer.encode(f"row {number}"), tokenizer)


def check_text(
    fields: Mapping[str, Any], place: int, tokens: list[int], tokenizer: Tokenizer
) -> None:
    mine = fields["segments"][0] == place
    given, labels = fields["input_ids"][0][mine], fields["labels"][0][mine]
    assert given[-len(tokens) - 1 :].tolist() == [tokenizer.eos_id, *tokens]
    assert labels[-len(tokens) - 1 :].tolist() == [*tokens, tokenizer.eos_id]
    assert (given[: -len(tokens) - 1] < 0).all() and (labels[: -len(tokens) - 1] == -100).all()
    assert fields["positions"][0][mine].tolist() == list(range(mine.sum()))


def test_places_are_as_many_as_what_the_encoders_make(dataset: Path) -> None:
    for _, microbatches in batches(settings(dataset)):
        for fields in microbatches:
            pictures, clips = fields["image_lengths"], fields["clip_lengths"]
            assert (fields["input_ids"] == -1).sum() == sum(-(-n // 4) for n in pictures)
            assert (fields["input_ids"] == -2).sum() == sum(-(-n // 4) for n in clips)


def test_resume_in_the_middle_gives_the_same_microbatches(dataset: Path) -> None:
    config = settings(dataset)
    whole = batches(config)
    rest = batches(config, cursor=whole[0][0].end, first_update=2)
    assert [info for info, _ in rest] == [info for info, _ in whole[1:]]
    for (_, mine), (_, theirs) in zip(rest, whole[1:], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert all((a[name] == b[name]).all() for name in b)


def test_sizes_are_known_before_anything_is_decoded(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[str] = set()
    value = ParquetSource.value

    def noting(self: ParquetSource, number: int, column: str) -> Any:
        asked.add(column)
        return value(self, number, column)

    monkeypatch.setattr(ParquetSource, "value", noting)
    stream = BatchStream(settings(dataset, 10, 1), "train", 10)
    assert stream._plan()
    assert not asked & {"image", "audio"}
    samples = {sample.id: sample for sample in stream._planned[0]}
    info, fields = next(stream)
    for made, told in zip(fields, info.microbatches, strict=True):
        sample = samples.pop(*told.sample_ids)
        assert sample.size is not None
        assert list(sample.size.image_patches) == made["image_lengths"].tolist()
        assert list(sample.size.audio_frames) == made["clip_lengths"].tolist()
        assert sample.size.num_tokens == sample.num_tokens == told.num_tokens
        assert sample.num_valid == told.num_valid == sample.size.text_tokens


def test_the_next_batch_is_begun_before_one_is_complete(
    dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    read = MediaSamples._row

    def noting(self: MediaSamples, sample: Sample, kinds: Sequence[str]) -> Any:
        begun.append(sample.id)
        return read(self, sample, kinds)

    monkeypatch.setattr(MediaSamples, "_row", noting)
    stream = BatchStream(settings(dataset), "train", 4, num_epochs=1)
    first, _ = next(stream)
    assert stream.cursor == first.end == Cursor(row=4)
    assert len(begun) == 10, "so few are all begun at once"
    (second, _), (third, _) = stream
    assert (second.end, third.end) == (Cursor(row=8), Cursor(epoch=1))
    assert len(begun) == len(set(begun)) == 10


def test_what_is_wrong_with_a_batch_is_raised_in_its_turn_and_from_then_on(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [row(number) for number in range(10)]
    rows[9]["text"] = ""
    config = settings(save(tmp_path / "media", rows, tokenizer), shuffle=False)
    stream = BatchStream(config, "train", 4)
    assert [next(stream)[0].num_samples for _ in range(2)] == [4, 4]
    for _ in range(2):
        with pytest.raises(DataError, match="row 9 of"):
            next(stream)
    assert stream.cursor == Cursor(row=8)


def test_a_batch_that_cannot_be_packed_lets_those_before_it_pass(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [{**row(number), "text": "a" * (500 if number == 9 else 1)} for number in range(10)]
    path = save(tmp_path / "media", rows, tokenizer)
    config = settings(path, shuffle=False, max_tokens_per_microbatch=400)
    stream = BatchStream(config, "train", 4)
    assert [next(stream)[0].num_samples for _ in range(2)] == [4, 4]
    for _ in range(2):
        with pytest.raises(PackingError, match="row 9"):
            next(stream)


def test_without_size_columns_heads_are_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{k: v for k, v in row(n).items() if k not in (*SIZES, "id")} for n in range(10)]
    plain = save(tmp_path / "plain", rows, tokenizer)
    sized = save(tmp_path / "sized", [row(n) for n in range(10)], tokenizer)
    mine = BatchStream(settings(plain), "train", 10)._take()
    theirs = BatchStream(settings(sized), "train", 10)._take()
    assert {s.id: s.size for s in mine} == {s.id: s.size for s in theirs}


def test_several_pictures_and_clips_per_sample(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [
        {"image": [png(20, 20)] * n, "audio": [wav(4000)] * (3 - n), "text": f"row {n}"}
        for n in range(4)
    ]
    path = save(tmp_path / "several", rows, tokenizer, media=pa.list_(FILE))
    ((info, (fields,)),) = batches(settings(path, microbatch=4, shuffle=False))
    assert info.num_samples == 4
    counts = [(fields["input_ids"][fields["segments"] == n] == -1).sum() for n in range(4)]
    assert counts[0] == 0 and counts == [n * counts[1] for n in range(4)]
    assert len(fields["clip_lengths"]) == 6


@pytest.mark.parametrize("media", [pa.binary(), pa.large_binary()])
def test_plain_bytes_are_files_too(tmp_path: Path, tokenizer: Tokenizer, media: Any) -> None:
    rows = [{"image": png(20, 20)["bytes"], "text": "a"} for _ in range(2)]
    path = save(tmp_path / "plain", rows, tokenizer, media=media)
    ((_, (fields,)),) = batches(settings(path, 2))
    assert len(fields["image_lengths"]) == 2


def test_columns_may_be_named_otherwise(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [{"text": "x", "img": row(n)["image"], "caption": f"row {n}"} for n in range(1, 3)]
    schema = pa.schema([("text", pa.string()), ("img", FILE), ("caption", pa.string())])
    folder = save(tmp_path / "named", [row(1)], tokenizer)
    table = pa.Table.from_pylist(rows, schema=schema)
    pq.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
    columns = {"image": "img", "text": "caption"}
    config = settings(folder, 2, columns=columns, shuffle=False)
    ((_, (fields,)),) = batches(config)
    assert len(fields["image_lengths"]) == 2
    check_text(fields, 1, tokenizer.encode("row 2"), tokenizer)
    for wrong, told in (
        ({"image": "picture"}, "no column 'picture', which data.columns.image names.*img"),
        ({"images": "img"}, "names 'images', which format media does not read"),
        ({}, "neither pictures nor sound.*text, img, caption"),
        ({"image": "caption"}, "holds string, not files"),
        ({"image": "img", "text": "words"}, "no column 'words'"),
    ):
        with pytest.raises(DataError, match=told):
            batches(settings(folder, 2, columns=wrong))


BAD: dict[str, tuple[Row, str]] = {
    "empty picture": ({"image": {"bytes": b"", "path": "a.png"}}, "0 bytes"),
    "no picture": ({"image": {"bytes": b"junk", "path": "a.png"}}, "Pillow knows"),
    "large picture": ({"image": png(300, 300)}, "300 x 300 pixels"),
    "no bytes": ({"image": {"bytes": None, "path": "a.png"}}, "a.png is named, but not held"),
    "silence": ({"audio": wav(0)}, "no samples"),
    "no text": ({"text": None}, "text is missing"),
    "blank text": ({"text": "  "}, "text is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_named_or_skipped(
    tmp_path: Path, tokenizer: Tokenizer, name: str
) -> None:
    change, told = BAD[name]
    rows = [row(number) for number in range(10)]
    rows[7].update(change)
    path = save(tmp_path / "bad", rows, tokenizer)
    limits: dict[str, Any] = {"max_image_pixels": 20_000}
    with pytest.raises(DataError, match=f"row 7 of .*parquet .name-7.: .*{told}"):
        batches(settings(path, **limits))
    skipping = batches(settings(path, on_error="skip", **limits))
    assert sorted(map(int, ids(skipping))) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    ((number, why),) = [entry for info, _ in skipping for entry in info.skipped]
    assert number == "7" and told.split()[-1] in why
    # One damaged file moves no other sample.
    whole = batches(settings(save(tmp_path / "good", [row(n) for n in range(10)], tokenizer)))
    for (mine, _), (theirs, _) in zip(skipping, whole, strict=True):
        for a, b in zip(mine.microbatches, theirs.microbatches, strict=True):
            assert a.sample_ids == tuple(i for i in b.sample_ids if i != "7")
        assert mine.end == theirs.end


def test_a_sample_too_long_for_any_microbatch_is_named_or_skipped(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = [row(number) for number in range(10)]
    rows[7]["text"] = "long " * 2000
    path = save(tmp_path / "long", rows, tokenizer)
    limit = {"max_tokens_per_microbatch": 900}
    with pytest.raises(PackingError, match="row 7 of .*name-7. has .* more than the 900"):
        batches(settings(path, **limit))
    found = batches(settings(path, on_error="skip", **limit))
    assert sorted(map(int, ids(found))) == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    ((number, why),) = [entry for info, _ in found for entry in info.skipped]
    assert number == "7" and re.search(r"name-7. has \d{4,} tokens, more than the 900", why)
    assert all(m.num_tokens <= 900 for info, _ in found for m in info.microbatches)


@pytest.mark.parametrize("fields", [None, {"patches", "frames"}])
@pytest.mark.parametrize(
    "change, told",
    [
        ({"image_width": 400}, r"pictures have \[24\] patches, but .* \[\d+\]"),
        ({"image": None}, r"pictures have \[\] patches, but .* \[24\]"),
        ({"audio_samples": 90_000}, r"clips have \[\d+\] frames, but .* \[\d+\]"),
    ],
)
def test_recorded_sizes_must_be_right(
    tmp_path: Path, tokenizer: Tokenizer, change: Row, told: str, fields: set[str] | None
) -> None:
    rows = [row(number) for number in range(10)]
    rows[7].update(change)
    path = save(tmp_path / "wrong", rows, tokenizer)
    with pytest.raises(DataError, match=f"row 7 of .*{told}"):
        batches(settings(path), fields=fields)
    assert "7" not in ids(batches(settings(path, on_error="skip"), fields=fields))


def test_sizes_are_whole_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    table = pa.table({"image": [png(8, 8)["bytes"]], "image_width": ["8"], "text": ["a"]})
    folder = save(tmp_path / "texts", [row(1)], tokenizer)
    pq.write_table(table, folder / "data" / "train-00000-of-00001.parquet")
    with pytest.raises(DataError, match="column image_width of .* holds string, not whole numbers"):
        batches(settings(folder))
    with pytest.raises(DataError, match="column image_width of .* holds string, not whole numbers"):
        inspect_dataset(str(folder), DataConfig())


def test_sizes_below_zero_count_as_none(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [row(number) for number in range(4)]
    rows[1].update(image=None, image_width=-20, audio=None, audio_rate=-16000)
    folder = save(tmp_path / "below", rows, tokenizer)
    assert len(ids(batches(settings(folder)))) == 4
    found = inspect_dataset(str(folder), DataConfig())
    assert found.rows_with == {"image": 2, "audio": 1, "text": 4}
    assert all(size > 0 for sizes in found.sizes.values() for size in sizes)


def test_microbatch_of_nothing_but_damage(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [row(number) for number in range(4)]
    for number in (0, 1):
        rows[number]["text"] = ""
    path = save(tmp_path / "bad", rows, tokenizer)
    config = settings(path, on_error="skip", shuffle=False, packing="order")
    ((info, (first, _)),) = batches(config)
    assert info.microbatches[0].num_samples == info.microbatches[0].num_valid == 0
    assert first["input_ids"].shape == (1, 1) and first["segments"].tolist() == [[-1]]
    assert first["patches"].shape == (0, 768) and first["frames"].shape == (0, 40)
    for damaged in rows:
        damaged["text"] = ""
    with pytest.raises(DataError, match="none of the 4 samples"):
        batches(settings(save(tmp_path / "worse", rows, tokenizer), on_error="skip"))


def test_facts_and_bad_settings(dataset: Path, tokenizer: Tokenizer) -> None:
    facts = describe(settings(dataset))
    assert facts.vocab_size == tokenizer.vocab_size
    assert facts.num_rows == 10 and facts.num_eval_rows is None
    assert facts.label_fields == ("labels",) and "patches" in facts.input_fields
    (dataset / "tokenizer.json").unlink()
    with pytest.raises(DataError, match="no tokenizer.json beside"):
        describe(settings(dataset))
