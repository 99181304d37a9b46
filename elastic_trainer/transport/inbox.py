"""Messages that have arrived, fenced by generation, and the waiting loop that channels share."""

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable

from elastic_trainer.errors import FencedError, StallError, TransportError
from elastic_trainer.transport.channel import Channel, Message, Tag
from elastic_trainer.types import WorkerId


class Inbox:
    """Buffer of one worker. Thread-safe; `version` grows with every change."""

    def __init__(self, worker: WorkerId) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = 0
        self.num_dropped = 0
        self._num_waiting = 0
        self._worker = worker
        self._messages: dict[tuple[WorkerId, Tag], deque[Message]] = {}
        self.generation = 0
        self._error: Exception | None = None
        self._is_closed = False

    def put(self, peer: WorkerId, tag: Tag, message: Message) -> None:
        """Keep the message, unless its generation is over."""
        with self.lock:
            if tag.generation < self.generation:
                self.num_dropped += 1
                return
            self._messages.setdefault((peer, tag), deque()).append(message)
            self.version += 1
            if self._num_waiting:
                self.changed.notify_all()

    def take(self, peer: WorkerId, tag: Tag) -> Message | None:
        """The oldest message with this tag, None if there is none yet."""
        with self.lock:
            self.check(tag, f"receive from {peer}")
            messages = self._messages.get((peer, tag))
            if messages is None:
                return None
            message = messages.popleft()
            if not messages:
                del self._messages[peer, tag]
            return message

    def has(self, peer: WorkerId, tag: Tag) -> bool:
        """Whether `take` would find a message."""
        with self.lock:
            self.check(tag, f"receive from {peer}")
            return (peer, tag) in self._messages

    def take_any(self) -> tuple[WorkerId, Tag, Message] | None:
        """The message of this generation that has waited longest, whoever sent it."""
        with self.lock:
            if self._error is not None:
                raise self._error
            for (peer, tag), messages in self._messages.items():
                if tag.generation == self.generation:
                    message = messages.popleft()
                    if not messages:
                        del self._messages[peer, tag]
                    return peer, tag, message
            return None

    def check(self, tag: Tag, verb: str) -> None:
        """Raise if this tag must not be used any more, or the channel was interrupted."""
        if tag.generation < self.generation:
            raise FencedError(
                f"{self._worker} may not {verb}: {tag} is over, generation is {self.generation}"
            )
        if self._error is not None:
            raise self._error

    def advance(self, generation: int) -> None:
        with self.lock:
            if generation < self.generation:
                raise FencedError(
                    f"{self._worker} cannot return to generation {generation} "
                    f"from generation {self.generation}"
                )
            if generation == self.generation:
                return
            self.generation = generation
            if not self._is_closed:
                self._error = None
            self._drop(lambda _, tag: tag.generation < generation)
            self.touch()

    def forget(self, peer: WorkerId) -> None:
        """Drop what this peer sent."""
        with self.lock:
            self._drop(lambda sender, _: sender == peer)

    def interrupt(self, error: Exception, generation: int | None = None) -> None:
        """Let waiting threads raise; `generation`: only if that one is not over."""
        with self.lock:
            is_over = generation is not None and generation < self.generation
            if self._error is None and not is_over:
                self._error = error
                self.touch()

    def close(self, error: Exception) -> None:
        """Interrupt for good."""
        with self.lock:
            self._is_closed = True
            self._error = error
            self.touch()

    def wait(self, seen: int, timeout_s: float) -> None:
        """Return once `version` differs from `seen`, at the latest after `timeout_s`."""
        with self.lock:
            self._num_waiting += 1
            try:
                self.changed.wait_for(lambda: self.version != seen, timeout_s)
            finally:
                self._num_waiting -= 1

    def _drop(self, is_over: Callable[[WorkerId, Tag], bool]) -> None:
        over = [key for key in self._messages if is_over(*key)]
        self.num_dropped += sum(len(self._messages.pop(key)) for key in over)

    def touch(self) -> None:
        """Let waiting threads look again."""
        with self.lock:
            self.version += 1
            self.changed.notify_all()


class BufferedChannel(Channel):
    """A channel whose arrivals pass through an inbox: waiting, fencing and counting."""

    def __init__(self, worker: WorkerId) -> None:
        self.worker = worker
        self._inbox = Inbox(worker)
        self._bytes_sent = 0
        self._bytes_received = 0

    @abstractmethod
    def _pump(self, seen: int, timeout_s: float) -> None:
        """Wait until something may have arrived since the inbox's version was `seen`, and put it
        there; return at the latest after `timeout_s`, and at once when woken.
        """

    def _wake(self) -> None:  # noqa: B027
        """Make a running `_pump` return; only channels that do not wait on the inbox need it."""

    def recv(self, peer: WorkerId, tag: Tag, timeout_s: float) -> Message:
        start = time.monotonic()
        while True:
            seen = self._inbox.version
            message = self._inbox.take(peer, tag)
            if message is not None:
                return message
            waited = time.monotonic() - start
            if waited >= timeout_s:
                raise StallError(
                    f"{self.worker} waited {waited:.1f} s for {tag} from {peer}",
                    f"see whether {peer} is alive and what it waits for; "
                    "elastic.stall_limit_s sets the limit",
                )
            self._pump(seen, timeout_s - waited)

    def has(self, peer: WorkerId, tag: Tag) -> bool:
        if not self._inbox.has(peer, tag):
            self._pump(self._inbox.version, 0.0)
        return self._inbox.has(peer, tag)

    def recv_any(self, timeout_s: float) -> tuple[WorkerId, Tag, Message] | None:
        """The next message of this generation, whoever sent it; for servers, instead of `recv`.

        Returns:
            None after `timeout_s`, or earlier if `wake` was called.

        Raises:
            TransportError: a peer sent what is no message; or whatever `interrupt` was given.
        """
        seen = self._inbox.version
        found = self._inbox.take_any()
        if found is None:
            self._pump(seen, timeout_s)
            found = self._inbox.take_any()
        return found

    def wake(self) -> None:
        """Let a waiting `recv_any` return; from any thread."""
        self._inbox.touch()
        self._wake()

    def advance(self, generation: int) -> None:
        self._inbox.advance(generation)
        self._wake()

    def interrupt(self, error: Exception) -> None:
        self._inbox.interrupt(error)
        self._wake()

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        return self._bytes_received

    @property
    def num_dropped(self) -> int:
        """Messages of older generations, or of forgotten peers, that were dropped."""
        return self._inbox.num_dropped

    def _shut(self) -> None:
        self._inbox.close(TransportError(f"the channel of {self.worker} is closed"))
        self._wake()
