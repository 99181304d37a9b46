"""The reading side of run folders: which runs there are, and where each stands."""

import difflib
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from elastic_trainer.errors import RunError
from elastic_trainer.observability.lines import complete_lines
from elastic_trainer.observability.record import (
    AUDIT_FILE,
    CONFIG_FILE,
    ENDED,
    EVENTS_FILE,
    MEMBERSHIP_FILE,
    METRICS_FILE,
    PLAN_FILE,
    STATUS_FILE,
    is_alive,
    read_json,
)

LATEST = "latest"
WRITING = ("running", "stopping")  # states in which the status is written every few seconds
RESPONDS_S = 60.0


def is_run(path: Path) -> bool:
    """Whether a folder is a run folder."""
    return (path / CONFIG_FILE).is_file() or (path / STATUS_FILE).is_file()


def run_dirs(storage_path: str | Path) -> list[Path]:
    """Run folders below `storage_path`, oldest first."""
    root = Path(storage_path)
    if not root.is_dir():
        return []
    runs = [path for path in root.iterdir() if path.is_dir() and is_run(path)]
    return sorted(runs, key=lambda path: (_started(path), path.name))


def _started(path: Path) -> float:
    started = read_json(path / STATUS_FILE).get("started_at")
    return float(started) if started else path.stat().st_mtime


def resolve_run(run: str | Path, storage_path: str | Path = "runs") -> Path:
    """The folder of a run given by path, by name or as `latest`."""
    path = Path(run)
    if is_run(path):
        return path.absolute()
    known = run_dirs(storage_path)
    if str(run) == LATEST and known:
        return known[-1].absolute()
    names = {folder.name: folder for folder in known}
    if str(run) in names:
        return names[str(run)].absolute()
    close = difflib.get_close_matches(str(run), names, n=1)
    if close:
        hint = f"Did you mean `{close[0]}`?"
    elif names:
        hint = "`elastic-trainer runs` lists them."
    else:
        hint = f"There are none in {Path(storage_path).absolute()}."
    raise RunError(f"There is no run `{run}`", hint)


def read_status(run_dir: str | Path) -> dict[str, Any]:
    """The status file's fields, with `alive`.

    The state is `interrupted` for a run whose trainer died, `not responding` for one that has not
    written its status for long, though a running one does every few seconds.
    """
    path = Path(run_dir)
    if not is_run(path):
        raise RunError(f"There is no run in {path}")
    alive = is_alive(path)
    status = {"name": path.name, "state": "starting", "update": 0} | read_json(path / STATUS_FILE)
    if not alive and status["state"] not in ENDED:
        status |= {
            "state": "interrupted",
            "reason": "its trainer is gone; `--resume auto` with this run's folder goes on",
        }
    if alive and status["state"] in WRITING:
        silent_s = time.time() - (path / STATUS_FILE).stat().st_mtime
        if silent_s > RESPONDS_S:
            process = f"no sign of its trainer (process {status.get('pid')}) for {silent_s:.0f} s"
            status["state"] = "not responding"
            status["reason"] = f"{process}: it is stopped, overloaded, or its disk is full"
    return status | {"alive": alive, "run_dir": str(path.absolute())}


def list_runs(storage_path: str | Path) -> list[dict[str, Any]]:
    """Status of every run below `storage_path`, oldest first."""
    return [read_status(path) for path in run_dirs(storage_path)]


def read_plan(run_dir: str | Path) -> dict[str, Any]:
    """The newest plan as plain dicts; empty when none was made yet."""
    return read_json(Path(run_dir) / PLAN_FILE)


def read_updates(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every line of the metrics file."""
    path = Path(run_dir) / METRICS_FILE
    return complete_lines(path) if path.exists() else []


def read_audit(run_dir: str | Path) -> list[dict[str, Any]]:
    """The samples of every update, by microbatch."""
    path = Path(run_dir) / AUDIT_FILE
    return complete_lines(path) if path.exists() else []


def read_membership(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every change of the membership, see `changes.Change`."""
    path = Path(run_dir) / MEMBERSHIP_FILE
    return complete_lines(path) if path.exists() else []


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every event of the run."""
    path = Path(run_dir) / EVENTS_FILE
    return complete_lines(path) if path.exists() else []


def tail_updates(run_dir: str | Path, count: int) -> list[dict[str, Any]]:
    """The newest `count` lines of the metrics file, without reading all of it."""
    path = Path(run_dir) / METRICS_FILE
    if count < 1 or not path.exists():
        return []
    with open(path, "rb") as file:
        position, block = file.seek(0, os.SEEK_END), b""
        while position and block.count(b"\n") <= count:
            step = min(65536, position)
            position -= step
            file.seek(position)
            block = file.read(step) + block
    # What follows the last newline is still being written. A first line that the block cut has
    # `count` whole ones behind it, so it is not among those returned.
    complete = block.split(b"\n")[:-1]
    return [json.loads(text) for text in deque(complete, maxlen=count)]


def run_story(run_dir: str | Path) -> dict[str, Any]:
    """A run's status with its plan, its membership's history, newest updates and newest events."""
    return read_status(run_dir) | {
        "plan": read_plan(run_dir),
        "membership": read_membership(run_dir),
        "updates": tail_updates(run_dir, 5),
        "events": read_events(run_dir)[-10:],
    }
