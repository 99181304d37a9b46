"""Parquet datasets with random access by row: which files make a split, and reading them."""

import copy
import difflib
import posixpath
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastic_trainer.data.location import Location, first_line
from elastic_trainer.data.order import WINDOW_BYTES
from elastic_trainer.errors import DataError

SPLITS = {"train": ("train",), "eval": ("eval", "validation", "valid", "dev", "test")}
_OPEN_THREADS = 8


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group: where it lies and how large its chosen columns are once decoded."""

    file: int
    index: int
    num_rows: int
    num_bytes: int


def split_files(location: Location, split: str) -> list[str]:
    """Files of one split, sorted by name.

    Files named like `train-…` or `eval-…` (also Hugging Face's validation and test) belong to that
    split; where no file is named after any split, all of them are training data. Empty when there
    is no such split.
    """
    files = location.list_parquet()
    by_split: dict[str, list[str]] = {"train": [], "eval": []}
    for file in files:
        for name, prefixes in SPLITS.items():
            if re.match(rf"({'|'.join(prefixes)})([-_.]|$)", posixpath.basename(file)):
                by_split[name].append(file)
    if files == [location.path] or not (by_split["train"] or by_split["eval"]):
        by_split["train"] = files
        by_split["eval"] = []
    if split == "train" and not by_split["train"]:
        raise DataError(
            f"{location.given} holds held-out files only, no training data",
            "Name the training files train-….parquet",
        )
    return by_split[split]


class ParquetSource:
    """The chosen columns of a list of Parquet files, as one table with random access by row.

    Only footers are read on opening. Row groups are decoded on first use and kept, least recently
    used out first, while they fit in two windows of the sample order.
    """

    def __init__(
        self,
        location: Location,
        files: Sequence[str],
        columns: Sequence[str],
        *,
        setting: str,
        optional: Sequence[str] = (),
        cache_bytes: int = 2 * WINDOW_BYTES,
    ) -> None:
        """Open the files.

        Args:
            location: the filesystem they lie on.
            files: paths, in order.
            columns: names of the columns to read.
            setting: configuration key that chose the columns, for messages.
            optional: columns that are read, too, where the first file has them.
            cache_bytes: decoded row groups to keep.
        """
        self.location = location
        self.files = tuple(files)
        self.nullable: frozenset[str] = frozenset()
        self._setting = setting
        self._cache_bytes = cache_bytes
        with ThreadPoolExecutor(_OPEN_THREADS) as pool:
            self._metadata = list(pool.map(self._read_footer, self.files))
        there = [column for column in optional if column in self.all_columns]
        self.columns = tuple(dict.fromkeys([*columns, *there]))
        self._read_schemas()
        self._starts = [0, *accumulate(group.num_rows for group in self.groups)]
        self.num_rows = self._starts[-1]
        if not self.num_rows:
            raise DataError(
                f"the dataset {location.given} is empty: {len(self.files)} file(s), no row",
                "Build it again, or set data.path to one with rows",
            )

    def part(self, columns: Sequence[str], nullable: Collection[str] = ()) -> "ParquetSource":
        """The same rows with some of the columns only, read and kept by themselves.

        Args:
            columns: their names.
            nullable: those of them whose cells may be null.
        """
        other = copy.copy(self)
        other.columns = tuple(columns)
        other.nullable = frozenset(nullable)
        other._read_schemas()
        return other

    @property
    def all_columns(self) -> list[str]:
        """Names of all columns of the first file, those that are not read too."""
        return list(self._metadata[0].schema.to_arrow_schema().names)

    def _read_schemas(self) -> None:
        """See that every file has the columns, and how large its row groups are."""
        self._cache: OrderedDict[int, pa.Table] = OrderedDict()
        self._plain: dict[tuple[int, str], list[Any]] = {}
        self.types: dict[str, Any] = {}
        self.groups: list[RowGroup] = []
        for number, metadata in enumerate(self._metadata):
            self._add_file(number, metadata)

    @property
    def fingerprint(self) -> str:
        """Changes when a file was added, removed or rewritten with other rows."""
        facts = [
            (posixpath.basename(self.files[group.file]), group.num_rows, group.num_bytes)
            for group in self.groups
        ]
        return sha256(repr((self.columns, facts)).encode()).hexdigest()[:16]

    def value(self, row: int, column: str) -> Any:
        """One cell as a pyarrow scalar, null only where its column is nullable."""
        group, inside = self._find(row)
        return self._group(group).column(column)[inside]

    def plain(self, row: int, column: str) -> Any:
        """The same as a Python object; for columns of small cells, all of which are kept so."""
        group, inside = self._find(row)
        table = self._group(group)
        if (cells := self._plain.get((group, column))) is None:
            cells = self._plain[group, column] = table.column(column).to_pylist()
        return cells[inside]

    def where(self, row: int) -> str:
        """A row as a message names it."""
        group, inside = self._find(row)
        first = sum(g.num_rows for g in self.groups[:group] if g.file == self.groups[group].file)
        return f"row {first + inside} of {self.files[self.groups[group].file]}"

    def _find(self, row: int) -> tuple[int, int]:
        group = bisect_right(self._starts, row) - 1
        return group, row - self._starts[group]

    def _read_footer(self, file: str) -> Any:
        def read() -> Any:
            with self.location.filesystem.open_input_file(file) as handle:
                return pq.ParquetFile(handle).metadata

        try:
            return self.location.call(read, "read", file)
        except DataError as error:
            if isinstance(error.__cause__, pa.ArrowInvalid):
                raise DataError(
                    f"{file} is cut short or not a Parquet file: {first_line(error.__cause__)}",
                    "Copy or build it again",
                ) from error
            raise

    def _add_file(self, number: int, metadata: Any) -> None:
        schema = metadata.schema.to_arrow_schema()
        for column in self.columns:
            if column not in schema.names:
                raise self._no_column(number, column, schema)
            kind = schema.field(column).type
            if self.types.setdefault(column, kind) != kind:
                raise DataError(
                    f"column {column} is {kind} in {self.files[number]}, "
                    f"but {self.types[column]} in {self.files[0]}",
                    "All files of a dataset need the same columns",
                )
        for index in range(metadata.num_row_groups):
            group = metadata.row_group(index)
            if not group.num_rows:
                continue
            chunks = [group.column(i) for i in range(group.num_columns)]
            mine = [c for c in chunks if c.path_in_schema.split(".")[0] in self.columns]
            num_bytes = sum(chunk.total_uncompressed_size for chunk in mine)
            self.groups.append(RowGroup(number, index, group.num_rows, num_bytes))

    def _no_column(self, number: int, column: str, schema: Any) -> DataError:
        listed = ", ".join(f"{field.name} ({field.type})" for field in schema) or "none at all"
        near = difflib.get_close_matches(column, schema.names, n=1, cutoff=0.5)
        texts = [f.name for f in schema if pa.types.is_string(f.type)]
        guess = near or (texts if self._setting == "data.text_column" else [])
        hint = f"Did you mean {guess[0]}? Set {self._setting}" if guess else f"Set {self._setting}"
        return DataError(
            f"{self.files[number]} has no column {column!r}; its columns are {listed}", hint
        )

    def _group(self, number: int) -> Any:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        table = self._cache[number] = self._load(number)
        kept = sum(self.groups[n].num_bytes for n in self._cache)
        while kept > self._cache_bytes and len(self._cache) > 1:
            dropped, _ = self._cache.popitem(last=False)
            kept -= self.groups[dropped].num_bytes
            for column in self.columns:
                self._plain.pop((dropped, column), None)
        return table

    def _load(self, number: int) -> Any:
        group = self.groups[number]
        file = self.files[group.file]

        def read() -> Any:
            with self.location.filesystem.open_input_file(file) as handle:
                opened = pq.ParquetFile(handle, metadata=self._metadata[group.file])
                table = opened.read_row_group(group.index, columns=list(self.columns))
                return table.combine_chunks()

        try:
            table = self.location.call(read, "decode", file)
        except DataError as error:
            raise DataError(
                f"{file} is damaged in row group {group.index}: {error.what}",
                "Copy or build it again",
            ) from error
        for column in self.columns:
            if table.column(column).null_count and column not in self.nullable:
                row = table.column(column).is_null().to_pylist().index(True)
                raise DataError(
                    f"column {column} is null in {self.where(self._starts[number] + row)} "
                    f"({table.column(column).null_count} null(s) in this row group)",
                    "Drop those rows or fill them in",
                )
        return table


def open_split(
    path: str,
    eval_path: str | None,
    split: str,
    columns: Sequence[str],
    *,
    setting: str,
    timeout_s: float,
    optional: Sequence[str] = (),
) -> ParquetSource | None:
    """The source of one split; None where the dataset has no such split."""
    location = Location(eval_path if split == "eval" and eval_path else path, timeout_s)
    files = split_files(location, split)
    if not files and split == "eval" and eval_path:
        files = location.list_parquet()
    if not files:
        return None
    return ParquetSource(location, files, columns, setting=setting, optional=optional)
