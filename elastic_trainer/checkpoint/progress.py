"""What a worker says of a save that goes on behind its back. No torch: the coordinator reads it."""

from dataclasses import dataclass

from elastic_trainer.checkpoint.store import LayerFile


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveProgress:
    """How far one worker is with writing its layers of an update.

    `problem` says why `files` are not all there; without one, a worker that is `writing` needs
    more time. With one it may be `writing` all the same, on a storage that does not answer.
    """

    files: tuple[LayerFile, ...] = ()
    problem: str | None = None
    writing: bool = False
