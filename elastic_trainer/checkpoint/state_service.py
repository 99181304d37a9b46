"""State on its way between workers: fetches, and snapshots to a buddy.

One thread per worker owns the receiving side of a channel, so that a worker gives state away and
takes copies in whatever its compute thread does. Messages, all fenced by generation:

    Q  who needs a layer's state after an update asks
    A  the answer: its tensors, or why there is none
    S  one layer of a snapshot, for the buddy to keep
    K  the buddy holds all of a snapshot
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_trainer.checkpoint.copies import Copies, Found, LayerState
from elastic_trainer.checkpoint.layers import snapshot as host_copy
from elastic_trainer.checkpoint.state_messages import decode_state, encode_state
from elastic_trainer.errors import ElasticTrainerError, FencedError, StallError, TransportError
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.inbox import BufferedChannel
from elastic_trainer.types import LayerName, WorkerId

log = logging.getLogger(__name__)

_IDLE_S = 1.0  # how long the thread waits before it looks around
_BRIEFLY_S = 0.1
_MAX_ASKED = 4  # questions under way to one worker, which has so many answers in memory twice
_MOVERS = 2  # threads that move state: the service's, and its sockets', which copies as much
_MAX_PARKED = 1024  # questions of peers that are not known yet


@dataclass(frozen=True, slots=True)
class Fetched:
    """A layer's state from another worker; `is_copy`: not from its layers, but from a snapshot."""

    found: Found
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Live:
    """The state of this worker's own layers, at rest: nobody writes to it while it is offered."""

    update: int
    states: Mapping[LayerName, LayerState]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer of a snapshot that is yet to be sent."""

    generation: int
    buddy: WorkerId
    update: int
    layers: tuple[LayerName, ...]
    layer: LayerName
    found: Found


class StateService:
    """One worker's keeper of state. `enter` comes first.

    Args:
        worker: whose.
        channel: its own channel for state; the service is the only one to receive from it.
        timeout_s: longest wait for one layer's state.
    """

    def __init__(self, worker: WorkerId, channel: BufferedChannel, timeout_s: float) -> None:
        self.worker = worker
        self.copies = Copies()
        self._channel = channel
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # held while live state is read, so that it stays at rest
        self._changed = threading.Condition(self._lock)
        self._generation = 0
        self._peers: set[WorkerId] = set()
        self._live: Live | None = None
        self._buddy: WorkerId | None = None
        self._acknowledged = -1
        self._outbox: deque[_Part] = deque()
        self._parked: deque[tuple[WorkerId, Tag, Message]] = deque(maxlen=_MAX_PARKED)
        self._answers: dict[int, Fetched | ElasticTrainerError | None] = {}
        self._num_asked = 0
        self._error: Exception | None = None
        self._closed = False
        self._worked_s = self._told_s = 0.0  # processor time of the thread: in all, as told
        self._thread = threading.Thread(target=self._serve, name="state", daemon=True)
        self._thread.start()

    # Called by the worker.

    def enter(self, generation: int, peers: Mapping[WorkerId, Mapping[str, Any]]) -> None:
        """Enter `generation`, and be reachable for these peers only.

        Args:
            generation: of the membership; older messages, fetches and snapshots are over.
            peers: addresses of all other workers.
        """
        with self._changed:
            if generation > self._generation:
                self._outbox.clear()
                self._parked.clear()
                self.copies.forget_parts()
                self._buddy = None
                self._acknowledged = -1
                self._error = None
            self._channel.advance(generation)
            self._generation = generation
            for gone in self._peers - peers.keys():
                self._channel.disconnect(gone)
            for peer, address in peers.items():
                self._channel.connect(peer, dict(address))
            self._peers = set(peers)
            self._changed.notify_all()
        self._channel.wake()

    def offer(
        self, update: int, states: Mapping[LayerName, LayerState], facts: Mapping[str, Any]
    ) -> None:
        """Give away these layers' state after `update` on demand; nobody may write to it."""
        with self._lock:
            self._live = Live(update, states, facts)

    def withdraw(self) -> None:
        """Training goes on: what was offered will change. Returns once nobody reads it."""
        with self._lock:
            self._live = None

    def stock(self) -> dict[int, list[LayerName]]:
        """Which layers this worker can give away, by update."""
        with self._lock:
            stock = self.copies.stock()
            if self._live is not None:
                layers = [*stock.get(self._live.update, ()), *self._live.states]
                stock[self._live.update] = list(dict.fromkeys(layers))
            return stock

    def offered(self, update: int) -> Live | None:
        """What this worker offers of its own layers, if it is their state after `update`."""
        live = self._live
        return live if live is not None and live.update == update else None

    def live(self, update: int, layer: LayerName) -> Found | None:
        """What this worker offers of its own layer."""
        live = self.offered(update)
        if live is None or layer not in live.states:
            return None
        return Found(live.states[layer], live.facts)

    def fetch(self, update: int, sources: Mapping[LayerName, WorkerId]) -> dict[LayerName, Fetched]:
        """The state after `update` of these layers, from the workers that are said to hold it.

        Raises:
            StallError: nothing came for too long.
            FencedError: the generation ended meanwhile.
            TransportError: a worker does not hold what it was asked for.
        """
        with self._lock:
            generation = self._generation
        waiting: dict[WorkerId, deque[LayerName]] = {}
        for layer, source in sources.items():
            waiting.setdefault(source, deque()).append(layer)
        asked: dict[int, LayerName] = {}
        fetched: dict[LayerName, Fetched] = {}

        def ask_next(source: WorkerId) -> None:
            if layers := waiting[source]:
                layer = layers.popleft()
                number = self._ask(generation, update, layer, source)
                asked[number] = layer

        try:
            for source in list(waiting) * _MAX_ASKED:
                ask_next(source)
            while asked:
                number, answer = self._next_answer(generation, asked, sources)
                layer = asked.pop(number)
                fetched[layer] = answer
                ask_next(sources[layer])
        finally:
            with self._lock:
                self._answers.clear()
        return fetched

    def restored(self, update: int, buddy: WorkerId | None) -> None:
        """The run goes on from `update`, newer ones are abandoned; `buddy` keeps copies."""
        with self._lock:
            self.copies.forget_after(update)
            self._buddy = buddy

    def snapshot(
        self, update: int, states: Mapping[LayerName, LayerState], facts: Mapping[str, Any]
    ) -> tuple[float, float]:
        """Copy these states now, and send the copies to the buddy behind the caller's back.

        Returns:
            Seconds of copying, and of the processor behind that back since the snapshot before.
        """
        begin = time.monotonic()
        copied = {layer: host_copy(state) for layer, state in states.items()}
        with self._lock:
            self.copies.put(self.worker, update, copied, facts)
            self._outbox.clear()  # of an older snapshot; the buddy drops what it has of it
            if self._buddy is None:
                self._acknowledged = update
            else:
                layers = tuple(copied)
                self._outbox.extend(
                    _Part(self._generation, self._buddy, update, layers, layer, Found(state, facts))
                    for layer, state in copied.items()
                )
        self._channel.wake()
        behind_s, self._told_s = _MOVERS * (self._worked_s - self._told_s), self._worked_s
        return time.monotonic() - begin, behind_s

    @property
    def acknowledged(self) -> int:
        """The newest update whose snapshot the buddy holds whole; -1: none in this generation.

        Without a buddy, the newest that this worker holds itself.
        """
        return self._acknowledged

    def progress(self, generation: int, stored: int, committed: int) -> None:
        """Drop what nobody needs any more, if this is said of the present generation.

        Args:
            generation: of the membership.
            stored: every layer's state after it stands at two places.
            committed: all stages hold it, and none holds an older one.
        """
        # Who calls this must answer soon, and calls again: it does not wait for a large layer.
        if not self._lock.acquire(timeout=_BRIEFLY_S):
            return
        try:
            if generation != self._generation:
                return
            self.copies.forget_before(stored)
            if self._live is not None and self._live.update < committed:
                self._live = None  # of a worker without a stage: others withdrew it long ago
        finally:
            self._lock.release()

    def interrupt(self, error: Exception) -> None:
        """Let fetches end with `error` until the next generation; from any thread."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread and release the sockets; fetches that wait end."""
        with self._changed:
            self._closed = True
            self._error = TransportError(f"the state service of {self.worker} is closed")
            self._changed.notify_all()
        self._channel.wake()
        self._thread.join(self._timeout_s)
        self._channel.close()

    def _ask(self, generation: int, update: int, layer: LayerName, source: WorkerId) -> int:
        with self._lock:
            self._num_asked += 1
            number = self._num_asked
            self._answers[number] = None
        self._channel.send(
            source, Tag(generation, "Q", update, number), Message([], {"layer": layer})
        )
        return number

    def _next_answer(
        self, generation: int, asked: Mapping[int, LayerName], sources: Mapping[LayerName, WorkerId]
    ) -> tuple[int, Fetched]:
        """The first of the answers to these questions that is there; removes it."""
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while (left := deadline - time.monotonic()) > 0:
                for number, answer in self._answers.items():
                    if isinstance(answer, Fetched):
                        del self._answers[number]
                        return number, answer
                    if answer is not None:
                        raise answer
                if self._generation != generation:
                    raise FencedError(f"generation {generation} of {self.worker} is over")
                if self._error is not None:
                    raise self._error
                self._changed.wait(left)
        layer = next(iter(asked.values()))
        raise StallError(
            f"{self.worker} waited {self._timeout_s:.1f} s for the state of layer {layer!r} from "
            f"{sources[layer]}",
            f"see whether {sources[layer]} is alive; elastic.stall_limit_s sets the limit",
        )

    # On the thread of the service.

    def _serve(self) -> None:
        while not self._closed:
            generation, self._worked_s = self._generation, time.thread_time()
            try:
                arrived = self._channel.recv_any(0 if self._outbox else _IDLE_S)
            except TransportError as error:
                self._out_of_order(error, generation)
                continue
            try:
                if arrived is not None:
                    self._handle(*arrived)
                elif self._outbox:
                    self._send_part()
                self._retry_parked()
            except FencedError:
                pass  # a new generation began meanwhile: what was at hand is over
            except TransportError as error:
                log.warning("%s, state: %s", self.worker, error)

    def _out_of_order(self, error: TransportError, generation: int) -> None:
        """Nothing can be received any more before the next generation."""
        with self._changed:
            if self._closed or self._generation != generation:
                return
            if self._error is None:
                log.warning("%s, state: %s", self.worker, error)
            self.interrupt(error)
            self._changed.wait(_IDLE_S)

    def _handle(self, peer: WorkerId, tag: Tag, message: Message) -> None:
        if tag.kind == "Q":
            self._give(peer, tag, message)
        elif tag.kind == "A":
            self._take_answer(tag, message)
        elif tag.kind == "S":
            self._keep(peer, tag, message)
        elif tag.kind == "K":
            with self._lock:
                if tag.generation == self._generation and peer == self._buddy:
                    self._acknowledged = max(self._acknowledged, tag.step)

    def _give(self, peer: WorkerId, tag: Tag, message: Message) -> None:
        """Answer a question; live state stays at rest until it is copied into the socket."""
        layer = str(message.meta.get("layer"))
        to = Tag(tag.generation, "A", tag.step, tag.microbatch)
        with self._lock:
            if peer not in self._peers:
                self._parked.append((peer, tag, message))
                return
            if (live := self.live(tag.step, layer)) is not None:
                self._channel.send(peer, to, encode_state(live, {"is_copy": False}))
                return
        if (copy := self.copies.find(tag.step, layer)) is not None:
            self._channel.send(peer, to, encode_state(copy, {"is_copy": True}))
            return
        problem = f"{self.worker} does not hold layer {layer!r} after update {tag.step}"
        self._channel.send(peer, to, Message([], {"problem": problem}))

    def _take_answer(self, tag: Tag, message: Message) -> None:
        answer: Fetched | ElasticTrainerError
        if "problem" in message.meta:
            answer = TransportError(str(message.meta["problem"]))
        else:
            answer = Fetched(decode_state(message), bool(message.meta.get("is_copy")))
        with self._changed:
            if tag.generation == self._generation and tag.microbatch in self._answers:
                self._answers[tag.microbatch] = answer
                self._changed.notify_all()

    def _keep(self, peer: WorkerId, tag: Tag, message: Message) -> None:
        layers, layer = message.meta.get("layers"), message.meta.get("layer")
        if not isinstance(layers, list) or layer not in layers:
            raise TransportError(f"{peer} sent a snapshot of layer {layer!r} of {layers!r}")
        with self._lock:
            if tag.generation != self._generation:
                return
            if self.copies.add(peer, tag.step, layers, str(layer), decode_state(message)):
                self._channel.send(peer, Tag(tag.generation, "K", tag.step, 0), Message([]))

    def _send_part(self) -> None:
        with self._lock:
            if not self._outbox:
                return
            part = self._outbox.popleft()
        facts = {"layers": list(part.layers), "layer": part.layer}
        tag = Tag(part.generation, "S", part.update, part.layers.index(part.layer))
        self._channel.send(part.buddy, tag, encode_state(part.found, facts))

    def _retry_parked(self) -> None:
        with self._lock:
            waiting = [parked for parked in self._parked if parked[0] in self._peers]
            if not waiting:
                return
            others = [parked for parked in self._parked if parked[0] not in self._peers]
            self._parked = deque(others, maxlen=_MAX_PARKED)
        for peer, tag, message in waiting:
            self._handle(peer, tag, message)
