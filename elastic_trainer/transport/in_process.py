"""Channels between threads of one process, for tests: the same promises, and faults on demand."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_trainer.errors import TransportError
from elastic_trainer.transport import codec, tensors
from elastic_trainer.transport.channel import Message, Outgoing, Tag
from elastic_trainer.transport.inbox import BufferedChannel
from elastic_trainer.types import WorkerId


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one message on its way."""

    drop: bool = False
    delay_s: float = 0.0


NO_FAULT = Fault()
FaultRule = Callable[[WorkerId, WorkerId, Tag], Fault]


class InProcessNetwork:
    """The workers that can reach each other.

    Args:
        fault: asked for each message (sender, receiver, tag) what happens to it; None: nothing.
    """

    def __init__(self, fault: FaultRule | None = None) -> None:
        self.fault: FaultRule = fault or (lambda sender, receiver, tag: NO_FAULT)
        self.num_dropped = 0
        self._channels: dict[WorkerId, InProcessChannel] = {}
        self._lock = threading.Lock()

    def channel(self, worker: WorkerId) -> "InProcessChannel":
        """A new channel for `worker`; a later one takes its place."""
        with self._lock:
            self._channels[worker] = InProcessChannel(self, worker)
            return self._channels[worker]

    def remove(self, channel: "InProcessChannel") -> None:
        """Deliver nothing to this channel any more."""
        with self._lock:
            if self._channels.get(channel.worker) is channel:
                del self._channels[channel.worker]

    def deliver(self, sender: WorkerId, receiver: WorkerId, tag: Tag, message: Message) -> None:
        """Hand the message to the receiver's channel as the fault rule wants it."""
        fault = self.fault(sender, receiver, tag)
        with self._lock:
            channel = self._channels.get(receiver)
            if fault.drop or channel is None:
                self.num_dropped += 1
                return
        channel.arrive(sender, tag, message, fault.delay_s)


class InProcessChannel(BufferedChannel):
    """One worker's end of an `InProcessNetwork`. Every worker of the network is connected."""

    def __init__(self, network: InProcessNetwork, worker: WorkerId) -> None:
        super().__init__(worker)
        self._network = network
        self._late: list[tuple[float, int, WorkerId, Tag, Message]] = []
        self._ids = itertools.count()

    def address(self) -> dict[str, Any]:
        return {"channel": "in_process", "worker": self.worker}

    def connect(self, peer: WorkerId, address: dict[str, Any]) -> None:
        if address != {"channel": "in_process", "worker": peer}:
            raise TransportError(f"not an in-process address of {peer}: {address}")

    def disconnect(self, peer: WorkerId) -> None:
        self._inbox.forget(peer)

    def send(self, peer: WorkerId, tag: Tag, message: Outgoing) -> None:
        self._inbox.check(tag, f"send to {peer}")
        # Through bytes as on a real wire, so that a test sees what would not travel.
        first, *rest = codec.encode(self.worker, tag, message)
        header = codec.decode_header(bytes(first))
        frames = [memoryview(bytearray(frame)) for frame in rest]
        copies = tensors.read_tensors(header, frames, "cpu")
        self._bytes_sent += sum(map(len, frames))
        self._network.deliver(self.worker, peer, tag, Message(copies, header.meta))

    def arrive(self, sender: WorkerId, tag: Tag, message: Message, delay_s: float) -> None:
        """Called by the network, on the sender's thread."""
        with self._inbox.lock:
            self._bytes_received += sum(tensor.nbytes for tensor in message.tensors)
            if delay_s == 0:
                self._inbox.put(sender, tag, message)
                return
            due = time.monotonic() + delay_s
            heapq.heappush(self._late, (due, next(self._ids), sender, tag, message))
            self._inbox.touch()

    def _pump(self, seen: int, timeout_s: float) -> None:
        with self._inbox.lock:
            if self._late:
                timeout_s = min(timeout_s, self._late[0][0] - time.monotonic())
        self._inbox.wait(seen, timeout_s)
        with self._inbox.lock:
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, sender, tag, message = heapq.heappop(self._late)
                self._inbox.put(sender, tag, message)

    def close(self) -> None:
        self._network.remove(self)
        self._shut()
