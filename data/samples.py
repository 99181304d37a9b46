"""What every reader of samples offers: the sample at a cursor, and the cursor behind it."""

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from elastic_trainer.data.order import EVAL_KEY, EpochOrder, epoch_key
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.errors import DataError
from elastic_trainer.types import Cursor

Fields = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its arrays by field name, its id for the audit, and the cursor behind it.

    `num_tokens` counts positions (padding too), `num_valid` those that the loss counts. Fields have
    no batch dimension.
    """

    fields: Fields
    id: str
    num_tokens: int
    num_valid: int
    end: Cursor


class SampleReader(Protocol):
    """Reads samples of one split; a pure function of the cursor, caches aside."""

    def next(self, cursor: Cursor) -> Sample:
        """The sample at this cursor."""


class RowOrder:
    """Which row of a source stands at each position of each epoch."""

    def __init__(self, source: ParquetSource, split: str, *, seed: int, shuffle: bool) -> None:
        self._source = source
        self._training = split == "train"
        self._seed = seed
        self._shuffle = shuffle or not self._training
        self._epoch = -1
        self._order: EpochOrder | None = None

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    def row(self, epoch: int, position: int) -> int:
        """Row of the dataset at this position of this epoch."""
        if self._order is None or (epoch != self._epoch and self._training and self._shuffle):
            self._order = EpochOrder(
                [group.num_rows for group in self._source.groups],
                [group.num_bytes for group in self._source.groups],
                key=self._key(epoch),
            )
            self._epoch = epoch
        return self._order.row(position)

    def check(self, cursor: Cursor) -> None:
        """Refuse a cursor behind the end, which only another dataset can have produced."""
        if min(cursor.epoch, cursor.row, cursor.offset) < 0 or cursor.row >= self.num_rows:
            raise DataError(
                f"position (epoch {cursor.epoch}, row {cursor.row}, offset {cursor.offset}) does "
                f"not lie in this dataset of {self.num_rows} rows",
                "The dataset has changed since that position was saved; point data.path at the "
                "same dataset",
            )

    def _key(self, epoch: int) -> str | None:
        if not self._shuffle:
            return None
        return epoch_key(self._seed, epoch) if self._training else EVAL_KEY
