"""The Collaborative International Dictionary of English (Webster 1913), from a Debian package.

The package is not installed: it is downloaded and unpacked into a cache folder.
"""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.data.packages import DebianPackage, default_cache, fetch
from elastic_trainer.data.raw import Provenance, RawDocument
from elastic_trainer.errors import DataError

PACKAGE = DebianPackage(
    name="dict-gcide",
    licence="GPL-2.0+",
    contains="usr/share/dictd/gcide.dict.dz",
    alternative="; or use `elastic-trainer make-dataset stdlib-text`, which needs no download",
)
_BASE64 = {
    c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}


def build(
    deb: str | None = None, cache_dir: str | None = None, from_dir: str | None = None
) -> tuple[Provenance, list[RawDocument]]:
    """Documents of the dictionary, one an entry.

    Args:
        deb: a downloaded package file; null finds or fetches one.
        cache_dir: where downloads are kept; null takes the user's cache folder.
        from_dir: a folder with the package, or with its unpacked files.
    """
    cache = Path(cache_dir).expanduser() if cache_dir else default_cache(PACKAGE.name)
    unpacked = fetch(PACKAGE, cache, deb or from_dir)
    dictionary = unpacked.folder / PACKAGE.contains
    documents = list(_entries(dictionary))
    if not documents:
        raise DataError(f"{dictionary} holds no entries", f"Remove {cache} and try again")
    return unpacked.provenance, documents


def _entries(dictionary: Path) -> Iterator[RawDocument]:
    """Entries in the order of the dictionary, each once however many headwords lead to it.

    The index has a line per headword: word, offset and length, the numbers in base 64 with the
    most significant digit first.
    """
    index = dictionary.with_name("gcide.index")
    try:
        content = gzip.decompress(dictionary.read_bytes())
        lines = index.read_text(encoding="utf-8").splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{dictionary} or its index is damaged: {error}", "Remove the cache folder, try again"
        ) from error
    places: set[tuple[int, int]] = set()
    for line in lines:
        word, start, length = line.split("\t")[:3]
        if not word.startswith("00"):  # the database's own description
            places.add((_number(start), _number(length)))
    for first, size in sorted(places):
        text = content[first : first + size].decode("utf-8", errors="replace").strip()
        if text:
            yield RawDocument(name=f"{first:09}", text=text)


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = value * 64 + _BASE64[digit]
    return value
