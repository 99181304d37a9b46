"""What every reader of samples offers: the sample at a cursor, and the cursor behind it."""

from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from elastic_trainer.data.order import EpochOrder
from elastic_trainer.data.sources import ParquetSource
from elastic_trainer.errors import DataError
from elastic_trainer.planner.sizes import ItemSize
from elastic_trainer.types import Cursor

Fields = dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its arrays by field name, its id for the audit, and the cursor behind it.

    `num_tokens` counts positions (padding too), `num_valid` those that the loss counts. Fields have
    no batch dimension. Samples of media have a `size` instead of fields until they are decoded.
    """

    fields: Fields
    id: str
    num_tokens: int
    num_valid: int
    end: Cursor
    size: ItemSize | None = None


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
        self._orders: dict[str | None, EpochOrder] = {}

    @property
    def num_rows(self) -> int:
        return self._source.num_rows

    def key(self, epoch: int) -> str | None:
        """Names the order of an epoch; None for the order of the files.

        Held-out rows come in the same order whatever the seed and the epoch, so losses compare.
        """
        if not self._shuffle:
            return None
        return f"train/{self._seed}/{epoch}" if self._training else "eval"

    def row(self, epoch: int, position: int) -> int:
        """Row of the dataset at this position of this epoch."""
        key = self.key(epoch)
        if key not in self._orders:
            # Two epochs at most are in use at a time: the current one, and the next one's start.
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            self._orders[key] = EpochOrder(
                [group.num_rows for group in self._source.groups],
                [group.num_bytes for group in self._source.groups],
                key=key,
            )
        return self._orders[key].row(position)

    def check(self, cursor: Cursor) -> None:
        """Refuse a cursor behind the end, which only another dataset can have produced."""
        if min(cursor.epoch, cursor.row, cursor.offset) < 0 or cursor.row >= self.num_rows:
            raise DataError(
                f"{place(cursor)} does not lie in this dataset of {self.num_rows} rows",
                CHANGED,
            )


CHANGED = (
    "The dataset, its tokenizer or data.sequence_length has changed since that position was saved; "
    "set them back, or start a new run"
)


def place(cursor: Cursor) -> str:
    """A cursor as a message names it."""
    return (
        f"the position epoch {cursor.epoch}, row {cursor.row}, offset {cursor.offset}, "
        f"sample {cursor.sample}"
    )
