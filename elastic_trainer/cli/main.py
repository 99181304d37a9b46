"""Runs a command and turns what goes wrong into one line and an exit code."""

import os
import sys
import traceback
from collections.abc import Sequence

import typer

from elastic_trainer.cli.chaos import chaos
from elastic_trainer.cli.commands import app
from elastic_trainer.cli.data import data_app, make_dataset
from elastic_trainer.errors import ElasticTrainerError

app.command()(chaos)
app.command("make-dataset")(make_dataset)
app.add_typer(data_app, name="data")

INTERRUPTED = 130
DEBUG = "--debug"


def main() -> None:
    """Entry point of the `elastic-trainer` script."""
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run a command; its exit code."""
    try:
        code = app(list(args), prog_name="elastic-trainer", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`| head`) has enough; Python must not find the pipe closed again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if DEBUG in args:
            traceback.print_exc()
        return _fail(*_explain(error))
    if code == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        return _fail("interrupted", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _explain(error: Exception) -> tuple[str, int]:
    """What to say of an error, and the exit code."""
    if isinstance(error, ElasticTrainerError):
        return str(error), error.exit_code
    if isinstance(error, typer.TyperException):  # a usage error
        # Without arguments the help has been printed, and there is nothing to say.
        return error.format_message() or "give a command, see --help", error.exit_code
    if isinstance(error, typer.Abort):
        return "aborted", INTERRUPTED
    text = str(error).strip() or "no message"
    return f"internal error: {type(error).__name__}: {text} ({DEBUG} shows where)", 1


def _fail(text: str, code: int) -> int:
    """Say why on standard error: a picture that belongs to it, then the reason as last line."""
    reason, *picture = text.strip().splitlines() or ["failed"]
    for line in picture:
        print(line, file=sys.stderr)  # noqa: T201
    print(f"elastic-trainer: {reason}", file=sys.stderr)  # noqa: T201
    return code
