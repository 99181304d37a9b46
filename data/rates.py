"""Which rates packing goes by, from which update on."""

import threading
from collections import deque

from elastic_trainer.planner.sample_costs import Rates


def effective_from(update: int, prefetch_updates: int) -> int:
    """The first update for which rates can count that become known before `update` is read."""
    # Of the updates from this one on, a `Prefetcher` holds `prefetch_updates` batches, and has one
    # more in hand that waits for room. It makes the next once `update` has been taken, not before.
    return update + prefetch_updates + 1


class RateTable:
    """Rates by update, told by one thread and asked for by another.

    All loaders are told the same before they read the same update, so they pack alike however far
    ahead each of them is.

    Args:
        rates: of the first updates.
    """

    def __init__(self, rates: Rates) -> None:
        self._lock = threading.Lock()
        self._entries = deque([(0, rates)])
        self._newest = 0  # update that was asked for

    def announce(self, first_update: int, rates: Rates) -> None:
        """From `first_update` on, which nobody has asked for yet, these rates count."""
        with self._lock:
            assert first_update > self._newest, "it is packed by other rates already"
            self._entries.append((first_update, rates))

    def at(self, update: int) -> Rates:
        """The rates of an update; updates are asked for in order."""
        with self._lock:
            self._newest = update
            while len(self._entries) > 1 and self._entries[1][0] <= update:
                self._entries.popleft()
            return self._entries[0][1]
