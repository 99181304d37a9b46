"""Which change of the membership a running pipeline should make, if any. Pure functions."""

from collections.abc import Collection
from dataclasses import dataclass

from elastic_trainer.elastic.members import holders
from elastic_trainer.elastic.staff import Staff
from elastic_trainer.types import Plan, WorkerId

LEAVE_MARGIN_S = 10.0  # so long before a departure that leaves too few workers, training pauses

Lineups = Collection[tuple[WorkerId, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Workers to make a plan for, in this order; a compulsory plan need not be faster."""

    workers: tuple[WorkerId, ...]
    reason: str
    compulsory: bool


def wish(plan: Plan, staff: Staff, refused: Lineups, now: float) -> Wish | None:
    """The change that should be made, None if all is fine or nothing can be done about it.

    Args:
        plan: what runs.
        staff: who is there, and the limits.
        refused: line-ups that were considered since `plan` runs.
        now: the time.
    """
    held = holders(plan)
    if (leaving := _leaving(plan, staff)) or len(held) > staff.most:
        line = _without_leaving(plan, staff)
        if len(line) < staff.floor or line in refused:
            return None
        reason = "; ".join(leaving) or f"at most {staff.most} workers are to hold stages"
        return Wish(workers=line, reason=reason, compulsory=True)
    line = staff.members.lineup(plan, staff.most)
    if len(line) <= len(held) or not staff.settled(now):
        return None
    if len(held) < staff.least <= len(line) and line not in refused:
        reason = f"at least {staff.least} workers are asked for"
        return Wish(workers=line, reason=reason, compulsory=True)
    for size in range(len(line), len(held), -1):
        if line[:size] not in refused:
            reason = f"{', '.join(line[len(held) : size])} joined"
            return Wish(workers=line[:size], reason=reason, compulsory=False)
    return None


def must_pause(plan: Plan, staff: Staff, refused: Lineups) -> bool:
    """Whether workers leave that hold a stage, and those that stay cannot do without them."""
    if not _leaving(plan, staff):
        return False
    line = _without_leaving(plan, staff)
    return len(line) < staff.floor or line in refused


def pause_is_due(plan: Plan, staff: Staff, now: float) -> bool:
    """Whether the first of them leaves soon. Until then, others may join in time."""
    limits = [d.by for w, d in staff.members.leaving.items() if w in holders(plan)]
    return any(by is None or now >= by - LEAVE_MARGIN_S for by in limits)


def _leaving(plan: Plan, staff: Staff) -> list[str]:
    """Why holders of a stage leave."""
    leaving = staff.members.leaving
    return list(dict.fromkeys(leaving[w].reason for w in holders(plan) if w in leaving))


def _without_leaving(plan: Plan, staff: Staff) -> tuple[WorkerId, ...]:
    size = max(len(holders(plan)), staff.floor)
    return staff.members.lineup(plan, min(size, staff.most))
