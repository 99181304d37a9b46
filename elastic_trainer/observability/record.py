"""A run's folder: one writer, any number of readers.

config.yaml               the resolved configuration
plan.json                 the newest plan
metrics.jsonl             one line per update, in order, without gaps or repeats
status.json               where the run stands; replaced atomically
events.jsonl              what happened: start, plan, checkpoint, evaluation, failure, end
prometheus/targets.json   where Prometheus finds the run
trainer.lock              held by the living trainer; names its host and process
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from elastic_trainer.errors import RunError
from elastic_trainer.types import Plan, to_jsonable

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
TARGETS_FILE = "prometheus/targets.json"
LOCK_FILE = "trainer.lock"

LOCK_WAIT_S = 1.0  # a reader's probe holds the lock for an instant
ENDED = ("completed", "stopped", "failed")

Clock = Callable[[], float]


def new_run_name(model: str, now: float) -> str:
    """A name that sorts by time: `2026-03-31_18-05-09-gpt`."""
    stamp = datetime.fromtimestamp(now).strftime("%Y-%m-%d_%H-%M-%S")
    safe = "".join(char if char.isalnum() or char in "-_." else "-" for char in model)
    return f"{stamp}-{safe}"


class RunRecord:
    """The writing side of a run folder. Hold one per run; a second one is refused."""

    def __init__(self, run_dir: str | Path, *, clock: Clock = time.time) -> None:
        """Open the folder, made when missing, and take its lock."""
        self.path = Path(run_dir).absolute()
        self._clock = clock
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path / LOCK_FILE)
        except OSError as error:
            raise RunError(
                f"Cannot write to the run folder {self.path}: {error.strerror or error}",
                "Choose another with --run-dir.",
            ) from error
        self._lines = Journal(self.path / METRICS_FILE)
        self._events = Journal(self.path / EVENTS_FILE)
        self._status = read_json(self.path / STATUS_FILE)
        self.last_update = 0
        # A crash may have cut the last line short; appending to it would spoil the next one too.
        self.truncate_after(_last_update(self.path / METRICS_FILE))

    @property
    def name(self) -> str:
        return self.path.name

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration (YAML)."""
        write_atomically(self.path / CONFIG_FILE, text)

    def write_plan(self, plan: Plan) -> None:
        """Keep the plan that the workers now follow."""
        write_atomically(self.path / PLAN_FILE, dump_json(to_jsonable(plan), indent=2) + "\n")

    def append_update(self, line: Mapping[str, Any]) -> None:
        """Append the line of one update; `line["update"]` follows on the last one."""
        update = line["update"]
        assert update > self.last_update, f"update {update} is recorded already"
        self._lines.append(line)
        self.last_update = update

    def truncate_after(self, update: int) -> None:
        """Drop the lines of updates after `update`, which a resumed run will do again."""
        path = self.path / METRICS_FILE
        if path.exists():
            kept = [line for line in complete_lines(path) if line["update"] <= update]
            write_atomically(path, "".join(dump_json(line) + "\n" for line in kept))
        self.last_update = _last_update(path)

    def write_status(self, fields: Mapping[str, Any]) -> None:
        """Change these fields of the status and keep the others.

        Known to the readers: state (starting, running, stopping, completed, stopped, failed),
        reason, update, total_updates, loss, eval_loss, perplexity, tokens_per_s, checkpoint,
        metrics_address, ray_address, actor, started_at.
        """
        self._status |= {
            **fields,
            "name": self.name,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "updated_at": self._clock(),
        }
        with full_disk_tolerated():  # the next status carries these fields, too
            write_atomically(self.path / STATUS_FILE, dump_json(self._status, indent=2) + "\n")

    def log_event(self, kind: str, message: str, **fields: Any) -> None:
        """Append one event to the run's story."""
        self._events.append({"time": self._clock(), "kind": kind, "message": message, **fields})

    def close(self) -> None:
        """Let go of the folder."""
        if not self._lock.closed:
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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


@contextlib.contextmanager
def full_disk_tolerated() -> Iterator[None]:
    """Swallows the errors of a full disk, and no others."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
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


def _take_lock(path: Path) -> IO[str]:
    """The open, locked file; the system lets go of the lock when its process dies."""
    file = open(path, "a+", encoding="utf-8")
    deadline = time.monotonic() + LOCK_WAIT_S
    while not _try_lock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise RunError(
                f"The run folder {path.parent} is in use by {holder}",
                f"Stop it with `elastic-trainer stop {path.parent.name}`, or choose another "
                "--run-dir.",
            )
        time.sleep(0.02)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _try_lock(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_alive(run_dir: Path) -> bool:
    """Whether a trainer holds the run folder."""
    try:
        with open(run_dir / LOCK_FILE, encoding="utf-8") as file:
            return not _try_lock(file, fcntl.LOCK_SH)
    except OSError:
        return False


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


def _last_update(path: Path) -> int:
    lines = complete_lines(path) if path.exists() else []
    return int(lines[-1]["update"]) if lines else 0


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
