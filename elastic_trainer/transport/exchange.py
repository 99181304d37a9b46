"""All of one worker's edges as one object, whatever channel serves each of them."""

from collections.abc import Mapping
from typing import Any

from elastic_trainer.errors import TransportError
from elastic_trainer.transport.channel import Channel, Message, Outgoing, Tag
from elastic_trainer.types import WorkerId


class Exchange:
    """Routes each peer's messages to the channel that was chosen for its edge.

    Args:
        channels: by name.
        choose: name of the channel for each peer; both ends of an edge must agree.
    """

    def __init__(self, channels: Mapping[str, Channel], choose: Mapping[WorkerId, str]) -> None:
        self._channels = dict(channels)
        self._choice: dict[WorkerId, str] = {}
        self.choose(choose)

    def choose(self, choose: Mapping[WorkerId, str]) -> None:
        """Replace the choice, for instance after a replan."""
        unknown = sorted(set(choose.values()) - set(self._channels))
        if unknown:
            raise TransportError(
                f"no channel {', '.join(unknown)} on this worker",
                f"it has {', '.join(self._channels)}",
            )
        self._choice = dict(choose)

    def addresses(self) -> dict[str, dict[str, Any]]:
        """What peers need to reach this worker, by channel."""
        return {name: channel.address() for name, channel in self._channels.items()}

    def connect(self, peer: WorkerId, addresses: Mapping[str, dict[str, Any]]) -> None:
        """Make `peer` reachable on the channel of its edge; `addresses` are its own."""
        edge = self._edge(peer)
        name = self._choice[peer]
        if name not in addresses:
            raise TransportError(f"{peer} has no channel {name}, which was chosen for its edge")
        edge.connect(peer, addresses[name])

    def disconnect(self, peer: WorkerId) -> None:
        self._edge(peer).disconnect(peer)

    def send(self, peer: WorkerId, tag: Tag, message: Outgoing) -> None:
        self._edge(peer).send(peer, tag, message)

    def recv(self, peer: WorkerId, tag: Tag, timeout_s: float) -> Message:
        return self._edge(peer).recv(peer, tag, timeout_s)

    def has(self, peer: WorkerId, tag: Tag) -> bool:
        return self._edge(peer).has(peer, tag)

    def advance(self, generation: int) -> None:
        for channel in self._channels.values():
            channel.advance(generation)

    def interrupt(self, error: Exception) -> None:
        for channel in self._channels.values():
            channel.interrupt(error)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    @property
    def bytes_sent(self) -> int:
        return sum(channel.bytes_sent for channel in self._channels.values())

    @property
    def bytes_received(self) -> int:
        return sum(channel.bytes_received for channel in self._channels.values())

    def _edge(self, peer: WorkerId) -> Channel:
        name = self._choice.get(peer)
        if name is None:
            raise TransportError(f"no channel was chosen for {peer}")
        return self._channels[name]
