"""Tensors as bytes and back: the half of the codec that needs torch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from elastic_trainer.errors import TransportError
from elastic_trainer.transport.channel import Message, Outgoing
from elastic_trainer.transport.codec import (
    DTYPES,
    Frame,
    Header,
    Shapes,
    array_bytes,
    cannot_travel,
    shapes_of_arrays,
)

TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in TYPES.items()}
# numpy has no such types: their bytes travel as integers of the same size
_STAND_INS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """What a header says of the tensors.

    Raises:
        TransportError: one of them cannot travel.
    """
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.dtype not in _NAMES:
            raise cannot_travel(f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
    return tuple([(_NAMES[tensor.dtype], tensor.shape) for tensor in tensors])


def as_message(message: Outgoing) -> Message:
    """The message with tensors, whatever it came with.

    Raises:
        TransportError: one of its arrays cannot travel.
    """
    if isinstance(message, Message):
        return message
    shapes_of_arrays(message)
    return Message([torch.from_numpy(array.copy()) for array in message.arrays], message.meta)


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
    return array_bytes(tensor.numpy(force=True))


def read_tensors(
    header: Header, frames: Sequence[Frame], device: torch.device | str
) -> list[Tensor]:
    """New tensors on `device` with the bytes of `frames`, which must be writable.

    The bytes are copied once more, although nobody else holds them: where ZeroMQ puts them is not
    aligned. Kernels may round differently on unaligned memory, and some crash (complex128 did).
    """
    if len(frames) != len(header.shapes):
        raise TransportError(
            f"{header.tag} from {header.sender} announces {len(header.shapes)} tensors and "
            f"brings {len(frames)}"
        )
    device, tensors = torch.device(device), []
    for (name, shape), frame in zip(header.shapes, frames, strict=True):
        dtype = TYPES[name]
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
