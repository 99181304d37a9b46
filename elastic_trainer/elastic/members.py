"""Who is there, who must leave, and in which order workers are offered to the planner."""

from collections.abc import Iterable
from dataclasses import dataclass

from elastic_trainer.types import Plan, WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """An announced one; `by` is the latest time, None: as soon as possible."""

    by: float | None
    reason: str


def holders(plan: Plan | None) -> tuple[WorkerId, ...]:
    """The workers that hold a stage, in stage order."""
    return () if plan is None else tuple(stage.worker for stage in plan.stages)


def by_age(workers: Iterable[WorkerId]) -> list[WorkerId]:
    """Ids that are counted up, in that order."""
    return sorted(workers, key=lambda w: (len(w), w))


class Members:
    """The living workers. An id that is gone does not come back."""

    def __init__(self) -> None:
        self.nodes: dict[WorkerId, str] = {}
        self.leaving: dict[WorkerId, Departure] = {}
        self.joined_at = float("-inf")
        self._gone: set[WorkerId] = set()

    def __contains__(self, worker: WorkerId) -> bool:
        return worker in self.nodes

    @property
    def usable(self) -> list[WorkerId]:
        """Those that may hold a stage, oldest first."""
        return by_age(w for w in self.nodes if w not in self.leaving)

    def join(self, worker: WorkerId, node: str, now: float) -> bool:
        """Take in a worker; False if it is known already, or was known once."""
        if worker in self.nodes or worker in self._gone:
            return False
        self.nodes[worker] = node
        self.joined_at = now
        return True

    def remove(self, worker: WorkerId) -> bool:
        """Forget a worker for good; False if that has happened before."""
        if worker in self._gone:
            return False
        self._gone.add(worker)
        self.nodes.pop(worker, None)
        self.leaving.pop(worker, None)
        return True

    def announce(
        self, workers: Iterable[WorkerId], by: float | None, reason: str
    ) -> list[WorkerId]:
        """Note departures; returns those that are new. Of two limits the earlier one counts."""
        new = []
        for worker in workers:
            if worker not in self.nodes:
                continue
            if worker not in self.leaving:
                new.append(worker)
            known = self.leaving.get(worker)
            limits = [b for b in (by, known.by if known else by) if b is not None]
            both = by is None or (known is not None and known.by is None)
            self.leaving[worker] = Departure(by=None if both else min(limits), reason=reason)
        return new

    def lineup(self, plan: Plan | None, most: int) -> tuple[WorkerId, ...]:
        """The workers to plan for, in stage order, at most `most`.

        Who holds a stage keeps its place; idle ones take the places of those that are gone, so that
        the other layers need not move; further idle ones come last.
        """
        usable = self.usable
        stages = [w if w in usable else None for w in holders(plan)]
        idle = [w for w in usable if w not in stages]
        places = max(0, most - sum(w is not None for w in stages))
        fill, line = idle[:places], list[WorkerId]()
        for worker in stages:
            if worker is not None:
                line.append(worker)
            elif fill:
                line.append(fill.pop(0))
        return tuple([*line, *fill][:most])
