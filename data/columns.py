"""Rows whose columns are numbers or (nested) lists of numbers, as arrays, one sample a row."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from elastic_trainer.data.packing import IGNORED_LABEL
from elastic_trainer.data.samples import RowOrder, Sample
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.errors import DataError
from elastic_trainer.types import Cursor


class ColumnSamples:
    """Integers and booleans become int64 and bool, other numbers float32; lists keep their shape.

    The loss counts the entries other than -100 of the label column called `labels`, else of the
    first one, where that holds integers; else the samples.
    """

    def __init__(
        self, source: ParquetSource, order: RowOrder, inputs: Sequence[str], labels: Sequence[str]
    ) -> None:
        self._source = source
        self._order = order
        self._columns = tuple(dict.fromkeys([*inputs, *labels]))
        self._label = "labels" if "labels" in labels else next(iter(labels), None)
        for column in self._columns:
            if not _is_numeric(source.types[column]):
                raise DataError(
                    f"column {column} of {source.files[0]} holds {source.types[column]}; format "
                    "columns reads numbers and lists of numbers",
                    "Choose other data.input_columns and data.label_columns, or convert it",
                )

    def next(self, cursor: Cursor) -> Sample:
        """The row at the cursor."""
        self._order.check(cursor)
        row = self._order.row(cursor.epoch, cursor.row)
        fields = {column: self._array(row, column) for column in self._columns}
        num_tokens = num_valid = 1
        if self._label is not None and fields[self._label].dtype == np.int64:
            label = fields[self._label]
            num_tokens, num_valid = label.size, int(np.count_nonzero(label != IGNORED_LABEL))
        following = cursor.row + 1
        end = Cursor(epoch=cursor.epoch, row=following)
        if following == self._order.num_rows:
            end = Cursor(epoch=cursor.epoch + 1)
        return Sample(fields, str(row), num_tokens, num_valid, end)

    def _array(self, row: int, column: str) -> NDArray[Any]:
        value = self._source.value(row, column)
        if not _is_nested(value.type):
            return _as_trainable(np.asarray(value.as_py()))
        values, shape = value.values, [len(value.values)]
        while _is_nested(values.type):
            lengths = pc.unique(pc.list_value_length(values)).to_pylist()
            if len(lengths) > 1 or None in lengths:
                raise DataError(
                    f"column {column} holds lists of unequal lengths {sorted(map(str, lengths))} "
                    f"in {self._source.where(row)}",
                    "Pad them to one length",
                )
            shape.append(lengths[0] if lengths else 0)
            values = values.flatten()
        if values.null_count:
            raise DataError(
                f"column {column} has a null inside {self._source.where(row)}",
                "Drop those rows or fill them in",
            )
        return _as_trainable(values.to_numpy(zero_copy_only=False).reshape(shape))


def _as_trainable(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype == np.bool_:
        return array
    return array.astype(np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32)


def _is_nested(kind: Any) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return bool(is_list or pa.types.is_fixed_size_list(kind))


def _is_numeric(kind: Any) -> bool:
    while _is_nested(kind):
        kind = kind.value_type
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
