"""Pictures of all kinds become patches; those that cannot are named."""

import io
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from elastic_trainer.data.media.images import (
    ImageLimits,
    decode_image,
    image_size,
    patch_rows_columns,
    patchify,
)
from elastic_trainer.errors import DataError

LIMITS = ImageLimits(patch_size=4, max_patches=64, max_pixels=10_000)


def saved(picture: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def plain(mode: str, color: Any, size: tuple[int, int] = (16, 16)) -> Image.Image:
    return Image.new(mode, size, color)


def center(data: bytes) -> list[int]:
    decoded = decode_image(data, LIMITS)
    return [int(value) for value in decoded[decoded.shape[0] // 2, decoded.shape[1] // 2]]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 10**5), st.integers(1, 10**5), st.integers(4, 500))
def test_grids_are_even_bounded_and_keep_proportions(width: int, height: int, most: int) -> None:
    limits = ImageLimits(patch_size=16, max_patches=most)
    rows, columns = patch_rows_columns(width, height, limits)
    assert rows >= 2 and columns >= 2 and rows % 2 == columns % 2 == 0
    assert rows * columns <= most
    assert patch_rows_columns(height, width, limits) == (columns, rows) or width == height
    assert width == height or (rows <= columns) == (width > height) or rows == columns


@pytest.mark.parametrize(
    "size, grid", [((1, 1), (2, 2)), ((640, 480), (12, 18)), ((480, 640), (18, 12))]
)
def test_sizes_become_grids(size: tuple[int, int], grid: tuple[int, int]) -> None:
    limits = ImageLimits(patch_size=16, max_patches=256)
    rows, columns = patch_rows_columns(*size, limits)
    assert abs(rows - grid[0]) <= 2 and abs(columns - grid[1]) <= 2
    assert rows * columns <= 256


def test_patches_put_together_give_the_picture() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (16, 24, 3)).astype(np.uint8)
    patches, grid = patchify(picture, 4)
    assert patches.shape == (24, 48) and grid.shape == (24, 2)
    again = np.zeros_like(picture)
    for patch, (row, column) in zip(patches, grid, strict=True):
        again[4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = patch.reshape(4, 4, 3)
    assert (again == picture).all()
    # The four of a cell are neighbours: they become one token.
    assert grid[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert grid[4:8].tolist() == [[0, 2], [0, 3], [1, 2], [1, 3]]


def sixteen_bits() -> bytes:
    return saved(Image.fromarray(np.full((16, 16), 0x8000, np.uint16)))


def animated() -> bytes:
    frames = [plain("RGB", color) for color in ("red", "blue", "lime")]
    return saved(frames[0], "GIF", save_all=True, append_images=frames[1:])


@pytest.mark.parametrize(
    "data, color",
    [
        (saved(plain("RGB", (10, 20, 30))), [10, 20, 30]),
        (saved(plain("L", 77)), [77, 77, 77]),
        (saved(plain("1", 1)), [255, 255, 255]),
        (saved(plain("P", 0)), [0, 0, 0]),
        (saved(plain("RGBA", (10, 20, 30, 0))), [255, 255, 255]),
        (saved(plain("LA", (50, 255))), [50, 50, 50]),
        (saved(plain("P", 0), transparency=0), [255, 255, 255]),
        (saved(plain("CMYK", (0, 255, 255, 0)), "TIFF"), [255, 0, 0]),
        (saved(plain("RGB", (10, 20, 30)), "WEBP", lossless=True), [10, 20, 30]),
        (sixteen_bits(), [128, 128, 128]),
        (animated(), [255, 0, 0]),
    ],
)
def test_every_kind_of_picture_becomes_rgb(data: bytes, color: list[int]) -> None:
    assert all(abs(a - b) <= 1 for a, b in zip(center(data), color, strict=True))


def test_cmyk_jpeg_becomes_rgb() -> None:
    red = center(saved(plain("CMYK", (0, 255, 255, 0)), "JPEG"))
    assert red[0] > 240 and red[1] < 15 and red[2] < 15


def test_picture_held_on_its_side_is_turned() -> None:
    picture: NDArray[np.uint8] = np.zeros((16, 32, 3), np.uint8)
    picture[:, :16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by a quarter
    decoded = decode_image(saved(Image.fromarray(picture), exif=exif), LIMITS)
    assert decoded.shape == (32, 16, 3)
    assert decoded[:8].min() > 200 and decoded[-8:].max() < 50


@pytest.mark.parametrize(
    "data, told",
    [
        (b"", "0 bytes"),
        (b"this is no picture", "no format that Pillow knows"),
        (saved(Image.effect_noise((60, 60), 90))[:-400], "damaged or cut short"),
        (saved(Image.effect_noise((60, 60), 90).convert("RGB"), "JPEG")[:800], "damaged or cut"),
        (saved(plain("RGB", "red"))[:20], "Pillow knows|damaged"),
    ],
)
def test_what_is_no_whole_picture_is_refused(data: bytes, told: str) -> None:
    with pytest.raises(DataError, match=told):
        decode_image(data, LIMITS)


def test_large_pictures_are_bounded_and_named() -> None:
    """Refused by what the head tells: a picture of 100 megapixels takes 300 MB."""
    bomb = huge_png(10_000, 10_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(DataError, match="10000 x 10000 pixels .100 megapixels."):
            decode_image(bomb, ImageLimits())
        with pytest.raises(DataError, match="too large to be opened"):
            decode_image(huge_png(100_000, 100_000), ImageLimits())
    with pytest.raises(DataError, match="too large to be opened"):  # where warnings are errors
        decode_image(bomb, ImageLimits())


def huge_png(width: int, height: int) -> bytes:
    """A small picture whose head claims to be a large one."""
    import struct
    import zlib

    data = bytearray(saved(plain("L", 0)))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


def test_large_jpeg_is_decoded_smaller() -> None:
    picture = plain("RGB", (200, 100, 50), (400, 200))
    assert abs(center(saved(picture, "JPEG"))[0] - 200) < 5
    with pytest.raises(DataError, match="400 x 200"):
        center(saved(picture, "JPEG", progressive=True))
    with pytest.raises(DataError, match="1600 x 800"):  # an eighth of it is still too large
        center(saved(plain("RGB", 0, (1600, 800)), "JPEG"))


@pytest.mark.parametrize("width, height", [(481, 17), (301, 299), (17, 481), (90, 1000)])
@pytest.mark.parametrize("turned", [False, True])
def test_large_jpeg_has_as_many_patches_as_its_head_tells(
    width: int, height: int, turned: bool
) -> None:
    limits = ImageLimits(patch_size=4, max_patches=256, max_pixels=6_000)
    exif = Image.Exif()
    exif[0x0112] = 6 if turned else 1
    data = saved(plain("L", 0, (width, height)), "JPEG", exif=exif)
    rows, columns = patch_rows_columns(*image_size(data), limits)
    if turned and rows != columns:
        rows, columns = columns, rows
    assert decode_image(data, limits).shape == (4 * rows, 4 * columns, 3)


def test_a_picture_that_is_a_program_is_not_run() -> None:
    with pytest.raises(DataError, match="is a program .EPS."):
        decode_image(saved(plain("RGB", 0), "EPS"), LIMITS)


def test_size_is_read_from_the_head() -> None:
    assert image_size(saved(plain("RGB", 0, (30, 20)))[:60]) == (30, 20)
    with pytest.raises(DataError):
        image_size(b"")
