"""Whether a run's coordinator is there: the driver's own check, as nobody else watches it."""

import time
from collections.abc import Callable
from typing import Protocol

from elastic_trainer.actors.handles import COORDINATOR
from elastic_trainer.actors.pending import Pending
from elastic_trainer.actors.pulse import Pulse
from elastic_trainer.config import Config
from elastic_trainer.errors import WorkerLostError


class Asked(Protocol):
    """What answers a ping with the seconds for which it has stood at one thing."""

    def ping(self) -> Pending[float]: ...


class Lifeline:
    """Asks the coordinator a few times per stall limit, without ever waiting for the answer.

    Its answer may take the stall limit (and the cluster's start-up time, at first). Its run may
    stand at one thing as long as the longest that it does itself: waiting for room on the cluster
    at the start, for workers and storage at the end.
    """

    def __init__(
        self, coordinator: Asked, config: Config, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        stall_s, start_s = config.elastic.stall_limit_s, config.cluster.start_timeout_s
        self._longest_s = start_s + 2 * stall_s
        self._pulse = Pulse(stall_s)
        self._pulse.ask(COORDINATOR, clock(), start_s + stall_s)
        self._asked: Pending[float] | None = coordinator.ping()

    def check(self) -> str | None:
        """What is wrong; None while all is well."""
        now = self._clock()
        if self._asked is None and self._pulse.due(now):
            self._pulse.ask(COORDINATOR, now)
            self._asked = self._coordinator.ping()
        if self._asked is not None:
            try:
                stood_s = self._asked.get(0.0)
            except TimeoutError:
                silent_s = self._pulse.silent(now).get(COORDINATOR)
                return None if silent_s is None else f"has not answered for {silent_s:.0f} s"
            except WorkerLostError:
                return None  # the run's own call tells of its end
            self._asked = None
            self._pulse.answered(COORDINATOR, now)
            if stood_s > self._longest_s:
                return f"has been at one thing for {stood_s:.0f} s"
        return None
