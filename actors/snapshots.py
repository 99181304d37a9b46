"""Which snapshots in memory are complete: every layer's state stands at two places."""

from collections.abc import Callable, Sequence

from elastic_trainer.elastic import events as ev
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import Plan, StageReport, WorkerId


class Snapshots:
    """Puts together what the stages of a generation say of their copies.

    Args:
        report: takes facts.
    """

    def __init__(self, report: Callable[[ev.Event], None]) -> None:
        self.stored = -1  # the newest complete one
        self._report = report
        self._generation = 0
        self._newest: dict[WorkerId, int] = {}
        self._ordered: set[int] = set()
        # Seconds: stood still for it, spent beside the compute thread, of its segment.
        self._costs: dict[int, tuple[float, float, float]] = {}

    def begin(self, plan: Plan) -> None:
        """A generation begins: what was copied before counts no more."""
        self._generation = plan.generation
        self._newest = dict.fromkeys((stage.worker for stage in plan.stages), -1)
        self._ordered.clear()
        self._costs.clear()
        self.stored = -1

    def sent(self, segment: Segment) -> None:
        """A segment was handed out."""
        if segment.snapshot:
            self._ordered.add(segment.last_update)

    def reported(self, segment: Segment, reports: Sequence[StageReport]) -> None:
        """All stages have reported of a segment."""
        if segment.snapshot:
            cost_s = max(report.snapshot_s for report in reports)
            behind_s = max(report.behind_s for report in reports)
            wall_s = max(report.wall_s for report in reports)
            self._costs[segment.last_update] = cost_s, behind_s, wall_s
        for report in reports:
            self.told(report.worker, report.snapshot_update)
        self._check()

    def told(self, worker: WorkerId, update: int) -> None:
        """The newest of a worker's copies that stands at two places."""
        if update in self._ordered and update > self._newest.get(worker, update):
            self._newest[worker] = update
            self._check()

    def _check(self) -> None:
        complete = min(self._newest.values(), default=-1)
        if complete <= self.stored or complete not in self._costs:
            return  # nothing new, or the reports that say what it has cost are yet to come
        cost_s, behind_s, segment_s = self._costs[complete]
        self._costs = {u: cost for u, cost in self._costs.items() if u > complete}
        self._ordered = {u for u in self._ordered if u > complete}
        self.stored = complete
        self._report(
            ev.SnapshotStored(
                generation=self._generation,
                update=complete,
                cost_s=cost_s,
                behind_s=behind_s,
                segment_s=segment_s,
            )
        )
