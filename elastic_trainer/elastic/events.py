"""Facts that reach the elastic core. The actors report them; the core never asks."""

from dataclasses import dataclass

from elastic_trainer.types import Plan, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerJoined(Event):
    """A worker has started, imported what it needs and answers."""

    worker: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost(Event):
    """A worker died or stopped answering."""

    worker: WorkerId
    cause: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned(Event):
    """A plan for the present workers; `segment_updates` updates make about a segment."""

    plan: Plan
    segment_updates: int


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
class EvaluationDone(Event):
    """The held-out loss of the state after `update` is known."""

    generation: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed(Event):
    """Something that this membership cannot repair; `reason` is the user's message."""

    generation: int
    reason: str


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
