"""The seam between the pipeline and whatever carries its tensors from worker to worker.

A message is addressed by (peer, tag). Both sides know from the schedule which tags to expect, so a
receiver asks for one tag and messages that arrive early wait in a buffer. Every tag carries the
generation of the membership: what belongs to an older one is refused on sending, dropped on arrival
and dropped from the buffer, so that nothing sent before a failure can reach the replay.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from elastic_trainer.types import WorkerId

if TYPE_CHECKING:  # who only sends arrays does without torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tag:
    """What a message is. `kind`: F activation, B gradient, G tied gradient, W tied weight,
    N norms, D training data, E evaluation data.
    """

    generation: int
    kind: str
    step: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of step {self.step}, generation {self.generation}"


@dataclass(slots=True)
class Message:
    """Tensors of any number, dtype and shape, and facts about them that fit into JSON."""

    tensors: "list[Tensor]"
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Arrays:
    """A message of numpy arrays; it arrives as a `Message` of tensors."""

    arrays: "list[np.ndarray[Any, Any]]"
    meta: dict[str, Any] = field(default_factory=dict)


Outgoing = Message | Arrays


class Channel(ABC):
    """Carries messages between one worker and its peers.

    `send`, `recv` and `has` belong to one compute thread; any thread may call the other methods.
    """

    @abstractmethod
    def address(self) -> dict[str, Any]:
        """What a peer needs to reach this channel. JSON-able; a secret: hand it to peers only."""

    @abstractmethod
    def connect(self, peer: WorkerId, address: dict[str, Any]) -> None:
        """Make `peer` reachable, and let it reach this channel. Never waits for the peer.

        Connecting again to the same address keeps the connection; to another one replaces it.
        """

    @abstractmethod
    def disconnect(self, peer: WorkerId) -> None:
        """Forget `peer` and what it sent; it cannot connect again until `connect` allows it."""

    @abstractmethod
    def send(self, peer: WorkerId, tag: Tag, message: Outgoing) -> None:
        """Take a copy of the message and pass it on; never waits for the peer.

        Its tensors or arrays may be changed as soon as this returns.

        Raises:
            FencedError: the tag belongs to an older generation than this channel.
            TransportError: no such peer, the message cannot travel, or what `interrupt` was given.
        """

    @abstractmethod
    def recv(self, peer: WorkerId, tag: Tag, timeout_s: float) -> Message:
        """The message that `peer` sent with `tag`: contiguous, writable tensors without history.

        Messages with an equal tag come in the order in which they were sent.

        Raises:
            StallError: it did not come within `timeout_s`.
            FencedError: the tag belongs to an older generation than this channel.
            TransportError: a peer sent what is no message; or whatever `interrupt` was given.
        """

    @abstractmethod
    def has(self, peer: WorkerId, tag: Tag) -> bool:
        """Whether the message is known to be there; what has just arrived may be seen a call later.

        Raises:
            FencedError: the tag belongs to an older generation than this channel.
            TransportError: a peer sent what is no message; or whatever `interrupt` was given.
        """

    @abstractmethod
    def advance(self, generation: int) -> None:
        """Enter `generation`: drop what belongs to older ones and forget the last interruption."""

    @abstractmethod
    def interrupt(self, error: Exception) -> None:
        """Make a waiting `recv`, and every later `send` and `recv`, raise `error` until `advance`
        enters a new generation. The first error stays.
        """

    @property
    @abstractmethod
    def bytes_sent(self) -> int:
        """Bytes of all tensors sent so far."""

    @property
    @abstractmethod
    def bytes_received(self) -> int:
        """Bytes of all tensors that have arrived so far."""

    @abstractmethod
    def close(self) -> None:
        """Release sockets, threads and files; a waiting `recv` raises. Twice is harmless."""
