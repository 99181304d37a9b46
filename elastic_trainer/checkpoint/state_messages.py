"""A layer's state as a message: its tensors, and their names among the facts."""

from collections.abc import Mapping
from typing import Any

from elastic_trainer.checkpoint.copies import Found
from elastic_trainer.errors import TransportError
from elastic_trainer.transport.channel import Message


def encode_state(found: Found, more: Mapping[str, Any]) -> Message:
    """The message that brings this state, and `more` facts about it."""
    meta = {"keys": list(found.state), "facts": dict(found.facts), **more}
    return Message(list(found.state.values()), meta)


def decode_state(message: Message) -> Found:
    """The state that a message brings.

    Raises:
        TransportError: it brings something else.
    """
    keys, facts = message.meta.get("keys"), message.meta.get("facts")
    if not isinstance(keys, list) or not isinstance(facts, dict):
        raise TransportError("a message of state names no tensors")
    if len(keys) != len(message.tensors) or not all(isinstance(key, str) for key in keys):
        raise TransportError(f"a message of state names {len(keys)} tensors, and brings others")
    return Found(dict(zip(keys, message.tensors, strict=True)), facts)
