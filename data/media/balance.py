"""How evenly a dataset's rows fill microbatches, by the way in which they are packed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.planner.packing import Packing, pack
from elastic_trainer.planner.sample_costs import CostModel, even_stages, of_stages
from elastic_trainer.planner.sizes import ItemSize

RANDOM, SORTED, BALANCED = "random", "length-sorted", "balanced"
_MOST_BATCHES = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Largest over mean cost of a microbatch for each way of packing, averaged over batches.

    The mean is that of the stage which has most to do, so 1 means that no stage ever waits for a
    microbatch that is larger than others.
    """

    num_stages: int
    batch_size: int
    num_microbatches: int
    num_batches: int
    largest_over_mean: dict[str, float]


def predict_balance(
    items: Sequence[ItemSize],
    cost: CostModel,
    *,
    num_stages: int,
    batch_size: int,
    num_microbatches: int,
    seed: int,
) -> Balance:
    """Pack batches of shuffled rows in three ways.

    Args:
        items: sizes of the rows.
        cost: seconds that a row takes in each part of the model; only their proportions count.
        num_stages: an even cut into so many is assumed.
        batch_size: rows of a batch; fewer where there are fewer.
        num_microbatches: of a batch; at most one a row.
        seed: of the order.
    """
    batch_size = min(batch_size, len(items))
    num_microbatches = min(num_microbatches, batch_size)
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    num_batches = min(len(items) // batch_size, _MOST_BATCHES)
    by_group = cost.predict_all(items)
    costs = of_stages(by_group, even_stages(by_group.sum(axis=0).tolist(), num_stages))
    tokens = [item.num_tokens for item in items]
    sums = dict.fromkeys((RANDOM, SORTED, BALANCED), 0.0)
    for number in range(num_batches):
        rows = order[number * batch_size : (number + 1) * batch_size]
        by_length = sorted(rows, key=lambda row: (tokens[row], row))
        for way, chosen in ((RANDOM, rows), (SORTED, by_length), (BALANCED, rows)):
            packing = pack(
                costs[chosen],
                num_microbatches,
                tokens=[tokens[row] for row in chosen],
                method="greedy" if way == BALANCED else "order",
            )
            sums[way] += _largest_over_mean(packing)
    return Balance(
        num_stages=num_stages,
        batch_size=batch_size,
        num_microbatches=num_microbatches,
        num_batches=num_batches,
        largest_over_mean={way: total / num_batches for way, total in sums.items()},
    )


def _largest_over_mean(packing: Packing) -> float:
    most = max(map(sum, zip(*packing.loads, strict=True))) / len(packing.loads)
    return packing.largest / most if most else 1.0
