"""Predicts the memory of a stage from its layers, its place in the pipeline and the schedule."""

from itertools import accumulate

from elastic_trainer.config import Config
from elastic_trainer.schedule.build import delay, is_asynchronous, most_left
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


def parameter_copies(schedule: str, stage: int, num_stages: int, moments: int) -> int:
    """How often a stage holds its parameters' size: weights, gradients, moments, stash."""
    stash = delay(stage, num_stages) if is_asynchronous(schedule) else 0
    return 2 + moments + stash


class MemoryModel:
    """Memory of any range of layers as any stage; each question takes constant time.

    Args:
        profile: costs of all layers.
        num_stages: stages of the pipeline.
        schedule: name of the schedule.
        num_microbatches: microbatches of a batch (of a segment, when asynchronous).
        moments: tensors of the parameters' size that the optimizer keeps.
    """

    def __init__(
        self,
        profile: Profile,
        num_stages: int,
        schedule: str,
        num_microbatches: int,
        moments: int,
    ) -> None:
        layers = profile.layers
        self._parameters = [0, *accumulate(layer.parameter_bytes for layer in layers)]
        self._saved = [0, *accumulate(layer.saved_bytes for layer in layers)]
        self._late = [0, *accumulate(layer.late_bytes for layer in layers)]
        stages = range(num_stages)
        self._copies = [parameter_copies(schedule, s, num_stages, moments) for s in stages]
        self._live = [live_activations(schedule, s, num_stages, num_microbatches) for s in stages]
        # One more is being left when it is seen that there are too many.
        self._left = [min(most_left(schedule, s) + (s > 0), num_microbatches) for s in stages]

    def stage_bytes(self, first: int, stop: int, stage: int) -> int:
        """What layers `first` to `stop` need: weights, gradients, moments, stash, live activations,
        and what backwards have left for later.
        """
        parameters = self._parameters[stop] - self._parameters[first]
        saved = self._saved[stop] - self._saved[first]
        late = (self._late[stop] - self._late[first]) * self._left[stage]
        return parameters * self._copies[stage] + saved * self._live[stage] + late


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
    """Bytes that layers `first` up to `stop` need as stage `stage`; see `MemoryModel`."""
    model = MemoryModel(profile, num_stages, schedule, num_microbatches, moments)
    return model.stage_bytes(first, stop, stage)
