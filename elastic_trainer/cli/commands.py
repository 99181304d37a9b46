"""The commands. Each loads what it needs itself, so that `--help` and completion stay instant."""

from pathlib import Path
from typing import Annotated, Any

import typer

from elastic_trainer.cli import render
from elastic_trainer.cli.complete import (
    complete_config,
    complete_node,
    complete_override,
    complete_run,
)
from elastic_trainer.errors import ConfigError
from elastic_trainer.version import __version__

DEFAULT_STORAGE = Path("runs")

app = typer.Typer(
    help="Train models split into pipeline stages over the workers of a Ray cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[CONFIG]",
        help="A YAML file, the name of a shipped recipe such as gpt, or a run folder.",
        autocompletion=complete_config,
        show_default=False,
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings that win over CONFIG, e.g. train.max_steps=100.",
        autocompletion=complete_override,
        show_default=False,
    ),
]
RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run folder, a run's name, or latest.", autocompletion=complete_run
    ),
]
StorageOption = Annotated[
    Path, typer.Option("--storage", metavar="DIR", help="Folder that holds the run folders.")
]
WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        "-w",
        metavar="N|MIN:MAX",
        help="Stage workers: so many, or between MIN and MAX as nodes come and go.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
CheckpointOption = Annotated[
    str,
    typer.Option(
        "--checkpoint", metavar="PATH|UPDATE", help="Which checkpoint; auto: the newest usable one."
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"elastic-trainer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the Python traceback of an error.")
    ] = False,
) -> None:
    """Options of every command; `--debug` is looked for by main."""


@app.command()
def train(
    config: ConfigArgument = None,
    overrides: OverridesArgument = None,
    workers: WorkersOption = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="local|auto|HOST:PORT",
            help="Ray cluster: start one here, find the running one, or connect to that one.",
            show_default=False,
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Folder of this run.", show_default=False),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Go on from the newest checkpoint of the run folder, or from that one.",
            show_default=False,
        ),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run and return; see status and stop.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and show the plan; train nothing.")
    ] = False,
    fast_dev_run: Annotated[
        bool,
        typer.Option("--fast-dev-run", help="Try all parts on a few updates, to find mistakes."),
    ] = False,
) -> int:
    """Train a model. Ctrl-C stops at the next commit point with a checkpoint; twice, at once."""
    from elastic_trainer.run import train_command

    if detach and dry_run:
        raise ConfigError("--detach and --dry-run exclude each other")
    config, settings = split_config(config, overrides)
    options: dict[str, Any] = {
        "workers": workers,
        "address": address,
        "run_dir": run_dir,
        "resume": resume,
        "fast_dev_run": fast_dev_run,
    }
    if dry_run:
        from elastic_trainer.config import to_yaml
        from elastic_trainer.run import dry_run as check

        resolved, made = check(config, settings, **options)

        typer.echo(to_yaml(resolved))
        render.plan(made, as_json=False)
        typer.echo("Dry run: nothing was started.")
        return 0
    return train_command(config, settings, detach=detach, **options)


@app.command()
def plan(
    config: ConfigArgument = None,
    overrides: OverridesArgument = None,
    workers: WorkersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show stages, predicted step time and memory per worker, and why; train nothing."""
    from elastic_trainer.run import plan_command

    config, settings = split_config(config, overrides)
    _, made = plan_command(config, settings, workers)
    render.plan(made, as_json)


@app.command()
def status(
    run: RunArgument, storage: StorageOption = DEFAULT_STORAGE, as_json: JsonOption = False
) -> None:
    """Show where a run stands."""
    from elastic_trainer.observability.runs import resolve_run, run_story

    render.status(run_story(resolve_run(run, storage)), as_json)


@app.command()
def runs(storage: StorageOption = DEFAULT_STORAGE, as_json: JsonOption = False) -> None:
    """List the runs, oldest first."""
    from elastic_trainer.observability.runs import list_runs

    render.runs(list_runs(storage), storage, as_json)


@app.command()
def stop(run: RunArgument, storage: StorageOption = DEFAULT_STORAGE) -> None:
    """Let a run stop at its next commit point, with a checkpoint."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import stop as stop_run

    found = stop_run(resolve_run(run, storage))
    typer.echo(f"{found['name']} stops after its next commit point (update {found['update']} now).")


@app.command()
def scale(
    run: RunArgument,
    workers: Annotated[
        str,
        typer.Option(
            "--workers", "-w", metavar="N|MIN:MAX", help="So many, or between MIN and MAX."
        ),
    ],
    storage: StorageOption = DEFAULT_STORAGE,
) -> None:
    """Let a run go on with other numbers of workers, from its next commit point."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import scale as scale_run

    done = scale_run(resolve_run(run, storage), workers)
    wanted = render.span_of_workers(done["min_workers"], done["max_workers"])
    typer.echo(f"{done['name']} goes on with {wanted} ({done['num_workers']} now).")


@app.command()
def drain(
    run: RunArgument,
    node: Annotated[
        str,
        typer.Option(
            metavar="IP",
            help="Address of the node, or its name or id in Ray.",
            autocompletion=complete_node,
        ),
    ],
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.0,
            help="The node goes in so many seconds; without: whenever its layers have moved.",
            show_default=False,
        ),
    ] = None,
    storage: StorageOption = DEFAULT_STORAGE,
) -> None:
    """Move a run's layers off a node, which may then be taken away, and place nothing there."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import drain as drain_run

    done = drain_run(resolve_run(run, storage), node, deadline)
    leaving = ", ".join(done["workers"])
    typer.echo(
        f"{leaving} leave{'s' if len(done['workers']) == 1 else ''} node {done['node']} at the "
        f"next commit point of {done['name']}."
        if leaving
        else f"{done['name']} has no worker on node {done['node']}, and will place none there."
    )


@app.command()
def checkpoints(
    run: RunArgument, storage: StorageOption = DEFAULT_STORAGE, as_json: JsonOption = False
) -> None:
    """List a run's complete checkpoints, oldest first."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import checkpoints as list_checkpoints

    render.checkpoints(list_checkpoints(resolve_run(run, storage)), as_json)


@app.command()
def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")],
    checkpoint: CheckpointOption = "auto",
    storage: StorageOption = DEFAULT_STORAGE,
) -> None:
    """Write a run's model in Hugging Face's layout."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import export as export_run

    written = export_run(resolve_run(run, storage), to, checkpoint)
    typer.echo(f"Wrote {written}. Load it: AutoModelForCausalLM.from_pretrained({str(written)!r})")


@app.command()
def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to continue.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(help="Same seed, same text.")] = 0,
    checkpoint: CheckpointOption = "auto",
    storage: StorageOption = DEFAULT_STORAGE,
) -> None:
    """Let a run's model continue a text."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import generate as generate_text

    text = generate_text(
        resolve_run(run, storage),
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        checkpoint=checkpoint,
    )
    typer.echo(text)


@app.command()
def evaluate(
    run: RunArgument,
    checkpoint: CheckpointOption = "auto",
    storage: StorageOption = DEFAULT_STORAGE,
    as_json: JsonOption = False,
) -> None:
    """Measure a run's model on the held-out data."""
    from elastic_trainer.observability.runs import resolve_run
    from elastic_trainer.run import evaluate as evaluate_run

    render.evaluation(evaluate_run(resolve_run(run, storage), checkpoint), as_json)


def split_config(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """CONFIG may be left out: a first argument `key=value` is an override."""
    settings = list(overrides or [])
    if config is not None and "=" in config and not Path(config).exists():
        return None, [config, *settings]
    return config, settings
