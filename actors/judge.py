"""What it means when a call fails or work stands still: facts for the elastic core.

A worker that dies leaves others waiting, and its generation's end interrupts them. Their errors say
nothing about themselves, so they are kept until the loss that explains them is known. If none comes
within the time in which a silent worker is found out, the work is repeated.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_trainer.actors.faults import one_line
from elastic_trainer.actors.pending import Pending
from elastic_trainer.actors.vigil import Standstill, Vigil
from elastic_trainer.elastic import events as ev
from elastic_trainer.errors import (
    CheckpointError,
    ElasticTrainerError,
    StallError,
    TransportError,
    WorkerLostError,
)
from elastic_trainer.types import WorkerId

MARGIN_S = 0.5  # beyond the time in which a silent worker is found out
CONSEQUENCES = (TransportError, CheckpointError)  # what others, or the storage, may have caused


class Seats(Protocol):
    """Who feeds the stages; `Loaders` knows."""

    @property
    def handles(self) -> Mapping[WorkerId, Any]: ...


class Losses(Protocol):
    """Parts with workers; `Crew` does."""

    @property
    def loaders(self) -> Seats: ...
    @property
    def stages(self) -> Mapping[WorkerId, Any]: ...
    def lose(self, worker: WorkerId, reason: str) -> None: ...
    def start_loaders(self) -> None: ...


class Run(Protocol):
    """What is to be known of the run."""

    @property
    def generation(self) -> int: ...
    @property
    def taking_stock(self) -> bool: ...
    @property
    def has_trained(self) -> bool: ...
    def name(self, worker: WorkerId) -> str: ...
    def losing(self, worker: WorkerId, detail: str, cause: ev.Cause) -> None: ...
    def lost(self, worker: WorkerId, detail: str, cause: ev.Cause) -> None: ...
    def loader_lost(self, worker: WorkerId, detail: str, cause: ev.Cause) -> bool: ...
    def trace(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Complaint:
    generation: int
    worker: WorkerId
    reason: str
    waited: bool  # in vain, for a message
    at: float


class Judge:
    """Says what failed calls, silent workers and standing work mean.

    Args:
        run: the run.
        crew: parts with lost workers.
        vigil: knows who is silent, and who holds up the others.
        report: takes facts.
    """

    def __init__(
        self,
        run: Run,
        crew: Losses,
        vigil: Vigil,
        report: Callable[[ev.Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._crew = crew
        self._vigil = vigil
        self._report = report
        self._clock = clock
        self._complaints: list[_Complaint] = []

    @property
    def wonders(self) -> bool:
        """Whether there are errors that nothing has explained yet."""
        return bool(self._complaints)

    def failed(self, call: Pending[Any], generation: int | None, error: Exception) -> None:
        """A call has raised.

        Args:
            call: which.
            generation: that it was made for, if for one.
            error: what came back.
        """
        if isinstance(error, WorkerLostError):
            self.lost(call.worker, error.what, ev.Cause.CRASHED)
        elif generation is not None and generation < self._run.generation:
            return  # the end of its generation has ended it
        elif isinstance(error, CONSEQUENCES) and generation is not None and self._run.has_trained:
            self._complaints.append(
                _Complaint(
                    generation=generation,
                    worker=call.worker,
                    reason=str(error),
                    waited=isinstance(error, StallError),
                    at=self._clock(),
                )
            )
        elif isinstance(error, ElasticTrainerError):
            self.hopeless(str(error))
        else:  # a fault of ours, or of the user's model: show where
            self._run.trace(str(error))
            self.hopeless(one_line(error, self._run.name(call.worker)))

    def lost(self, worker: WorkerId, detail: str, cause: ev.Cause) -> None:
        """A worker, or a loader, is dead, or is treated as if it were."""
        if worker in self._crew.loaders.handles:
            needed = self._run.loader_lost(worker, detail, cause)
            self._crew.lose(worker, detail)
            if needed:
                self._crew.start_loaders()
        elif worker in self._crew.stages:
            self._run.losing(worker, detail, cause)
            self._crew.lose(worker, detail)
            self._run.lost(worker, detail, cause)
        else:  # known already, or dismissed
            self._crew.lose(worker, detail)

    def hopeless(self, reason: str) -> None:
        """Something has gone wrong that other workers would not change."""
        self._report(ev.Failed(generation=self._run.generation, reason=reason))

    def look(self) -> None:
        """See who is silent, what stands still, and which complaints nothing has explained."""
        for worker, detail in list(self._vigil.silent()):
            self.lost(worker, detail, ev.Cause.LEASE_EXPIRED)
        if (still := self._vigil.stalled(self._run.name)) is not None:
            self._stands_still(still)
        current = self._run.generation
        self._complaints = [c for c in self._complaints if c.generation == current]
        patience_s = self._vigil.lease_s * 4 / 3 + MARGIN_S
        if self._complaints and self._clock() - self._complaints[0].at > patience_s:
            self._unexplained()

    def _unexplained(self) -> None:
        complaints, self._complaints = self._complaints, []
        first = complaints[0]
        if any(c.waited for c in complaints) and (guilty := self._guilty(complaints)) is not None:
            self.lost(guilty.workers[0], guilty.reason, ev.Cause.WEDGED)
        else:
            self._report(ev.Disturbed(generation=first.generation, reason=first.reason))

    def _guilty(self, complaints: list[_Complaint]) -> Standstill | None:
        """Who kept the others waiting, if it still does. Who has complained itself is awake."""
        held = self._vigil.blame(self._run.name)
        if held is None or not held.wedged:
            return None
        awake = {c.worker for c in complaints}
        asleep = held.workers[0] not in awake and held.still_s >= self._vigil.stall_s
        return held if asleep else None

    def _stands_still(self, still: Standstill) -> None:
        """Work stands still though every process answers."""
        if still.wedged or self._run.taking_stock:
            # Who takes stock was interrupted before: what keeps it now is nobody else.
            for worker in still.workers[:1] if still.wedged else still.workers:
                self.lost(worker, still.reason, ev.Cause.WEDGED)
        elif self._run.has_trained:
            self._report(ev.Disturbed(generation=self._run.generation, reason=still.reason))
        else:
            self.hopeless(still.reason)
