"""The end of a process that nobody asks for anything any more.

A worker that was cut off from its coordinator, or has outlived it, must not keep its device for
ever. Nobody can tell it so: that nobody calls is all that it can notice.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

_log = logging.getLogger(__name__)
_LOOKS_PER_LIMIT = 20


class Watchdog:
    """Calls `leave` once nobody has been heard for `limit_s` seconds.

    Args:
        limit_s: how long silence may last.
        leave: ends the process; called once, in the watching thread.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        limit_s: float,
        leave: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s = limit_s
        self._leave = leave
        self._clock = clock
        self._heard_at = clock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch in a thread of its own until `stop`."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def heard(self) -> None:
        """Somebody has called."""
        self._heard_at = self._clock()

    def look(self) -> bool:
        """Leave if it is time to; says whether it was."""
        silent_s = self._clock() - self._heard_at
        if silent_s <= self._limit_s:
            return False
        _log.error("nobody has called for %.0f s: this worker ends", silent_s)
        self._leave()
        return True

    def _watch(self) -> None:
        while not self._stopped.wait(self._limit_s / _LOOKS_PER_LIMIT):
            if self.look():
                return


def leave(tidy: Callable[[], None], limit_s: float) -> None:
    """End this process at once, after `limit_s` seconds for what can be tidied up."""
    # Not by an exception: the threads that work may hang, and Ray would wait for them.
    tidying = threading.Thread(target=tidy, name="tidying", daemon=True)
    tidying.start()
    tidying.join(limit_s)
    os._exit(1)
