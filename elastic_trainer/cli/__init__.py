"""The command line: `elastic-trainer`."""

from elastic_trainer.cli.main import main

__all__ = ["main"]
