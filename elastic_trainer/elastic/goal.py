"""What a run is to reach, with whom, and how much it puts up with."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_trainer.config import Config, fewest_workers, fixed_stages
from elastic_trainer.schedule.build import is_asynchronous

ANY_NUMBER = 1 << 30  # of layers, while nobody knows


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Set once. Periods count updates, 0 means never; limits of -1 mean any number.

    `max_layers` is the most stages that are of use. `start_update` is the checkpoint to restore, 0
    for a new run. With `grid`, segments end at multiples of the updates that the plan names, since
    an asynchronous schedule drains there and results depend on it.
    """

    min_workers: int
    max_workers: int
    num_spares: int = 0
    max_layers: int = ANY_NUMBER
    max_steps: int | None
    eval_steps: int
    save_steps: int
    start_update: int = 0
    final_eval: bool = True
    max_failures: int = 0
    max_preemptions: int = -1
    refill_updates: int = 100
    snapshot_every: int = 0
    grid: bool = False


def goal_of(config: Config, start: Mapping[str, Any]) -> Goal:
    """What the elastic core is to reach.

    Args:
        config: the resolved configuration.
        start: as the coordinator is given it.
    """
    train, elastic = config.train, config.elastic
    stages = fixed_stages(config) or start["num_layers"]
    return Goal(
        min_workers=fewest_workers(config),
        max_workers=config.cluster.num_workers,
        num_spares=elastic.num_spares,
        max_layers=ANY_NUMBER if stages is None else stages,
        max_steps=train.max_steps,
        eval_steps=train.eval_steps if train.eval_batches else 0,
        save_steps=config.checkpoint.every_steps,
        start_update=start["update"],
        final_eval=train.eval_batches > 0,
        max_failures=elastic.max_failures,
        max_preemptions=elastic.max_preemptions,
        refill_updates=elastic.refill_updates,
        snapshot_every=elastic.snapshot_every,
        grid=is_asynchronous(config.pipeline.schedule),
    )
