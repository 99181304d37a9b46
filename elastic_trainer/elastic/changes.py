"""Changes of the membership: which one is wanted, and how the next generation begins."""

from collections.abc import Collection
from dataclasses import dataclass

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.members import holders
from elastic_trainer.elastic.recovery import recovery_point
from elastic_trainer.elastic.staff import Staff
from elastic_trainer.types import Plan, WorkerId


@dataclass(kw_only=True)
class Change:
    """The next generation, in the making. `asked` for their stock, once it is entered."""

    generation: int
    workers: tuple[WorkerId, ...]
    reason: str
    compulsory: bool = True
    plan: Plan | None = None
    segment_updates: int = 1
    asked: tuple[WorkerId, ...] = ()
    stock: ev.StockTaken | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Workers to make a plan for, in this order; a compulsory plan need not be faster."""

    workers: tuple[WorkerId, ...]
    reason: str
    compulsory: bool


def wish(
    plan: Plan, staff: Staff, refused: Collection[tuple[WorkerId, ...]], now: float
) -> Wish | None:
    """The change that the running pipeline should make, None if it is fine.

    Args:
        plan: what runs.
        staff: who is there, and the limits.
        refused: line-ups that were considered since `plan` runs.
        now: the time.
    """
    held, members = holders(plan), staff.members
    gone = [w for w in held if w in members.leaving]
    if gone or len(held) > staff.most:
        why = "; ".join(dict.fromkeys(members.leaving[w].reason for w in gone))
        size = min(staff.most, max(len(held), staff.floor))
        return Wish(
            workers=members.lineup(plan, size),
            reason=why or f"at most {staff.most} workers are to hold stages",
            compulsory=True,
        )
    line = members.lineup(plan, staff.most)
    if len(line) == len(held) or not staff.settled(now):
        return None
    if len(held) < staff.least <= len(line) and line not in refused:
        reason = f"at least {staff.least} workers are asked for"
        return Wish(workers=line, reason=reason, compulsory=True)
    for size in range(len(line), len(held), -1):
        if line[:size] not in refused:
            reason = f"{', '.join(line[len(held) : size])} joined"
            return Wish(workers=line[:size], reason=reason, compulsory=False)
    return None


def still_fits(change: Change, staff: Staff) -> bool:
    """Whether a change that was decided can still be made as it is."""
    usable = staff.members.usable
    return len(change.workers) <= staff.most and all(w in usable for w in change.workers)


def configuration(change: Change, staff: Staff, *, saved: int, newest: int) -> do.Configure | None:
    """How the generation begins; None while the plan, or somebody's stock, is missing."""
    members = staff.members
    if change.plan is None or change.stock is None:
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
    return do.Configure(plan=change.plan, update=point.update, sources=point.sources, reason=reason)


def first_configuration(plan: Plan, update: int) -> do.Configure:
    """How a run begins: from the checkpoint of `update`, or anew."""
    source = do.STORAGE if update else do.INITIAL
    return do.Configure(
        plan=plan,
        update=update,
        sources=dict.fromkeys(plan.layers, source),
        reason=f"restoring update {update}" if update else "initial weights",
    )
