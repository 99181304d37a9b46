"""Facts that reach the elastic core. The actors report them; the core never asks."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from elastic_trainer.types import LayerName, Plan, WorkerId


class Cause(StrEnum):
    """Why a worker is gone. `PREEMPTED` was announced, and has a budget of its own."""

    CRASHED = "crashed"  # its process died
    LEASE_EXPIRED = "lease_expired"  # it stopped answering: node cut off, process stopped
    WEDGED = "wedged"  # it answers, but its work stands still
    PREEMPTED = "preempted"  # its node was announced to leave
    SCALED_DOWN = "scaled_down"  # asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJoined(Event):
    """A worker has started, imported what it needs and answers."""

    worker: WorkerId
    node: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost(Event):
    """A worker died or stopped answering; `detail` is the user's message."""

    worker: WorkerId
    detail: str
    cause: Cause = Cause.CRASHED


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersDraining(Event):
    """These workers must be gone within `deadline_s` seconds; None: at the next commit point."""

    workers: tuple[WorkerId, ...]
    reason: str
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRequested(Event):
    """Somebody wants other limits on the number of workers."""

    min_workers: int
    max_workers: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderLost(Event):
    """A loader is gone; another one is being started. `node` is empty if it was not known yet."""

    worker: WorkerId
    node: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(Event):
    """A plan for the workers that were named; `segment_updates` updates make about a segment."""

    plan: Plan
    segment_updates: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NotPlanned(Event):
    """There is no plan for the workers that were named, such as for lack of memory."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StockTaken(Event):
    """All workers have dropped `generation - 1` and say which states they hold.

    `copies` maps a worker to an update to the layers whose state after it that worker holds whole:
    live, in its own snapshots, or kept for a buddy. `nodes` maps it to its node.
    """

    generation: int
    copies: Mapping[WorkerId, Mapping[int, tuple[LayerName, ...]]]
    nodes: Mapping[WorkerId, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configured(Event):
    """All workers hold their layers, in the state after `update`."""

    generation: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DataEnded(Event):
    """The loader has no batch after `update`: the last epoch is over."""

    generation: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentDone(Event):
    """All stages have drained; `last_update` is committed."""

    generation: int
    last_update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbed(Event):
    """Work of this generation ended early though nobody is known to be lost: replay it."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationDone(Event):
    """The held-out loss of the state after `update` is known."""

    generation: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Event):
    """Something that no other membership would repair; `reason` is the user's message."""

    generation: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotStored(Event):
    """Every layer's state after `update` stands at two places.

    Seconds: training stood still for `cost_s` to take it; cores that compute also spent `behind_s`
    on moving copies; the segment took `segment_s`.
    """

    generation: int
    update: int
    cost_s: float
    segment_s: float
    behind_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointWritten(Event):
    """The checkpoint of `update` is complete on storage."""

    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFailed(Event):
    """The checkpoint of `update` could not be written; nothing older was touched."""

    update: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested(Event):
    """Somebody wants the run to end at the next commit point, with a checkpoint."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick(Event):
    """Time has passed; nothing else has happened."""
