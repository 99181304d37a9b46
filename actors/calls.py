"""The remote calls of the coordinator that are under way, and who is told of their ends."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_trainer.actors.pending import Pending, wait_any
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.types import WorkerId

Then = Callable[[Any], None]  # what to do with a call's result
Judge = Callable[[Pending[Any], int | None, Exception], None]
Wait = Callable[[Sequence[Pending[Any]], float], list[Pending[Any]]]
AT_HAND_S = 60.0  # a result that is there is fetched in no time; what takes longer is broken


@dataclass(frozen=True, slots=True)
class _Entry:
    then: Then
    failed: Callable[[str], None] | None
    generation: int | None
    judged: bool = True


class Calls:
    """Keeps calls until their results are there. One thread.

    Args:
        vigil: keeps their deadlines.
        judge: told of each call that raised, where that means something: the call, the generation
            that it was made for, and the error.
        wait: blocks until some of the given calls are ready.
    """

    def __init__(self, vigil: Vigil, judge: Judge, wait: Wait = wait_any) -> None:
        self._vigil = vigil
        self._judge = judge
        self._wait = wait
        self._open: dict[Pending[Any], _Entry] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(
        self,
        call: Pending[Any],
        then: Then,
        *,
        generation: int | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Await a call that its worker answers at once, whatever else it does."""
        self._open[call] = _Entry(then, None, generation)
        self._vigil.asked(call, limit_s)

    def when(
        self,
        call: Pending[Any],
        then: Then,
        *,
        generation: int | None = None,
        limit_s: float | None = None,
        failed: Callable[[str], None] | None = None,
        judged: bool = True,
    ) -> None:
        """Await a call that takes as long as it needs while its work moves on.

        Args:
            generation: that it belongs to and ends with, if it does.
            limit_s: how long its work may stand still, if not as long as usual.
            failed: told why there will be no result; `then` is not called.
            judged: whether an error means anything beyond that.
        """
        self._open[call] = _Entry(then, failed, generation, judged)
        self._vigil.sent(call, limit_s)

    def whenever(self, call: Pending[Any], then: Then, failed: Callable[[str], None]) -> None:
        """Await something that nobody can hasten, such as room on the cluster."""
        self._open[call] = _Entry(then, failed, None, judged=False)
        self._vigil.sent(call, math.inf)

    def collect(self, timeout_s: float) -> None:
        """Hand out the results that are there, after `timeout_s` seconds at most."""
        for call in self._wait(list(self._open), timeout_s):
            entry = self._open.pop(call, None)
            if entry is None:
                continue  # dropped on account of another one
            self._vigil.returned(call)
            try:
                value = call.get(AT_HAND_S)
            except Exception as error:  # whatever it is, the judge knows what it means
                if entry.failed is not None:
                    entry.failed(str(error))
                if entry.judged:
                    self._judge(call, entry.generation, error)
            else:
                entry.then(value)

    def drop_worker(self, worker: WorkerId, reason: str) -> None:
        """Expect nothing more of this worker."""
        self._drop([call for call in self._open if call.worker == worker], reason)
        self._vigil.forget(worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker need not answer any more, though what it does may still be awaited."""
        self._vigil.forget(worker)

    def drop_generation(self, generation: int, reason: str) -> None:
        """Expect nothing more of this generation and older ones."""
        made_for = {call: entry.generation for call, entry in self._open.items()}
        old = [call for call, g in made_for.items() if g is not None and g <= generation]
        self._drop(old, reason)

    def drop(self, call: Pending[Any]) -> None:
        """Expect nothing more of this call."""
        if self._open.pop(call, None) is not None:
            self._vigil.dropped(call)

    def _drop(self, calls: Sequence[Pending[Any]], reason: str) -> None:
        entries = [self._open.pop(call) for call in calls]
        for call in calls:
            self._vigil.dropped(call)
        for entry in entries:
            if entry.failed is not None:
                entry.failed(reason)
