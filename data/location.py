"""Where a dataset lies: a local path or any `pyarrow.fs` URI, behind calls that always end."""

import os
import posixpath
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from elastic_trainer.errors import DataError

T = TypeVar("T")

REMOTE_TIMEOUT_S = 30.0


class Location:
    """A file or folder on some filesystem.

    Remote clients retry for as long as they please (a Google Storage client for a quarter of an
    hour), so each call on a remote filesystem runs in a thread of its own under a deadline.
    """

    def __init__(self, path: str, timeout_s: float = REMOTE_TIMEOUT_S) -> None:
        self.given = path
        self.is_remote = "://" in path and not path.startswith("file://")
        self._timeout_s = timeout_s
        if "://" not in path:
            self.filesystem: Any = fs.LocalFileSystem()
            self.path = os.path.abspath(os.path.expanduser(path))
        else:
            opened: tuple[Any, str] = self.call(lambda: fs.FileSystem.from_uri(path), "open")
            self.filesystem, self.path = opened
        if not self.path.strip("/"):
            raise DataError(
                f"the data path {path!r} names no file or folder",
                "Set data.path to a Parquet file, a folder of them, or a URI such as s3://bucket/x",
            )

    def call(self, function: Callable[[], T], verb: str, name: str = "") -> T:
        """Run one filesystem call; a failure becomes a DataError that names the file."""
        where = name or self.given
        try:
            return self._within_deadline(function) if self.is_remote else function()
        except TimeoutError:
            raise DataError(
                f"cannot {verb} {where}: no answer within {self._timeout_s:g} s",
                "Check the address, the network and the credentials",
            ) from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"cannot {verb} {where}: {first_line(error)}", self._hint(error)
            ) from error

    def exists(self, name: str) -> bool:
        """Whether the path `name`, beside or below this location, is a file."""
        info = self.call(lambda: self.filesystem.get_file_info(name), "look at", name)
        return bool(info.type == fs.FileType.File)

    def read_bytes(self, name: str) -> bytes:
        """The whole content of a small file."""

        def read() -> bytes:
            with self.filesystem.open_input_stream(name) as stream:
                return bytes(stream.read())

        return self.call(read, "read", name)

    def list_parquet(self) -> list[str]:
        """Parquet files at this location, sorted: the file itself, or those in the folder and in
        its `data` folder."""
        info = self.call(lambda: self.filesystem.get_file_info(self.path), "look at")
        if info.type == fs.FileType.File:
            return [self.path]
        if info.type != fs.FileType.Directory:
            raise DataError(
                f"there is no dataset at {self.given}",
                "Build one with `elastic-trainer make-dataset stdlib-text`, or set data.path",
            )
        names: list[str] = []
        for folder in (self.path, posixpath.join(self.path, "data")):
            selector = fs.FileSelector(folder, allow_not_found=True)
            found = self.call(partial(self.filesystem.get_file_info, selector), "list")
            names += [f.path for f in found if f.is_file and f.path.endswith(".parquet")]
        if not names:
            raise DataError(
                f"there is no .parquet file in {self.given} or in its data folder",
                "Build a dataset with `elastic-trainer make-dataset stdlib-text`, or set data.path",
            )
        return sorted(names)

    def folders(self) -> list[str]:
        """Folders in which a dataset's side files may lie, nearest first."""
        nearest = posixpath.dirname(self.path) if self.path.endswith(".parquet") else self.path
        folders = [nearest]
        if posixpath.basename(nearest) == "data":
            folders.append(posixpath.dirname(nearest))
        return folders

    def find_beside(self, name: str) -> str | None:
        """Path of a side file such as tokenizer.json, None where there is none."""
        paths = [posixpath.join(folder, name) for folder in self.folders()]
        return next((path for path in paths if self.exists(path)), None)

    def uri(self, name: str) -> str:
        """`name` as a string that `Location` accepts again."""
        if "://" not in self.given:
            return str(Path(name))
        scheme, _, rest = self.given.partition("://")
        _, mark, query = rest.partition("?")
        return f"{scheme}://{name}{mark}{query}"

    def _within_deadline(self, function: Callable[[], T]) -> T:
        done = threading.Event()
        results: list[T] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                results.append(function())
            except BaseException as error:
                failures.append(error)
            finally:
                done.set()

        # A daemon: a call that never returns must not keep the process alive.
        threading.Thread(target=work, name=f"open {self.given}", daemon=True).start()
        if not done.wait(self._timeout_s):
            raise TimeoutError
        if failures:
            raise failures[0]
        return results[0]

    def _hint(self, error: Exception) -> str:
        if "Unrecognized filesystem" in str(error):
            return "Known schemes are those of pyarrow.fs: file, s3, gs, abfs, hdfs"
        if self.is_remote:
            return "Check the address, the network and the credentials"
        return "Check the path and its permissions"


def first_line(error: BaseException) -> str:
    """The first line of an error's text: what a one-line message has room for."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
