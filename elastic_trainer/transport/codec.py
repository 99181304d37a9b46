"""Messages as bytes: a header and the raw bytes of each tensor, never a pickle.

    header = fixed-size numbers | sender | kind | JSON [[dtype, shape], ...] | JSON meta or nothing

A reader trusts nothing it is told: names, counts and sizes are checked before memory is taken. The
shapes of a stage's messages recur, so both directions remember their JSON.
"""

import json
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from elastic_trainer.errors import TransportError
from elastic_trainer.transport.channel import Arrays, Outgoing, Tag
from elastic_trainer.types import WorkerId

VERSION = 1
# version, generation, step, microbatch, lengths of sender, kind and shapes
_NUMBERS = struct.Struct("<BqqqHBI")
# torch calls them so, and numpy those that it has
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
_KNOWN = frozenset(DTYPES)

Frame = bytes | memoryview
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(slots=True)
class Header:
    """Everything about a message but the bytes of its tensors."""

    sender: WorkerId
    tag: Tag
    shapes: Shapes
    meta: dict[str, Any]


def encode(sender: WorkerId, tag: Tag, message: Outgoing) -> list[Frame]:
    """The frames of a message: its header, then the bytes of each tensor or array.

    Raises:
        TransportError: something in it cannot travel.
    """
    if isinstance(message, Arrays):
        shapes = shapes_of_arrays(message)
        frames = [array_bytes(array) for array in message.arrays]
    else:
        from elastic_trainer.transport import tensors  # whoever has tensors has loaded torch

        shapes = tensors.shapes_of(message.tensors)
        frames = [tensors.host_bytes(tensor) for tensor in message.tensors]
    return [encode_header(sender, tag, shapes, message.meta), *frames]


def shapes_of_arrays(message: Arrays) -> Shapes:
    """What a header says of the arrays.

    Raises:
        TransportError: one of them is of a type that tensors do not have.
    """
    for array in message.arrays:
        if array.dtype.name not in _KNOWN or not array.dtype.isnative:
            raise cannot_travel(f"an array of {array.dtype}")
    return tuple([(array.dtype.name, array.shape) for array in message.arrays])


def cannot_travel(what: str) -> TransportError:
    """For tensors and arrays of kinds that the receiver could not make."""
    return TransportError(f"{what} cannot travel", f"dense ones of {', '.join(DTYPES)} can")


def array_bytes(array: "np.ndarray[Any, Any]") -> memoryview:
    """The array's bytes in row-major order; a view where it already lies so."""
    array = np.ascontiguousarray(array)
    return array.data.cast("B") if array.size else memoryview(b"")


def encode_header(sender: WorkerId, tag: Tag, shapes: Shapes, meta: dict[str, Any]) -> bytes:
    """The first frame of a message."""
    text, who, kind = _encode_shapes(shapes), sender.encode(), tag.kind.encode()
    try:
        facts = json.dumps(meta).encode() if meta else b""
        numbers = (tag.generation, tag.step, tag.microbatch, len(who), len(kind), len(text))
        return _NUMBERS.pack(VERSION, *numbers) + who + kind + text + facts
    except (TypeError, ValueError, struct.error) as error:
        raise TransportError(f"the facts of {tag} cannot travel: {error}") from error


def decode_header(frame: bytes) -> Header:
    """What `encode_header` wrote, checked."""
    try:
        version, generation, step, microbatch, *lengths = _NUMBERS.unpack_from(frame)
        if version != VERSION:
            raise ValueError(f"version {version} instead of {VERSION}")
        who = _NUMBERS.size + lengths[0]
        kind = who + lengths[1]
        shapes = kind + lengths[2]
        if shapes > len(frame):
            raise ValueError("cut short")
        tag = Tag(generation, frame[who:kind].decode(), step, microbatch)
        meta = json.loads(frame[shapes:]) if len(frame) > shapes else {}
        if type(meta) is not dict:
            raise ValueError("its facts are no object")
        sender = frame[_NUMBERS.size : who].decode()
        return Header(sender, tag, _decode_shapes(frame[kind:shapes]), meta)
    except (ValueError, TypeError, RecursionError, struct.error) as error:
        reason = f"{type(error).__name__}: {error}"[:120]
        raise TransportError(f"a message has a malformed header ({reason})") from error


@lru_cache(maxsize=512)
def _encode_shapes(shapes: Shapes) -> bytes:
    return json.dumps(shapes).encode()


@lru_cache(maxsize=512)
def _decode_shapes(text: bytes) -> Shapes:
    shapes = []
    for name, dims in json.loads(text):
        if name not in _KNOWN:
            raise ValueError(f"there is no type {name}")
        if any(type(dim) is not int or dim < 0 for dim in dims):
            raise ValueError("a shape has a dimension that is no count")
        shapes.append((name, tuple(dims)))
    return tuple(shapes)
