"""Pictures: from the bytes of a file to patches of any number of rows and columns.

A picture keeps its proportions. It is scaled to a whole number of *cells* of two by two patches, so
that four neighbours can become one token of the language model.
"""

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import DataError

CELL = 2  # patches along the side of a cell
_HINT = "Remove it, or set data.on_error=skip"
_PROGRAMS = ("EPS",)  # Pillow would have Ghostscript run what the file says
_WHITE = (255, 255, 255)
_REDUCTIONS = (2, 4, 8)  # with which JPEG files can be decoded
_SHRINK_GAP = 2.0  # large pictures are averaged down to twice the size first, which is faster


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLimits:
    """How large patches are, how many a picture has at the most, what is decoded at all."""

    patch_size: int = 16
    max_patches: int = 256
    max_pixels: int = 4_000_000


def patch_rows_columns(width: int, height: int, limits: ImageLimits) -> tuple[int, int]:
    """Rows and columns of patches, both even, that a picture of so many pixels becomes.

    A picture on its side has as many as one that stands.
    """
    side = CELL * limits.patch_size
    most = limits.max_patches // CELL**2
    scale = min(1.0, math.sqrt(most * side * side / (max(1, width) * max(1, height))))
    short, long = sorted(max(1, round(length * scale / side)) for length in (width, height))
    if short * long > most:
        short, long = sorted((short, max(1, most // short)))
    rows, columns = (short, long) if width >= height else (long, short)
    return CELL * rows, CELL * columns


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height that the head of the file tells."""
    with _opened(data) as picture:
        width, height = picture.size
    return int(width), int(height)


def decode_image(data: bytes, limits: ImageLimits) -> NDArray[np.uint8]:
    """A picture as RGB of shape (height, width, 3), scaled to whole cells.

    The first frame of an animated picture; what is transparent becomes white; a picture that its
    camera held on its side is turned upright.

    Raises:
        DataError: what is wrong with it; the caller says where it stands.
    """
    with _opened(data) as picture:
        width, height = picture.size
        _check_size(picture, limits)
        try:
            rgb = _to_rgb(picture)
        except Exception as error:  # each format has its own errors
            raise _damaged(error) from error
        # Of the size that the head tells, as without decoding, not of a reduced JPEG's.
        rows, columns = patch_rows_columns(width, height, limits)
        if (rgb.width - rgb.height) * (width - height) < 0:  # it was turned upright
            rows, columns = columns, rows
        from PIL.Image import Resampling

        size = (columns * limits.patch_size, rows * limits.patch_size)
        scaled = rgb.resize(size, Resampling.BILINEAR, reducing_gap=_SHRINK_GAP)
        return np.asarray(scaled, dtype=np.uint8)


def patchify(
    picture: NDArray[np.uint8], patch_size: int
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Patches as rows of numbers, and row and column of each; the four of a cell are neighbours."""
    side = CELL * patch_size
    rows, columns = picture.shape[0] // side, picture.shape[1] // side
    cut = picture.reshape(rows, CELL, patch_size, columns, CELL, patch_size, 3)
    patches = cut.transpose(0, 3, 1, 4, 2, 5, 6).reshape(-1, 3 * patch_size**2)
    row, column = np.indices((rows * CELL, columns * CELL))
    grid = np.stack([row, column], axis=-1).reshape(rows, CELL, columns, CELL, 2)
    return patches, grid.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int64)


def _opened(data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    if not data:
        raise DataError("the picture is empty: 0 bytes", _HINT)
    try:
        picture = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        start = data[:8].hex(" ")
        raise DataError(
            f"the picture is of no format that Pillow knows ({len(data)} bytes that begin {start})",
            _HINT,
        ) from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"the picture is too large to be opened: {error}", _HINT) from error
    except Exception as error:  # each format has its own errors
        raise _damaged(error) from error
    if picture.format in _PROGRAMS:
        raise DataError(f"the picture is a program ({picture.format}), which is not run", _HINT)
    return picture


def _check_size(picture: Any, limits: ImageLimits) -> None:
    """Refuse a picture before it takes memory; ask for a smaller decoding where there is one."""
    width, height = picture.size
    if width * height <= limits.max_pixels:
        return
    # All coefficients of a progressive file are in memory at once, whatever the reduction.
    if picture.format == "JPEG" and not picture.info.get("progressive"):
        for step in _REDUCTIONS:
            if -(-width // step) * -(-height // step) <= limits.max_pixels:
                picture.draft(None, (width // step, height // step))
                return
    raise DataError(
        f"the picture has {width} x {height} pixels ({width * height / 1e6:.0f} megapixels), more "
        f"than {limits.max_pixels / 1e6:g} million",
        "Scale it down, raise data.max_image_pixels, or set data.on_error=skip",
    )


def _to_rgb(picture: Any) -> Any:
    from PIL import Image, ImageOps

    picture.seek(0)
    picture.load()
    mode = picture.mode
    if mode.startswith("I"):  # 16 bits per pixel, some of it in 32
        high = np.clip(np.asarray(picture).astype(np.int64), 0, 0xFFFF) >> 8
        picture = Image.fromarray(high.astype(np.uint8))
    ImageOps.exif_transpose(picture, in_place=True)
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        rgba = picture.convert("RGBA")
        # The same as alpha_composite, which would let no other thread work meanwhile.
        picture = Image.new("RGB", rgba.size, _WHITE)
        picture.paste(rgba, mask=rgba)
    return picture.convert("RGB")


def _damaged(error: Exception) -> DataError:
    return DataError(f"the picture is damaged or cut short: {error}", _HINT)
