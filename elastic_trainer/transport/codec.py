"""Messages as bytes: a header and the raw bytes of each tensor, never a pickle.

    header = fixed-size numbers | sender | kind | JSON [[dtype, shape], ...] | JSON meta or nothing

A reader trusts nothing it is told: names, counts and sizes are checked before memory is taken. The
shapes of a stage's messages recur, so both directions remember their JSON.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import Tensor

from elastic_trainer.errors import TransportError
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.types import WorkerId

VERSION = 1
# version, generation, step, microbatch, lengths of sender, kind and shapes
_NUMBERS = struct.Struct("<BqqqHBI")
# numpy has no such types: their bytes travel as integers of the same size
_STAND_INS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, *_STAND_INS),
        *(torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Frame = bytes | memoryview
Shapes = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


@dataclass(slots=True)
class Header:
    """Everything about a message but the bytes of its tensors."""

    sender: WorkerId
    tag: Tag
    shapes: Shapes
    meta: dict[str, Any]


def encode_header(sender: WorkerId, tag: Tag, message: Message) -> bytes:
    """The first frame of a message."""
    for tensor in message.tensors:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _NAMES:
            raise TransportError(
                f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device} cannot travel",
                f"dense tensors of {', '.join(_DTYPES)} can",
            )
    shapes = _encode_shapes(tuple([(tensor.dtype, tensor.shape) for tensor in message.tensors]))
    who, kind = sender.encode(), tag.kind.encode()
    try:
        meta = json.dumps(message.meta).encode() if message.meta else b""
        numbers = (tag.generation, tag.step, tag.microbatch, len(who), len(kind), len(shapes))
        return _NUMBERS.pack(VERSION, *numbers) + who + kind + shapes + meta
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
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        reason = f"{type(error).__name__}: {error}"[:120]
        raise TransportError(f"a message has a malformed header ({reason})") from error


@lru_cache(maxsize=512)
def _encode_shapes(shapes: Shapes) -> bytes:
    return json.dumps([(_NAMES[dtype], shape) for dtype, shape in shapes]).encode()


@lru_cache(maxsize=512)
def _decode_shapes(text: bytes) -> Shapes:
    shapes = []
    for name, dims in json.loads(text):
        if any(type(dim) is not int or dim < 0 for dim in dims):
            raise ValueError("a shape has a dimension that is no count")
        shapes.append((_DTYPES[name], tuple(dims)))
    return tuple(shapes)


def host_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order; a view where the tensor already lies so on the CPU."""
    if tensor.is_cuda:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor.detach(), non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        tensor = pinned
    stand_in = _STAND_INS.get(tensor.dtype)
    if stand_in is not None:
        tensor = tensor.detach().view(stand_in)
    array = numpy.ascontiguousarray(tensor.numpy(force=True))
    return array.data.cast("B") if array.size else memoryview(b"")


def read_tensors(header: Header, frames: Sequence[Frame], device: torch.device) -> list[Tensor]:
    """New tensors on `device` with the bytes of `frames`, which must be writable.

    The bytes are copied once more, although nobody else holds them: where ZeroMQ puts them is not
    aligned. Kernels may round differently on unaligned memory, and some crash (complex128 did).
    """
    if len(frames) != len(header.shapes):
        raise TransportError(
            f"{header.tag} from {header.sender} announces {len(header.shapes)} tensors and "
            f"brings {len(frames)}"
        )
    tensors = []
    for (dtype, shape), frame in zip(header.shapes, frames, strict=True):
        if math.prod(shape) * dtype.itemsize != len(frame):
            raise TransportError(
                f"{header.tag} from {header.sender} announces {dtype} of shape {shape} and "
                f"brings {len(frame)} bytes"
            )
        try:
            tensors.append(_place(frame, dtype, shape, device))
        except (RuntimeError, OverflowError, TypeError) as error:
            raise TransportError(
                f"{header.tag} from {header.sender} announces an impossible shape {shape}"[:200]
            ) from error
    return tensors


def _place(
    frame: Frame, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    on_gpu = device.type == "cuda"
    host = torch.empty(shape, dtype=dtype, pin_memory=on_gpu)
    if len(frame):
        host_bytes(host)[:] = frame
    return host.to(device, non_blocking=True) if on_gpu else host
