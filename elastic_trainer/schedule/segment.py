"""A segment: the work between two commit points, handed to the workers as one value."""

import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, overload

from elastic_trainer.schedule.actions import Action, ActionLists, Kind
from elastic_trainer.types import BatchInfo

SegmentKind = Literal["train", "eval"]

_KINDS = tuple(Kind)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_RECORD = struct.Struct("<BIi")
_NO_PEER = -1


class ActionTable(Sequence[tuple[Action, ...]]):
    """Lists of actions that pickle to a few bytes per action.

    A worker that receives a table decodes only the rows that it looks at: its own, and the others
    only to draw the grid of a failure.
    """

    def __init__(self, lists: ActionLists) -> None:
        self._rows: list[tuple[Action, ...] | None] = [tuple(actions) for actions in lists]
        self._packed: list[bytes] | None = None

    @overload
    def __getitem__(self, stage: int) -> tuple[Action, ...]: ...
    @overload
    def __getitem__(self, stage: slice) -> tuple[tuple[Action, ...], ...]: ...
    def __getitem__(
        self, stage: int | slice
    ) -> tuple[Action, ...] | tuple[tuple[Action, ...], ...]:
        if isinstance(stage, slice):
            return tuple(self[s] for s in range(*stage.indices(len(self))))
        row = self._rows[stage]
        if row is None:
            assert self._packed is not None, "a row without actions came packed"
            stage %= len(self._rows)
            row = self._rows[stage] = _unpack(stage, self._packed[stage])
        return row

    def __len__(self) -> int:
        return len(self._rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"ActionTable({[' '.join(map(str, row)) for row in self]})"

    def __getstate__(self) -> list[bytes]:
        if self._packed is None:
            self._packed = [_pack(row) for row in self]
        return self._packed

    def __setstate__(self, packed: list[bytes]) -> None:
        self._packed = packed
        self._rows = [None] * len(packed)


def _pack(row: Sequence[Action]) -> bytes:
    records = (
        _RECORD.pack(_CODES[a.kind], a.microbatch, _NO_PEER if a.peer is None else a.peer)
        for a in row
    )
    return zlib.compress(b"".join(records), level=1)


def _unpack(stage: int, packed: bytes) -> tuple[Action, ...]:
    return tuple(
        Action(_KINDS[code], stage, microbatch, None if peer == _NO_PEER else peer)
        for code, microbatch, peer in _RECORD.iter_unpack(zlib.decompress(packed))
    )


@dataclass(frozen=True)
class Segment:
    """What one generation's workers run between two commit points.

    Microbatches are numbered through the segment, 0 to `num_microbatches` - 1, in the order of the
    batches; `locate` says to which batch each belongs. `snapshot`: at its end every stage keeps a
    copy of its state, and sends one to its buddy.
    """

    generation: int
    index: int
    kind: SegmentKind
    batches: tuple[BatchInfo, ...]
    actions: ActionLists
    schedule: str
    snapshot: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.actions, ActionTable):
            object.__setattr__(self, "actions", ActionTable(self.actions))

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """Microbatches of each batch."""
        return tuple(len(batch.microbatches) for batch in self.batches)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(accumulate(self.groups))

    @property
    def num_microbatches(self) -> int:
        return self._stops[-1] if self._stops else 0

    @property
    def first_update(self) -> int:
        """Number of the first update (of the batch evaluated first, in an evaluation)."""
        return self.batches[0].update

    @property
    def last_update(self) -> int:
        """Number of the last update: what is committed when the segment is done."""
        return self.batches[-1].update

    def locate(self, microbatch: int) -> tuple[int, int]:
        """Position of the microbatch's batch in `batches`, and its index within that batch."""
        if not 0 <= microbatch < self.num_microbatches:
            raise IndexError(f"microbatch {microbatch} of {self.num_microbatches}")
        position = bisect_right(self._stops, microbatch)
        return position, microbatch - (self._stops[position] - self.groups[position])

    def __getstate__(self) -> dict[str, Any]:
        fields = ("generation", "index", "kind", "batches", "actions", "schedule", "snapshot")
        return {name: getattr(self, name) for name in fields}
