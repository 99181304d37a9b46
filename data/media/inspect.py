"""What is in a dataset: rows, modalities, sizes, and how evenly it would fill microbatches.

Sizes come from the size columns. Only where there are none are the heads of the files read.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow.parquet as pq

from elastic_trainer.config import DataConfig
from elastic_trainer.data.location import Location
from elastic_trainer.data.media.audio import num_frames
from elastic_trainer.data.media.collate import opened_text_tokens
from elastic_trainer.data.media.images import patch_rows_columns
from elastic_trainer.data.media.reader import limits_of
from elastic_trainer.data.media.rows import measure
from elastic_trainer.data.media.schema import (
    COLUMNS,
    MODALITIES,
    SIZE_COLUMNS,
    as_list,
    check_names,
    check_types,
    sizes_in,
)
from elastic_trainer.data.sources import SPLITS, split_files
from elastic_trainer.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from elastic_trainer.errors import DataError
from elastic_trainer.planner.sizes import ItemSize

_CHARS_PER_TOKEN = 4

Pair = tuple[int, int]
"""Width and height of a picture, or samples and rate of a sound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """What was found.

    `sizes` maps a title to a number per picture, clip or text; `items` are the sizes of each
    training row; `vocab_size` is that of the tokenizer beside the dataset, if there is one;
    `num_damaged` counts files whose heads could not be read.
    """

    path: str
    num_rows: Mapping[str, int]
    rows_with: Mapping[str, int]
    sizes: Mapping[str, Sequence[float]]
    items: Sequence[ItemSize]
    vocab_size: int | None
    num_damaged: int


@dataclass(slots=True)
class _Rows:
    """Columns of all rows of a split."""

    image: list[list[Pair]]
    audio: list[list[Pair]]
    text: list[str]
    num_damaged: int = 0


def inspect_dataset(path: str, data: DataConfig) -> Inspection:
    """Read the sizes of every row.

    Args:
        path: a dataset's folder, a Parquet file, or the URI of one.
        data: names of columns, limits of sizes, the tokenizer.
    """
    location = Location(path)
    check_names(data.columns, "the list of columns")
    files = {split: split_files(location, split) for split in SPLITS}
    by_split = {split: _read(location, names, data) for split, names in files.items()}
    if not by_split["train"].text:
        raise DataError(f"the dataset {path} is empty", "Build it again")
    train, everything = by_split["train"], list(by_split.values())
    images = [pair for rows in everything for pairs in rows.image for pair in pairs]
    clips = [pair for rows in everything for pairs in rows.audio for pair in pairs]
    texts = [text for rows in everything for text in rows.text]
    tokenizer = _tokenizer(location, data)
    items = _items(train, _count_tokens(train.text, tokenizer), data)
    sizes = {
        "pixels of a picture": [float(w * h) for w, h in images],
        "seconds of a sound": [samples / rate for samples, rate in clips],
        "characters of a text": [float(len(text)) for text in texts if text],
        "tokens of a row": [float(item.num_tokens) for item in items],
    }
    return Inspection(
        path=path,
        num_rows={split: len(rows.text) for split, rows in by_split.items()},
        rows_with={
            "image": sum(bool(pairs) for rows in everything for pairs in rows.image),
            "audio": sum(bool(pairs) for rows in everything for pairs in rows.audio),
            "text": sum(bool(text) for text in texts),
        },
        sizes={title: values for title, values in sizes.items() if values},
        items=items,
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        num_damaged=sum(rows.num_damaged for rows in everything),
    )


def _read(location: Location, files: Sequence[str], data: DataConfig) -> _Rows:
    rows = _Rows([], [], [])
    names = {column: data.columns.get(column, column) for column in COLUMNS}
    for file in files:
        _read_file(location, file, names, rows)
    return rows


