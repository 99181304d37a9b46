"""How many workers there should be, whom to ask for and dismiss, and the budgets of losses."""

from collections.abc import Collection, Mapping, Sequence

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.goal import Goal
from elastic_trainer.elastic.members import Members
from elastic_trainer.elastic.policies import Budget
from elastic_trainer.types import WorkerId

SETTLE_S = 2.0  # so long after a join, more may follow and be taken in together
INCIDENT_S = 5.0  # workers of one node that are lost within this time are lost by one cause
SETTINGS = {
    "failures": "elastic.max_failures",
    "preemptions": "elastic.max_preemptions",
    "idle": "elastic.max_failures",
}


class Staff:
    """The workers of a run against what it wants. Budget `idle`: workers lost without a stage."""

    def __init__(self, goal: Goal) -> None:
        self.members = Members()
        self._goal = goal
        self._min, self._max = goal.min_workers, goal.max_workers
        self._floor = goal.min_workers
        self._asked: int | None = None
        self._recount = False
        self._incidents: dict[tuple[str, str], float] = {}  # (budget, node) -> its begin
        self._budgets = {
            name: Budget(
                limit=goal.max_preemptions if name == "preemptions" else goal.max_failures,
                refill_updates=goal.refill_updates,
            )
            for name in SETTINGS
        }

    @property
    def most(self) -> int:
        """The most workers that may hold a stage."""
        return min(self._max, self._goal.max_layers)

    @property
    def least(self) -> int:
        """The fewest that are asked for. Training may still stand on fewer, see `floor`."""
        return min(self._min, self.most)

    @property
    def floor(self) -> int:
        """The fewest to train with. A higher one counts from when so many are there."""
        return min(self._floor, self.most)

    @property
    def wanted(self) -> int:
        """How many to have, spares included."""
        return self.most + self._goal.num_spares

    @property
    def counts(self) -> dict[str, int]:
        return {name: budget.count for name, budget in self._budgets.items()}

    @property
    def spent(self) -> dict[str, tuple[int, int]]:
        """By budget, how many were counted and at which highest update, to be handed on."""
        return {name: (budget.count, budget.spent_at) for name, budget in self._budgets.items()}

    def inherit(self, spent: Mapping[str, Sequence[int]]) -> None:
        """Go on with what another coordinator has `spent`."""
        for name, (count, spent_at) in spent.items():
            self._budgets[name].count, self._budgets[name].spent_at = count, spent_at

    def settled(self, now: float) -> bool:
        """Whether to go ahead with who is there, or wait for more to join."""
        return len(self.members.usable) >= self.most or now - self.members.joined_at >= SETTLE_S

    @property
    def enough(self) -> bool:
        return len(self.members.usable) >= self.floor

    def can_employ(self, workers: Collection[WorkerId]) -> bool:
        """Whether all these may hold a stage."""
        usable = self.members.usable
        return len(workers) <= self.most and all(w in usable for w in workers)

    def scale(self, event: ev.ScaleRequested, standing: int | None) -> None:
        """Take other limits. To ask for more than are there does not stop what trains.

        Args:
            event: the limits.
            standing: how many workers hold a stage; None if nothing trains.
        """
        self._min, self._max = event.min_workers, event.max_workers
        self._floor = self._min if standing is None else min(self._floor, self._min)
        self.stands(standing or 0)

    def stands(self, workers: int) -> None:
        """A pipeline of so many workers stands: if that is the new minimum, it holds from now."""
        if workers >= self.least:
            self._floor = self._min

    def hope(self) -> None:
        """Training cannot go on without new workers: ask for some, whatever became of others."""
        self._budgets["idle"].count = 0

    # Budgets.

    def spend(self, budget: str, reached: int, now: float, node: str) -> str | None:
        """Count a disturbance; returns words for the user if that was one too many.

        Args:
            budget: failures, preemptions or idle.
            reached: highest update committed so far.
            now: the time.
            node: where; what one node loses at once counts once. Empty: unknown.
        """
        incident = (budget, node)
        spent = self._budgets[budget]
        if not node or now - self._incidents.get(incident, float("-inf")) > INCIDENT_S:
            self._incidents = {k: t for k, t in self._incidents.items() if now - t <= INCIDENT_S}
            self._incidents[incident] = now
            spent.spend(reached)
        if not spent.exhausted:
            return None
        if not spent.limit:
            return ""
        return f"; number {spent.count} in a row, {SETTINGS[budget]} is {spent.limit}"

    def refill(self, reached: int) -> None:
        for budget in self._budgets.values():
            budget.refill(reached)

    # Asking and dismissing.

    def ask(self, reason: str) -> list[do.Instruction]:
        """Say how many workers to have, when that or the number of those that live has changed."""
        number = self.wanted + len(self.members.leaving)
        if self._budgets["idle"].exhausted and self.enough:
            number = min(number, len(self.members.nodes))
            reason = "new workers were lost before they were of use: no more until training goes on"
        if number == self._asked and not self._recount:
            return []
        self._asked, self._recount = number, False
        return [do.StartWorkers(num_workers=number, reason=reason)]

    def recount(self) -> None:
        """A worker is gone, so ask again though the number is the same."""
        self._recount = True

    def dismiss(self, keep: Collection[WorkerId]) -> list[do.Instruction]:
        """Stop who leaves and who is too many, except those that are needed for now."""
        out: list[do.Instruction] = []
        leaving = {w: d.reason for w, d in self.members.leaving.items() if w not in keep}
        for reason in dict.fromkeys(leaving.values()):
            out.append(self._stop(tuple(w for w in leaving if leaving[w] == reason), reason))
        usable = self.members.usable
        idle = [w for w in usable if w not in keep]
        surplus = idle[max(0, self.wanted - (len(usable) - len(idle))) :]
        if surplus:
            reason = f"no more than {self.wanted} workers are wanted"
            out.append(self._stop(tuple(surplus), reason))
        return out

    def _stop(self, workers: tuple[WorkerId, ...], reason: str) -> do.StopWorkers:
        for worker in workers:
            self.members.remove(worker)
        return do.StopWorkers(workers=workers, reason=reason)
