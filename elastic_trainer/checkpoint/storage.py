"""One folder on any filesystem that pyarrow reaches: a local path, s3://, gs:// and so on.

A file written here is either whole or absent under its name. Local files get that by a temporary
name and a rename; object stores publish an object only when its upload closes.
"""

import errno
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import ArrowException, fs

from elastic_trainer.errors import CheckpointError

# Folders do not exist on these; making one would leave a marker object behind.
_OBJECT_STORES = ("s3", "gcs", "abfs")
TEMPORARY_MARK = ".writing-"


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn a filesystem's errors into a `CheckpointError` that starts with `what`."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{what}: it does not exist", "Was it moved or deleted?") from error
    except (OSError, ArrowException) as error:
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"{what}: no space left on the device",
                "Free space there, or set checkpoint.storage_path to another place",
            ) from error
        reason = os.strerror(number) if number else " ".join(str(error).split())
        raise CheckpointError(
            f"{what}: {reason}", "Check that the place is reachable and that you may use it"
        ) from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a folder."""

    name: str
    is_folder: bool
    num_bytes: int


class Storage:
    """Files below one root. Names are relative and use `/`; the empty name is the root itself.

    Methods raise OSError as pyarrow does.

    Args:
        root: local path, or a URI that `pyarrow.fs.FileSystem.from_uri` understands, with the
            filesystem's options in its query.
    """

    def __init__(self, root: str | Path) -> None:
        text = str(root)
        self._query = ""
        if "://" in text:
            with storage_errors(f"cannot use {text.partition('?')[0]} as storage"):
                self._fs, path = fs.FileSystem.from_uri(text)
            base, mark, query = text.partition("?")
            self._root, self._display = path.rstrip("/"), base.rstrip("/")
            self._query = mark + query
        else:
            self._fs = fs.LocalFileSystem()
            self._root = self._display = os.path.abspath(os.path.expanduser(text))
        self._is_local = isinstance(self._fs, fs.LocalFileSystem)
        self._has_folders = self._fs.type_name not in _OBJECT_STORES

    def address(self, name: str = "") -> str:
        """Path or URI of `name`, good for another `Storage`."""
        path = f"{self._display}/{name}" if name else self._display
        return path + self._query

    def label(self, name: str = "") -> str:
        """`address` for people: without the options, which may hold credentials."""
        return f"{self._display}/{name}" if name else self._display

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Write a file whole, making its folder. On failure nothing is left under `name`."""
        path = self._path(name)
        if self._has_folders:
            self._fs.create_dir(os.path.dirname(path), recursive=True)
        if not self._is_local:
            with self._fs.open_output_stream(path) as stream:
                for chunk in chunks:
                    stream.write(chunk)
            return
        # Two writers of one name (an old generation's and the new one's) must not share a file.
        temporary = f"{path}{TEMPORARY_MARK}{uuid.uuid4().hex}"
        try:
            with self._fs.open_output_stream(temporary) as stream:
                for chunk in chunks:
                    stream.write(chunk)
            _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _sync(os.path.dirname(path))

    def read(self, name: str) -> bytes:
        """The whole content of a file."""
        with self._fs.open_input_file(self._path(name)) as stream:
            content = stream.read()
        assert isinstance(content, bytes)
        return content

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return self.num_bytes(name) is not None

    def num_bytes(self, name: str) -> int | None:
        """Size of a file; None where there is none."""
        info = self._fs.get_file_info(self._path(name))
        return info.size if info.type == fs.FileType.File else None

    def entries(self, folder: str = "") -> list[Entry]:
        """What lies directly in a folder, by name; nothing where the folder does not exist."""
        path = self._path(folder)
        found = self._fs.get_file_info(fs.FileSelector(path, allow_not_found=True))
        return sorted(
            (
                Entry(info.base_name, info.type == fs.FileType.Directory, info.size or 0)
                for info in found
            ),
            key=lambda entry: entry.name,
        )

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, replacing what is there (copy and delete on object stores)."""
        self._fs.move(self._path(name), self._path(new_name))

    def delete(self, name: str) -> None:
        """Delete a file; it may be gone already."""
        with suppress(FileNotFoundError):
            self._fs.delete_file(self._path(name))

    def delete_folder(self, name: str) -> None:
        """Delete a folder with all it holds; it may be gone already."""
        with suppress(FileNotFoundError):
            self._fs.delete_dir(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _sync(path: str) -> None:
    """Push a file or folder to the disk, so that a power cut cannot undo it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
