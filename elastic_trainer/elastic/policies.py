"""Judgements of the elastic core: budgets, what a change is worth, how often to snapshot."""

import math
from dataclasses import dataclass

from elastic_trainer.types import Plan

WORTH = 0.02  # share of the predicted step time that a voluntary change must save
SNAPSHOT_SHARE = 0.015  # of the time, at the interval that is chosen: under 2% with some room
FAILURES_APART_S = 600.0  # what the interval is chosen for: a bad day for a pipeline on spot nodes
MAX_SNAPSHOTS_UNDER_WAY = 2
SILENT_SEGMENTS = 2  # after so many without news of the snapshots before, another one is taken


@dataclass(kw_only=True)
class Budget:
    """How many disturbances of one kind are survived in a row.

    Args:
        limit: the most; -1 for any number.
        refill_updates: new updates after which they are forgotten.
    """

    limit: int
    refill_updates: int
    count: int = 0
    spent_at: int = 0  # highest update committed when the last one was counted

    @property
    def exhausted(self) -> bool:
        return 0 <= self.limit < self.count

    def spend(self, reached: int) -> None:
        """Count one.

        Args:
            reached: the highest update ever committed. Training updates again is no progress: a
                fault that comes back at the same place must not refill what it spends.
        """
        self.count += 1
        self.spent_at = reached

    def refill(self, reached: int) -> None:
        if self.count and reached - self.spent_at >= self.refill_updates:
            self.count = 0


def worth_it(old: Plan, new: Plan) -> tuple[bool, str]:
    """Whether a change that nobody needs pays, and why."""
    before, after = old.predicted.step_s, new.predicted.step_s
    figures = (
        f"a step of {after:.4g} s with {new.num_stages} stages, {before:.4g} s with "
        f"{old.num_stages}, is predicted"
    )
    if after < before * (1 - WORTH):
        return True, figures
    return False, f"{figures}: not {WORTH:.0%} faster"


class SnapshotPace:
    """Chooses the segments that end with a snapshot.

    What a snapshot costs is paid at each; what was trained since the last one is lost at a failure.
    The sum is least where `interval = sqrt(2 * cost * time between failures)` (J. W. Young, A first
    order approximation to the optimum checkpoint interval, CACM 17(9), 1974). Expensive ones are
    rarer than that, so that they stay below their share of the time.

    Args:
        every: segments between two; 0: as often as pays; -1: never.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._cost_s = 0.0
        self._update_s = 0.0
        self._updates_of: dict[int, int] = {}  # last update of a segment with snapshot -> updates
        self._under_way: list[int] = []
        self._segments: int | None = None  # since the last one; None: there was none
        self._updates = 0

    def restart(self) -> None:
        """A new generation: what was kept may be anywhere, so the next segment gets a snapshot."""
        self._under_way, self._updates_of = [], {}
        self._segments, self._updates = None, 0

    def choose(self, first: int, last: int) -> bool:
        """Whether the segment of these updates, about to be handed out, ends with a snapshot."""
        if self._every < 0:
            return False
        updates = last - first + 1
        self._updates += updates
        if self._segments is not None:
            self._segments += 1
            if not self._is_due(self._segments):
                return False
        self._segments, self._updates = 0, 0
        self._under_way = [*self._under_way, last][-MAX_SNAPSHOTS_UNDER_WAY:]
        self._updates_of = {u: self._updates_of.get(u, updates) for u in self._under_way}
        return True

    def _is_due(self, segments: int) -> bool:
        if segments <= SILENT_SEGMENTS and len(self._under_way) >= MAX_SNAPSHOTS_UNDER_WAY:
            return False
        if self._every:
            return segments >= self._every
        if self._update_s <= 0:  # no news of what one costs
            return segments > SILENT_SEGMENTS
        best_s = math.sqrt(2 * self._cost_s * FAILURES_APART_S)
        return self._updates * self._update_s >= max(best_s, self._cost_s / SNAPSHOT_SHARE)

    def stored(self, update: int, cost_s: float, segment_s: float) -> None:
        """A snapshot stands at two places."""
        updates = self._updates_of.get(update)
        self._under_way = [u for u in self._under_way if u > update]
        if updates is None or segment_s <= 0:
            return
        update_s = segment_s / updates
        known = self._update_s > 0
        self._cost_s = (self._cost_s + cost_s) / 2 if known else cost_s
        self._update_s = (self._update_s + update_s) / 2 if known else update_s
