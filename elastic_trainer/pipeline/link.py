"""What the runtime needs of the transport: a whole exchange, or in tests a single channel."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.types import WorkerId

# Vector kernels may round differently on memory that is not aligned as torch's own.
_ALIGNMENT = 64


class Link(Protocol):
    """Sends to peers and receives from them; `transport.channel.Channel` has the promises."""

    def send(self, peer: WorkerId, tag: Tag, message: Message) -> None: ...

    def recv(self, peer: WorkerId, tag: Tag, timeout_s: float) -> Message: ...

    def has(self, peer: WorkerId, tag: Tag) -> bool: ...

    def interrupt(self, error: Exception) -> None: ...

    @property
    def bytes_sent(self) -> int: ...

    @property
    def bytes_received(self) -> int: ...


def without_gaps(grads: Sequence[Tensor | None]) -> Message:
    """Gradients as a message; those that are missing are named in its facts."""
    missing = [i for i, grad in enumerate(grads) if grad is None]
    found = [grad for grad in grads if grad is not None]
    return Message(found, {"missing": missing} if missing else {})


def with_gaps(message: Message) -> list[Tensor | None]:
    """The inverse of `without_gaps`."""
    grads: list[Tensor | None] = list(message.tensors)
    for index in message.meta.get("missing", ()):
        grads.insert(index, None)
    return grads


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy whose memory is aligned as torch aligns its own."""
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
