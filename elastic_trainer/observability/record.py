"""A run's folder: one writer, any number of readers.

config.yaml               the resolved configuration
plan.json                 the newest plan
metrics.jsonl             one line per update, in order, without gaps or repeats
audit.jsonl               the samples of each update, one list per microbatch, and those skipped
status.json               where the run stands; replaced atomically
events.jsonl              what happened: start, plan, checkpoint, evaluation, failure, end
membership.jsonl          one line per change of the membership, with the plan that came of it
exit_report.json, .txt    what the changes cost, written at the end
prometheus/targets.json   where Prometheus finds the run
trainer.lock              held by the living trainer; names its host and process
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from elastic_trainer.errors import RunError
from elastic_trainer.observability.lines import Journal, dump_json, full_disk_tolerated
from elastic_trainer.types import Plan, to_jsonable

CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
METRICS_FILE = "metrics.jsonl"
AUDIT_FILE = "audit.jsonl"
STATUS_FILE = "status.json"
EVENTS_FILE = "events.jsonl"
MEMBERSHIP_FILE = "membership.jsonl"
EXIT_REPORT_FILE = "exit_report.json"
EXIT_REPORT_TEXT_FILE = "exit_report.txt"
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
        self._samples = Journal(self.path / AUDIT_FILE)
        self._events = Journal(self.path / EVENTS_FILE)
        self._status = read_json(self.path / STATUS_FILE)
        # A crash may have cut the last line short; appending to it would spoil the next one too.
        # And it may have come between the two files. Older trainers wrote no audit.
        self.last_update = self._lines.last_update()
        audited = self._samples.last_update() or self.last_update
        self.truncate_after(min(self.last_update, audited))

    @property
    def name(self) -> str:
        return self.path.name

    def write_config(self, text: str) -> None:
        """Keep the resolved configuration (YAML)."""
        write_atomically(self.path / CONFIG_FILE, text)

    def write_plan(self, plan: Plan) -> None:
        """Keep the plan that the workers now follow."""
        write_atomically(self.path / PLAN_FILE, dump_json(to_jsonable(plan), indent=2) + "\n")

    def append_update(
        self,
        line: Mapping[str, Any],
        samples: Sequence[Sequence[str]] = (),
        skipped: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Append the line of one update; `line["update"]` follows on the last one.

        Args:
            line: the update's metrics.
            samples: ids of what it was trained on, by microbatch.
            skipped: ids of what would have been among it but could not be read, each with why.
        """
        update = line["update"]
        assert update > self.last_update, f"update {update} is recorded already"
        audited: dict[str, Any] = {"update": update, "samples": samples}
        if skipped:
            audited["skipped"] = dict(skipped)
        self._samples.append(audited)
        self._lines.append(line)
        self.last_update = update

    def truncate_after(self, update: int) -> None:
        """Drop the lines of updates after `update`, which are done again."""
        self._lines.truncate_after(update)
        self._samples.truncate_after(update)
        self.last_update = self._lines.last_update()

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


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}
