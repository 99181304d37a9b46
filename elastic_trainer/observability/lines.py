"""Files of JSON lines that one process appends to and any number of others read."""

import contextlib
import errno
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

BLOCK = 65536  # read at a time from the end of a file


class Journal:
    """Appends lines to a JSONL file. Training goes on while the disk is full: what it refuses waits
    in memory and is written, in order, with the next line that finds room."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = b""

    def append(self, line: Mapping[str, Any]) -> None:
        self._waiting += (dump_json(line) + "\n").encode()
        with full_disk_tolerated(), open(self._path, "ab", buffering=0) as file:
            while self._waiting:  # readers take lines once they are whole
                self._waiting = self._waiting[file.write(self._waiting) :]

    def last_update(self) -> int:
        """That of the last whole line in the file, 0 without one."""
        with _opened(self._path) as file:
            return next((update for _, update in _backwards(file) if update is not None), 0)

    def truncate_after(self, update: int) -> None:
        """Drop lines of later updates, and a last one that was cut short. Lines are in order, so
        only what goes is read."""
        with _opened(self._path) as file:
            keep = next((end for end, u in _backwards(file) if u is not None and u <= update), 0)
            file.seek(keep)
            rest = file.read() + self._waiting  # the disk may be full in the middle of a line
            if file.tell() > keep:
                file.truncate(keep)
        lines = [line for line in rest.splitlines(keepends=True) if _update_of(line) is not None]
        self._waiting = b"".join(line for line in lines if (_update_of(line) or 0) <= update)


class Follower:
    """Reads what is new in a file of JSON lines, which its writer may also cut back."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""  # the line that ends there

    def look(self) -> tuple[bool, list[dict[str, Any]]]:
        """What is new since the last look.

        Returns:
            Whether the file was cut back, so that the lines are all that it has now; the lines.
        """
        try:
            file = open(self._path, "rb")
        except FileNotFoundError:
            return False, []
        with file:
            file.seek(self._offset - len(self._last))
            anew = file.read(len(self._last)) != self._last
            if anew:
                self._offset, self._last = 0, b""
                file.seek(0)
            lines = []
            for line in file:
                if not line.endswith(b"\n"):
                    break
                lines.append(json.loads(line))
                self._offset += len(line)
                self._last = line
        return anew, lines


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """The file, to read and to shorten; an empty one where there is none."""
    try:
        file: IO[bytes] = open(path, "r+b")
    except FileNotFoundError:
        file = io.BytesIO()
    with file:
        yield file


def _backwards(file: IO[bytes]) -> Iterator[tuple[int, int | None]]:
    """From the last line to the first: where it ends, and its update; None if it is cut short."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start, line = end, b""
        while start and line[:-1].rfind(b"\n") < 0:
            step = min(BLOCK, start)
            start -= step
            file.seek(start)
            line = file.read(step) + line
        cut = line[:-1].rfind(b"\n") + 1
        yield end, _update_of(line[cut:])
        end -= len(line) - cut


def _update_of(line: bytes) -> int | None:
    """The update that a line is of; None if it is cut short."""
    try:
        value = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return int(value["update"]) if isinstance(value, dict) and "update" in value else None


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file up to the first that a crash cut short."""
    lines: list[dict[str, Any]] = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                break
            if not text.endswith("\n") or not isinstance(line, dict):
                break
            lines.append(line)
    return lines


@contextlib.contextmanager
def full_disk_tolerated() -> Iterator[None]:
    """Swallows the errors of a full disk, and no others."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def dump_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: numbers that JSON cannot write become null."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
