"""Plays schedules of which something stops: who then stands where, and waits for whom.

Written apart from `schedule.culprit`, which is tested with it, and compared with the runtime.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from elastic_trainer.schedule.actions import Action, ActionLists, Kind
from elastic_trainer.schedule.culprit import LOADER

Message = tuple[str, int, int, int]  # kind, microbatch, from, to
NEVER = (0, ("end", 0, 0, 0))


@dataclass
class Play:
    """Plays lists as the runtime does: sends are buffered, RECV does nothing, REDUCE gathers at
    stage 0, which answers everybody.

    Attributes:
        stops: (stage, index) of actions that are never begun.
        lost: messages that never arrive.
        batch: microbatch that the loader does not send.
        progress: index of each stage's action at hand, after `run`.
        waiting: whose message each stage waits for, after `run`.
        needs: the same, with the message.
        sent: all messages that were sent.
    """

    lists: ActionLists
    stops: frozenset[tuple[int, int]] = frozenset()
    lost: frozenset[Message] = frozenset()
    batch: int | None = None
    progress: list[int] = field(default_factory=list)
    waiting: dict[int, int] = field(default_factory=dict)
    needs: dict[int, tuple[int, Message]] = field(default_factory=dict)
    sent: set[Message] = field(default_factory=set)

    def run(self) -> "Play":
        num_stages = len(self.lists)
        self.progress = [0] * num_stages
        scripts = [self._script(stage) for stage in range(num_stages)]
        needs = self.needs
        moved = True
        while moved:
            moved = False
            for stage, script in enumerate(scripts):
                while stage not in needs or needs[stage][1] in self.sent - self.lost:
                    needs[stage] = next(script, NEVER)
                    moved = True
        self.waiting = {s: need[0] for s, need in needs.items() if need is not NEVER}
        return self

    def _script(self, stage: int) -> Iterator[tuple[int, Message]]:
        """What a stage waits for, one after the other; it sends in between."""
        for index, action in enumerate(self.lists[stage]):
            self.progress[stage] = index
            if (stage, index) in self.stops:
                return
            yield from self._perform(action)
        self.progress[stage] = len(self.lists[stage])

    def _perform(self, action: Action) -> Iterator[tuple[int, Message]]:
        s, j, kind = action.stage, action.microbatch, action.kind.value
        last = len(self.lists) - 1
        if action.kind is Kind.F and s > 0:
            yield s - 1, ("F", j, s - 1, s)
        if action.kind is Kind.F and s in (0, last) and j == self.batch:
            yield LOADER, ("D", j, LOADER, s)
        if action.kind is Kind.B and s < last:
            yield s + 1, ("B", j, s + 1, s)
        if action.kind is Kind.TIE:
            assert action.peer is not None
            yield action.peer, ("W", j, action.peer, s)
        if action.kind in (Kind.OPT, Kind.REDUCE):
            for other in self.lists[s]:
                if other.kind is Kind.RECV_G and other.microbatch == j:
                    yield other.other, ("G", j, other.other, s)
        if action.kind is Kind.REDUCE:
            yield from self._reduce(s, j)
        if kind.startswith("SEND"):
            self.sent.add((kind[-1], j, s, action.other))

    def _reduce(self, stage: int, j: int) -> Iterator[tuple[int, Message]]:
        others = range(1, len(self.lists))
        if stage == 0:
            for other in others:
                yield other, ("N", j, other, 0)
            self.sent |= {("N", j, 0, other) for other in others}
        else:
            self.sent.add(("N", j, stage, 0))
            yield 0, ("N", j, 0, stage)
