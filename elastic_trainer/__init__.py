"""elastic-trainer: elastic pipeline training on heterogeneous Ray clusters."""

from typing import TYPE_CHECKING

from elastic_trainer.version import __version__

if TYPE_CHECKING:
    from elastic_trainer.run import RunResult, fit

__all__ = ["RunResult", "__version__", "fit"]


def __getattr__(name: str) -> object:
    # Ray and the trainer load only when they are asked for: workers import single modules.
    if name in ("fit", "RunResult"):
        from elastic_trainer import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
