"""Balanced microbatches against random ones: log-normal sizes (sigma 1), two stages of an emulated
encoder and two of a language model, real actors, channels and loader, in turns.

The costs of microbatches and the time of packing are those of the same stream of batches, and
small batches are compared with the exact optimum. Of these two comparisons the worst case counts.

With `--captions PATH` the recipe `captions` is trained on that dataset instead, which
`elastic-trainer make-dataset captions` made: the real model on two workers, again in turns.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from common import Trained, figure, log, parser, show, train

from elastic_trainer.config import load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.dataset import Dataset
from elastic_trainer.data.microbatches import Divider
from elastic_trainer.data.synthetic import COST_FIELDS
from elastic_trainer.planner.packing import pack
from elastic_trainer.types import Cursor

BATCH_SIZE, LARGE_BATCH_SIZE, MICROBATCH_SIZE = 128, 512, 8
FORWARD_S, BACKWARD_S = 0.015, 0.030  # of a microbatch of average samples
STEPS, LARGE_STEPS, WARMUP = 14, 6, 2
CAPTIONS_STEPS, CAPTIONS_WARMUP = 24, 4
# Twice as wide as the recipe's: where decoding takes the cores on which stages wait for each other,
# it fills the very gaps that packing closes.
CAPTIONS_DIM = 256
SMALL_BATCHES, SMALL_MICROBATCHES, SEEDS = (8, 10, 12, 14), (2, 3, 4), range(8)
COUNTED_BATCHES = 40
SOLVE_S = 60.0
SHAPES = ((BATCH_SIZE, MICROBATCH_SIZE), (LARGE_BATCH_SIZE, 32))  # of batch and microbatches


def config(
    packing: str, batch_size: int, steps: int = STEPS, microbatch_size: int = MICROBATCH_SIZE
) -> dict[str, Any]:
    """A run of four stages, the first two as slow as pictures are large, the others as texts."""
    stages = [COST_FIELDS[0]] * 2 + [COST_FIELDS[1]] * 2
    costs = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "activation_bytes": 16384}
    layers = [{**costs, "cost_field": name} for name in stages]
    return {
        "model": {"name": "emulated", "args": {"layers": layers}},
        "data": {
            "format": "synthetic",
            "sequence_length": 8,
            "size_sigma": 1.0,
            "packing": packing,
        },
        "train": {"global_batch_size": batch_size, "max_steps": steps, "max_grad_norm": 0.0},
        "pipeline": {"microbatch_size": microbatch_size, "cuts": [1, 2, 3]},
        "cluster": {"address": "local", "num_workers": 4},
    }


def step_s(packing: str, batch_size: int = BATCH_SIZE, steps: int = STEPS) -> float:
    """Mean seconds of a step; batches hold the same samples whatever the packing."""
    return mean_step_s(train(config(packing, batch_size, steps)), WARMUP)


def captions_step_s(packing: str, dataset: Path) -> float:
    """The same of the recipe captions at two stages."""
    run = train(
        "captions",
        f"data.path={dataset.absolute()}",
        f"data.packing={packing}",
        f"model.args.dim={CAPTIONS_DIM}",
        f"train.max_steps={CAPTIONS_STEPS}",
        "train.eval_steps=0",
    )
    return mean_step_s(run, CAPTIONS_WARMUP)


def mean_step_s(run: Trained, skip: int) -> float:
    """Mean seconds of the updates after the first `skip`."""
    elapsed: float = run.lines[-1]["time"] - run.lines[skip - 1]["time"]
    return elapsed / (len(run.lines) - skip)


def max_over_mean(batch_size: int, microbatch_size: int) -> list[float]:
    """Largest cost of a microbatch over the mean one, of batches without a larger sample."""
    settings = load_config(config("greedy", batch_size, STEPS, microbatch_size))
    found = []
    for _, parts in islice(BatchStream(settings, "train", batch_size), COUNTED_BATCHES):
        loads = np.array([[part[name].sum() for name in COST_FIELDS] for part in parts])
        means = loads.mean(axis=0)
        largest = [max(part[name].max() for part in parts) for name in COST_FIELDS]
        if (largest <= means).all():
            found.append(float((loads / means).max()))
    return found


def packing_s(batch_size: int) -> float:
    """Seconds to predict, pack and order a batch."""
    settings = load_config(config("greedy", batch_size))
    reader, divider = Dataset(settings).reader("train"), Divider(settings)
    cursor, seconds = Cursor(), []
    for _ in range(COUNTED_BATCHES):
        samples = []
        for _ in range(batch_size):
            samples.append(reader.next(cursor))
            cursor = samples[-1].end
        begin = time.perf_counter()
        divider.divide(samples)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def greedy_over_exact(seeds: Sequence[int]) -> list[float]:
    """Largest load of the greedy packing over the optimum, of small batches."""
    ratios = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        for size in SMALL_BATCHES:
            for count in SMALL_MICROBATCHES:
                costs = np.exp(random.normal(size=(size, 2)))
                greedy = pack(costs, count, tokens=[1] * size)
                exact = pack(costs, count, tokens=[1] * size, method="exact", time_limit_s=SOLVE_S)
                if "cut short" in exact.reason:
                    raise RuntimeError(f"{size} samples were not solved within {SOLVE_S} s")
                ratios.append(greedy.largest / exact.largest)
    return ratios


@contextmanager
def quiet_solver() -> Iterator[None]:
    """The solver's own messages go to standard error: the JSON object stands alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def worst(samples: Sequence[float]) -> dict[str, Any]:
    """A figure that stands for the largest of its samples."""
    return {**figure(samples), "value": max(samples)}


def in_turns(step: Callable[[str], float], repeats: int) -> dict[str, Any]:
    """Step time with balanced over that with random packing."""
    ratios = []
    for repeat in range(repeats):
        ways = ("order", "greedy") if repeat % 2 == 0 else ("greedy", "order")
        seconds = {way: step(way) for way in ways}
        ratios.append(seconds["greedy"] / seconds["order"])
        log(
            f"step {1000 * seconds['order']:.1f} ms random, "
            f"{1000 * seconds['greedy']:.1f} ms balanced"
        )
    return figure(ratios)


def main() -> None:
    command_line = parser(__doc__ or "", repeats=3)
    command_line.add_argument("--captions", type=Path, help="measure this dataset alone")
    options = command_line.parse_args()
    if options.captions is not None:
        ratios = in_turns(lambda way: captions_step_s(way, options.captions), options.repeats)
        show({"captions_balanced_over_random_step": ratios}, options.json)
        return
    packing = packing_s(LARGE_BATCH_SIZE)
    large = step_s("greedy", LARGE_BATCH_SIZE, LARGE_STEPS)
    log(f"batches of {LARGE_BATCH_SIZE}: packing {1000 * packing:.1f} ms, step {large:.2f} s")
    balanced = in_turns(step_s, options.repeats)
    with quiet_solver():
        compared = greedy_over_exact(SEEDS)
    show(
        {
            "balanced_over_random_step": balanced,
            "max_over_mean_cost": worst([x for shape in SHAPES for x in max_over_mean(*shape)]),
            "packing_share": figure([packing / large]),
            "greedy_over_exact": worst(compared),
        },
        options.json,
    )


if __name__ == "__main__":
    main()
