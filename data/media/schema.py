"""Columns of a dataset of pictures, sound and text, and what they may hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from elastic_trainer.errors import DataError

# The columns of each modality's sizes, in the order in which measuring a file returns them.
SIZE_COLUMNS = {
    "image": ("image_width", "image_height"),
    "audio": ("audio_samples", "audio_rate"),
}
MODALITIES = tuple(SIZE_COLUMNS)
COLUMNS = (*MODALITIES, "text", "id", *(c for names in SIZE_COLUMNS.values() for c in names))
_SIZES = tuple(column for names in SIZE_COLUMNS.values() for column in names)


def check_names(given: Mapping[str, str], setting: str) -> None:
    """What is renamed are columns of ours."""
    for name in given:
        if name not in COLUMNS:
            raise DataError(
                f"{setting} names {name!r}, which format media does not read",
                f"It reads {', '.join(COLUMNS)}",
            )


def check_types(file: str, types: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Files are bytes, sizes are whole numbers.

    Args:
        file: where the columns are.
        types: Arrow types of the columns that are there, by name.
        names: ours to theirs.
    """
    for name in (*MODALITIES, *_SIZES):
        kind = types.get(names[name])
        is_file = name in MODALITIES
        if kind is not None and not (_holds_bytes(kind) if is_file else _holds_counts(kind)):
            what, hint = "whole numbers", "Sizes are integers, and lists of them"
            if is_file:
                what = "files"
                hint = "Format media reads struct<bytes, path>, binary, and lists of them"
            raise DataError(f"column {names[name]} of {file} holds {kind}, not {what}", hint)


def sizes_in(first: Any, second: Any) -> list[tuple[int, int]]:
    """The sizes in the cells of two columns of sizes; what is not there has none above 0."""
    pairs = zip(as_list(first), as_list(second), strict=False)
    return [(int(a), int(b)) for a, b in pairs if a and b and min(a, b) > 0]


def as_list(cell: Any) -> Sequence[Any]:
    """What a cell holds: several, one, or none."""
    return cell if isinstance(cell, list) else [] if cell is None else [cell]


def _holds_bytes(kind: Any) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return bool(kind.get_field_index("bytes") >= 0)
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_null(kind)
    )


def _holds_counts(kind: Any) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _holds_counts(kind.value_type)
    return bool(pa.types.is_integer(kind) or pa.types.is_null(kind))
