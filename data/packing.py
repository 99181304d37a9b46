"""Packing token lists into sequences of fixed length: a pure fold over (cursor, documents).

Each token of each document is predicted exactly once per epoch: a sequence's labels are the next
`length` tokens behind the cursor, its inputs are the tokens before each of them. The token before
a document's first one is the separator (end of text), which is what the previous document ended
with; so a sequence can be built from the cursor alone, without looking back.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.types import Cursor

IGNORED_LABEL = -100

Tokens = NDArray[np.int32]
TokensAt = Callable[[int], Tokens]
"""Tokens of the row at a position of the epoch, separator included."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens start up to stop of the row at `position` of the epoch."""

    position: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Packed:
    """One sequence; `end` is the cursor behind it."""

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    pieces: tuple[Piece, ...]
    end: Cursor

    @property
    def num_valid(self) -> int:
        return sum(piece.stop - piece.start for piece in self.pieces)


def pack_next(
    cursor: Cursor, num_rows: int, tokens_at: TokensAt, *, length: int, separator: int
) -> Packed:
    """Fill one sequence from the cursor; the last one of an epoch may be short, and is padded."""
    inputs = np.full(length, separator, dtype=np.int64)
    labels = np.full(length, IGNORED_LABEL, dtype=np.int64)
    pieces: list[Piece] = []
    filled, position, offset = 0, cursor.row, cursor.offset
    while filled < length and position < num_rows:
        tokens = tokens_at(position)
        taken = tokens[offset : offset + length - filled]
        stop = filled + len(taken)
        labels[filled:stop] = taken
        if len(taken):
            if offset:
                inputs[filled] = tokens[offset - 1]
            inputs[filled + 1 : stop] = taken[:-1]
            pieces.append(Piece(position, offset, offset + len(taken)))
        filled, offset = stop, offset + len(taken)
        if offset >= len(tokens):
            position, offset = position + 1, 0
    end = _skip_empty(Cursor(epoch=cursor.epoch, row=position, offset=offset), num_rows, tokens_at)
    return Packed(inputs, labels, tuple(pieces), end)


def _skip_empty(cursor: Cursor, num_rows: int, tokens_at: TokensAt) -> Cursor:
    """Move over rows without tokens, so that an epoch's last sequence is known to be its last."""
    position = cursor.row
    if cursor.offset == 0:
        while position < num_rows and len(tokens_at(position)) == 0:
            position += 1
    if position == num_rows:
        return Cursor(epoch=cursor.epoch + 1)
    return Cursor(epoch=cursor.epoch, row=position, offset=cursor.offset)
