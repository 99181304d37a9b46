"""What the readers of packages and files hand over: samples whose media are read when written."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.config import ON_ERROR
from elastic_trainer.data.raw import Provenance
from elastic_trainer.errors import DataError

_SHOWN_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A picture or a sound: the path to record, and how to get its bytes."""

    path: str
    read: Callable[[], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSample:
    """One row to be.

    `id` is unique and stable. Rows of one `group` lie on the same side of the split: what shares a
    picture must not be trained on and held out at once.
    """

    id: str
    group: str
    text: str
    images: Sequence[MediaFile] = ()
    audio: Sequence[MediaFile] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class RawSource:
    """Samples in a fixed order, their further columns (name -> Arrow type name), their origin."""

    sources: Sequence[Provenance]
    samples: Iterable[RawSample]
    extra: Mapping[str, str] = field(default_factory=dict)


class Problems:
    """What becomes of a sample that cannot be read: an error, or a number in the record."""

    def __init__(self, on_error: str) -> None:
        if on_error not in ON_ERROR:
            raise DataError(f"on_error is {on_error!r}", f"Set it to one of {', '.join(ON_ERROR)}")
        self._raises = on_error == "raise"
        self.num = 0
        self.first: list[str] = []

    def note(self, error: DataError) -> None:
        """Raise the error, or count it and keep the text of the first few."""
        if self._raises:
            raise DataError(error.what, f"{error.hint}, or pass on_error=skip") from error
        self.num += 1
        if self.num <= _SHOWN_PROBLEMS:
            self.first.append(error.what)
