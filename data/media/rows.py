"""Rows of pictures, sound and text as Parquet files in Hugging Face's layout.

Media are stored as the bytes of their files. Beside them stand their sizes, so that planning needs
to read neither. Row groups are small enough to be read and dropped one by one.
"""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_trainer.data.media.audio import audio_size
from elastic_trainer.data.media.images import image_size
from elastic_trainer.data.media.raw import MediaFile, RawSample
from elastic_trainer.data.media.schema import SIZE_COLUMNS
from elastic_trainer.errors import DataError

ROW_GROUP_BYTES = 16 << 20
SHARD_BYTES = 256 << 20
MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
_FEATURE = {"image": "Image", "audio": "Audio"}
_MOST_BYTES = 1 << 30
# What libsndfile reports for a stream whose end it cannot find is far beyond.
_MOST_SAMPLES = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Columns of a dataset: which modalities are lists, and what there is besides."""

    several: Mapping[str, bool]
    extra: Mapping[str, str]

    def schema(self) -> Any:
        """The Arrow schema with the features that Hugging Face's datasets reads from it."""
        fields: list[Any] = [("id", pa.string()), ("text", pa.string())]
        features: dict[str, Any] = {
            "id": {"dtype": "string", "_type": "Value"},
            "text": {"dtype": "string", "_type": "Value"},
        }
        for name in SIZE_COLUMNS:
            fields.append((name, pa.list_(MEDIA) if self.several[name] else MEDIA))
            features[name] = self._feature(name, {"_type": _FEATURE[name]})
        for name, columns in SIZE_COLUMNS.items():
            for column in columns:
                fields.append((column, pa.list_(pa.int64()) if self.several[name] else pa.int64()))
                features[column] = self._feature(name, {"dtype": "int64", "_type": "Value"})
        for column, kind in {"text_chars": "int64", **self.extra}.items():
            fields.append((column, kind))
            features[column] = {"dtype": kind, "_type": "Value"}
        return pa.schema(
            fields, metadata={"huggingface": json.dumps({"info": {"features": features}})}
        )

    def _feature(self, modality: str, inner: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"_type": "List", "feature": inner} if self.several[modality] else inner


@dataclass(frozen=True, slots=True)
class Row:
    """A row ready to be written."""

    columns: Mapping[str, Any]
    num_bytes: int
    num_media: Mapping[str, int]
    audio_s: float


def read_row(sample: RawSample, layout: Layout) -> Row:
    """Read a sample's files and measure them."""
    columns: dict[str, Any] = {"id": sample.id, "text": sample.text, **sample.extra}
    columns["text_chars"] = len(sample.text)
    num_bytes, audio_s = len(sample.text), 0.0
    for name, files in (("image", sample.images), ("audio", sample.audio)):
        read = [_picture(file) if name == "image" else _sound(file) for file in files]
        sizes = [size for _, size in read]
        media = [{"bytes": c, "path": f.path} for (c, _), f in zip(read, files, strict=True)]
        several = layout.several[name]
        columns[name] = media if several else next(iter(media), None)
        for at, column in enumerate(SIZE_COLUMNS[name]):
            values = [size[at] for size in sizes]
            columns[column] = values if several else next(iter(values), 0)
        num_bytes += sum(len(content) for content, _ in read)
        audio_s += sum(size[0] / size[1] for size in sizes) if name == "audio" else 0.0
    num_media = {"image": len(sample.images), "audio": len(sample.audio)}
    return Row(columns, num_bytes, num_media, audio_s)


def measure(modality: str, content: bytes, path: str) -> tuple[int, int]:
    """Width and height of a picture, or samples per channel and rate of a sound, from its head."""
    try:
        if modality == "image":
            with warnings.catch_warnings():
                # Nothing is decoded here: how much will be is a setting of training.
                warnings.simplefilter("ignore")
                return image_size(content)
        samples, rate = audio_size(content)
    except DataError as error:
        raise DataError(f"{path}: {error.what}", "Repair or remove it") from error
    if not 0 < samples < _MOST_SAMPLES:
        what = "has no samples" if samples == 0 else "does not tell its length"
        raise DataError(f"{path}: the sound {what}", "Repair or remove it")
    return samples, rate


