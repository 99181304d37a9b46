"""What the shell offers after Tab."""

from pathlib import Path

import typer


def complete_config(incomplete: str) -> list[str]:
    """Shipped recipes and YAML files."""
    from elastic_trainer.config import recipe_names

    folder = Path(incomplete).parent if "/" in incomplete else Path()
    files = [str(path) for path in folder.glob("*.yaml")]
    folders = [f"{path}/" for path in folder.glob("*/")] if "/" in incomplete else []
    return _matching(incomplete, [*recipe_names(), *files, *folders])


def complete_dataset(incomplete: str) -> list[str]:
    """Kinds of datasets."""
    from elastic_trainer.data.make_dataset import KINDS

    return _matching(incomplete, list(KINDS))


def complete_override(incomplete: str) -> list[str]:
    """Settings, and the values of those with a fixed choice."""
    from elastic_trainer.config.tree import leaf_types
    from elastic_trainer.config.validate import CHOICES

    path, separator, _ = incomplete.partition("=")
    if separator:
        return _matching(incomplete, [f"{path}={choice}" for choice in CHOICES.get(path, ())])
    return _matching(incomplete, [f"{key}=" for key in leaf_types()])


def complete_run(incomplete: str) -> list[str]:
    """Runs in the default folder, newest first."""
    from elastic_trainer.observability.runs import LATEST, run_dirs

    names = [path.name for path in reversed(run_dirs("runs"))]
    return _matching(incomplete, [LATEST, *names] if names else [])


def complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    """Nodes on which the run that stands before on the line, else the latest, has workers."""
    from elastic_trainer.errors import RunError
    from elastic_trainer.observability.runs import LATEST, read_status, resolve_run

    # While an option has no value yet, the arguments before it are not told apart.
    run = ctx.params.get("run") or next(iter(ctx.args), LATEST)
    try:
        status = read_status(resolve_run(str(run)))
    except RunError:
        return []
    workers = status.get("workers") or {}
    return _matching(incomplete, sorted({facts["node"] for facts in workers.values()}))


def _matching(incomplete: str, candidates: list[str]) -> list[str]:
    return [text for text in candidates if text.startswith(incomplete)]
