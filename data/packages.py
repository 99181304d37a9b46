"""Files out of Debian and Python packages, without installing any.

A package is downloaded once and unpacked into a cache folder. Where there is no package manager or
no network, a package file or an unpacked folder that the user names takes its place.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path

from elastic_trainer.data.raw import Provenance
from elastic_trainer.errors import DataError

_DOWNLOAD_TIMEOUT_S = 900.0
_UNPACK_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DebianPackage:
    """A package that apt-get downloads; `contains` is a path by which its content is known."""

    name: str
    licence: str
    contains: str
    alternative: str = ""

    @property
    def pattern(self) -> str:
        return f"{self.name}_*.deb"

    @property
    def offline(self) -> str:
        """What to do without a network or a package manager."""
        return (
            f"On a Debian machine run `apt-get download {self.name}`, copy the .deb here and pass "
            f"its path or its folder as --from-dir{self.alternative}"
        )

    def version(self, file: Path) -> str:
        parts = file.name.split("_")
        return parts[1].replace("%3a", ":") if len(parts) > 1 else "unknown"

    def download(self, into: Path) -> None:
        if shutil.which("apt-get") is None:
            raise DataError(
                f"cannot download {self.name}: this machine has no apt-get (it is not Debian or "
                "Ubuntu)",
                self.offline,
            )
        command = ["apt-get", "download", self.name]
        _run(command, into, _DOWNLOAD_TIMEOUT_S, f"download {self.name}", self.offline)

    def unpack(self, file: Path, into: Path) -> None:
        if shutil.which("dpkg") is None:
            raise DataError(f"cannot unpack {file}: this machine has no dpkg", self.offline)
        command = ["dpkg", "-x", str(file.absolute()), str(into.absolute())]
        _run(command, into, _UNPACK_TIMEOUT_S, f"unpack {file}", self.offline)


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonPackage:
    """A wheel of one version that pip downloads; its dependencies are not wanted."""

    name: str
    pinned: str
    licence: str
    contains: str

    @property
    def pattern(self) -> str:
        return f"{self.name}-{self.pinned}-*.whl"

    @property
    def offline(self) -> str:
        """What to do without a network or pip."""
        return (
            f"Where there is a network run `pip download --no-deps {self.name}=={self.pinned}`, "
            "copy the .whl here and pass its path or its folder as --from-dir"
        )

    def version(self, file: Path) -> str:
        parts = file.name.split("-")
        return parts[1] if len(parts) > 1 else "unknown"

    def download(self, into: Path) -> None:
        wanted = f"{self.name}=={self.pinned}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--quiet", "--dest", str(into), wanted]
        _run(command, into, _DOWNLOAD_TIMEOUT_S, f"download {wanted}", self.offline)

    def unpack(self, file: Path, into: Path) -> None:
        try:
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(into)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"cannot unpack {file}: {error}", self.offline) from error


AnyPackage = DebianPackage | PythonPackage


@dataclass(frozen=True, slots=True)
class Unpacked:
    """The folder that holds a package's files, and where they came from."""

    folder: Path
    provenance: Provenance


def default_cache(name: str) -> Path:
    """Where the downloads of one dataset are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "elastic-trainer" / name


def fetch(package: AnyPackage, cache: Path, given: str | None = None) -> Unpacked:
    """The unpacked package: what the user gave, else the newest in the cache, else a download.

    Args:
        package: which one.
        cache: folder for downloads and unpacked files.
        given: a package file, a folder that holds one, or the folder of an unpacked one.
    """
    if given is not None:
        path = Path(given).expanduser()
        if path.is_dir() and (path / package.contains).exists():
            digest = _digest_of(path / package.contains)
            return Unpacked(path, _provenance(package, "unknown", digest))
        file = _given_file(package, path)
    else:
        cached = sorted(cache.glob(package.pattern))
        file = cached[-1] if cached else _download(package, cache)
    with open(file, "rb") as content:
        digest = file_digest(content, "sha256").hexdigest()
    folder = cache / f"unpacked-{digest[:16]}"
    if not (folder / package.contains).exists():
        _unpack(package, file, folder)
    return Unpacked(folder, _provenance(package, package.version(file), digest))


def _given_file(package: AnyPackage, path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"there is no package file {path}", package.offline)
    found = sorted(path.glob(package.pattern))
    if not found:
        raise DataError(
            f"the folder {path} holds neither {package.pattern} nor its unpacked files "
            f"({package.contains})",
            package.offline,
        )
    return found[-1]


def _download(package: AnyPackage, cache: Path) -> Path:
    """Download beside the final place, so that a broken download is never taken for a whole one."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="download-", dir=cache) as name:
            package.download(Path(name))
            found = sorted(Path(name).glob(package.pattern))
            if not found:
                raise DataError(f"the download left no {package.pattern}", package.offline)
            return Path(shutil.move(found[-1], cache / found[-1].name))
    except OSError as error:
        raise DataError(
            f"cannot use the cache folder {cache}: {error.strerror or error}",
            "Free or permit it, or set XDG_CACHE_HOME to another place",
        ) from error


def _unpack(package: AnyPackage, file: Path, into: Path) -> None:
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="unpack-", dir=into.parent))
        try:
            package.unpack(file, building)
            if not (building / package.contains).exists():
                raise DataError(
                    f"{file} does not hold {package.contains}: is it {package.name}?",
                    package.offline,
                )
            shutil.rmtree(into, ignore_errors=True)
            os.replace(building, into)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"cannot unpack {file}: {error.strerror or error}",
            "Check free space and permissions, or set XDG_CACHE_HOME to another place",
        ) from error


def _provenance(package: AnyPackage, version: str, digest: str) -> Provenance:
    return Provenance(package=package.name, version=version, licence=package.licence, sha256=digest)


def _digest_of(place: Path) -> str:
    """Digest of a file, or of all files in a folder."""
    digest = sha256()
    for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if path.is_file():
            with open(path, "rb") as content:
                of_file = file_digest(content, "sha256").hexdigest()
            line = f"{path.relative_to(place).as_posix()}\0{of_file}\n"
            digest.update(line.encode(errors="surrogateescape"))  # names may be any bytes
    return digest.hexdigest()


def _run(command: list[str], folder: Path, timeout_s: float, purpose: str, offline: str) -> None:
    try:
        subprocess.run(
            command, cwd=folder, timeout=timeout_s, check=True, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"cannot {purpose}: no end within {timeout_s:g} s", offline) from None
    except subprocess.CalledProcessError as error:
        lines = error.stderr.strip().splitlines()
        errors = [line for line in lines if line.startswith(("E:", "ERROR:"))]
        reason = (errors or lines or [f"exit code {error.returncode}"])[0]
        if "No module named pip" in error.stderr:
            reason = "this Python has no pip"
        lists = "Run `apt-get update` and try again. " if command[0] == "apt-get" else ""
        raise DataError(f"cannot {purpose}: {reason}", lists + offline) from error
