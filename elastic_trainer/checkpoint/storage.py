"""One folder on any filesystem that pyarrow reaches: a local path, s3://, gs:// and so on.

A file written here is either whole or absent under its name. Local files get that by a temporary
name and a rename; object stores publish an object only when its upload closes.
"""

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pyarrow import ArrowException, fs

from elastic_trainer.errors import CheckpointError

# Folders do not exist on these; making one would leave a marker object behind.
_OBJECT_STORES = ("s3", "gcs", "abfs")
TEMPORARY_MARK = ".writing-"
REMOTE_TIMEOUT_S = 60.0
SLOWEST_BYTES_PER_S = 1e6

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview


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

    Methods raise OSError as pyarrow does; a remote place that does not answer is a TimeoutError.

    Args:
        root: local path, or a URI that `pyarrow.fs.FileSystem.from_uri` understands, with the
            filesystem's options in its query.
        timeout_s: limit on one call to a remote place; data gets a second per megabyte more.
    """

    def __init__(self, root: str | Path, timeout_s: float = REMOTE_TIMEOUT_S) -> None:
        text = str(root)
        self._timeout_s = timeout_s
        self._query = ""
        self._is_local = "://" not in text
        if self._is_local:
            self._fs: fs.FileSystem = fs.LocalFileSystem()
            self._root = self._display = os.path.abspath(os.path.expanduser(text))
        else:
            base, mark, query = text.partition("?")
            with storage_errors(f"cannot use {base} as storage"):
                self._fs, path = self._call(lambda: fs.FileSystem.from_uri(text))
            self._root, self._display = path.rstrip("/"), base.rstrip("/")
            self._query = mark + query
            self._is_local = isinstance(self._fs, fs.LocalFileSystem)
        self._has_folders = self._fs.type_name not in _OBJECT_STORES

    @property
    def is_local(self) -> bool:
        """Whether this is a file system of this machine, mounted ones included."""
        return self._is_local

    def address(self, name: str = "") -> str:
        """Path or URI of `name`, good for another `Storage`."""
        return self.label(name) + self._query

    def label(self, name: str = "") -> str:
        """`address` for people: without the options, which may hold credentials."""
        return f"{self._display}/{name}" if name else self._display

    def write(self, name: str, chunks: Sequence[Buffer]) -> None:
        """Write a file whole, making its folder. On failure nothing is left under `name`."""
        path = self._path(name)
        if self._is_local:
            self._write_local(path, chunks)
        else:
            num_bytes = sum(len(chunk) for chunk in chunks)
            self._call(lambda: self._write(path, path, chunks), num_bytes)

    def _write_local(self, path: str, chunks: Sequence[Buffer]) -> None:
        # Two writers of one name (an old generation's and the new one's) must not share a file.
        temporary = f"{path}{TEMPORARY_MARK}{uuid.uuid4().hex}"
        try:
            self._write(path, temporary, chunks)
            _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _sync(os.path.dirname(path))

    def _write(self, path: str, target: str, chunks: Sequence[Buffer]) -> None:
        if self._has_folders:
            self._fs.create_dir(os.path.dirname(path), recursive=True)
        with self._fs.open_output_stream(target) as stream:
            for chunk in chunks:
                stream.write(chunk)

    def read(self, name: str) -> bytes:
        """The whole content of a file."""

        def read() -> bytes:
            with self._fs.open_input_file(path) as stream:
                return bytes(stream.read())

        path = self._path(name)
        return self._call(read, 0 if self._is_local else self.num_bytes(name) or 0)

    def exists(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return self.num_bytes(name) is not None

    def num_bytes(self, name: str) -> int | None:
        """Size of a file; None where there is none."""
        info = self._call(lambda: self._fs.get_file_info(self._path(name)))
        return info.size if info.type == fs.FileType.File else None

    def entries(self, folder: str = "") -> list[Entry]:
        """What lies directly in a folder, by name; nothing where the folder does not exist."""
        selector = fs.FileSelector(self._path(folder), allow_not_found=True)
        found = self._call(lambda: self._fs.get_file_info(selector))
        return sorted(
            (
                Entry(info.base_name, info.type == fs.FileType.Directory, info.size or 0)
                for info in found
            ),
            key=lambda entry: entry.name,
        )

    def rename(self, name: str, new_name: str) -> None:
        """Rename a file, replacing what is there (copy and delete on object stores)."""
        self._call(lambda: self._fs.move(self._path(name), self._path(new_name)))

    def delete(self, name: str) -> None:
        """Delete a file; it may be gone already."""
        with suppress(FileNotFoundError):
            self._call(lambda: self._fs.delete_file(self._path(name)))

    def delete_folder(self, name: str) -> None:
        """Delete a folder with all it holds; it may be gone already."""
        with suppress(FileNotFoundError):
            self._call(lambda: self._fs.delete_dir(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _call(self, function: Callable[[], T], num_bytes: int = 0) -> T:
        """Run one call; on a remote place under a deadline, for clients retry for minutes.

        A call that was given up may still take effect later. That does no harm: a file's name
        tells its content, and a late manifest lists only files that were checked to be there.
        """
        if self._is_local:
            return function()
        limit_s = self._timeout_s + num_bytes / SLOWEST_BYTES_PER_S
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(function())
            except BaseException as error:
                outcome.set_exception(error)

        # A daemon: a call that never returns must not keep the process from ending.
        threading.Thread(target=work, name="checkpoint-storage", daemon=True).start()
        try:
            return outcome.result(limit_s)
        except TimeoutError as error:
            if outcome.done():
                raise
            raise TimeoutError(f"no answer within {limit_s:g} s") from error


def _sync(path: str) -> None:
    """Push a file or folder to the disk, so that a power cut cannot undo it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
