"""Lists in JSON lines: a line is a sample whose values name files beside the list."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.data.media.bundles import modality_of
from elastic_trainer.data.media.raw import MediaFile, Problems, RawSample
from elastic_trainer.data.media.schema import MODALITIES
from elastic_trainer.errors import DataError

# In the lists that Hugging Face's folders have, this key names the file, whatever it is.
_FILE_NAME = "file_name"
_HINT = "Repair or remove the line"
_SHOWN_CHARS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Keys:
    """Under which keys of a line the parts of a sample stand."""

    image: str
    audio: str
    text: str
    id: str


def list_samples(
    path: Path, keys: Keys, prefix: str, required: Sequence[str], problems: Problems
) -> Iterator[RawSample]:
    """Samples of a list, one a line; empty lines do not count.

    A line may have no picture and no sound, but not all lines: then they are named otherwise.
    """
    any_media, found = False, ""
    try:
        with open(path, encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    facts = _parse(line, f"line {number} of {path}")
                    found = ", ".join(facts)
                    sample = _sample(facts, keys, path, number, prefix, required)
                except DataError as error:
                    problems.note(error)
                    continue
                any_media = any_media or bool(sample.images or sample.audio)
                yield sample
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}", "It must be text in UTF-8") from error
    if found and not any_media:
        raise DataError(
            f"no line of {path} names a picture or a sound under {keys.image!r}, {keys.audio!r} or "
            f"{_FILE_NAME!r}; the keys of the last one are {found}",
            "Say which ones they are, such as image=KEY or audio=KEY",
        )


def _parse(line: str, where: str) -> Mapping[str, Any]:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}", _HINT) from error
    if not isinstance(facts, dict):
        raise DataError(f"{where} is not an object in braces", _HINT)
    return facts


def _sample(
    facts: Mapping[str, Any],
    keys: Keys,
    path: Path,
    number: int,
    prefix: str,
    required: Sequence[str],
) -> RawSample:
    where = f"line {number} of {path}"
    names = {"image": _names(facts, keys.image, where), "audio": _names(facts, keys.audio, where)}
    for name in _names(facts, _FILE_NAME, where):
        kind = modality_of(Path(name).suffix.lower())
        if kind is None:
            raise DataError(f"{where} names {name}, neither a picture nor a sound", _HINT)
        names[kind].append(name)
    for kind in required:
        if not names[kind]:
            raise DataError(f"{where} has no {kind}", _HINT)
    text = _text(facts, keys.text, where)
    files = {kind: [_file(path.parent, name, where) for name in names[kind]] for kind in MODALITIES}
    given = facts.get(keys.id)
    name = f"{number:08}" if given is None else str(given)
    first = [*files["image"], *files["audio"]]
    return RawSample(
        id=prefix + name,
        # Several lines may say something of one picture.
        group=f"{path.parent.name}/" * bool(prefix) + (first[0].path if first else name),
        text=text,
        images=files["image"],
        audio=files["audio"],
    )


def _text(facts: Mapping[str, Any], key: str, where: str) -> str:
    if key not in facts:
        near = difflib.get_close_matches(key, list(facts), n=1, cutoff=0.4)
        raise DataError(
            f"{where} has no {key!r}; its keys are {', '.join(facts) or 'none'}",
            f"Say which one the caption is, such as text={near[0] if near else 'KEY'}",
        )
    text = facts[key]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where} has no caption under {key!r}", _HINT)
    return text.strip()


def _names(facts: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = facts.get(key)
    values = value if isinstance(value, list) else [] if value is None else [value]
    for name in values:
        if not isinstance(name, str) or not name:
            raise DataError(f"{where} has {name!r} under {key!r}, not the name of a file", _HINT)
    return list(values)


def _file(folder: Path, name: str, where: str) -> MediaFile:
    path = folder / name
    try:
        is_there = path.is_file()
    except OSError as error:  # such as a name that is too long
        raise DataError(f"{where} names {name[:_SHOWN_CHARS]}: {error.strerror}", _HINT) from error
    if not is_there:
        raise DataError(f"{where} names {name}, but there is no file {path}", _HINT)
    return MediaFile(name, path.read_bytes)
