"""WebDataset archives: tar files in which members of one name are one sample."""

import lzma
import os
import tarfile
import weakref
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from elastic_trainer.data.media.bundles import Bundle
from elastic_trainer.data.media.raw import MediaFile
from elastic_trainer.errors import DataError

_HINT = "Write or copy it again"
_DAMAGE = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError)


def tar_bundles(path: Path) -> Iterator[Bundle]:
    """Samples of an archive in its order; nothing but the headers and texts is read for them.

    The suffix is what follows the first dot of a member's name, as WebDataset has it.
    """
    archive = _Archive(path)
    bundles: dict[str, Bundle] = {}
    for member in archive.members():
        folder, name = os.path.split(member.name.removeprefix("./"))
        stem, dot, suffix = name.partition(".")
        if stem and dot:
            key = os.path.join(folder, stem)
            bundle = bundles.setdefault(key, Bundle(key, str(path), []))
            file = MediaFile(f"{path.name}/{key}{dot}{suffix}", partial(archive.read, member))
            bundle.files.append((f".{suffix.lower()}", file))
    yield from bundles.values()


class _Archive:
    """An open archive; a compressed one is read best from front to back, as rows are written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._tar = tarfile.open(path)
        except _DAMAGE as error:
            raise DataError(f"{path} is not a tar archive: {error}", _HINT) from error
        # Samples read from it until the last of them is gone.
        weakref.finalize(self, self._tar.close)

    def members(self) -> list[tarfile.TarInfo]:
        try:
            members = [member for member in self._tar.getmembers() if member.isreg()]
            self._check_end()
            return members
        except _DAMAGE as error:
            raise DataError(f"{self._path} is cut short or damaged: {error}", _HINT) from error

    def _check_end(self) -> None:
        """tarfile takes a head that it cannot read for the end, and says nothing."""
        file = self._tar.fileobj
        assert file is not None  # it was just read
        file.seek(self._tar.offset)
        if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
            raise tarfile.ReadError(f"no member begins at byte {self._tar.offset}")

    def read(self, member: tarfile.TarInfo) -> bytes:
        try:
            content = self._tar.extractfile(member)
            assert content is not None  # members are regular files
            return content.read()
        except _DAMAGE as error:
            raise DataError(
                f"{member.name} of {self._path} is cut short or damaged: {error}", _HINT
            ) from error
