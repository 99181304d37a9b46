"""Packing by longest-first placement and exchanges, on arrays."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count as counting

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Indices = NDArray[np.int64]

_TINY = 1e-9
_SMALL = 64  # samples; so few are packed more carefully, as there is less to even out
_ENOUGH = {True: 0.002, False: 0.01}  # above the least possible, for small batches and others
_STARTS_FOR, _MOST_STARTS = 768, 16  # samples times starts
_EXCHANGES_PER_MICROBATCH = 8
_MOST_IN_PAIR = 12  # samples of two microbatches of which all 2^n divisions are tried
_POWER = 4
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Problem:
    """Samples to pack: costs by sample and stage, tokens by sample, and the limit (0: none)."""

    costs: Numbers
    tokens: Indices
    max_tokens: int

    @staticmethod
    def of(
        costs: Sequence[Sequence[float]] | Numbers, tokens: Sequence[int], max_tokens: int
    ) -> "Problem":
        array = np.asarray(costs, np.float64).reshape(len(tokens), -1)
        if not np.isfinite(array).all() or (array < 0).any():
            raise ValueError("costs are finite and not negative")
        return Problem(_distinct(array), np.asarray(tokens, np.int64), max_tokens)

    @property
    def num_samples(self) -> int:
        return len(self.tokens)

    def fewest(self) -> int:
        """Microbatches that the limit of tokens needs at least."""
        return -(-int(self.tokens.sum()) // self.max_tokens) if self.max_tokens else 1

    def bound(self, count: int) -> float:
        """No packing into `count` microbatches has a smaller largest load."""
        means = self.costs.sum(axis=0) / count
        return float(max(means.max(initial=0.0), self.costs.max(initial=0.0)))

    def loads(self, assigned: Indices, count: int) -> Numbers:
        """Loads by microbatch and stage."""
        columns = [np.bincount(assigned, column, count) for column in self.costs.T]
        return np.stack(columns, axis=1)

    def peak(self, assigned: Indices, count: int) -> float:
        """The largest load."""
        return float(self.loads(assigned, count).max())

    def fits(self, assigned: Indices, count: int) -> bool:
        """Whether the limit of tokens is respected."""
        held = np.bincount(assigned, self.tokens, count)
        return not self.max_tokens or bool(held.max() <= self.max_tokens)


def _distinct(costs: Numbers) -> Numbers:
    """Stages that no other one equals: stages with like costs need to be looked at only once."""
    kept: list[int] = []
    for column in range(costs.shape[1]):
        if not any(np.allclose(costs[:, column], costs[:, other], 1e-9, 0.0) for other in kept):
            kept.append(column)
    return np.ascontiguousarray(costs[:, kept])


def improve_starts(problem: Problem, count: int) -> Indices | None:
    """The best of some packings into exactly `count` microbatches; None if tokens do not fit."""
    small = problem.num_samples <= _SMALL
    goal = problem.bound(count) * (1 + _ENOUGH[small])
    best: Indices | None = None
    best_peak = np.inf
    most = min(_MOST_STARTS, max(1, _STARTS_FOR // problem.num_samples))
    for number, (key, power) in enumerate(_starts(problem.costs)):
        if number >= most or best_peak <= goal:
            break
        assigned = _place(problem, count, np.argsort(-key, kind="stable"), power=power)
        if assigned is None:
            continue
        state = _State(problem, assigned, count)
        state.improve(goal)
        if (peak := float(state.peaks.max())) < best_peak:
            best, best_peak = state.assigned, peak
    if best is None:
        return _place(problem, count, np.argsort(-problem.tokens, kind="stable"), by_tokens=True)
    return best


def _starts(costs: Numbers) -> Iterator[tuple[Numbers, bool]]:
    """Orders of placement (largest key first), and whether powers decide the place; endless."""
    largest = costs.max(axis=1)
    keys = [largest, costs.sum(axis=1), *(costs.T if costs.shape[1] > 1 else ())]
    yield from ((key, power) for power in (False, True) for key in keys)
    numbers = np.arange(1, len(costs) + 1)
    for turn in counting(1):  # shaken by multiples of the golden ratio, which are spread evenly
        yield largest * (1 + (numbers * turn * _GOLDEN) % 1), False


def _place(
    problem: Problem, count: int, order: Indices, *, power: bool = False, by_tokens: bool = False
) -> Indices | None:
    """Put one sample after the other where the load stays smallest; the first ones alone."""
    assigned = np.empty(problem.num_samples, np.int64)
    loads = np.zeros((problem.costs.shape[1], count))
    after = np.empty_like(loads)
    free = np.full(count, problem.max_tokens, np.int64)
    costs, tokens = problem.costs[:, :, None], problem.tokens.tolist()
    for place, index in enumerate(order.tolist()):
        chosen = place
        if place >= count:
            np.add(loads, costs[index], out=after)
            if by_tokens:
                value = -free.astype(np.float64)
            elif power:
                value = (after**_POWER - loads**_POWER).sum(axis=0)
            else:
                value = np.maximum.reduce(after)
            if problem.max_tokens:
                value = np.where(free >= tokens[index], value, np.inf)
            chosen = int(value.argmin())
            if problem.max_tokens and free[chosen] < tokens[index]:
                return None
        assigned[index] = chosen
        loads[:, chosen] += problem.costs[index]
        free[chosen] -= tokens[index]
    return assigned


class _State:
    """A packing that is being improved: the largest load falls with every exchange."""

    def __init__(self, problem: Problem, assigned: Indices, count: int) -> None:
        self.problem = problem
        self.assigned = assigned
        self.count = count
        self.loads = problem.loads(assigned, count)
        self.held = np.bincount(assigned, problem.tokens, count)

    @property
    def peaks(self) -> Numbers:
        found: Numbers = self.loads.max(axis=1)
        return found

    def improve(self, goal: float) -> None:
        """Exchange samples until the largest load is at most `goal`, or nothing helps."""
        for _ in range(_EXCHANGES_PER_MICROBATCH * self.count):
            peaks = self.peaks
            worst = int(peaks.argmax())
            target = float(peaks[worst]) * (1 - _TINY)
            if target <= goal or self.count == 1:
                return
            if not self._exchange(worst, target) and not self._divide(worst, target):
                return

    def _exchange(self, worst: int, target: float) -> bool:
        """Swap a sample of the largest microbatch with another's, or give it away."""
        costs, tokens = self.problem.costs, self.problem.tokens
        mine = np.flatnonzero(self.assigned == worst)
        others = np.flatnonzero(self.assigned != worst)
        owners, theirs, lengths = self.assigned[others], costs[others], tokens[others]
        if len(mine) > 1:  # then one may leave without another coming
            targets = np.delete(np.arange(self.count), worst)
            owners = np.concatenate([owners, targets])
            theirs = np.concatenate([theirs, np.zeros((len(targets), costs.shape[1]))])
            lengths = np.concatenate([lengths, np.zeros(len(targets), np.int64)])
        value = np.zeros((len(mine), len(owners)))
        for column in range(costs.shape[1]):
            gone, come = costs[mine, column], theirs[:, column]
            kept = np.add.outer(self.loads[worst, column] - gone, come)
            np.maximum(value, kept, out=value)
            np.maximum(value, np.add.outer(gone, self.loads[owners, column] - come), out=value)
        if limit := self.problem.max_tokens:
            more = np.subtract.outer(tokens[mine], lengths)
            value[(self.held[owners] + more > limit) | (self.held[worst] - more > limit)] = np.inf
        row, chosen = divmod(int(value.argmin()), len(owners))
        if not value[row, chosen] < target:
            return False
        self.assigned[mine[row]] = owners[chosen]
        if chosen < len(others):
            self.assigned[others[chosen]] = worst
        self._recount(worst, int(owners[chosen]))
        return True

    def _divide(self, worst: int, target: float) -> bool:
        """Divide the samples of the largest microbatch and one other anew, in the best way."""
        best: tuple[float, int, Indices, NDArray[np.bool_]] | None = None
        for other in range(self.count):
            both = np.flatnonzero((self.assigned == worst) | (self.assigned == other))
            if other == worst or not 2 < len(both) <= _MOST_IN_PAIR:
                continue
            choices = _divisions(len(both))
            mine = choices @ self.problem.costs[both]
            value = np.maximum(mine, self.loads[worst] + self.loads[other] - mine).max(axis=1)
            if limit := self.problem.max_tokens:
                tokens = choices @ self.problem.tokens[both]
                rest = self.held[worst] + self.held[other] - tokens
                value[(tokens > limit) | (rest > limit)] = np.inf
            chosen = int(value.argmin())
            if value[chosen] < min(target, best[0] if best else np.inf):
                best = float(value[chosen]), other, both, choices[chosen] > 0
        if best is None:
            return False
        _, other, both, stays = best
        self.assigned[both] = np.where(stays, worst, other)
        self._recount(worst, other)
        return True

    def _recount(self, *changed: int) -> None:
        # From scratch, so that rounding does not depend on the way there.
        for number in changed:
            members = self.assigned == number
            self.loads[number] = self.problem.costs[members].sum(axis=0)
            self.held[number] = self.problem.tokens[members].sum()


@cache
def _divisions(count: int) -> Numbers:
    """All ways to divide `count` samples in two parts, none empty: 1 where the first's part is."""
    numbers = np.arange((1 << (count - 1)) - 1)
    rest = (numbers[:, None] >> np.arange(count - 1)) & 1
    return np.hstack([np.ones((len(numbers), 1)), rest])
