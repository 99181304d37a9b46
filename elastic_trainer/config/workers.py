"""How many workers, as commands take it: `N` or `MIN:MAX`."""

import re

from elastic_trainer.config.schema import Config
from elastic_trainer.errors import ConfigError

_NUMBER_OR_RANGE = re.compile(r"([0-9]+)(?::([0-9]+))?")


def parse_workers(text: str | int) -> tuple[int, int]:
    """Fewest and most workers.

    Raises:
        ConfigError: neither a number nor a range, no worker at all, or the larger one first.
    """
    match = _NUMBER_OR_RANGE.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(
            f"`--workers` is {text!r}", "Write a number such as 4, or MIN:MAX such as 2:8."
        )
    fewest = int(match[1])
    most = int(match[2] or match[1])
    if fewest < 1:
        raise ConfigError(f"`--workers` is {text!r}", "A run needs at least one worker.")
    if fewest > most:
        raise ConfigError(f"`--workers` is {text!r}", f"The fewest come first: {most}:{fewest}.")
    return fewest, most


def fewest_workers(config: Config) -> int:
    """Fewest workers to train with; the most are `cluster.num_workers`."""
    fewest, most = config.elastic.min_workers, config.cluster.num_workers
    return most if fewest is None else fewest


def fixed_stages(config: Config) -> int | None:
    """How many stages the configuration asks for; None: as many as there are workers."""
    cuts = config.pipeline.cuts
    return config.pipeline.num_stages or (len(cuts) + 1 if cuts else None)
