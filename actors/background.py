"""Calls that may take long, such as those of a remote storage, beside the coordinator's loop."""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from elastic_trainer.errors import CheckpointError

T = TypeVar("T")
_log = logging.getLogger(__name__)


class _Job:
    """What to do, and whom to tell."""

    def __init__(self, run: Callable[[], Callable[[], None]], failed: Callable[[str], None]):
        self.run = run
        self.failed = failed


class Background:
    """Does jobs one by one, in order, in a thread of its own.

    What comes of them is handed out by `deliver`, in the caller's thread, so that whoever waits for
    it needs no locks.

    Args:
        name: of the thread.
        limit_s: how long one job may take. After that it and all behind it count as failed.
    """

    def __init__(self, name: str, limit_s: float) -> None:
        self._name, self._limit_s = name, limit_s
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[_Job, Callable[[], None]]] = queue.SimpleQueue()
        self._open: deque[_Job] = deque()
        self._num_running = 0  # jobs, given up or not, that the thread still has before it
        self._since = 0.0  # when the first of them became the first
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether there are jobs whose outcome was not delivered yet."""
        return bool(self._open)

    def submit(
        self, job: Callable[[], T], then: Callable[[T], None], failed: Callable[[str], None]
    ) -> None:
        """Do `job` after all earlier ones.

        Args:
            job: what to do.
            then: called with the result.
            failed: called with the reason if there is none.
        """

        def run() -> Callable[[], None]:
            try:
                result = job()
            except (CheckpointError, OSError) as error:
                reason = str(error)
            except Exception as error:
                _log.exception("%s", self._name)
                reason = f"{type(error).__name__}: {error}"
            else:
                return lambda: then(result)
            return lambda: failed(reason)

        if not self._num_running:
            self._since = time.monotonic()
        self._num_running += 1
        self._open.append(_Job(run, failed))
        self._jobs.put(self._open[-1])
        if self._thread is None:
            # A daemon: a storage that hangs must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def deliver(self, timeout_s: float = 0.0) -> bool:
        """Hand out what has come; wait for the rest, `timeout_s` seconds at most.

        Returns:
            Whether everything is done.
        """
        deadline = time.monotonic() + timeout_s
        while self._num_running:
            latest = min(deadline, self._since + self._limit_s)
            try:
                job, tell = self._outcomes.get(timeout=max(0.0, latest - time.monotonic()))
            except queue.Empty:
                if time.monotonic() >= self._since + self._limit_s:
                    self._give_up()
                return not self._open
            self._num_running -= 1
            self._since = time.monotonic()
            if job in self._open:  # else it was given up before
                self._open.remove(job)
                tell()  # may submit another job
        return True

    def _give_up(self) -> None:
        """The storage hangs, and what is behind the first job would wait for ever."""
        silent_s = time.monotonic() - self._since
        while self._open:
            self._open.popleft().failed(f"the storage has not answered for {silent_s:.0f} s")

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            self._outcomes.put((job, job.run()))
