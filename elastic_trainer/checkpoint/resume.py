"""Which checkpoint a run goes on from."""

from dataclasses import dataclass

from elastic_trainer.checkpoint.store import CheckpointStore, Manifest, folder_update
from elastic_trainer.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The checkpoint chosen; `passed_over` says which newer ones could not be used, and why."""

    store: CheckpointStore
    manifest: Manifest
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        info = f"resuming from update {self.manifest.update} in {self.store.storage.label()}"
        return "; passed over ".join((info, *self.passed_over))


def resolve_resume(store: CheckpointStore, resume: str | int) -> ResumePoint | None:
    """Choose a checkpoint.

    Args:
        store: the run's own checkpoints.
        resume: `auto` (the newest whose files are all there), an update, a checkpoint's folder, or
            a folder that holds checkpoints (a run folder, too), as path or URI.

    Returns:
        The choice; None only for `auto` where no checkpoint was ever completed.

    Raises:
        CheckpointError: what was asked for is not there or not whole; or, for `auto`, there are
            checkpoints but all are damaged: starting over silently would lose them.
    """
    text = str(resume)
    if text == "auto":
        return _newest_usable(store)
    if text.isdecimal():
        return _exactly(store, int(text))
    base, mark, query = text.partition("?")
    parent, _, name = base.rstrip("/").rpartition("/")
    update = folder_update(name)
    if update is not None:
        return _exactly(CheckpointStore((parent or ".") + mark + query), update)
    for root in (base, base.rstrip("/") + "/checkpoints"):
        found = _newest_usable(CheckpointStore(root + mark + query))
        if found is not None:
            return found
    raise CheckpointError(
        f"there is no complete checkpoint in {base}",
        "`--resume` takes auto, an update, a checkpoint folder or a run folder",
    )


def _exactly(store: CheckpointStore, update: int) -> ResumePoint:
    manifest = store.manifest(update)
    faults = store.faults(manifest)
    if faults:
        raise CheckpointError(
            f"the checkpoint of update {update} is damaged: {faults[0]}",
            "Resume from another checkpoint; `--resume auto` takes the newest that is whole",
        )
    return ResumePoint(store, manifest)


def _newest_usable(store: CheckpointStore) -> ResumePoint | None:
    passed_over: list[str] = []
    for info in reversed(store.list()):
        manifest = store.manifest(info.update)
        faults = store.faults(manifest)
        if not faults:
            return ResumePoint(store, manifest, tuple(passed_over))
        passed_over.append(f"update {info.update}: {faults[0]}")
    if passed_over:
        raise CheckpointError(
            f"no checkpoint in {store.storage.label()} is whole: {'; '.join(passed_over)}",
            "Restore the missing files, or start a new run",
        )
    return None
