"""The history of the membership: kept in the run folder, counted, and summed up at the end.

The coordinator tells what happens and when. Times of one run are seconds on one clock that never
goes back; `time` is that of the calendar. A change is open from `changed` until an update is
committed with the generation that came of it; changes that come together end together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic_trainer.observability.changes import (
    CAUSES,
    COMMITTED,
    NO_NEW_PLAN,
    REFUSED,
    RESUMED,
    START,
    UNFINISHED,
    UNPLANNED,
    Change,
    stages_of,
)
from elastic_trainer.observability.exit_report import make_report, write_report
from elastic_trainer.observability.lines import Journal
from elastic_trainer.observability.metrics import RunMetrics
from elastic_trainer.observability.record import MEMBERSHIP_FILE
from elastic_trainer.observability.runs import read_membership
from elastic_trainer.types import ConfigureReport, Plan


@dataclass(kw_only=True, slots=True)
class _Open:
    """A change that is not settled yet."""

    change: Change
    at: float
    configured: bool = False

    @property
    def planned(self) -> bool:
        return self.change.cause not in UNPLANNED


class MembershipLog:
    """Writes membership.jsonl and the exit report, and counts.

    Args:
        run_dir: folder of the run.
        metrics: counts what happens.
        time: when this trainer started; the exit report begins there.
    """

    def __init__(self, run_dir: str | Path, metrics: RunMetrics, time: float) -> None:
        self._run_dir = Path(run_dir)
        self._metrics = metrics
        self._lines = Journal(self._run_dir / MEMBERSHIP_FILE)
        self._since = time
        self._open: list[_Open] = []
        self._planning_at: float | None = None
        self._planned_at: float | None = None
        self._stopped_at: float | None = None

    def changed(
        self,
        *,
        at: float,
        time: float,
        cause: str,
        reason: str,
        update: int,
        workers: int,
        worker: str = "",
        stage: int | None = None,
        node: str = "",
        detect_s: float | None = None,
        concerns_plan: bool = True,
    ) -> None:
        """A change has become known.

        Args:
            cause: one of `changes.CAUSES`.
            reason: the message for the user.
            update: the newest one committed.
            workers: how many hold a stage, the one that is lost included.
            worker: the guilty one, or the one that joined or leaves.
            stage: that it held, if any.
            node: that it is on.
            detect_s: time since the guilty worker's last sign of life, or of work if it was wedged.
            concerns_plan: False if the plan stands, as when an idle worker is lost.
        """
        assert cause in CAUSES, cause
        change = Change(
            time=time,
            cause=str(cause),
            reason=reason,
            update=update,
            workers_before=workers,
            workers_after=workers,
            worker=worker,
            stage=stage,
            node=node,
            detect_s=detect_s,
        )
        self._metrics.observe_change(change)
        if not concerns_plan:
            self._append(replace(change, outcome=NO_NEW_PLAN))
            return
        if stage is not None and cause in UNPLANNED:
            self._metrics.observe_departed([stage])
        self._open.append(_Open(change=change, at=at))

    def refused(self, note: str) -> None:
        """A plan for the planned changes that are open would not pay: they are over."""
        for entry in self._open:
            if entry.planned:
                self._append(replace(entry.change, outcome=REFUSED, note=note))
        self._open = [entry for entry in self._open if not entry.planned]

    def planning(self, at: float) -> None:
        """A plan is asked for: there are workers to plan with."""
        self._planning_at = at

    def planned(self, at: float) -> None:
        """The plan for the next generation is there."""
        self._planned_at = at

    def stopped(self, at: float) -> None:
        """Training stands still, for the next generation to be entered; the last time counts."""
        self._stopped_at = at

    def configured(
        self,
        *,
        at: float,
        plan: Plan,
        update: int,
        nodes: Mapping[str, str],
        reports: Iterable[ConfigureReport],
        updates_replayed: int,
        samples_reread: int,
    ) -> None:
        """All workers hold their layers.

        Args:
            plan: that is in force now.
            update: the state that they hold.
            nodes: the node of each worker.
            reports: of all workers.
            updates_replayed: updates after `update` that had been handed out to the workers, and
                are trained again.
            samples_reread: samples of those updates.
        """
        if not self._open:
            return
        num_bytes = _sum_bytes(reports)
        facts = {
            "generation": plan.generation,
            "restored_update": update,
            "workers_after": plan.num_stages,
            "stages": stages_of(plan, nodes),
        }
        once: dict[str, Any] = {
            "updates_replayed": updates_replayed,
            "samples_reread": samples_reread,
            "moved_bytes": num_bytes,
        }
        first = self._first()
        for entry in self._open:
            taken = self._phases(entry, at) | facts | (once if entry is first else {})
            entry.change = replace(entry.change, **taken)
            entry.configured = True
        pause_s = 0.0
        if first.change.cause not in (START, RESUMED):
            began = self._stopped_at if first.planned else first.at
            pause_s = at - max(first.at, began or first.at)
        self._metrics.observe_moved(num_bytes, pause_s)
        self._planning_at = self._planned_at = self._stopped_at = None

    def committed(self, at: float) -> None:
        """An update was committed; call it for every segment, it is cheap."""
        if not self._open:
            return
        for entry in self._open:
            if entry.configured:
                seconds = at - entry.at
                change = replace(entry.change, outcome=COMMITTED, first_commit_s=seconds)
                self._append(change)
                if not entry.planned:
                    replayed = change.updates_replayed, change.samples_reread
                    self._metrics.observe_recovery(seconds, *replayed)
        self._open = [entry for entry in self._open if not entry.configured]

    def finish(
        self,
        *,
        time: float,
        status: str,
        reason: str,
        update: int,
        budgets: Mapping[str, tuple[int, int]],
    ) -> None:
        """The run is over: what is open stays unfinished, and the exit report is written.

        Args:
            status: completed, stopped or failed.
            reason: the message for the user.
            update: the newest one committed.
            budgets: spent and limit (-1: any number) of failures and of preemptions.
        """
        for entry in self._open:
            self._append(replace(entry.change, outcome=UNFINISHED))
        self._open.clear()
        changes = [c for c in read_membership(self._run_dir) if c["time"] >= self._since]
        report = make_report(
            run=self._run_dir.name,
            status=status,
            reason=reason,
            update=update,
            started_at=self._since,
            ended_at=time,
            budgets=budgets,
            changes=changes,
        )
        write_report(self._run_dir, report)

    def state(self) -> dict[str, Any]:
        """What is open, JSON-able, for the coordinator's journal."""
        return {"since": self._since, "open": [asdict(entry.change) for entry in self._open]}

    def restore(self, state: Mapping[str, Any], *, at: float, time: float) -> None:
        """Go on where another coordinator's `state` was taken."""
        self._since = state["since"]
        for fields in state["open"]:
            change = Change(**fields | {"stages": tuple(fields["stages"])})
            self._open.append(_Open(change=change, at=at - max(0.0, time - change.time)))

    def _first(self) -> _Open:
        """With whom the costs are counted: the first loss, else the first change."""
        return next((entry for entry in self._open if not entry.planned), self._open[0])

    def _phases(self, entry: _Open, at: float) -> dict[str, Any]:
        """Seconds from phase to phase, none of them negative.

        After a loss training stands still at once, and again when there are workers to go on with;
        for a planned change it stands still only when the plan is there.
        """
        stopped = self._stopped_at or entry.at
        began = max(entry.at, self._planning_at or entry.at)
        if not entry.planned:
            began = max(began, stopped)
        planned = max(began, self._planned_at or began)
        ready = max(planned, stopped) if entry.planned else planned
        return {
            "wait_s": began - entry.at + ready - planned,
            "plan_s": planned - began,
            "transfer_s": at - ready,
        }

    def _append(self, change: Change) -> None:
        self._lines.append(asdict(change))


def _sum_bytes(reports: Iterable[ConfigureReport]) -> dict[str, int]:
    total = {"own": 0, "peer": 0, "snapshot": 0, "storage": 0}
    for report in reports:
        total["own"] += report.own_bytes
        total["peer"] += report.peer_bytes
        total["snapshot"] += report.snapshot_bytes
        total["storage"] += report.storage_bytes
    return total
