"""The generation that is entered, its plan, and the change that leads to the next one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.members import Members, holders
from elastic_trainer.elastic.recovery import recovery_point
from elastic_trainer.types import Plan, WorkerId


@dataclass(kw_only=True)
class Change:
    """The next generation, in the making.

    Once it is entered, `asked` are asked for their stock, and it breaks off without the `vital`.
    """

    generation: int
    workers: tuple[WorkerId, ...]
    reason: str
    compulsory: bool = True
    plan: Plan | None = None
    segment_updates: int = 1
    asked: tuple[WorkerId, ...] = ()
    vital: tuple[WorkerId, ...] = ()
    stock: ev.StockTaken | None = None
    restoring: bool = False


class Generations:
    """Numbers, plans and the change under way.

    Every plan that is asked for has a number of its own, so an outdated one is known by it. A
    generation is entered by `TakeStock`, the first one by `Configure`, and configured once at most.

    Attributes:
        current: the generation that is entered.
        plan: the newest one that workers were configured with.
        change: what is being prepared, if anything.
        refused: line-ups of workers that are not worth a plan while `plan` stands.
    """

    def __init__(self, current: int = 0, plan: Plan | None = None) -> None:
        self.current = current
        self.plan = plan
        self.change: Change | None = None
        self.refused: set[tuple[WorkerId, ...]] = set()
        self._highest = current
        self._sources: frozenset[str] = frozenset()

    @property
    def holders(self) -> tuple[WorkerId, ...]:
        """The workers that hold a stage, in stage order."""
        return holders(self.plan)

    @property
    def entered(self) -> bool:
        """Whether the change has ended the generation before it."""
        return self.change is not None and bool(self.change.asked)

    def _number(self) -> int:
        self._highest += 1
        return self._highest

    def propose(
        self, workers: tuple[WorkerId, ...], reason: str, compulsory: bool = True
    ) -> do.MakePlan:
        """Prepare a change, in place of any other that is not entered."""
        self.change = Change(
            generation=self._number(), workers=workers, reason=reason, compulsory=compulsory
        )
        return do.MakePlan(generation=self.change.generation, workers=workers, reason=reason)

    def enter(self) -> do.TakeStock:
        """Begin the change's generation at a commit point."""
        change = self.change
        assert change is not None and change.plan is not None and not change.asked
        # What those hold that held a stage so far may be nowhere else.
        change.asked = change.vital = tuple(dict.fromkeys([*self.holders, *change.workers]))
        self.current = change.generation
        return do.TakeStock(generation=self.current, workers=change.asked, reason=change.reason)

    def regroup(
        self, workers: tuple[WorkerId, ...], everybody: Iterable[WorkerId], reason: str, length: int
    ) -> list[do.Instruction]:
        """Begin a generation after a loss. Who still has a stage keeps it if nobody is missing.

        Args:
            workers: to plan for.
            everybody: to ask what they hold.
            reason: for the user.
            length: updates per segment, as planned last.
        """
        plan = self.propose(workers, reason)
        change = self.change
        assert change is not None
        change.asked, change.vital = tuple(everybody), workers
        self.current = change.generation
        stock = do.TakeStock(generation=self.current, workers=change.asked, reason=reason)
        if self.plan is None or self.holders != workers:
            return [stock, plan]
        change.plan, change.segment_updates = replace(self.plan, generation=self.current), length
        return [stock]

    def drop(self) -> None:
        """Forget the change under way."""
        self.change, self._sources = None, frozenset()

    def refuse(self) -> Change:
        """Do not make this change, nor ask for it again while the plan stands."""
        change, self.change = self.change, None
        assert change is not None
        self.refused.add(change.workers)
        return change

    def needs(self, worker: WorkerId) -> bool:
        """Whether the generation breaks off without this worker."""
        change = self.change
        vital = change.vital if change is not None and change.vital else self.holders
        return worker in vital or worker in self._sources

    def planned(self, event: ev.Planned) -> Change | None:
        """The change that a plan belongs to, None if it comes too late."""
        change = self._awaiting_plan(event.plan.generation)
        if change is not None:
            change.plan, change.segment_updates = event.plan, event.segment_updates
        return change

    def not_planned(self, event: ev.NotPlanned) -> bool:
        return self._awaiting_plan(event.generation) is not None

    def _awaiting_plan(self, generation: int) -> Change | None:
        change = self.change
        open_ = change is not None and change.plan is None and change.generation == generation
        return change if open_ else None

    def stock_taken(self, event: ev.StockTaken) -> bool:
        """False if nobody waits for it."""
        change = self.change
        if change is None or not change.asked or change.stock is not None:
            return False
        change.stock = event
        return True

    def configuration(self, members: Members, *, saved: int, newest: int) -> do.Configure | None:
        """How the generation begins; None while its plan, or somebody's stock, is missing."""
        change = self.change
        if change is None or change.plan is None or change.stock is None or change.restoring:
            return None
        stock = {w: copies for w, copies in change.stock.copies.items() if w in members}
        if any(w in members and w not in stock for w in change.asked):
            return None  # that worker was lost, which will be reported too
        members.nodes.update({w: n for w, n in change.stock.nodes.items() if w in members})
        point = recovery_point(change.plan, stock, members.nodes, saved=saved, newest=newest)
        again = newest - point.update
        what = f"update {point.update}" if point.update else "the initial weights"
        whence = "" if point.from_memory or not point.update else " from the newest checkpoint"
        reason = f"{change.reason}: restoring {what}{whence}"
        if again > 0:
            reason += f", {again} committed updates are trained again"
        return self._begin(
            do.Configure(
                plan=change.plan, update=point.update, sources=point.sources, reason=reason
            )
        )

    def first_configuration(self, plan: Plan, update: int) -> do.Configure:
        """How a run begins: from the checkpoint of `update`, or anew."""
        source = do.STORAGE if update else do.INITIAL
        return self._begin(
            do.Configure(
                plan=plan,
                update=update,
                sources=dict.fromkeys(plan.layers, source),
                reason=f"restoring update {update}" if update else "initial weights",
            )
        )

    def _begin(self, configure: do.Configure) -> do.Configure:
        self.plan, self.current = configure.plan, configure.plan.generation
        self._sources = frozenset(configure.sources.values())
        assert self.change is not None
        self.change.restoring, self.change.vital = True, self.holders
        return configure

    def configured(self) -> Change:
        """All workers are ready: the change is made."""
        change = self.change
        assert change is not None
        self.drop()
        self.refused = {change.workers}
        return change
