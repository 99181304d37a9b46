"""Files that belong together by their name, as WebDataset has it: telling what each of them is."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.data.media.raw import MediaFile, RawSample
from elastic_trainer.data.media.schema import MODALITIES
from elastic_trainer.errors import DataError

IMAGE_SUFFIXES = frozenset(
    ".apng .avif .bmp .gif .jfif .jp2 .jpeg .jpg .pgm .png .ppm .tif .tiff .webp".split()
)
AUDIO_SUFFIXES = frozenset(".aif .aiff .au .flac .mp3 .oga .ogg .opus .wav".split())
TEXT_SUFFIXES = (".txt", ".caption", ".json")
_OTHER_TEXT_KEY = "caption"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Files of one sample, each with its suffix in small letters, in order of their names."""

    key: str
    container: str
    files: list[tuple[str, MediaFile]]

    @property
    def where(self) -> str:
        """The sample as a message names it."""
        return f"sample {self.key} of {self.container}"


def modality_of(suffix: str) -> str | None:
    """image or audio by the suffix of a file (the last part of a compound one), else None."""
    last = "." + suffix.rpartition(".")[2]
    if last in IMAGE_SUFFIXES:
        return "image"
    return "audio" if last in AUDIO_SUFFIXES else None


def check_names(require: str) -> tuple[str, ...]:
    """Modalities out of a list with commas."""
    names = tuple(name.strip() for name in require.split(",") if name.strip())
    for name in names:
        if name not in MODALITIES:
            raise DataError(f"require names {name!r}", f"It can name {' and '.join(MODALITIES)}")
    return names


def as_sample(bundle: Bundle, prefix: str, text_key: str, required: Sequence[str]) -> RawSample:
    """The sample that the files make, complete or refused.

    Raises:
        DataError: it has no text, no picture and no sound, or lacks what is required.
    """
    images = [file for suffix, file in bundle.files if modality_of(suffix) == "image"]
    audio = [file for suffix, file in bundle.files if modality_of(suffix) == "audio"]
    for name, files in zip(MODALITIES, (images, audio), strict=True):
        if not files and name in required:
            raise _lacks(bundle, f"no {name}")
    if not images and not audio:
        raise _lacks(bundle, "neither a picture nor a sound")
    return RawSample(
        id=prefix + bundle.key,
        group=prefix + bundle.key,
        text=_text(bundle, text_key),
        images=images,
        audio=audio,
    )


def _text(bundle: Bundle, key: str) -> str:
    by_suffix = dict(bundle.files)
    for suffix in TEXT_SUFFIXES:
        file = by_suffix.get(suffix)
        if file is None:
            continue
        try:
            text = file.read().decode("utf-8-sig")
            if suffix == ".json":
                text = _text_in(json.loads(text), key)
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(
                f"{bundle.where}: cannot read {file.path}: {error}", "Repair or remove it"
            ) from error
        if text.strip():
            return text.strip()
    raise _lacks(bundle, "no caption (NAME.txt, or NAME.json with a text)")


def _text_in(value: object, key: str) -> str:
    facts = value if isinstance(value, dict) else {}
    found = facts.get(key, facts.get(_OTHER_TEXT_KEY, ""))
    return found if isinstance(found, str) else ""


def _lacks(bundle: Bundle, what: str) -> DataError:
    names = ", ".join(file.path for _, file in bundle.files)
    return DataError(
        f"{bundle.where} has {what}; it has {names}", "Add the missing file or remove the others"
    )
