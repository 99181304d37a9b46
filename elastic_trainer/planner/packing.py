"""Which samples of a batch share a microbatch, so that no stage waits for another; and in which
order the microbatches run.

A microbatch loads each stage with the sum of its samples' costs. What is minimised is the largest
load over stages and microbatches: in a pipeline everybody waits for it.

`greedy` puts the longest sample first, each into the microbatch that stays smallest, and then
exchanges samples with the largest one while that helps. All limits are amounts of work, never
seconds: a packing is a pure function of the costs, on any machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.errors import PackingError
from elastic_trainer.planner.packing_exact import solve
from elastic_trainer.planner.packing_greedy import Problem, improve_starts

TOO_LONG_HINT = (
    "Raise data.max_tokens_per_microbatch, or lower data.max_patches and data.max_audio_s"
)
METHODS = ("order", "greedy", "exact")


@dataclass(frozen=True, slots=True)
class Packing:
    """Indices of the samples of each microbatch, ascending.

    `loads` are seconds by microbatch and stage, `largest` is the largest of them, `reason` says
    why they are what they are.
    """

    microbatches: tuple[tuple[int, ...], ...]
    loads: tuple[tuple[float, ...], ...]
    largest: float
    method: str
    reason: str

    @property
    def max_over_mean(self) -> float:
        """Largest load over the mean one of the same stage, of the stage where that is worst."""
        columns = [column for column in zip(*self.loads, strict=True) if sum(column) > 0]
        return max((max(c) * len(c) / sum(c) for c in columns), default=1.0)


def pack(
    costs: Sequence[Sequence[float]] | NDArray[np.float64],
    num_microbatches: int,
    *,
    tokens: Sequence[int],
    max_tokens: int = 0,
    method: str = "greedy",
    time_limit_s: float | None = None,
) -> Packing:
    """Distribute samples over microbatches.

    Args:
        costs: seconds of each sample by stage.
        num_microbatches: how many; fewer where there are fewer samples, more only where
            `max_tokens` asks for it.
        tokens: length of each sample.
        max_tokens: most tokens of a microbatch; 0: any number.
        method: order (as they come), greedy or exact (where that is not too much work).
        time_limit_s: exact only: how long to try. Without, the amount of work is limited instead,
            and the packing depends on its arguments alone.

    Raises:
        PackingError: a sample alone has more tokens than `max_tokens`.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}")
    if not len(tokens):
        return Packing((), (), 0.0, method, "no samples")
    seconds = np.asarray(costs, np.float64)
    problem = Problem.of(seconds, tokens, max_tokens)
    for index, count in enumerate(tokens):
        if max_tokens and count > max_tokens:
            raise PackingError(
                f"sample {index} has {count} tokens, more than the {max_tokens} of a microbatch",
                TOO_LONG_HINT,
                index,
            )
    wanted = max(1, min(num_microbatches, problem.num_samples))
    if method == "order":
        return _packing(seconds, _in_order(problem, wanted), method, "in the order of the data")
    assigned, count, reason = _greedy(problem, wanted)
    if method == "exact":
        better, reason = solve(problem, assigned, count, wanted, time_limit_s)
        assigned = assigned if better is None else better
    return _packing(seconds, assigned, method, reason)


def _greedy(problem: Problem, wanted: int) -> tuple[NDArray[np.int64], int, str]:
    count = max(wanted, problem.fewest())
    # With as many microbatches as samples each sample has its own, so this ends.
    while (assigned := improve_starts(problem, count)) is None:
        count += 1
    bound = problem.bound(count)
    over = problem.peak(assigned, count) / bound - 1 if bound > 0 else 0.0
    reason = f"largest load at most {max(0.0, over):.1%} above the least possible"
    if count > wanted:
        reason = f"{count} microbatches instead of {wanted} to respect the limit; {reason}"
    return assigned, count, reason


def _in_order(problem: Problem, count: int) -> NDArray[np.int64]:
    """Runs of equal numbers of samples, shorter ones where the limit of tokens ends them."""
    most = -(-problem.num_samples // count)
    assigned = np.zeros(problem.num_samples, np.int64)
    number = held = filled = 0
    for index, length in enumerate(problem.tokens.tolist()):
        too_long = problem.max_tokens and filled + length > problem.max_tokens
        if held == most or too_long:
            number, held, filled = number + 1, 0, 0
        assigned[index] = number
        held, filled = held + 1, filled + length
    return assigned


def _packing(
    costs: NDArray[np.float64], assigned: NDArray[np.int64], method: str, reason: str
) -> Packing:
    """The packing of an assignment; microbatches in the order of their first samples."""
    members: dict[int, list[int]] = {}
    for index, number in enumerate(assigned.tolist()):
        members.setdefault(number, []).append(index)
    loads = [costs[indices].sum(axis=0).tolist() for indices in members.values()]
    return Packing(
        microbatches=tuple(map(tuple, members.values())),
        loads=tuple(map(tuple, loads)),
        largest=max(map(max, loads)),
        method=method,
        reason=reason,
    )


def order_for(schedule: str, loads: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The order in which to run microbatches with these loads by stage.

    1F1B begins with one microbatch after the other passing all stages forward, and ends with them
    passing all stages backward: while those pass, the other stages wait. So small ones stand at
    both ends, the smallest at the end, whose backward is the longer way, and large ones in the
    middle, where there is other work. Simulated with four stages and log-normal loads this takes
    13% off a random order, as much as the best of 40 random orders does 8%. In other schedules
    no simple order gained 1%, so the given one stays.
    """
    indices = range(len(loads))
    if schedule != "1f1b":
        return tuple(indices)
    rising = sorted(indices, key=lambda index: (sum(loads[index]), index))
    return (*rising[1::2], *rising[0::2][::-1])
