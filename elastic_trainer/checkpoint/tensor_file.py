"""Tensors to safetensors bytes without copying them, and back.

The safetensors library's own writer joins everything into one new byte string while it holds the
interpreter lock; a save in the background would stall training. So the header is made here and the
tensors' memory is handed out as it is. Reading is the library's.
"""

import json
from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> list[memoryview]:
    """The file as chunks of memory. The tensors must be on the host and stay unchanged."""
    # Widest elements first, then by name, as the format's own writer does: all stay aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    body: list[memoryview] = []
    offset = 0
    for name, tensor in ordered:
        chunk = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        offset += len(chunk)
        body.append(chunk)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    prefix = len(text).to_bytes(8, "little") + text
    return [memoryview(prefix), *(chunk for chunk in body if len(chunk))]


def decode(content: bytes) -> dict[str, Tensor]:
    """The tensors of a file, writable.

    Raises:
        ValueError: the bytes are not safetensors.
    """
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    return tensors
