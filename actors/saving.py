"""Checkpoints as the coordinator sees them: positions, manifests, retention."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elastic_trainer.actors.background import Background
from elastic_trainer.actors.handles import StageHandle
from elastic_trainer.actors.pending import Pending
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.storage import REMOTE_TIMEOUT_S
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile, Manifest
from elastic_trainer.config import Config
from elastic_trainer.data.info import describe
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import BatchInfo, CheckpointInfo, Cursor, Plan, WorkerId

COMMIT_LIMIT_S = 5 * REMOTE_TIMEOUT_S  # a commit takes a few calls of the storage
_log = logging.getLogger(__name__)


def checkpoint_root(config: Config, run_dir: str | Path) -> str:
    """Where a run's checkpoints lie: in its folder, or in one of its name at the place configured.

    Never right at that place: runs that share it would take each other's checkpoints for theirs.
    """
    folder = Path(run_dir).resolve()
    if config.checkpoint.storage_path is None:
        return str(folder / "checkpoints")
    base, mark, query = config.checkpoint.storage_path.partition("?")
    return f"{base.rstrip('/')}/{folder.name}{mark}{query}"


def check_same_data(config: Config, manifest: Manifest) -> None:
    """Refuse to go on from a position in other data: it would skip samples and repeat others.

    Raises:
        CheckpointError: rows, tokenizer, sequence length, shuffling or seed are not what they were.
    """
    saved = manifest.extra.get("data")
    if saved is not None and saved != describe(config).fingerprint:
        raise CheckpointError(
            f"the checkpoint of update {manifest.update} was made with other data than "
            f"{config.data.path} as it is configured now",
            "Set data.*, train.seed and the dataset as they were, or start a new run.",
        )


class Saving:
    """Remembers the data position of every update that may be saved, and commits manifests.

    After the start the storage is only reached from a thread of its own: a remote one may take long
    to answer. What comes of it is reported when `deliver` is called.

    Args:
        config: the resolved configuration.
        run_dir: the run's folder.
        start_update: where the run starts.
        start_cursor: the data position there.
    """

    def __init__(
        self, config: Config, run_dir: str, start_update: int, start_cursor: Cursor
    ) -> None:
        self.root = checkpoint_root(config, run_dir)
        self._num_to_keep = config.checkpoint.num_to_keep
        self._store = CheckpointStore(self.root)
        # A run that goes on from an older state abandons the newer ones.
        self._store.supersede_after(start_update)
        self._newest = self._store.newest()
        self._cursors = {start_update: start_cursor}
        self._data = describe(config).fingerprint
        self._background = Background("checkpoint-commit", COMMIT_LIMIT_S)
        self._writers: dict[int, set[WorkerId]] = {}  # of incomplete updates: who may be writing

    @property
    def newest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint. Known without asking the storage."""
        return self._newest

    @property
    def busy(self) -> bool:
        """Whether the storage has yet to answer."""
        return self._background.busy

    def note(self, batches: Sequence[BatchInfo]) -> None:
        """Remember the positions behind these batches."""
        self._cursors.update({b.update: b.end for b in batches})

    def deliver(self, timeout_s: float = 0.0) -> bool:
        """Report what the storage has answered; False if `timeout_s` was too short for all."""
        return self._background.deliver(timeout_s)

    def start(
        self,
        update: int,
        plan: Plan,
        stages: Mapping[WorkerId, StageHandle],
        when: Callable[[Pending[Any], Callable[[Any], None]], None],
        saved: Callable[[CheckpointInfo], None],
        failed: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """Have all stages snapshot and write the state after `update`, then commit.

        Args:
            when: calls a function with a call's result, once it is there.
            saved: called with the complete checkpoint.
            failed: called with the reason, if there is none.
            warn: called with what went wrong beside it.
        """
        waiting, files = set(stages), list[LayerFile]()
        problems: list[str] = []
        extra: dict[str, Any] = {
            "schedule": plan.schedule,
            "num_stages": plan.num_stages,
            "data": self._data,
        }
        self._writers[update] = set()

        def snapshot_taken(worker: WorkerId, facts: Mapping[str, Any] | str) -> None:
            if isinstance(facts, str):
                ended(worker, facts)
                return
            # It writes one update at a time: what it wrote before has ended.
            for writers in self._writers.values():
                writers.discard(worker)
            self._writers[update].add(worker)
            extra.update(facts)  # alike on every stage
            ask(worker)

        def ask(worker: WorkerId) -> None:
            when(stages[worker].saved(update), partial(answered, worker))

        def answered(worker: WorkerId, progress: SaveProgress) -> None:
            if not progress.writing:
                self._writers[update].discard(worker)
            files.extend(progress.files)
            if progress.writing and progress.problem is None:
                ask(worker)  # it may take as long as it needs, while it gets on
            else:
                ended(worker, progress.problem)

        def ended(worker: WorkerId, problem: str | None) -> None:
            waiting.discard(worker)
            if problem is not None:
                problems.append(problem)
            if waiting:
                return
            if missing := sorted(set(plan.layers) - {file.name for file in files}):
                problems.append(f"no worker has written {', '.join(missing)} of update {update}")
            problem = problems[0] if problems else None
            self._commit(update, files, extra, problem, saved, failed, warn)

        for worker, handle in stages.items():
            when(handle.save(update, self.root), partial(snapshot_taken, worker))

    def close(self, timeout_s: float) -> None:
        """The workers are gone: clear what they could not complete, and come to an end in time."""
        updates, self._writers = list(self._writers), {}
        self._background.submit(lambda: self._discard(updates), _ignore, _log.warning)
        if not self.deliver(timeout_s):
            _log.warning("%s did not answer within %.0f s", self._store.storage.label(), timeout_s)

    def _commit(
        self,
        update: int,
        files: Sequence[LayerFile],
        extra: Mapping[str, Any],
        problem: str | None,
        saved: Callable[[CheckpointInfo], None],
        failed: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """Write the manifest, report, then remove what need not be kept."""
        cursor = self._cursors[update]
        # A remote call that was given up may still act later, when the same update is being saved
        # again; what is left there goes with the next prune, or at the end.
        unused = [u for u, w in self._writers.items() if not w] if self._store.is_local else []

        def commit() -> CheckpointInfo:
            try:
                if problem is not None:
                    raise CheckpointError(problem)
                return self._store.commit(update, files, cursor=cursor, extra=extra)
            except (CheckpointError, OSError):
                self._discard(unused)
                raise

        def committed(info: CheckpointInfo) -> None:
            self._newest = info
            self._cursors = {u: c for u, c in self._cursors.items() if u >= update}
            self._writers = {u: w for u, w in self._writers.items() if w}
            saved(info)
            self._background.submit(
                lambda: self._store.prune(self._num_to_keep),
                _ignore,
                lambda reason: warn(f"old checkpoints could not be removed: {reason}"),
            )

        self._background.submit(commit, committed, failed)

    def _discard(self, updates: Sequence[int]) -> None:
        """Give back the space of saves that came to nothing; complete ones stay."""
        for update in updates:
            try:
                self._store.discard(update)
            except (CheckpointError, OSError) as error:
                _log.warning("%s", error)


def _ignore(_: object) -> None:
    """The result tells nothing."""
