"""Pictures with captions, read aloud by people in many languages: the stamps of Tux Paint.

The Debian package is not installed: it is downloaded and unpacked into a cache folder. Beside each
picture NAME.png lie NAME.txt, whose first line is the English caption and whose other lines are
`LANGUAGE.utf8=caption`, and the recordings NAME_desc.ogg (English) and NAME_desc_LANGUAGE.ogg.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.data.media.raw import MediaFile, Problems, RawSample, RawSource
from elastic_trainer.data.packages import DebianPackage, default_cache, fetch
from elastic_trainer.errors import DataError

PACKAGE = DebianPackage(
    name="tuxpaint-stamps-default",
    licence="GPL-2.0",
    contains="usr/share/tuxpaint/stamps",
)
_RECORDING = re.compile(r"(?P<stem>.+)_desc(?:_(?P<language>[A-Za-z_@]+))?\.(?:ogg|wav)")
_CAPTION = re.compile(r"(?P<language>[A-Za-z_@]+)\.utf8=(?P<text>.*)")
_ENGLISH = "en"


def build(
    problems: Problems, cache_dir: str | None = None, from_dir: str | None = None
) -> RawSource:
    """A row for each picture and language that has both a caption and a recording of it.

    Args:
        problems: told of captions that cannot be read.
        cache_dir: where downloads are kept; null takes the user's cache folder.
        from_dir: the package file, or a folder with it or with its unpacked files.
    """
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache(PACKAGE.name)
    unpacked = fetch(PACKAGE, cache, from_dir)
    stamps = unpacked.folder / PACKAGE.contains
    samples = list(_stamps(stamps, problems))
    if not samples:
        raise DataError(
            f"{stamps} holds no picture with a caption and a recording", PACKAGE.offline
        )
    return RawSource(
        sources=[unpacked.provenance],
        samples=samples,
        extra={"language": "string", "category": "string"},
    )


def _stamps(root: Path, problems: Problems) -> Iterator[RawSample]:
    for folder, subfolders, files in os.walk(root):
        subfolders.sort()
        recordings: dict[str, dict[str, str]] = {}
        for name in sorted(files):
            if found := _RECORDING.fullmatch(name):
                of_picture = recordings.setdefault(found["stem"], {})
                of_picture.setdefault(found["language"] or _ENGLISH, name)
        for stem in sorted(recordings):
            if f"{stem}.png" in files and f"{stem}.txt" in files:
                try:
                    yield from _rows(root, Path(folder, stem), recordings[stem])
                except DataError as error:
                    problems.note(error)


def _rows(root: Path, picture: Path, recordings: dict[str, str]) -> Iterator[RawSample]:
    captions = _captions(picture.with_name(f"{picture.name}.txt"))
    group = picture.relative_to(root).as_posix()
    image = _file(root, picture.with_name(f"{picture.name}.png"))
    for language, recording in sorted(recordings.items()):
        if language in captions:
            yield RawSample(
                id=f"{group}:{language}",
                group=group,
                text=captions[language],
                images=[image],
                audio=[_file(root, picture.with_name(recording))],
                extra={"language": language, "category": group.split("/")[0]},
            )


def _captions(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the captions {path}: {error}", "Repair the file") from error
    captions = {_ENGLISH: lines[0].strip()} if lines else {}
    for line in lines[1:]:
        if found := _CAPTION.fullmatch(line.strip()):
            captions[found["language"]] = found["text"].strip()
    return {language: text for language, text in captions.items() if text}


def _file(root: Path, path: Path) -> MediaFile:
    return MediaFile(path.relative_to(root).as_posix(), path.read_bytes)
