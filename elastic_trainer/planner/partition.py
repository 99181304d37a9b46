"""Cuts a list of layers into stages so that the slowest stage is as fast as possible."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic_trainer.errors import PlanError

MemoryOf = Callable[[int, int, int], int]
"""Bytes that layers `first` up to `stop` need as stage `stage`."""


def partition(
    costs: Sequence[float],
    num_stages: int,
    *,
    memory: MemoryOf | None = None,
    limits: Sequence[int | None] | None = None,
) -> tuple[int, ...]:
    """Index of the first layer of each stage but the first.

    Exact: no cut has a smaller largest stage cost; of those that tie, the one with the smallest sum
    of squares, then the one that cuts earliest. Costs are added without rounding, so that the
    result does not depend on the order of additions.

    Args:
        costs: seconds of each layer, in model order.
        num_stages: stages, each with at least one layer.
        memory: what a stage would need; only asked where `limits` has a number.
        limits: bytes that each stage may use, None for no limit.
    """
    num_layers = len(costs)
    if num_stages < 1:
        raise PlanError(f"a plan of {num_stages} stages", "Ask for at least one")
    if num_stages > num_layers:
        raise PlanError(
            f"{num_stages} stages, but the model has only {num_layers} layers",
            f"Set pipeline.num_stages to at most {num_layers}",
        )
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise PlanError("the profile has a layer with a negative or infinite time")
    table = _Table(_exact_prefix_sums(costs), num_stages, memory, limits)
    cap = table.smallest_maximum()
    if cap is None:
        raise PlanError(
            f"no cut of {num_layers} layers into {num_stages} stages fits the memory limits",
            "Use more stages, a smaller pipeline.microbatch_size or model.recompute=true",
        )
    return table.most_even(cap)


def _exact_prefix_sums(costs: Sequence[float]) -> list[int]:
    """Prefix sums in a unit in which every cost is a whole number."""
    ratios = [float(cost).as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in ratios)
    sums = [0]
    for numerator, denominator in ratios:
        sums.append(sums[-1] + numerator * (unit // denominator))
    return sums


@dataclass(frozen=True, slots=True)
class _Table:
    sums: list[int]
    num_stages: int
    memory: MemoryOf | None
    limits: Sequence[int | None] | None

    def smallest_maximum(self) -> int | None:
        """The largest stage cost of the best cut, None when nothing fits."""
        num_layers = len(self.sums) - 1
        best: list[int | None] = [0] + [None] * num_layers
        for stage in range(self.num_stages):
            best = [self._best_end(stage, stop, best) for stop in range(num_layers + 1)]
        return best[num_layers]

    def _best_end(self, stage: int, stop: int, before: list[int | None]) -> int | None:
        """Smallest largest cost of stages 0 to `stage` over layers 0 to `stop`."""
        best: int | None = None
        for first in range(stop - 1, stage - 1, -1):
            cost = self.sums[stop] - self.sums[first]
            if best is not None and cost >= best:
                break  # stages that begin earlier only cost more
            rest = before[first]
            if rest is not None and self._fits(first, stop, stage):
                worst = max(rest, cost)
                best = worst if best is None else min(best, worst)
        return best

    def most_even(self, cap: int) -> tuple[int, ...]:
        """Cuts with the smallest sum of squares among those with no stage above `cap`.

        Works from the last stage to the first, so that of equal sums the earliest cut wins.
        """
        num_layers = len(self.sums) - 1
        squares: list[int | None] = [None] * num_layers + [0]
        choices: list[list[int]] = []
        for stage in range(self.num_stages - 1, -1, -1):
            row = [self._best_start(stage, first, squares, cap) for first in range(num_layers + 1)]
            squares = [total for total, _ in row]
            choices.append([stop for _, stop in row])
        cuts = [0]
        for stops in reversed(choices):
            cuts.append(stops[cuts[-1]])
        return tuple(cuts[1:-1])

    def _best_start(
        self, stage: int, first: int, after: list[int | None], cap: int
    ) -> tuple[int | None, int]:
        """Smallest sum of squares of stages `stage` on from layer `first`, and where it stops."""
        best: int | None = None
        choice = -1
        for stop in range(first + 1, len(self.sums)):
            cost = self.sums[stop] - self.sums[first]
            if cost > cap:
                break
            rest = after[stop]
            if rest is None or not self._fits(first, stop, stage):
                continue
            total = rest + cost * cost
            if best is None or total < best:
                best, choice = total, stop
        return best, choice

    def _fits(self, first: int, stop: int, stage: int) -> bool:
        if self.memory is None or self.limits is None:
            return True
        limit = self.limits[stage]
        return limit is None or self.memory(first, stop, stage) <= limit