@lru_cache(maxsize=1)  # neighbours often share their picture
def _picture(file: MediaFile) -> tuple[bytes, tuple[int, int]]:
    content = _read(file)
    return content, measure("image", content, file.path)


def _sound(file: MediaFile) -> tuple[bytes, tuple[int, int]]:
    content = _read(file)
    return content, measure("audio", content, file.path)


def _read(file: MediaFile) -> bytes:
    try:
        content = file.read()
    except OSError as error:
        raise DataError(
            f"cannot read {file.path}: {error.strerror or error}", "Check the file"
        ) from error
    if len(content) > _MOST_BYTES:
        raise DataError(
            f"{file.path} has {len(content)} bytes; a row can hold {_MOST_BYTES}",
            "Cut or compress it",
        )
    return content


class SplitWriter:
    """Writes one split as `SPLIT-00000-of-0000N.parquet`, row group by row group."""

    def __init__(self, folder: Path, split: str, layout: Layout) -> None:
        self.num_rows = 0
        self._folder = folder
        self._split = split
        self._schema = layout.schema()
        self._options = _options(layout)
        self._rows: list[Row] = []
        self._pending = self._in_shard = 0
        self._shards: list[Path] = []
        self._writer: Any = None
        self._digest = sha256(split.encode())

    def add(self, row: Row) -> None:
        """Take a row; a full row group is written."""
        if self._rows and self._pending + row.num_bytes > ROW_GROUP_BYTES:
            self._flush()
        self._rows.append(row)
        self._pending += row.num_bytes
        self.num_rows += 1
        self._update_digest(row)

    def close(self) -> str:
        """Write what is left and name the shards; the digest of all rows."""
        self._flush()
        self._end_shard()
        total = len(self._shards)
        for number, path in enumerate(self._shards):
            os.replace(path, self._folder / f"{self._split}-{number:05}-of-{total:05}.parquet")
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Let go of the open file after a failure."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _flush(self) -> None:
        if not self._rows:
            return
        if self._writer is not None and self._in_shard + self._pending > SHARD_BYTES:
            self._end_shard()
        if self._writer is None:
            path = self._folder / f".{self._split}-{len(self._shards)}"
            self._shards.append(path)
            self._writer = pq.ParquetWriter(str(path), self._schema, **self._options)
        columns = {
            name: pa.array(
                [row.columns.get(name) for row in self._rows], self._schema.field(name).type
            )
            for name in self._schema.names
        }
        self._writer.write_table(pa.table(columns, schema=self._schema))
        self._in_shard += self._pending
        self._rows, self._pending = [], 0

    def _end_shard(self) -> None:
        self.abandon()
        self._in_shard = 0

    def _update_digest(self, row: Row) -> None:
        for name in self._schema.names:
            value = row.columns.get(name)
            for part in value if isinstance(value, list) else [value]:
                content = part["bytes"] if isinstance(part, dict) else str(part).encode()
                self._digest.update(len(content).to_bytes(8, "little") + content)


def _options(layout: Layout) -> dict[str, Any]:
    """Media are compressed already; their bytes need neither statistics nor a dictionary."""
    schema = layout.schema()
    plain = [name for name in schema.names if name not in SIZE_COLUMNS]
    lists = {column for name, of in SIZE_COLUMNS.items() if layout.several[name] for column in of}
    leaves = {name: f"{name}.list.element" if name in lists else name for name in plain}
    compression = {leaf: "zstd" for leaf in leaves.values()}
    for name in SIZE_COLUMNS:
        inner = f"{name}.list.element" if layout.several[name] else name
        compression |= {f"{inner}.bytes": "none", f"{inner}.path": "zstd"}
    return {
        "compression": compression,
        "use_dictionary": [*layout.extra],
        "write_statistics": [*leaves.values()],
    }


def layout_of(samples: Sequence[RawSample], extra: Mapping[str, str]) -> Layout:
    """Lists where any sample has several pictures or sounds, plain structs otherwise."""
    several = {
        "image": any(len(sample.images) > 1 for sample in samples),
        "audio": any(len(sample.audio) > 1 for sample in samples),
    }
    return Layout(several=several, extra=extra)
