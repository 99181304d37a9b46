"""What the elastic core tells the coordinator to do, each with its reason."""

from dataclasses import dataclass

from elastic_trainer.types import Plan, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """Base of all instructions; `reason` goes to the log when it changes."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StartWorkers(Instruction):
    """Reserve room on the cluster and start so many workers."""

    num_workers: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MakePlan(Instruction):
    """Profile if needed and plan for these workers."""

    generation: int
    workers: tuple[WorkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Configure(Instruction):
    """Give every worker its layers, restored to the state after `update` (0: initial weights)."""

    plan: Plan
    update: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSegment(Instruction):
    """Train the updates `first_update` to `last_update`; ends drained."""

    generation: int
    first_update: int
    last_update: int


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
class Finish(Instruction):
    """The run is over: completed, stopped or failed."""

    status: str
    update: int
