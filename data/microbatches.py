"""Divides a batch into microbatches: as its samples come, or packed by what they cost.

Samples that have sizes are packed. What they cost follows from the model's dimensions and the
sizes, and what is to be even are the stages of an even cut into a fixed number of stages, so which
samples share a microbatch does not depend on workers, plans or timings. A planner that balances its
stages cuts at nearly the same places, or at some of them. Given the rates of the stages that there
are, these are what is to be even (`data.cost=adaptive`).
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.config import Config
from elastic_trainer.data.samples import Sample
from elastic_trainer.data.synthetic import COST_FIELDS
from elastic_trainer.errors import PackingError
from elastic_trainer.planner.packing import Packing, order_for, pack
from elastic_trainer.planner.sample_costs import (
    CostModel,
    Costs,
    GroupCost,
    Rates,
    analytic_cost,
    deciding_stages,
    even_stages,
    of_stages,
)
from elastic_trainer.planner.sizes import ItemSize, audio_tokens

# A group of layers that takes an eighth of the time is balanced by itself; smaller ones together
# with their neighbours, with which they would share a stage.
EVEN_STAGES = 8

# Emulated layers take as long as the synthetic sizes say, each group by itself.
EMULATED_GROUPS = dict(zip(COST_FIELDS, ("vision", "head"), strict=True))
EMULATED_COST = CostModel(tuple(GroupCost(g, linear_s=1.0) for g in EMULATED_GROUPS.values()))

_DIMENSIONS = frozenset(inspect.signature(analytic_cost).parameters)


def cost_model(config: Config) -> CostModel:
    """What a sample costs the groups of the configured model, relative to each other."""
    if config.model.target is None and config.model.name == "emulated":
        return EMULATED_COST
    args = config.model.args
    known = {name: args[name] for name in args if _is_dimension(name, args[name])}
    known.setdefault("patch_size", config.data.patch_size)
    known.setdefault("mel_bins", config.data.mel_bins)
    return analytic_cost(**known)


def _is_dimension(name: str, value: object) -> bool:
    """Models that are not shipped may mean anything else by an argument of the same name."""
    if name == "freeze":
        return isinstance(value, list | tuple)
    is_count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return name in _DIMENSIONS and is_count


def lengths_in(fields: Mapping[str, NDArray[Any]]) -> dict[str, list[int]]:
    """Lengths of the sequences that a microbatch with these fields gives each group.

    Synthetic ones are in a unit of their own. Of samples without sizes nothing is known.
    """
    if set(COST_FIELDS) <= set(fields):
        return {g: fields[name].tolist() for name, g in EMULATED_GROUPS.items()}
    if "image_lengths" not in fields:
        return {}
    segments, ids = fields["segments"].ravel(), fields["input_ids"].ravel()
    is_text = (segments >= 0) & (ids >= 0)  # no padding, no place of a picture or a clip
    return {
        "vision": fields["image_lengths"].tolist(),
        "audio": [audio_tokens(n) for n in fields["clip_lengths"].tolist()],
        "language": np.bincount(segments[segments >= 0]).tolist(),
        "head": np.bincount(segments[is_text]).tolist(),
    }


@dataclass(frozen=True, slots=True)
class Division:
    """How a batch is divided.

    `microbatches` are places of samples, in the order in which they run. `costs` are the predicted
    seconds of each group for the whole batch, empty for samples without sizes.
    """

    microbatches: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...] = ()


class Divider:
    """Divides batches as the configuration says; a pure function of samples and rates.

    Args:
        config: method, size of microbatches, limit of tokens, schedule, and the model's dimensions.
    """

    def __init__(self, config: Config) -> None:
        self._costs = cost_model(config)
        self._method = config.data.packing
        self._max_tokens = config.data.max_tokens_per_microbatch
        self._size = config.pipeline.microbatch_size
        self._schedule = config.pipeline.schedule

    def divide(self, samples: Sequence[Sample], rates: Rates | None = None) -> Division:
        """The microbatches of a batch.

        Args:
            samples: of the batch.
            rates: of the stages that run it; None: of an even cut.
        """
        sizes = [sample.size for sample in samples if sample.size is not None]
        if len(sizes) < len(samples):
            places = range(len(samples))
            starts = places[:: self._size]
            return Division(tuple(tuple(places[at : at + self._size]) for at in starts))
        costs = self._costs.predict_all(sizes)
        try:
            packing = self._pack(sizes, costs, rates)
        except PackingError as error:
            raise PackingError(
                error.what.replace(f"sample {error.index}", f"sample {samples[error.index].id}"),
                error.hint,
                error.index,
            ) from error
        order: Sequence[int] = range(len(packing.microbatches))
        if self._method != "order":
            order = order_for(self._schedule, packing.loads)
        return Division(
            tuple(packing.microbatches[place] for place in order),
            tuple(map(math.fsum, costs.T.tolist())),  # the same on any processor
        )

    def _pack(self, sizes: Sequence[ItemSize], costs: Costs, rates: Rates | None) -> Packing:
        """Which samples of these sizes share a microbatch."""
        if rates is None:
            rates = deciding_stages(even_stages(costs.sum(axis=0).tolist(), EVEN_STAGES))
        return pack(
            of_stages(costs, rates),
            -(-len(sizes) // self._size),
            tokens=[size.num_tokens for size in sizes],
            max_tokens=self._max_tokens,
            method=self._method,
        )
