"""Sentences of very different lengths, read by one speaker: the prompts of the Asterisk exchange.

Sounds and transcripts are in two Debian packages. Neither is installed: they are downloaded and
unpacked into a cache folder.
"""

import gzip
import zlib
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.data.media.raw import MediaFile, Problems, RawSample, RawSource
from elastic_trainer.data.packages import DebianPackage, default_cache, fetch
from elastic_trainer.errors import DataError

SOUNDS = DebianPackage(
    name="asterisk-core-sounds-en-wav",
    licence="CC-BY-SA-3.0",
    contains="usr/share/asterisk/sounds/en_US_f_Allison",
)
TRANSCRIPTS = DebianPackage(
    name="asterisk-core-sounds-en",
    licence="CC-BY-SA-3.0",
    contains="usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz",
)
# Tones and music are described in brackets instead of transcribed.
_NOT_SPEECH = ("[", "(", "<")


def build(
    problems: Problems, cache_dir: str | None = None, from_dir: str | None = None
) -> RawSource:
    """A row for each sound that has a transcript.

    Args:
        problems: unused, what cannot be measured is noted later.
        cache_dir: where downloads are kept; null takes the user's cache folder.
        from_dir: a folder with both package files, or with the unpacked files of both.
    """
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache("asterisk-core-sounds")
    sounds, transcripts = fetch(SOUNDS, cache, from_dir), fetch(TRANSCRIPTS, cache, from_dir)
    root = sounds.folder / SOUNDS.contains
    samples = []
    for name, text in sorted(_transcripts(transcripts.folder / TRANSCRIPTS.contains).items()):
        path = root / f"{name}.wav"
        if path.is_file():  # the list is longer than the package by a line
            file = MediaFile(f"{name}.wav", path.read_bytes)
            samples.append(RawSample(id=name, group=name, text=text, audio=[file]))
    if not samples:
        raise DataError(f"{root} holds no sound with a transcript", SOUNDS.offline)
    return RawSource(sources=[sounds.provenance, transcripts.provenance], samples=samples)


def _transcripts(path: Path) -> Mapping[str, str]:
    """Name of a sound without its suffix -> what is said in it."""
    try:
        content = gzip.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"the transcripts {path} are damaged: {error}", "Remove the cache folder, try again"
        ) from error
    texts = {}
    for line in content.splitlines():
        name, separator, text = line.partition(":")
        text = text.strip()
        if separator and text and not line.startswith(";") and not text.startswith(_NOT_SPEECH):
            texts[name.strip()] = text
    return texts
