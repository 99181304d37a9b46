"""Checkpoints as the coordinator sees them: positions, manifests, retention."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elastic_trainer.actors.handles import Pending, StageHandle
from elastic_trainer.checkpoint.store import CheckpointStore, LayerFile, Manifest
from elastic_trainer.config import Config
from elastic_trainer.data.info import describe
from elastic_trainer.errors import CheckpointError
from elastic_trainer.types import BatchInfo, CheckpointInfo, Cursor, Plan, WorkerId


def checkpoint_root(config: Config, run_dir: str | Path) -> str:
    """Where a run's checkpoints lie: in its folder, unless configured otherwise."""
    return config.checkpoint.storage_path or str(Path(run_dir).resolve() / "checkpoints")


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
        self._cursors = {start_update: start_cursor}
        self._data = describe(config).fingerprint

    def note(self, batches: Sequence[BatchInfo]) -> None:
        """Remember the positions behind these batches."""
        self._cursors.update({b.update: b.end for b in batches})

    def commit(
        self,
        update: int,
        files: Sequence[LayerFile],
        plan: Plan,
        extra: Mapping[str, Any],
    ) -> CheckpointInfo:
        """Write the manifest, then remove what need not be kept.

        Raises:
            CheckpointError: a layer is missing, or the storage refuses.
        """
        info = self._store.commit(
            update,
            files,
            cursor=self._cursors[update],
            extra={
                "schedule": plan.schedule,
                "num_stages": plan.num_stages,
                "data": self._data,
                **extra,
            },
        )
        self._cursors = {u: c for u, c in self._cursors.items() if u >= update}
        self._store.prune(self._num_to_keep)
        return info

    def start(
        self,
        update: int,
        plan: Plan,
        stages: Mapping[WorkerId, StageHandle],
        when: Callable[[Pending[Any], Callable[[Any], None]], None],
        saved: Callable[[CheckpointInfo], None],
        failed: Callable[[str], None],
    ) -> None:
        """Have all stages snapshot and write the state after `update`, then commit.

        Args:
            when: calls a function with a call's result, once it is there.
            saved: called with the complete checkpoint.
            failed: called with the reason, if there is none.
        """
        waiting, files = set(stages), list[LayerFile]()
        problems: list[str] = []
        extra: dict[str, Any] = {}  # alike on every stage

        def snapshot_taken(worker: WorkerId, facts: Mapping[str, Any]) -> None:
            extra.update(facts)
            when(stages[worker].saved(update), partial(written, worker))

        def written(worker: WorkerId, result: list[LayerFile] | str) -> None:
            waiting.discard(worker)
            if isinstance(result, str):
                problems.append(result)
            else:
                files.extend(result)
            if not waiting:
                finish()

        def finish() -> None:
            try:
                if problems:
                    raise CheckpointError(problems[0])
                info = self.commit(update, files, plan, extra)
            except (CheckpointError, OSError) as error:
                failed(str(error))
            else:
                saved(info)

        for worker, handle in stages.items():
            when(handle.save(update, self.root), partial(snapshot_taken, worker))

    def newest(self) -> CheckpointInfo | None:
        """The newest complete checkpoint."""
        return self._store.newest()
