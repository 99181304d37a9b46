"""Random token sequences that need no dataset: for schedules, benchmarks and emulated models."""

from hashlib import blake2b

import numpy as np

from elastic_trainer.data.samples import Sample
from elastic_trainer.types import Cursor

NUM_ROWS = {"train": 1 << 16, "eval": 1 << 10}
DEFAULT_VOCAB_SIZE = 256


class SyntheticSamples:
    """Each row is drawn from a counter-based generator keyed by (seed, split, epoch, row)."""

    def __init__(self, split: str, *, seed: int, length: int, vocab_size: int) -> None:
        self._split = split
        self._seed = seed
        self._length = length
        self._vocab_size = vocab_size
        self.num_rows = NUM_ROWS[split]

    def next(self, cursor: Cursor) -> Sample:
        """The row at the cursor."""
        name = f"synthetic/{self._split}/{self._seed}/{cursor.epoch}/{cursor.row}"
        key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        # Raw bits, because numpy promises their stream across its versions, unlike that of its
        # distributions.
        bits = np.random.Philox(key=key).random_raw(self._length + 1)
        ids = (bits % np.uint64(self._vocab_size)).astype(np.int64)
        following = cursor.row + 1
        end = Cursor(epoch=cursor.epoch, row=following)
        if following == self.num_rows:
            end = Cursor(epoch=cursor.epoch + 1)
        return Sample(
            fields={"input_ids": ids[:-1], "labels": ids[1:]},
            id=str(cursor.row),
            num_tokens=self._length,
            num_valid=self._length,
            end=end,
        )
