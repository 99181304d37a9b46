"""What stages take for samples, compared with the prediction: the rates that packing follows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_trainer.config import Config
from elastic_trainer.data.microbatches import EMULATED_GROUPS, cost_model, lengths_in
from elastic_trainer.data.rates import effective_from
from elastic_trainer.models.outline import COST_FIELD
from elastic_trainer.planner.sample_costs import Adaptive, Rates, Shares, group_of, shares_of
from elastic_trainer.schedule.build import is_asynchronous
from elastic_trainer.types import BatchInfo, Plan, Profile, StageReport

SMALLEST_CHANGE = 0.05  # of a factor: below, packing stays as it is


class SampleCosting:
    """Learns what the groups of a model take, and says by which rates to pack for a plan.

    There are rates only under `data.cost=adaptive`, where a batch is divided at all, and for models
    whose layers are known to belong to groups. What was learnt lasts as long as the object.

    Args:
        config: the resolved configuration.
        log: takes kind and message of what the user may want to know.
    """

    def __init__(self, config: Config, log: Callable[[str, str], None]) -> None:
        model = cost_model(config)
        self._config = config
        self._log = log
        self._groups = model.groups
        self._adaptive = Adaptive(model)
        # An asynchronous batch is one microbatch, whatever it costs.
        self._follows = config.data.cost == "adaptive" and not is_asynchronous(
            config.pipeline.schedule
        )
        self._layers: list[tuple[str, float]] = []  # group and seconds of each
        self._shares: Shares = ()  # of the present generation's stages
        self._announced: tuple[float, ...] = ()

    def profiled(self, profile: Profile, sample: Mapping[str, Any]) -> None:
        """Start from what each layer took for a microbatch with the fields `sample`."""
        if not self._follows:
            return
        layers = []
        for index, layer in enumerate(profile.layers):
            group = self._group(index, layer.name)
            if group is None:
                self._follows = False
                self._log(
                    "warning",
                    f"data.cost=adaptive has no effect: of layer {layer.name} it is not known with "
                    "which size of a sample its cost grows; packing stays as under frozen",
                )
                return
            layers.append((group, layer.forward_s + layer.backward_s))
        self._layers = layers
        lengths = lengths_in(sample)
        predicted = [group.seconds(lengths.get(group.group, ())) for group in self._groups]
        taken = [
            sum(seconds for own, seconds in layers if own == group.group) if expected > 0 else 0.0
            for group, expected in zip(self._groups, predicted, strict=True)
        ]
        # As if each group were a stage.
        whole = tuple(tuple(float(a is b) for b in self._groups) for a in self._groups)
        self._adaptive.observe_stages(predicted, whole, taken)

    def begin(self, plan: Plan) -> Rates | None:
        """Rates for the stages of a generation that begins, None where packing follows none."""
        self._shares = ()
        if not self._follows:
            return None
        assert self._layers, "plans come from a profile"
        stages = [(stage.first, stage.stop) for stage in plan.stages]
        self._shares = shares_of(self._layers, stages, [g.group for g in self._groups])
        self._announced = self._adaptive.factors()
        told = self._told([1.0] * len(self._groups))
        self._log("packing", f"batches are packed for {plan.num_stages} stages; {told}")
        return self._adaptive.rates(self._shares)

    def observe(self, batches: Sequence[BatchInfo], reports: Sequence[StageReport]) -> None:
        """All stages, in order, have trained on these batches."""
        costs = [batch.costs for batch in batches if batch.costs]
        if not (self._shares and costs):
            return
        busy = [r.busy_s.get("forward", 0.0) + r.busy_s.get("backward", 0.0) for r in reports]
        predicted = [sum(of_group) for of_group in zip(*costs, strict=True)]
        self._adaptive.observe_stages(predicted, self._shares, busy)

    def news(self, update: int) -> Rates | None:
        """Other rates, if stages have proved to be so much faster or slower that packing should
        follow; loaders are told before they are asked for `update`.
        """
        if not self._shares:
            return None
        factors = self._adaptive.factors()
        changes = zip(factors, self._announced, strict=True)
        if all(abs(factor / known - 1) <= SMALLEST_CHANGE for factor, known in changes):
            return None
        before, self._announced = self._announced, factors
        first = effective_from(update, self._config.data.prefetch_updates)
        self._log(
            "packing", f"from update {first} on batches are packed anew: {self._told(before)}"
        )
        return self._adaptive.rates(self._shares)

    def _told(self, before: Sequence[float]) -> str:
        """The factors in words."""
        changes = []
        for group, factor, old in zip(self._groups, self._announced, before, strict=True):
            was = f" (was {old:.2f})" if f"{old:.2f}" != f"{factor:.2f}" else ""
            changes.append(f"{group.group} {factor:.2f}{was}")
        return f"times their predictions, parts take {', '.join(changes)}"

    def _group(self, index: int, name: str) -> str | None:
        """The group of a layer, None if it is in none."""
        model = self._config.model
        if model.target is None and model.name == "emulated":
            layers = model.args.get("layers") or ()
            profile = layers[index] if index < len(layers) else {}
            return EMULATED_GROUPS.get(profile.get(COST_FIELD, ""))
        return group_of(name)
