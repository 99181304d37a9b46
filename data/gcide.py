"""The Collaborative International Dictionary of English (Webster 1913), from a Debian package.

The package is not installed: it is downloaded and unpacked into a cache folder.
"""

import gzip
import os
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from elastic_trainer.data.raw import Provenance, RawDocument
from elastic_trainer.errors import DataError

PACKAGE = "dict-gcide"
_DICTIONARY = Path("usr/share/dictd/gcide.dict.dz")
_DOWNLOAD_TIMEOUT_S = 300.0
_UNPACK_TIMEOUT_S = 60.0
_OFFLINE = (
    f"On a Debian machine run `apt-get download {PACKAGE}`, copy the .deb here and pass its path "
    "as deb; or use `elastic-trainer make-dataset stdlib-text`, which needs no download"
)
_BASE64 = {
    c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}


@dataclass(frozen=True, slots=True)
class _Package:
    """The unpacked files, the version they are of, and the digest of the .deb or dictionary."""

    dictionary: Path
    version: str
    sha256: str


def build(
    deb: str | None = None, cache_dir: str | None = None
) -> tuple[Provenance, list[RawDocument]]:
    """Documents of the dictionary, one an entry.

    Args:
        deb: a downloaded package file; null finds or fetches one.
        cache_dir: where downloads are kept; null takes the user's cache folder.
    """
    cache = Path(cache_dir).expanduser() if cache_dir else _default_cache()
    package = _locate(Path(deb).expanduser() if deb else None, cache)
    documents = list(_entries(package.dictionary))
    if not documents:
        raise DataError(f"{package.dictionary} holds no entries", f"Remove {cache} and try again")
    provenance = Provenance(
        package=PACKAGE, version=package.version, licence="GPL-2.0+", sha256=package.sha256
    )
    return provenance, documents


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elastic-trainer" / PACKAGE


def _locate(deb: Path | None, cache: Path) -> _Package:
    """The given package, else the newest one in the cache, else a downloaded one."""
    if deb is not None and not deb.is_file():
        raise DataError(f"there is no package file {deb}", _OFFLINE)
    if deb is None:
        cached = sorted(cache.glob(f"{PACKAGE}_*.deb"))
        deb = cached[-1] if cached else _download(cache)
    digest = sha256(deb.read_bytes()).hexdigest()
    unpacked = cache / f"unpacked-{digest[:16]}"
    if not (unpacked / _DICTIONARY).is_file():
        _unpack(deb, unpacked)
    if not (unpacked / _DICTIONARY).is_file():
        raise DataError(f"{deb} does not hold {_DICTIONARY}: is it {PACKAGE}?", _OFFLINE)
    parts = deb.name.split("_")
    version = parts[1].replace("%3a", ":") if len(parts) > 1 else "unknown"
    return _Package(unpacked / _DICTIONARY, version, digest)


def _download(cache: Path) -> Path:
    if shutil.which("apt-get") is None:
        raise DataError(
            f"cannot download {PACKAGE}: this machine has no apt-get (it is not Debian or Ubuntu)",
            _OFFLINE,
        )
    cache.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", "download", PACKAGE], cache, _DOWNLOAD_TIMEOUT_S, f"download {PACKAGE}")
    found = sorted(cache.glob(f"{PACKAGE}_*.deb"))
    if not found:
        raise DataError(f"apt-get left no {PACKAGE} package in {cache}", _OFFLINE)
    return found[-1]


def _unpack(deb: Path, into: Path) -> None:
    if shutil.which("dpkg") is None:
        raise DataError(f"cannot unpack {deb}: this machine has no dpkg", _OFFLINE)
    building = into.with_name(f"{into.name}.{os.getpid()}")
    building.mkdir(parents=True, exist_ok=True)
    try:
        _run(
            ["dpkg", "-x", str(deb.absolute()), str(building.absolute())],
            building,
            _UNPACK_TIMEOUT_S,
            f"unpack {deb}",
        )
        shutil.rmtree(into, ignore_errors=True)
        os.replace(building, into)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _run(command: list[str], folder: Path, timeout_s: float, purpose: str) -> None:
    try:
        subprocess.run(
            command, cwd=folder, timeout=timeout_s, check=True, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"cannot {purpose}: no end within {timeout_s:g} s", _OFFLINE) from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.startswith("E:")]
        reason = lines[0] if lines else error.stderr.strip() or f"exit code {error.returncode}"
        lists = "Run `apt-get update` and try again. " if command[0] == "apt-get" else ""
        raise DataError(f"cannot {purpose}: {reason}", lists + _OFFLINE) from error


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
