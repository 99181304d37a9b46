"""Predicts the memory of a stage from its layers, its place in the pipeline and the schedule."""

from elastic_trainer.config import Config
from elastic_trainer.schedule.build import delay, is_asynchronous
from elastic_trainer.types import Profile

_MOMENTS = {"adamw": 2, "nadam": 2}


def num_moments(config: Config) -> int:
    """Tensors of the parameters' size that the optimizer keeps."""
    if config.optim.name == "sgd":
        return int(config.optim.beta1 > 0)
    return _MOMENTS[config.optim.name]


def live_activations(schedule: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Microbatches whose activations a stage holds at once, at most."""
    if schedule == "gpipe":
        return num_microbatches
    return min(num_stages - stage, num_microbatches)


def stash_copies(schedule: str, stage: int, num_stages: int) -> int:
    """Versions of the weights that a stage keeps beside the newest."""
    return delay(stage, num_stages) if is_asynchronous(schedule) else 0


def stage_memory_bytes(
    profile: Profile,
    first: int,
    stop: int,
    stage: int,
    num_stages: int,
    schedule: str,
    num_microbatches: int,
    moments: int,
) -> int:
    """Bytes of weights, gradients, optimizer moments, stash and live activations.

    Args:
        profile: costs of all layers.
        first: first layer of the stage.
        stop: layer behind the last of the stage.
        stage: place in the pipeline.
        num_stages: stages of the pipeline.
        schedule: name of the schedule.
        num_microbatches: microbatches of a batch (of a segment, when asynchronous).
        moments: tensors of the parameters' size that the optimizer keeps.
    """
    layers = profile.layers[first:stop]
    parameters = sum(layer.parameter_bytes for layer in layers)
    saved = sum(layer.saved_bytes for layer in layers)
    copies = 2 + moments + stash_copies(schedule, stage, num_stages)
    live = live_activations(schedule, stage, num_stages, num_microbatches)
    return parameters * copies + saved * live
