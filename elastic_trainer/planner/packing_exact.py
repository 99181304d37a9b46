"""Packing as a mixed integer programme."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.planner.packing_greedy import Indices, Problem

_MOST_CHOICES = 1024  # samples times microbatches
_NODES_FOR = 20_000  # choices times nodes of the search: about a second
_GAP = 1e-3
_STOPPED, _INFEASIBLE = 1, 2  # statuses of scipy's milp


def solve(
    problem: Problem, known: Indices, count: int, wanted: int, time_limit_s: float | None
) -> tuple[Indices | None, str]:
    """A better packing than `known` (into `count` microbatches), None if there is none, and why.

    It has `wanted` microbatches, more only where tokens do not fit otherwise. Which optimum is
    found depends on the problem alone; a search that is cut short counts as none, so that its
    state at that time does not matter.
    """
    for number in range(max(wanted, problem.fewest()), count + 1):
        peak = problem.peak(known, count) if number == count else np.inf
        bound = problem.bound(number)
        if peak <= bound * (1 + _GAP):
            return None, "longest first is as even as can be"
        if problem.num_samples * number > _MOST_CHOICES:
            return None, "too many samples and microbatches to solve; longest first"
        status, found = _search(problem, number, (bound, peak), time_limit_s)
        if status == _STOPPED:
            return None, "the search was cut short; longest first"
        if found is not None and problem.fits(found, number):
            better = problem.peak(found, number) < peak
            return (found if better else None), "the optimum"
    return None, "longest first is the optimum"


def _search(
    problem: Problem, count: int, limits: tuple[float, float], time_limit_s: float | None
) -> tuple[int, Indices | None]:
    # Scipy's optimizer takes a third of a second to load.
    from scipy.optimize import Bounds, milp
    from scipy.sparse import csr_array, hstack, kron

    n, stages = problem.costs.shape
    scale = limits[0] or 1.0
    each, every = np.eye(count), np.ones((1, count))
    # Variables: n x count choices, sample by sample, then the largest load.
    rows: list[tuple[Any, Any, float, float]] = [
        (kron(np.eye(n), every), 0.0, 1.0, 1.0),  # each sample in one microbatch
        (kron(np.ones((1, n)), each), 0.0, 1.0, np.inf),  # no microbatch empty
    ]
    for stage in range(stages):
        rows.append((kron(problem.costs[:, stage][None] / scale, each), -1.0, -np.inf, 0.0))
    if problem.max_tokens:
        most = float(problem.max_tokens)
        rows.append((kron(problem.tokens[None].astype(float), each), 0.0, 0.0, most))
    upper = np.ones(n * count + 1)
    upper[-1] = limits[1] / scale
    for place, sample in enumerate(_largest_first(problem)[:count]):
        upper[sample * count + place + 1 : (sample + 1) * count] = 0  # microbatches are alike
    lower = np.zeros(n * count + 1)
    lower[-1] = limits[0] / scale * (1 - 1e-9)
    options: dict[str, Any] = {"mip_rel_gap": _GAP}
    if time_limit_s is None:
        options["node_limit"] = max(1, _NODES_FOR // (n * count))
    else:
        options["time_limit"] = time_limit_s
    result = milp(
        np.append(np.zeros(n * count), 1.0),
        integrality=np.append(np.ones(n * count), 0),
        bounds=Bounds(lower, upper),
        constraints=[
            (hstack([csr_array(a), csr_array(np.full((a.shape[0], 1), load))]), low, high)
            for a, load, low, high in rows
        ],
        options=options,
    )
    if result.status != 0 or result.x is None:
        return int(result.status), None
    chosen: NDArray[np.int64] = result.x[:-1].reshape(n, count).argmax(axis=1)
    return 0, chosen


def _largest_first(problem: Problem) -> list[int]:
    order: list[int] = np.argsort(-problem.costs.max(axis=1), kind="stable").tolist()
    return order
