"""What the shell offers after Tab."""

from pathlib import Path


def complete_config(incomplete: str) -> list[str]:
    """Shipped recipes and YAML files."""
    from elastic_trainer.config import recipe_names

    folder = Path(incomplete).parent if "/" in incomplete else Path()
    files = [str(path) for path in folder.glob("*.yaml")]
    folders = [f"{path}/" for path in folder.glob("*/")] if "/" in incomplete else []
    return _matching(incomplete, [*recipe_names(), *files, *folders])


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


def _matching(incomplete: str, candidates: list[str]) -> list[str]:
    return [text for text in candidates if text.startswith(incomplete)]
