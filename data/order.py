"""In which order an epoch visits the rows: a pure function of (seed, epoch, position).

Nothing here depends on a library's random generator, whose stream may change with its version: a
permutation is a keyed Feistel network, so any position is computed alone, in constant memory.

A Parquet reader fetches whole row groups, so an order that jumps freely over a large dataset would
decode a group per row. Row groups are therefore permuted first, then joined into *windows* that
fit in memory, then rows are permuted inside each window. A dataset that fits in one window (any of
ours) is shuffled freely.
"""

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

WINDOW_BYTES = 128 << 20
_ROUNDS = 6
_WORD = 2**64 - 1
_MIX_1 = 0x9E3779B97F4A7C15  # odd multipliers: each bit of a product depends on all below it
_MIX_2 = 0xBF58476D1CE4E5B9


class Permutation:
    """A keyed permutation of range(size) with random access."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        digest = blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._round_keys = [
            int.from_bytes(digest[start : start + 8], "little")
            for start in range(0, 8 * _ROUNDS, 8)
        ]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.size:
            raise IndexError(index)
        # The network permutes the next power of four; walking its cycle until it is back inside
        # the range keeps it a permutation of the range.
        value = self._encrypt(index)
        while value >= self.size:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        left, right = value >> self._half_bits, value & self._mask
        for key in self._round_keys:
            mixed = ((right ^ key) * _MIX_1) & _WORD
            mixed = ((mixed ^ mixed >> 32) * _MIX_2) & _WORD
            left, right = right, left ^ (mixed >> 32 & self._mask)
        return left << self._half_bits | right


class EpochOrder:
    """The rows of one epoch: `row(position)` for position in range(num_rows)."""

    def __init__(
        self,
        group_rows: Sequence[int],
        group_bytes: Sequence[int],
        *,
        key: str | None,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        """Order row groups of the given sizes.

        Args:
            group_rows: number of rows of each row group, in file order.
            group_bytes: decoded size of each.
            key: names the order; None keeps the order of the file.
            window_bytes: what may be held in memory at a time.
        """
        self.num_rows = sum(group_rows)
        self._key = key
        if key is None:
            return
        starts = [0, *accumulate(group_rows)]
        shuffled = Permutation(len(group_rows), f"{key}/groups")
        self._group_start: list[int] = []
        self._group_at: list[int] = []
        self._window_at: list[int] = []
        position, filled = 0, 0
        for index in range(len(group_rows)):
            group = shuffled[index]
            if index == 0 or filled + group_bytes[group] > window_bytes:
                self._window_at.append(position)
                filled = 0
            filled += group_bytes[group]
            self._group_at.append(position)
            self._group_start.append(starts[group])
            position += group_rows[group]
        ends = [*self._window_at[1:], position]
        self._windows = [
            Permutation(end - start, f"{key}/window/{number}")
            for number, (start, end) in enumerate(zip(self._window_at, ends, strict=True))
        ]

    def row(self, position: int) -> int:
        """Index in the dataset of the row at this position of the epoch."""
        if not 0 <= position < self.num_rows:
            raise IndexError(position)
        if self._key is None:
            return position
        window = bisect_right(self._window_at, position) - 1
        start = self._window_at[window]
        inside = start + self._windows[window][position - start]
        group = bisect_right(self._group_at, inside) - 1
        return self._group_start[group] + inside - self._group_at[group]
