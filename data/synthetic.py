"""Random token sequences that need no dataset: for schedules, benchmarks and emulated models."""

import math
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.samples import Fields, Sample
from elastic_trainer.planner.sizes import ItemSize
from elastic_trainer.types import Cursor

NUM_ROWS = {"train": 1 << 16, "eval": 1 << 10}
DEFAULT_VOCAB_SIZE = 256
COST_FIELDS = ("vision_cost", "text_cost")
_MEDIAN_SIZE = 256


class SyntheticSamples:
    """Each row is drawn from a counter-based generator keyed by (seed, split, epoch, row).

    Args:
        split: train or eval.
        seed: of all rows.
        length: tokens of each row.
        vocab_size: token ids are below it.
        size_sigma: above 0, each row also has the size of a picture and of a text, log-normal with
            this spread and independent of each other, and the fields `vision_cost` and `text_cost`:
            these sizes over their means. Its tokens are as many as ever.
    """

    def __init__(
        self, split: str, *, seed: int, length: int, vocab_size: int, size_sigma: float = 0.0
    ) -> None:
        self._split = split
        self._seed = seed
        self._length = length
        self._vocab_size = vocab_size
        self._sigma = size_sigma
        self.num_rows = NUM_ROWS[split]

    def next(self, cursor: Cursor) -> Sample:
        """The row at the cursor."""
        name = f"synthetic/{self._split}/{self._seed}/{cursor.epoch}/{cursor.row}"
        key = int.from_bytes(blake2b(name.encode(), digest_size=16).digest(), "little")
        # Raw bits, because numpy promises their stream across its versions, unlike that of its
        # distributions.
        bits = np.random.Philox(key=key).random_raw(self._length + 1 + 2)
        ids = (bits[:-2] % np.uint64(self._vocab_size)).astype(np.int64)
        following = cursor.row + 1
        end = Cursor(epoch=cursor.epoch, row=following)
        if following == self.num_rows:
            end = Cursor(epoch=cursor.epoch + 1)
        fields: Fields = {"input_ids": ids[:-1], "labels": ids[1:]}
        size = self._size(bits[-2:]) if self._sigma else None
        if size is not None:
            mean = _MEDIAN_SIZE * math.exp(self._sigma**2 / 2)
            for name, length in zip(
                COST_FIELDS, (*size.image_patches, size.text_tokens), strict=True
            ):
                fields[name] = np.array(length / mean)
        return Sample(
            fields=fields,
            id=str(cursor.row),
            num_tokens=self._length,
            num_valid=self._length,
            end=end,
            size=size,
        )

    def _size(self, bits: NDArray[Any]) -> ItemSize:
        # Box and Muller: two normal numbers of two uniform ones, of which the first is not 0.
        first, second = ((int(b >> np.uint64(11)) + 1) / (1 << 53) for b in bits)
        radius, angle = math.sqrt(-2 * math.log(first)), 2 * math.pi * second
        normals = radius * math.cos(angle), radius * math.sin(angle)
        picture, text = (max(1, round(_MEDIAN_SIZE * math.exp(self._sigma * z))) for z in normals)
        return ItemSize((picture,), (), text)
