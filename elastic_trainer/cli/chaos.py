"""The command that does harm on purpose."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elastic_trainer.cli import render
from elastic_trainer.cli.commands import DEFAULT_STORAGE, JsonOption, RunArgument, StorageOption
from elastic_trainer.errors import ConfigError

if TYPE_CHECKING:
    from elastic_trainer.testing.chaos.script import Step

Events = list[str] | None


def _event(kind: str, like: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{kind}", metavar=like, help=f"{what} May be given again.", show_default=False
    )
    return option


def chaos(
    run: RunArgument,
    kill: Annotated[
        Events, _event("kill", "stage=S@update=U", "Kill the worker that has the stage then.")
    ] = None,
    hang: Annotated[
        Events, _event("hang", "stage=S@update=U", "Let its compute thread stand still.")
    ] = None,
    stop: Annotated[
        Events, _event("stop", "stage=S@update=U", "Stop its process, which answers nobody.")
    ] = None,
    drain: Annotated[
        Events, _event("drain", "node=IP@update=U", "Announce that the node leaves.")
    ] = None,
    scale: Annotated[
        Events, _event("scale", "MIN:MAX@update=U", "Ask for other numbers of workers.")
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Events, one per line.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Recorded comings and goings of nodes: milliseconds,add|remove,node.",
            show_default=False,
        ),
    ] = None,
    speedup: Annotated[
        float, typer.Option(metavar="X", help="Replay the trace so many times as fast.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Same seed, same choices.")] = 0,
    limit: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.0,
            help="Seconds from a fault to the next committed update; without: "
            "elastic.stall_limit_s + 30.",
            show_default=False,
        ),
    ] = None,
    storage: StorageOption = DEFAULT_STORAGE,
    as_json: JsonOption = False,
) -> int:
    """Do harm to a running run, and judge how it takes that. Exit code 0: as it should."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.testing.chaos.trace import parse_trace
    from elastic_trainer.testing.chaos.trial import try_run

    given = {"kill": kill, "hang": hang, "stop": stop, "drain": drain, "scale": scale}
    steps = steps_of(given, script)
    changes = parse_trace(read_file(trace), trace.name) if trace is not None else []
    if not steps and not changes:
        raise ConfigError("nothing is to happen", "Give --kill, --script, --trace or another.")
    verdict = try_run(
        resolve_run(run, storage),
        steps,
        trace=changes,
        speedup=speedup,
        seed=seed,
        limit_s=limit,
        tell=lambda text: typer.echo(text, err=True),
    )
    render.verdict(verdict, as_json)
    return 0 if verdict.passed else 1


def steps_of(given: dict[str, Events], script: Path | None) -> list["Step"]:
    """The events of the options, then those of the script."""
    from elastic_trainer.testing.chaos.script import parse_script, parse_step

    steps = []
    for kind, texts in given.items():
        for text in texts or []:
            try:
                steps.append(parse_step(f"{kind} {text}"))
            except ConfigError as error:
                raise ConfigError(f"--{kind} {text}: {error.what}", error.hint) from error
    if script is not None:
        steps += parse_script(read_file(script), script.name)
    return steps


def read_file(path: Path) -> str:
    """Its text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read {path}: {reason}") from error
