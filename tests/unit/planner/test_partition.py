"""Cuts are the best there are: checked by brute force and by integer programming."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import lil_array

from elastic_trainer.errors import PlanError
from elastic_trainer.planner.partition import partition

COSTS = st.lists(st.integers(0, 30).map(float), min_size=1, max_size=9)


def stages(costs: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs)))]


def score(costs: Sequence[float], cuts: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
    sums = stages(costs, cuts)
    return max(sums), sum(s * s for s in sums), cuts


def smallest_maximum(costs: Sequence[float], num_stages: int) -> float:
    """The largest stage of the best cut, as an integer programme.

    x[i, s] = 1 when layer i is on stage s. Each layer has one stage, each stage a layer, a layer's
    stage is the one before's or the next, and no stage costs more than t, which is minimised.
    """
    n, p = len(costs), num_stages
    num_variables = n * p + 1
    rows: list[tuple[dict[int, float], float, float]] = []
    for i in range(n):
        rows.append(({i * p + s: 1.0 for s in range(p)}, 1, 1))
    for s in range(p):
        rows.append(({i * p + s: 1.0 for i in range(n)}, 1, n))
        load = {i * p + s: float(costs[i]) for i in range(n)}
        rows.append(({**load, n * p: -1.0}, -np.inf, 0))
    for i in range(n - 1):
        step: dict[int, float] = {}
        for s in range(p):
            step[(i + 1) * p + s] = float(s)
            step[i * p + s] = -float(s)
        rows.append((step, 0, 1))
    matrix = lil_array((len(rows), num_variables))
    for r, (entries, _, _) in enumerate(rows):
        for column, value in entries.items():
            matrix[r, column] = value
    objective = np.zeros(num_variables)
    objective[-1] = 1.0
    integrality = np.ones(num_variables)
    integrality[-1] = 0
    upper = np.ones(num_variables)
    upper[-1] = np.inf
    result = milp(
        objective,
        constraints=LinearConstraint(
            matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows]
        ),
        integrality=integrality,
        bounds=(0, upper),
        options={"mip_rel_gap": 0.0},
    )
    assert result.success, result.message
    return float(result.fun)


@given(COSTS, st.data())
def test_no_cut_is_better(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    cuts = partition(costs, num_stages)
    every = itertools.combinations(range(1, len(costs)), num_stages - 1)
    assert cuts == min(every, key=lambda c: score(costs, c))


@given(COSTS, st.data())
def test_no_cut_within_the_memory_is_better(costs: list[float], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(costs), max_size=len(costs)))
    limits = data.draw(
        st.lists(st.none() | st.integers(1, 25), min_size=num_stages, max_size=num_stages)
    )

    def memory(first: int, stop: int, stage: int) -> int:
        return sum(sizes[first:stop]) * (num_stages - stage)

    def fits(cuts: tuple[int, ...]) -> bool:
        return all(
            limit is None or memory(a, b, s) <= limit
            for s, ((a, b), limit) in enumerate(
                zip(itertools.pairwise((0, *cuts, len(costs))), limits, strict=True)
            )
        )

    every = filter(fits, itertools.combinations(range(1, len(costs)), num_stages - 1))
    best = min(every, key=lambda c: score(costs, c), default=None)
    if best is None:
        with pytest.raises(PlanError, match="fits the memory limits"):
            partition(costs, num_stages, memory=memory, limits=limits)
    else:
        assert partition(costs, num_stages, memory=memory, limits=limits) == best


@pytest.mark.parametrize(("num_layers", "num_stages", "seed"), [(10, 3, 0), (14, 4, 1), (16, 5, 2)])
def test_an_integer_programme_finds_nothing_better(
    num_layers: int, num_stages: int, seed: int
) -> None:
    costs = np.random.default_rng(seed).uniform(0.5, 4.0, num_layers).round(3).tolist()
    ours = max(stages(costs, partition(costs, num_stages)))
    assert ours == pytest.approx(smallest_maximum(costs, num_stages), abs=1e-6)


def test_equal_layers_give_equal_stages() -> None:
    assert partition([0.1] * 12, 4) == (3, 6, 9)


def test_of_equal_cuts_the_earliest_wins() -> None:
    assert partition([1.0] * 10, 4) == (2, 4, 7)


def test_what_does_not_set_the_maximum_is_still_even() -> None:
    """The last layer sets the maximum; the others are halved all the same."""
    assert partition([1.0, 1.0, 1.0, 1.0, 9.0], 3) == (2, 4)


def test_costs_of_very_different_size_add_exactly() -> None:
    assert partition([1e16, 1.0, 1.0, 1e16], 2) == (2,)
    assert partition([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 2) == (3,)


def test_two_hundred_layers_on_sixteen_stages() -> None:
    costs = np.random.default_rng(3).uniform(0.0, 1.0, 200).tolist()
    sums = stages(costs, partition(costs, 16))
    assert max(sums) < sum(costs) / 16 + 1.0


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0, 1.0], 3, "3 stages, but the model has only 2 layers"),
        ([1.0], 0, "a plan of 0 stages"),
        ([1.0, -1.0], 1, "negative or infinite"),
        ([1.0, float("nan")], 1, "negative or infinite"),
        ([1.0, float("inf")], 1, "negative or infinite"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs: list[float], num_stages: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        partition(costs, num_stages)
