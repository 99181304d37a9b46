"""What Ray starts in a worker's process: stand-ins that load the real actor there.

Whoever starts an actor must have its class. The real ones need torch, which takes seconds to load
and which the coordinator has no use for.
"""

from typing import Any


class StageWorker:
    """Stands before `stage_worker.StageWorker`; takes its arguments."""

    def __init__(self, *args: Any) -> None:
        from elastic_trainer.actors import stage_worker

        self._actor = stage_worker.StageWorker(*args)

    def call(self, method: str, *args: Any) -> Any:
        """Pass a call on."""
        return getattr(self._actor, method)(*args)


class Loader:
    """Stands before `loader.Loader`; takes its arguments."""

    def __init__(self, *args: Any) -> None:
        from elastic_trainer.actors import loader

        self._actor = loader.Loader(*args)

    def call(self, method: str, *args: Any) -> Any:
        """Pass a call on."""
        return getattr(self._actor, method)(*args)
