"""From a configuration to a finished run: launch, watch, control, and use of the results."""

import importlib
from typing import TYPE_CHECKING

from elastic_trainer.run.control import runs, status, stop
from elastic_trainer.run.launch import fit
from elastic_trainer.run.train import train_command
from elastic_trainer.types import RunResult

if TYPE_CHECKING:
    from elastic_trainer.run.planning import dry_run, plan_command
    from elastic_trainer.run.results import checkpoints, evaluate, export, generate

__all__ = [
    "RunResult",
    "checkpoints",
    "dry_run",
    "evaluate",
    "export",
    "fit",
    "generate",
    "plan_command",
    "runs",
    "status",
    "stop",
    "train_command",
]


_NEEDING_TORCH = {
    "dry_run": "planning",
    "plan_command": "planning",
    "checkpoints": "results",
    "evaluate": "results",
    "export": "results",
    "generate": "results",
}


def __getattr__(name: str) -> object:
    # Torch takes seconds to load, and starting a run has no use for it.
    if name in _NEEDING_TORCH:
        module = importlib.import_module(f"elastic_trainer.run.{_NEEDING_TORCH[name]}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
