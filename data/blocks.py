"""Shuffling packed sequences, so that a batch is not a few long documents from end to end.

Packing yields sequences in the order of the documents; a file of source code fills hundreds in a
row. Consecutive sequences are therefore gathered into blocks and permuted inside each. A cursor
names the place where its block begins and how many of the block's sequences are taken, so this
stays a pure function of the cursor; opening one in the middle costs packing one block.
"""

from collections.abc import Callable
from dataclasses import replace

from elastic_trainer.data.order import Permutation
from elastic_trainer.data.samples import CHANGED, Sample, SampleReader, place
from elastic_trainer.errors import DataError
from elastic_trainer.types import Cursor

BLOCK_TOKENS = 1 << 17


def block_size(sequence_length: int) -> int:
    """Sequences per block: a fixed number of tokens, which bounds what a resume must redo."""
    return max(1, BLOCK_TOKENS // sequence_length)


class _Block:
    """Consecutive sequences from `start` on, at most `size`, never from two epochs."""

    def __init__(self, start: Cursor, size: int) -> None:
        self.start = start
        self.samples: list[Sample] = []
        self._size = size
        self._permutation: Permutation | None = None

    @property
    def end(self) -> Cursor:
        return self.samples[-1].end if self.samples else self.start

    @property
    def is_full(self) -> bool:
        return len(self.samples) == self._size or self.end.epoch != self.start.epoch

    def grow(self, reader: SampleReader) -> None:
        """Pack one sequence more, unless full."""
        if not self.is_full:
            self.samples.append(reader.next(self.end))

    def shuffled(self, index: int, key: str | None) -> Sample:
        """The sequence at this place of the block's own order; a short one always comes last."""
        if key is None:
            return self.samples[index]
        if self._permutation is None:
            short = self.samples[-1].num_valid < self.samples[-1].num_tokens
            name = f"{key}/block/{self.start.row}/{self.start.offset}"
            self._permutation = Permutation(len(self.samples) - short, name)
        inside = index < len(self._permutation)
        return self.samples[self._permutation[index] if inside else index]


class ShuffledBlocks:
    """A reader of packed sequences, permuted block by block."""

    def __init__(
        self, reader: SampleReader, key: Callable[[int], str | None], *, size: int
    ) -> None:
        """Shuffle what `reader` packs.

        Args:
            reader: yields sequences in the order of the documents.
            key: names the order of an epoch; None keeps the documents' order.
            size: sequences per block.
        """
        self._reader = reader
        self._key = key
        self._size = size
        self._block: _Block | None = None
        self._next: _Block | None = None

    def next(self, cursor: Cursor) -> Sample:
        """The sequence at the cursor."""
        block = self._at(replace(cursor, sample=0))
        if not 0 <= cursor.sample < len(block.samples):
            raise DataError(f"{place(cursor)} lies behind the end of its block", CHANGED)
        sample = block.shuffled(cursor.sample, self._key(cursor.epoch))
        # One sequence of the next block for each taken from this one: the work stays even.
        if self._next is None:
            self._next = _Block(block.end, self._size)
        self._next.grow(self._reader)
        taken = cursor.sample + 1
        end = replace(cursor, sample=taken) if taken < len(block.samples) else block.end
        return replace(sample, end=end)

    def _at(self, start: Cursor) -> _Block:
        if self._block is None or self._block.start != start:
            prepared = self._next is not None and self._next.start == start
            self._block = self._next if prepared and self._next else _Block(start, self._size)
            self._next = None
        while not self._block.is_full:
            self._block.grow(self._reader)
        return self._block
