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
_STARTS_FOR, _MOST_STARTS = 192, 24  # samples times starts
_LEAST_STARTS = 4  # of a large batch, too, if the first does not come near enough
_EXCHANGES_PER_MICROBATCH = 8
_POLISHES_FOR = 8192  # samples times exchanges
_EVEN = 0.005  # distance from the mean at which a microbatch is left alone
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
        others = costs[:, kept]
        if not (abs(costs[:, column, None] - others) <= 1e-9 * others).all(axis=0).any():
            kept.append(column)
    return np.ascontiguousarray(costs[:, kept])


def improve_starts(problem: Problem, count: int) -> Indices | None:
    """The best of some packings into exactly `count` microbatches; None if tokens do not fit."""
    small = problem.num_samples <= _SMALL
    goal = problem.bound(count) * (1 + _ENOUGH[small])
    best: _State | None = None
    best_peak = np.inf
    most = min(_MOST_STARTS, max(_LEAST_STARTS, _STARTS_FOR // problem.num_samples))
    for number, (key, power) in enumerate(_starts(problem.costs)):
        if number >= most or best_peak <= goal:
            break
        assigned = _place(problem, count, np.argsort(-key, kind="stable"), power=power)
        if assigned is None:
            continue
        state = _State(problem, assigned, count)
        state.improve(goal)
        if (peak := float(state.peaks.max())) < best_peak:
            best, best_peak = state, peak
    if best is None:
        return _place(problem, count, np.argsort(-problem.tokens, kind="stable"), by_tokens=True)
    best.polish()
    return best.assigned


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
    """A packing that is being improved: the largest load falls with every exchange.

    Batches are small, so that what counts is the number of array operations. Stages come first in
    arrays. Behind the samples stands, for each microbatch, nothing: what a sample is exchanged for
    that is given away.
    """

    def __init__(self, problem: Problem, assigned: Indices, count: int) -> None:
        self.problem = problem
        self.count = count
        self.owners = np.concatenate([assigned, np.arange(count)])
        self.assigned = self.owners[: problem.num_samples]  # the same memory
        nothing = np.zeros((problem.costs.shape[1], count))
        self.costs = np.concatenate([problem.costs.T, nothing], axis=1)
        self.tokens = np.concatenate([problem.tokens, np.zeros(count, np.int64)])
        self.loads = np.ascontiguousarray(problem.loads(assigned, count).T)
        self.held = np.bincount(assigned, problem.tokens, count)

    @property
    def peaks(self) -> Numbers:
        found: Numbers = np.maximum.reduce(self.loads)
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

    def polish(self) -> None:
        """Even out the others where one large sample decides the largest load, which stays."""
        limit = float(self.peaks.max()) * (1 + _TINY)
        means = self.loads.mean(axis=1)[:, None]
        enough = (_EVEN * means.max()) ** 2
        settled = np.zeros(self.count, np.bool_)
        for _ in range(_POLISHES_FOR // self.problem.num_samples):
            distance = np.add.reduce((self.loads - means) ** 2)
            distance[settled] = -1.0
            chosen = int(distance.argmax())
            if distance[chosen] <= enough:
                return
            if (other := self._even_out(chosen, limit)) is None:
                settled[chosen] = True
            else:
                settled[chosen] = settled[other] = False

    def _exchange(self, worst: int, target: float) -> bool:
        """Swap a sample of the largest microbatch with another's, or give it away."""
        swaps = _Swaps(self, worst)
        value = swaps.peaks()
        row, column = divmod(int(value.argmin()), value.shape[1])
        if not value[row, column] < target:
            return False
        self._swap(swaps, row, column)
        return True

    def _even_out(self, chosen: int, limit: float) -> int | None:
        """The exchange that brings this microbatch and another nearest to each other, if any."""
        swaps = _Swaps(self, chosen)
        value = swaps.squares()
        value[swaps.peaks() > limit] = np.inf
        row, column = divmod(int(value.argmin()), value.shape[1])
        if not value[row, column] < -_TINY * float((self.loads[:, chosen] ** 2).sum()):
            return None
        return self._swap(swaps, row, column)

    def _swap(self, swaps: "_Swaps", row: int, column: int) -> int:
        """Make an exchange; gives the other microbatch."""
        other = int(self.owners[column])
        self.assigned[swaps.mine[row]] = other
        if column < len(self.assigned):
            self.assigned[column] = swaps.microbatch
        self._recount(swaps.microbatch, other)
        return other

    def _divide(self, worst: int, target: float) -> bool:
        """Divide the samples of the largest microbatch and one other anew, in the best way."""
        best: tuple[float, int, Indices, NDArray[np.bool_]] | None = None
        sizes = np.bincount(self.assigned, minlength=self.count) + (self.assigned == worst).sum()
        pairs = self.loads + self.loads[:, worst, None]
        halves = np.maximum.reduce(pairs) / 2  # no division makes less of a pair
        halves[worst] = np.inf
        promising = (sizes > 2) & (sizes <= _MOST_IN_PAIR) & (halves < target)
        for other in promising.nonzero()[0].tolist():
            if best is not None and halves[other] >= best[0]:
                continue
            both = ((self.assigned == worst) | (self.assigned == other)).nonzero()[0]
            choices = _divisions(len(both))
            mine = choices @ self.problem.costs[both]
            value = np.maximum(mine, pairs[:, other] - mine).max(axis=1)
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
            members = (self.assigned == number).nonzero()[0]
            self.loads[:, number] = np.add.reduce(self.problem.costs[members])
            self.held[number] = np.add.reduce(self.problem.tokens[members])


class _Swaps:
    """All exchanges of a sample of one microbatch (row) with what is owned by another (column)."""

    def __init__(self, state: _State, microbatch: int) -> None:
        self.state, self.microbatch = state, microbatch
        is_own = state.owners == microbatch
        self.mine = is_own[: len(state.assigned)].nonzero()[0]
        if len(self.mine) == 1:  # it must not go without another coming
            is_own[len(state.assigned) :] = True
        self._barred = is_own
        self._gone = state.costs[:, self.mine, None]
        self._others = state.loads[:, state.owners]

    def peaks(self) -> Numbers:
        """The larger of the two microbatches' largest loads after each; infinite if too long."""
        state = self.state
        kept = (state.loads[:, self.microbatch, None, None] - self._gone) + state.costs[:, None, :]
        given = self._gone + (self._others - state.costs)[:, None, :]
        np.maximum(kept, given, out=kept)
        value: Numbers = np.maximum.reduce(kept)
        value[:, self._barred] = np.inf
        if limit := state.problem.max_tokens:
            more = state.tokens[self.mine, None] - state.tokens
            over = (state.held[state.owners] + more > limit) | (
                state.held[self.microbatch] - more > limit
            )
            value[over] = np.inf
        return value

    def squares(self) -> Numbers:
        """By how much the sum of the squares of all loads grows."""
        state = self.state
        change = state.costs[:, None, :] - self._gone
        ahead = state.loads[:, self.microbatch, None] - self._others
        change *= ahead[:, None, :] + change
        value: Numbers = 2 * np.add.reduce(change)
        return value


@cache
def _divisions(count: int) -> Numbers:
    """All ways to divide `count` samples in two parts, none empty: 1 where the first's part is."""
    numbers = np.arange((1 << (count - 1)) - 1)
    rest = (numbers[:, None] >> np.arange(count - 1)) & 1
    return np.hstack([np.ones((len(numbers), 1)), rest])
