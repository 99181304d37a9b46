"""Histograms of sizes that range over decades: bins of equal width on a logarithmic scale."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NUM_BINS = 12


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values lie in each bin, and their smallest, middle, 90th percentile and largest."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    smallest: float
    median: float
    p90: float
    largest: float


def histogram(values: Sequence[float], num_bins: int = NUM_BINS) -> Histogram:
    """Count positive values; equal ones all lie in one bin."""
    array = np.asarray(values, dtype=np.float64)
    low, high = float(array.min()), float(array.max())
    if low == high:
        edges, counts = np.array([low, high]), np.array([len(array)])
    else:
        edges = np.geomspace(low, high, num_bins + 1)
        edges[0], edges[-1] = low, high  # geomspace rounds
        counts, _ = np.histogram(array, edges)
    return Histogram(
        edges=tuple(edges.tolist()),
        counts=tuple(counts.tolist()),
        smallest=low,
        median=float(np.median(array)),
        p90=float(np.quantile(array, 0.9)),
        largest=high,
    )
