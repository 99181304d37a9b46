"""Checkpoints as the coordinator sees them: positions, manifests, retention."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.actors.background import Background
from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.handles import StageHandle
from elastic_trainer.actors.positions import Positions
from elastic_trainer.actors.save import Save
from elastic_trainer.checkpoint.storage import REMOTE_TIMEOUT_S
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile, Manifest
from elastic_trainer.config import Config
from elastic_trainer.data.info import describe
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import CheckpointInfo, Cursor, Plan, WorkerId

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
    """Remembers the data position of every state that may be returned to, and commits manifests.

    After the start the storage is only reached from a thread of its own: a remote one may take long
    to answer. What comes of it is reported when `deliver` is called.

    Args:
        config: the resolved configuration.
        run_dir: the run's folder.
        start_update: where the run starts.
        start_cursor: the data position there.
        goes_on: whether this coordinator takes the place of one that died.
    """

    def __init__(
        self,
        config: Config,
        run_dir: str,
        start_update: int,
        start_cursor: Cursor,
        *,
        goes_on: bool = False,
    ) -> None:
        self.root = checkpoint_root(config, run_dir)
        self.positions = Positions(start_update, start_cursor)
        self._num_to_keep = config.checkpoint.num_to_keep
        self._store = CheckpointStore(self.root)
        if not goes_on:  # a run that goes on from an older state abandons the newer ones
            self._store.supersede_after(start_update)
        self._newest = self._store.newest()
        self._data = describe(config).fingerprint
        self._background = Background("checkpoint-commit", COMMIT_LIMIT_S)
        self._open: list[Save] = []
        self._writers: dict[int, set[WorkerId]] = {}  # of incomplete updates: who may be writing

    @property
    def newest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint. Known without asking the storage."""
        return self._newest

    @property
    def busy(self) -> bool:
        """Whether the storage has yet to answer."""
        return self._background.busy

    def deliver(self, timeout_s: float = 0.0) -> bool:
        """Report what the storage has answered; False if `timeout_s` was too short for all."""
        return self._background.deliver(timeout_s)

    def start(
        self,
        generation: int,
        update: int,
        plan: Plan,
        stages: Mapping[WorkerId, StageHandle],
        calls: Calls,
        saved: Callable[[CheckpointInfo], None],
        failed: Callable[[str], None],
    ) -> None:
        """Have all stages copy and write the state after `update`, then commit.

        Args:
            saved: called with the complete checkpoint.
            failed: called with the reason, if there is none.
        """

        def ended(save: Save, problem: str | None) -> None:
            self._open = [s for s in self._open if s is not save]
            facts = {"schedule": plan.schedule, "num_stages": plan.num_stages, "data": self._data}
            self._commit(update, save.files, facts | save.facts, problem, saved, failed)

        self.positions.saving(update)
        save = Save(generation, update, plan, stages, calls, self.root, self._writers, ended)
        if not save.is_over:
            self._open.append(save)

    def abandon(self, generation: int) -> None:
        """This generation broke off: its checkpoints that workers still write come to nothing."""
        for save in self._open:
            if save.generation <= generation:
                save.abandon()
                self.positions.not_saving(save.update)
        self._open = [s for s in self._open if s.generation > generation]

    def rely_on(self, update: int, warn: Callable[[str], None]) -> None:
        """Training may go back to this checkpoint from now on: older ones need not be kept.

        Args:
            warn: called if they cannot be removed.
        """
        self.positions.saved(update)
        self._background.submit(
            lambda: self._store.prune(self._num_to_keep),
            _ignore,
            lambda reason: warn(f"old checkpoints could not be removed: {reason}"),
        )

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
    ) -> None:
        """Write the manifest, and report."""
        cursor = self.positions.at(update)
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
            self.positions.not_saving(update)
            for idle in [u for u, w in self._writers.items() if not w]:
                del self._writers[idle]
            saved(info)

        def not_committed(reason: str) -> None:
            self.positions.not_saving(update)
            failed(reason)

        self._background.submit(commit, committed, not_committed)

    def _discard(self, updates: Sequence[int]) -> None:
        """Give back the space of saves that came to nothing; complete ones stay."""
        for update in updates:
            try:
                self._store.discard(update)
            except (CheckpointError, OSError) as error:
                _log.warning("%s", error)


def _ignore(_: object) -> None:
    """The result tells nothing."""
