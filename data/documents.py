"""Rows as token lists: tokenised a few rows ahead of need, kept in a bounded cache."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from elastic_trainer.data.packing import Tokens, pack_next
from elastic_trainer.data.samples import CHANGED, RowOrder, Sample, place
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.data.tokenizer import Tokenizer
from elastic_trainer.errors import DataError
from elastic_trainer.types import Cursor

CACHE_BYTES = 64 << 20
_AHEAD_CHARS = 1 << 17
_AHEAD_ROWS = 64


class Documents(Protocol):
    """Loads the tokens of rows, separators included."""

    def load(self, rows: Iterator[int]) -> dict[int, Tokens]:
        """Tokens of the first row and of as many more as are worth doing at once."""


class TextDocuments:
    """A column of text, tokenised in parallel, several rows at a time."""

    def __init__(self, source: ParquetSource, column: str, tokenizer: Tokenizer) -> None:
        kind = source.types[column]
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if not _is_text(kind):
            raise DataError(
                f"column {column} of {source.files[0]} holds {kind}, not text",
                "Set data.text_column to a column of strings, or data.format to tokens or columns",
            )
        self._source = source
        self._column = column
        self._tokenizer = tokenizer

    def load(self, rows: Iterator[int]) -> dict[int, Tokens]:
        texts: dict[int, str] = {}
        num_chars = 0
        for row in rows:
            text = self._text(row)
            num_chars += len(text)
            if texts and (num_chars > _AHEAD_CHARS or len(texts) == _AHEAD_ROWS):
                break
            texts[row] = text
        ids = self._tokenizer.encode_batch(list(texts.values()))
        return {row: self._end(t) for row, t in zip(texts, ids, strict=True)}

    def _text(self, row: int) -> str:
        try:
            value = self._source.value(row, self._column).as_py()
            return value.decode() if isinstance(value, bytes) else str(value)
        except UnicodeDecodeError as error:
            raise DataError(
                f"column {self._column} is not UTF-8 in {self._source.where(row)}: byte "
                f"{error.object[error.start]:#04x} at {error.start}",
                "Convert the text to UTF-8 and build the dataset again",
            ) from error

    def _end(self, tokens: Tokens) -> Tokens:
        return _with_end(tokens, self._tokenizer.eos_id)


class TokenDocuments:
    """A column of lists of token ids, checked against the vocabulary."""

    def __init__(
        self, source: ParquetSource, column: str, *, vocab_size: int | None, eos_id: int | None
    ) -> None:
        kind = source.types[column]
        if not (_is_list(kind) and pa.types.is_integer(kind.value_type)):
            raise DataError(
                f"column {column} of {source.files[0]} holds {kind}, not lists of token ids",
                "Set data.tokens_column to a column of integer lists, or data.format to text",
            )
        self._source = source
        self._column = column
        self._limit = 2**31 if vocab_size is None else vocab_size
        self._eos_id = eos_id

    def load(self, rows: Iterator[int]) -> dict[int, Tokens]:
        row = next(rows)
        values = self._source.value(row, self._column).values
        if values.null_count:
            raise DataError(
                f"column {self._column} has a null among the ids of {self._source.where(row)}",
                "Drop those rows or fill them in",
            )
        ids = values.to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero((ids < 0) | (ids >= self._limit))
        if len(wrong):
            raise DataError(
                f"token id {ids[wrong[0]]} at {wrong[0]} of {self._source.where(row)} is outside "
                f"the vocabulary of {self._limit}",
                "Use the tokenizer that made the ids, or set model.args.vocab_size to match it",
            )
        return {row: _with_end(ids.astype(np.int32), self._eos_id)}


class PackedSamples:
    """Samples of `sequence_length` tokens, packed from documents in the order of the epoch."""

    def __init__(
        self, documents: Documents, order: RowOrder, *, length: int, separator: int
    ) -> None:
        self._documents = documents
        self._order = order
        self._length = length
        self._separator = separator
        self._cached_bytes = 0
        self._cache: OrderedDict[int, Tokens] = OrderedDict()

    def next(self, cursor: Cursor) -> Sample:
        """The sequence at the cursor."""
        epoch = cursor.epoch
        self._order.check(cursor)
        if cursor.offset and cursor.offset >= len(self._tokens(epoch, cursor.row)):
            raise DataError(f"{place(cursor)} lies behind the end of that row", CHANGED)
        packed = pack_next(
            cursor,
            self._order.num_rows,
            lambda position: self._tokens(epoch, position),
            length=self._length,
            separator=self._separator,
        )
        if not packed.pieces:
            raise DataError(
                f"no row of the dataset from position {cursor.row} on holds a token",
                "Build it again, or set data.path to one with content",
            )
        pieces = ((self._order.row(epoch, p.position), p.start, p.stop) for p in packed.pieces)
        return Sample(
            fields={"input_ids": packed.input_ids, "labels": packed.labels},
            id="+".join(f"{row}:{start}-{stop}" for row, start, stop in pieces),
            num_tokens=self._length,
            num_valid=packed.num_valid,
            end=packed.end,
        )

    def _tokens(self, epoch: int, position: int) -> Tokens:
        row = self._order.row(epoch, position)
        if row in self._cache:
            self._cache.move_to_end(row)
            return self._cache[row]
        ahead = self._uncached(epoch, range(position + 1, self._order.num_rows))
        loaded = self._documents.load(chain([row], ahead))
        for key, tokens in loaded.items():
            self._cache[key] = tokens
            self._cached_bytes += tokens.nbytes
        while self._cached_bytes > CACHE_BYTES and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.nbytes
        return loaded[row]

    def _uncached(self, epoch: int, positions: Iterable[int]) -> Iterator[int]:
        """Rows to tokenise ahead, up to the first that is in the cache already."""
        for position in positions:
            row = self._order.row(epoch, position)
            if row in self._cache:
                return
            yield row


def _with_end(tokens: Tokens, eos_id: int | None) -> Tokens:
    """End a document with the separator, unless it has one already."""
    if eos_id is None or (len(tokens) and tokens[-1] == eos_id):
        return tokens
    return np.append(tokens, np.int32(eos_id))


def _is_text(kind: Any) -> bool:
    is_string = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return bool(is_string or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_list(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list or pa.types.is_fixed_size_list(kind))
