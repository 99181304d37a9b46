"""From a configuration to a finished run: launch, watch, control, and use of the results."""

from typing import TYPE_CHECKING

from elastic_trainer.run.control import drain, runs, scale, status, stop
from elastic_trainer.run.launch import fit
from elastic_trainer.run.results import checkpoints, evaluate, export, generate
from elastic_trainer.run.train import train_command
from elastic_trainer.types import RunResult

if TYPE_CHECKING:
    from elastic_trainer.run.planning import dry_run, plan_command

__all__ = [
    "RunResult",
    "checkpoints",
    "drain",
    "dry_run",
    "evaluate",
    "export",
    "fit",
    "generate",
    "plan_command",
    "runs",
    "scale",
    "status",
    "stop",
    "train_command",
]


def __getattr__(name: str) -> object:
    # Planning needs torch, which takes seconds to load and which starting a run has no use for.
    if name in ("dry_run", "plan_command"):
        from elastic_trainer.run import planning

        return getattr(planning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
