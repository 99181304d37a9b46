"""What the elastic core tells the coordinator to do, each with its reason."""

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_trainer.types import LayerName, Plan, WorkerId

STORAGE = "storage"  # a source of state that is no worker: the newest complete checkpoint
INITIAL = "initial"  # the initial weights, keyed by layer name


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """Base of all instructions; `reason` goes to the log when it changes."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorkers(Instruction):
    """Ask the cluster for room until this many workers are there or on their way.

    A fact, not an increment: workers that are lost or stopped no longer count. Never waits: each
    worker that comes is reported as joined.
    """

    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StopWorkers(Instruction):
    """Dismiss these workers and give their room back; they hold nothing that is needed."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MakePlan(Instruction):
    """Profile if needed and plan for these workers, in this order. Does not disturb training."""

    generation: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeStock(Instruction):
    """Make these workers drop what they do and enter `generation`, and collect what they hold."""

    generation: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configure(Instruction):
    """Give every worker its layers, in the state after `update` (0: initial weights).

    `sources` says for each layer whence: a worker (the new owner itself: it has the state in its
    own memory), STORAGE or INITIAL.
    """

    plan: Plan
    update: int
    sources: Mapping[LayerName, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSegment(Instruction):
    """Train the updates `first_update` to `last_update`; ends drained, with a snapshot or not."""

    generation: int
    first_update: int
    last_update: int
    snapshot: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluate(Instruction):
    """Measure the held-out loss of the state after `update`."""

    generation: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCheckpoint(Instruction):
    """Snapshot the state after `update` and write it in the background."""

    generation: int
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Abort(Instruction):
    """Make every worker drop the work of this generation at once."""

    generation: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait(Instruction):
    """Nothing can be done now; the reason is shown to the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Note(Instruction):
    """Nothing is to be done; the reason is worth a line in the log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finish(Instruction):
    """The run is over: completed, stopped or failed."""

    status: str
    update: int
