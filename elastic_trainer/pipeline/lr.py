"""The learning rate, a pure function of the update, so that no scheduler has any state."""

import math

from elastic_trainer.config import OptimConfig


def lr_at(update: int, config: OptimConfig, max_steps: int | None) -> float:
    """Learning rate of update `update` (they count from 1).

    It rises linearly over the warm-up, then falls to `min_lr_ratio` of the peak at `max_steps`;
    without `max_steps` there is nothing to fall towards and it stays at the peak.
    """
    if update < config.warmup_steps:
        return config.learning_rate * update / config.warmup_steps
    if config.lr_schedule == "constant" or max_steps is None:
        return config.learning_rate
    span = max(1, max_steps - config.warmup_steps)
    done = min(1.0, max(0.0, (update - config.warmup_steps) / span))
    shape = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    floor = config.min_lr_ratio
    return config.learning_rate * (floor + (1.0 - floor) * shape)
