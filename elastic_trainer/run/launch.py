"""Start a run, watch it, end it: what stands behind `fit` and `elastic-trainer train`."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from elastic_trainer.actors.handles import CoordinatorHandle, Pending
from elastic_trainer.errors import ClusterError, WorkerLostError
from elastic_trainer.observability.display import Display, choose_display
from elastic_trainer.observability.record import METRICS_FILE
from elastic_trainer.observability.runs import is_run, read_plan, read_status
from elastic_trainer.run.cluster import add_working_folder, connected, worker_environment
from elastic_trainer.run.lifeline import Lifeline
from elastic_trainer.run.model_check import ModelCheck
from elastic_trainer.run.prepare import Launch, Source, prepare
from elastic_trainer.types import RunResult

INTERRUPTED = "interrupted twice"  # the reason of a run that was stopped at once
POLL_S = 1.0  # how often the run folder is looked at: a driver must not cost a core
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def fit(
    config: Source = None,
    *overrides: str,
    workers: int | None = None,
    address: str | None = None,
    run_dir: str | Path | None = None,
    resume: str | None = None,
    fast_dev_run: bool = False,
    display: Display | bool = True,
) -> RunResult:
    """Train a model; the same thing as `elastic-trainer train`.

    Args:
        config: a YAML file, the name of a shipped recipe, a mapping or a `Config`.
        overrides: `key=value` texts.
        workers: stage workers; overrides `cluster.num_workers`.
        address: `local`, `auto` or HOST:PORT; overrides `cluster.address`.
        run_dir: folder of the run; derived from `run.storage_path` and `run.name` otherwise.
        resume: `auto`, an update, or the path of a checkpoint.
        fast_dev_run: three updates, one evaluation, one checkpoint.
        display: show progress, or how.

    Returns:
        How the run ended; `status` is `completed`, `stopped` or `failed`.

    Raises:
        ElasticTrainerError: the run could not start.
    """
    add_working_folder()
    launch = prepare(
        config,
        overrides,
        workers=workers,
        address=address,
        run_dir=run_dir,
        resume=resume,
        fast_dev_run=fast_dev_run,
        with_model=False,
    )
    with (
        closing(ModelCheck(launch.config)) as check,
        choose_display(display) as shown,
        connected(launch.config),
    ):
        check.result()
        for note in launch.notes:
            shown.message(note)
        return _run(launch, shown)


def _run(launch: Launch, shown: Display) -> RunResult:
    start = {"update": launch.update, "cursor": launch.cursor, "checkpoint": launch.checkpoint}
    coordinator = CoordinatorHandle.start(
        launch.name,
        launch.config,
        str(launch.run_dir),
        start,
        detached=False,
        env=worker_environment(launch.config),
    )
    running = coordinator.run()
    lifeline = Lifeline(coordinator, launch.config)
    watcher = Watcher(launch, shown)
    asked = False
    with stop_requests() as requests:
        while True:
            result = _poll(running)
            watcher.update()
            if result is not None:
                return result
            if len(requests) > 1:
                return _stopped_at_once(launch, shown)
            if requests and not asked:
                asked = True
                _ask_to_stop(coordinator, shown, requests[0])
            if (trouble := lifeline.check()) is not None:
                coordinator.kill()
                raise _not_responding(launch, trouble)


def _not_responding(launch: Launch, trouble: str) -> ClusterError:
    status = read_status(launch.run_dir) if is_run(launch.run_dir) else {}
    process = f" (process {status['pid']})" if status.get("alive") else ""
    return ClusterError(
        f"the run's coordinator{process} {trouble}; was it stopped, or does its storage hang",
        "Continue with `--resume auto`.",
    )


def _stopped_at_once(launch: Launch, shown: Display) -> RunResult:
    """The end without the coordinator: leaving the connection ends all actors of the run."""
    shown.message("stopped at once; the newest checkpoint stays")
    status = read_status(launch.run_dir) if is_run(launch.run_dir) else {}
    return RunResult(
        name=launch.name,
        status="stopped",
        reason=INTERRUPTED,
        run_dir=str(launch.run_dir),
        update=int(status.get("update") or 0),
        checkpoint=status.get("checkpoint"),
    )


def _poll(running: Pending[RunResult]) -> RunResult | None:
    try:
        return running.get(POLL_S)
    except TimeoutError:
        return None
    except WorkerLostError as error:
        raise ClusterError(
            f"the run's coordinator died: {error.what}", "Continue with `--resume auto`."
        ) from error


def _ask_to_stop(coordinator: CoordinatorHandle, shown: Display, name: str) -> None:
    shown.message(f"{name}: stopping at the next commit point; once more to stop at once")
    coordinator.stop(f"{name} received")


@contextmanager
def stop_requests() -> Iterator[list[str]]:
    """Names of the signals that ask to stop, as they come; empty outside a main thread.

    Nothing is raised and nothing called when one comes: it may interrupt Ray's native code. Only
    the third, when this program itself seems stuck, does what it always does in Python.
    """
    seen: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        seen.append(signal.Signals(number).name)
        if len(seen) > 2:
            raise KeyboardInterrupt

    old = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


class Watcher:
    """Follows the files of a run and shows what is new."""

    def __init__(self, launch: Launch, shown: Display) -> None:
        self._run_dir, self._shown = launch.run_dir, shown
        self._after = launch.update
        self._since = time.time()
        self._offset: int | None = None
        self._generation: int | None = None

    def update(self) -> None:
        """Show what was written since the last call."""
        if not is_run(self._run_dir):
            return
        status = read_status(self._run_dir)
        if status.get("started_at", 0.0) < self._since:
            return  # a resumed run's folder still tells of the run before
        if status.get("generation") not in (None, self._generation):
            self._generation = status["generation"]
            self._shown.plan(read_plan(self._run_dir))
        self._shown.status(status)
        for line in self._new_lines():
            self._shown.update(line)

    def _new_lines(self) -> Iterator[dict[str, Any]]:
        if self._generation is None:
            return
        try:
            with open(self._run_dir / METRICS_FILE, encoding="utf-8") as file:
                file.seek(self._offset or 0)
                while (text := file.readline()).endswith("\n"):
                    self._offset = file.tell()
                    line = json.loads(text)
                    if line["update"] > self._after:
                        yield line
        except FileNotFoundError:
            return  # no update has been committed yet
