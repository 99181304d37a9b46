"""From a configuration to a finished run: launch, watch, control, and use of the results."""

from elastic_trainer.run.control import drain, runs, scale, status, stop
from elastic_trainer.run.launch import fit
from elastic_trainer.run.planning import dry_run, plan_command
from elastic_trainer.run.results import checkpoints, evaluate, export, generate
from elastic_trainer.run.train import train_command
from elastic_trainer.types import RunResult

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
