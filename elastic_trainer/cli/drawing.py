"""The picture that `data inspect --png` draws: a histogram for each size, and the balance."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageDraw, ImageFont

from elastic_trainer.cli.sizes import balance_title, number
from elastic_trainer.data.media.histogram import Histogram, histogram
from elastic_trainer.errors import DataError

if TYPE_CHECKING:
    from elastic_trainer.data.media.balance import Balance
    from elastic_trainer.data.media.inspect import Inspection

_WIDTH, _HEIGHT = 640, 320  # of a panel
_MARGIN = 56
_HEAD = 64
_COLUMNS = 2
_INK, _PAPER = "#202830", "#ffffff"
_FILL, _BEST = "#3d6fb4", "#2e8b57"


def draw(found: "Inspection", balance: "Balance", file: Path) -> None:
    """Write the picture as a PNG file."""
    panels: list[tuple[str, Histogram | Balance]] = [
        (title, histogram(values)) for title, values in found.sizes.items()
    ]
    panels.append((balance_title(balance), balance))
    rows = -(-len(panels) // _COLUMNS)
    picture = Image.new("RGB", (_COLUMNS * _WIDTH, _HEAD + rows * _HEIGHT), _PAPER)
    canvas = ImageDraw.Draw(picture)
    held_out = found.num_rows["eval"]
    title = f"{found.path}: {found.num_rows['train']} rows to train on, {held_out} held out"
    canvas.text((_MARGIN, 20), title, _INK, _font(20))
    for place, (heading, content) in enumerate(panels):
        left, top = place % _COLUMNS * _WIDTH, _HEAD + place // _COLUMNS * _HEIGHT
        canvas.text((left + _MARGIN, top), heading, _INK, _font(14))
        if isinstance(content, Histogram):
            _draw_histogram(canvas, left, top, content)
        else:
            _draw_balance(canvas, left, top, content.largest_over_mean)
    try:
        picture.save(file, format="PNG")
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot write {file}: {reason}", "Choose another place") from error


def _draw_histogram(canvas: Any, left: int, top: int, shown: Histogram) -> None:
    bottom = top + _HEIGHT - _MARGIN
    edges, counts = shown.edges, shown.counts
    step = (_WIDTH - 2 * _MARGIN) / len(counts)
    highest = bottom - top - _MARGIN
    canvas.line((left + _MARGIN, bottom, left + _WIDTH - _MARGIN, bottom), _INK)
    for at, count in enumerate(counts):
        x = left + _MARGIN + at * step
        y = bottom - highest * count / max(counts)
        canvas.rectangle((x + 1, y, x + step - 2, bottom), _FILL)
        canvas.text((x + step / 2, y - 3), str(count), _INK, _font(11), anchor="ms")
    for at in range(0, len(edges), 2 if len(edges) > 2 else 1):
        x = left + _MARGIN + at * step
        canvas.line((x, bottom, x, bottom + 4), _INK)
        canvas.text((x, bottom + 8), number(edges[at]), _INK, _font(11), anchor="ma")


def _draw_balance(canvas: Any, left: int, top: int, ratios: dict[str, float]) -> None:
    """Bars that begin at 1, the best that there can be."""
    start, end = left + _MARGIN + 110, left + _WIDTH - _MARGIN
    most = max(1.1, *ratios.values())
    for at, (way, ratio) in enumerate(ratios.items()):
        y = top + 50 + at * 60
        x = start + (end - start - 50) * (ratio - 1) / (most - 1)
        colour = _BEST if ratio == min(ratios.values()) else _FILL
        canvas.text((start - 10, y + 15), way, _INK, _font(13), anchor="rm")
        canvas.rectangle((start, y, max(x, start + 1), y + 30), colour)
        canvas.text((x + 8, y + 15), f"{ratio:.2f}", _INK, _font(13), anchor="lm")
    canvas.line((start, top + 40, start, top + 50 + 60 * len(ratios)), _INK)
    canvas.text((start, top + 54 + 60 * len(ratios)), "1 = even", _INK, _font(11), anchor="ma")


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
