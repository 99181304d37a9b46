"""The loader's position behind every state from which training may go on."""

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_trainer.types import BatchInfo, Cursor

NUM_RECENT = 16  # commit points; workers hold live states of the last two or three


class Positions:
    """Remembers positions at commit points, and forgets those to which nothing leads back.

    Kept are those of the newest checkpoint, of checkpoints being written, of the newest complete
    snapshot and the one before, of all snapshots since, and of the newest commit points.

    Args:
        update: where the run starts.
        cursor: the position there.
    """

    def __init__(self, update: int, cursor: Cursor) -> None:
        self._cursors = {update: cursor}
        self._samples = {update: 0}  # read since the start, by update
        self._saved = update
        self._saving: set[int] = set()
        self._snapshots: list[int] = []

    def __contains__(self, update: int) -> bool:
        return update in self._cursors

    def at(self, update: int) -> Cursor:
        """The position behind the state after `update`."""
        return self._cursors[update]

    def samples_between(self, update: int, later: int) -> int:
        """How many samples lead from one state to a later one."""
        return max(0, self._samples.get(later, 0) - self._samples.get(update, 0))

    def note(self, batches: Sequence[BatchInfo], *, snapshot: bool = False) -> None:
        """The batches of a segment: training may go on behind the last one.

        Args:
            snapshot: copies of the state there are kept in memory.
        """
        if not batches:
            return
        before, last = batches[0].update - 1, batches[-1]
        self._cursors[last.update] = last.end
        read = sum(batch.num_samples for batch in batches)
        self._samples[last.update] = self._samples.get(before, 0) + read
        if snapshot:
            self._snapshots = [u for u in self._snapshots if u != last.update] + [last.update]
        self._forget()

    def rewind(self, update: int) -> None:
        """Training goes on from this state: what came after is void."""
        for later in [u for u in self._cursors if u > update and u not in self._saving]:
            del self._cursors[later]
        self._snapshots = [u for u in self._snapshots if u <= update]

    def saving(self, update: int) -> None:
        """A checkpoint of this state is being written."""
        self._saving.add(update)

    def not_saving(self, update: int) -> None:
        """It is complete, or came to nothing."""
        self._saving.discard(update)

    def saved(self, update: int) -> None:
        """This is the checkpoint to which training may go back."""
        self._saved = update
        self._forget()

    def stored(self, update: int) -> None:
        """A snapshot is complete. Workers keep the one before, too."""
        older = [u for u in self._snapshots if u < update]
        self._snapshots = [*older[-1:], *(u for u in self._snapshots if u >= update)]
        self._forget()

    def facts(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {
            "cursors": [
                [update, [c.epoch, c.row, c.offset, c.sample], self._samples.get(update, 0)]
                for update, c in self._cursors.items()
            ],
            "snapshots": list(self._snapshots),
        }

    def restore(self, facts: Mapping[str, Any], saved: int) -> None:
        """Take over what `facts` gave another process; checkpoints under way there are lost."""
        self._cursors = {
            update: Cursor(epoch=epoch, row=row, offset=offset, sample=sample)
            for update, (epoch, row, offset, sample), _ in facts["cursors"]
        }
        self._samples = {update: num_samples for update, _, num_samples in facts["cursors"]}
        self._snapshots = list(facts["snapshots"])
        self._saved = saved

    def _forget(self) -> None:
        recent = sorted(self._cursors)[-NUM_RECENT:]
        keep = {self._saved, *self._saving, *self._snapshots, *recent}
        self._cursors = {u: c for u, c in self._cursors.items() if u in keep}
        self._samples = {u: n for u, n in self._samples.items() if u in keep}
