"""A fake cluster on which one stage stops in the middle of a segment, and the others wait for it.

How far each of them comes then, and for whom it waits, is played as the schedule says.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elastic_trainer.actors.watch import Mark, Standing
from elastic_trainer.errors import StallError
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.testing.fake_site import FakeSite, FakeStage
from elastic_trainer.testing.standstill import Play
from elastic_trainer.types import WorkerId


class How(StrEnum):
    """What becomes of the stage that stops."""

    KILLED = "killed"  # its process dies, which is known soon
    FROZEN = "frozen"  # SIGSTOP, or its node is off the network: it answers nobody
    HUNG = "hung"  # it answers, but its work does not move on


@dataclass(frozen=True, kw_only=True)
class Stop:
    """One stage stops at a place drawn from `seed`, in the first segment that reaches `update`."""

    how: How
    update: int
    seed: int


class StuckSite(FakeSite):
    """The cluster of a run that gets stuck once.

    Args:
        stop: how.
        stall_s: after so long a stage that waits for a message gives up, and says so.
    """

    def __init__(
        self, folder: str, layers: Sequence[str], *, stop: Stop, stall_s: float, **site: Any
    ) -> None:
        super().__init__(folder, layers, **site)
        self.stop = stop
        self.guilty: WorkerId | None = None  # once it has happened
        self.place = ""
        self._stall_s = stall_s
        self._random = random.Random(stop.seed)
        self._stuck: Segment | None = None
        self._standings: dict[WorkerId, Standing] = {}
        self._gives_up: dict[WorkerId, float] = {}

    def mark(self, stage: FakeStage) -> Mark:
        standing = self._standings.get(stage.worker)
        if standing is None:
            return super().mark(stage)
        at = standing.segment, standing.done
        return Mark(at, f"action {standing.done}", stage.stored, standing)

    def _work(self, actor: Any) -> None:
        hangs = actor.worker == self.guilty and self.stop.how is How.HUNG
        if not hangs:  # whoever hangs does not hear that its generation is over, either
            super()._work(actor)

    def _gathered(self, segment: Segment) -> bool:
        if segment is self._stuck:
            return False
        gathered = super()._gathered(segment)
        due = segment.kind == "train" and segment.last_update >= self.stop.update
        if gathered and due and self.guilty is None:
            self._get_stuck(segment)
            return False
        if gathered:
            self._standings.clear()
        return gathered

    def _get_stuck(self, segment: Segment) -> None:
        assert self.plan is not None
        places = [(s, i) for s, row in enumerate(segment.actions) for i in range(len(row))]
        stage, index = self._random.choice(places)
        play = Play(segment.actions, frozenset({(stage, index)})).run()
        workers = [s.worker for s in self.plan.stages]
        self._stuck, self.guilty = segment, workers[stage]
        self.place = f"{segment.actions[stage][index]} of {self.guilty}"
        for each, worker in enumerate(workers):
            done, waits_for = play.progress[each], play.waiting.get(each)
            self._standings[worker] = Standing(segment.generation, segment.index, done, waits_for)
            if waits_for is not None:
                # They have begun to wait at different times.
                begun = time.monotonic() - self._random.uniform(0.0, 0.2)
                self._gives_up[worker] = begun + self._stall_s
        guilty = self.stages[self.guilty]
        if self.stop.how is How.KILLED:
            self._after(self._random.uniform(0.0, 0.2), lambda: setattr(guilty, "is_dead", True))
        elif self.stop.how is How.FROZEN:
            guilty.is_frozen = True
        self.hooks.append(self._complain)

    def _complain(self) -> None:
        """Whoever has waited long enough gives up, unless it was interrupted before."""
        for worker, at in list(self._gives_up.items()):
            stage = self.stages[worker]
            head = stage.compute[0] if stage.compute else None
            if head is None or getattr(head, "segment", None) is not self._stuck:
                del self._gives_up[worker]
            elif time.monotonic() > at:
                del self._gives_up[worker]
                stage.live = None
                head.answer = self._given_up(worker)
                stage.compute.popleft()
                head.run()

    def _given_up(self, worker: WorkerId) -> Callable[[], Any]:
        def answer() -> Any:
            raise StallError(f"{worker} has waited for {self._stall_s:g} s in vain")

        return answer

    def _after(self, seconds: float, act: Callable[[], Any]) -> None:
        due = time.monotonic() + seconds

        def hook() -> None:
            if time.monotonic() > due:
                self.hooks.remove(hook)
                act()

        self.hooks.append(hook)