def _read_file(location: Location, file: str, names: Mapping[str, str], rows: _Rows) -> None:
    def call(function: Callable[[], Any]) -> Any:
        return location.call(function, "read", file)

    with call(lambda: location.filesystem.open_input_file(file)) as handle:
        opened = call(lambda: pq.ParquetFile(handle))
        there = set(opened.schema_arrow.names)
        _check_there(file, names, there)
        check_types(file, {field.name: field.type for field in opened.schema_arrow}, names)
        wanted = [names["text"]] if names["text"] in there else []
        heads = []
        for modality, columns in SIZE_COLUMNS.items():
            sized = [names[column] for column in columns]
            if there.issuperset(sized):
                wanted += sized
            elif names[modality] in there:
                heads.append(modality)
                wanted.append(names[modality])
        for index in range(opened.num_row_groups):
            table = call(partial(opened.read_row_group, index, columns=wanted))
            _take(table, names, heads, rows)


def _check_there(file: str, names: Mapping[str, str], there: set[str]) -> None:
    for ours, theirs in names.items():
        if ours != theirs and theirs not in there:
            raise DataError(
                f"{file} has no column {theirs!r} for {ours}",
                f"Its columns are {', '.join(sorted(there))}",
            )
    wanted = [names[name] for name in (*MODALITIES, "text")]
    if there.isdisjoint(wanted):
        raise DataError(
            f"{file} has no column {', '.join(wanted)}; its columns are {', '.join(sorted(there))}",
            "Say what they are called, such as image=COLUMN",
        )


def _take(table: Any, names: Mapping[str, str], heads: Sequence[str], rows: _Rows) -> None:
    """Append the rows of a table to what was read before."""

    def cells(name: str) -> list[Any]:
        return list(table.column(names[name]).to_pylist())

    there = set(table.column_names)
    empty: list[list[Pair]] = [[] for _ in range(table.num_rows)]
    for modality, kept in (("image", rows.image), ("audio", rows.audio)):
        first, second = SIZE_COLUMNS[modality]
        if modality in heads:
            for cell in cells(modality):
                pairs = list(_measured(modality, cell))
                rows.num_damaged += sum(pair is None for pair in pairs)
                kept.append([pair for pair in pairs if pair is not None])
        elif names[first] in there and names[second] in there:
            kept.extend(map(sizes_in, cells(first), cells(second)))
        else:
            kept.extend(empty)
    texts = cells("text") if names["text"] in there else [None] * table.num_rows
    rows.text.extend(text if isinstance(text, str) else "" for text in texts)


def _measured(modality: str, cell: Any) -> Iterator[Pair | None]:
    """Sizes from the heads of the files in a cell, None for one that cannot be read."""
    for item in as_list(cell):
        content = item.get("bytes") if isinstance(item, dict) else item
        if content is None:
            continue
        try:
            yield measure(modality, content, "a file")
        except DataError:
            yield None


def _tokenizer(location: Location, data: DataConfig) -> Tokenizer | None:
    path = find_tokenizer(location, data.tokenizer)
    return None if path is None else load_tokenizer(path)


def _count_tokens(texts: Sequence[str], tokenizer: Tokenizer | None) -> list[int]:
    """Tokens of each text, estimated by its length where there is no tokenizer."""
    if tokenizer is None:
        return [-(-len(text) // _CHARS_PER_TOKEN) for text in texts]
    return [len(ids) for ids in tokenizer.encode_batch(texts)]


def _items(rows: _Rows, tokens: Sequence[int], data: DataConfig) -> list[ItemSize]:
    pictures, sound = limits_of(data)
    items = []
    for images, clips, count in zip(rows.image, rows.audio, tokens, strict=True):
        cells = [patch_rows_columns(width, height, pictures) for width, height in images]
        frames = [num_frames(samples, rate, sound) for samples, rate in clips]
        items.append(
            ItemSize(tuple(r * c for r, c in cells), tuple(frames), opened_text_tokens(count))
        )
    return items
