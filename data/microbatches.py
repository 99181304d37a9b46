"""Divides a batch into microbatches: as its samples come, or packed by what they cost.

Samples that have sizes are packed. What they cost follows from the model's dimensions and the
sizes, and what is to be even are the stages of an even cut into a fixed number of stages, so which
samples share a microbatch does not depend on workers, plans or timings. A planner that balances its
stages cuts at nearly the same places, or at some of them.
"""

import inspect
from collections.abc import Sequence

from elastic_trainer.config import Config
from elastic_trainer.data.samples import Sample
from elastic_trainer.errors import PackingError
from elastic_trainer.planner.packing import Packing, order_for, pack
from elastic_trainer.planner.sample_costs import (
    CostModel,
    GroupCost,
    analytic_cost,
    deciding_stages,
    even_stages,
    of_stages,
)
from elastic_trainer.planner.sizes import ItemSize

# A group of layers that takes an eighth of the time is balanced by itself; smaller ones together
# with their neighbours, with which they would share a stage.
EVEN_STAGES = 8

# Emulated layers take as long as the synthetic sizes say, each group by itself.
EMULATED_COST = CostModel((GroupCost("vision", linear_s=1.0), GroupCost("head", linear_s=1.0)))

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


class Divider:
    """Divides batches as the configuration says; a pure function of the samples.

    Args:
        config: method, size of microbatches, limit of tokens, schedule, and the model's dimensions.
    """

    def __init__(self, config: Config) -> None:
        self._costs = cost_model(config)
        self._method = config.data.packing
        self._max_tokens = config.data.max_tokens_per_microbatch
        self._size = config.pipeline.microbatch_size
        self._schedule = config.pipeline.schedule

    def divide(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The microbatches of a batch, in the order in which they run."""
        sizes = [sample.size for sample in samples if sample.size is not None]
        if len(sizes) < len(samples):
            starts = range(0, len(samples), self._size)
            return [list(samples[start : start + self._size]) for start in starts]
        try:
            packing = self.pack(sizes)
        except PackingError as error:
            raise PackingError(
                error.what.replace(f"sample {error.index}", f"sample {samples[error.index].id}"),
                error.hint,
                error.index,
            ) from error
        order: Sequence[int] = range(len(packing.microbatches))
        if self._method != "order":
            order = order_for(self._schedule, packing.loads)
        return [[samples[index] for index in packing.microbatches[place]] for place in order]

    def pack(self, sizes: Sequence[ItemSize]) -> Packing:
        """Which samples of these sizes share a microbatch."""
        costs = self._costs.predict_all(sizes)
        shares = even_stages(costs.sum(axis=0).tolist(), EVEN_STAGES)
        return pack(
            of_stages(costs, deciding_stages(shares)),
            -(-len(sizes) // self._size),
            tokens=[size.num_tokens for size in sizes],
            max_tokens=self._max_tokens,
            method=self._method,
        )
