"""Training whose packing follows its stages: real workers and loaders, without Ray."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from elastic_trainer.actors.costing import SampleCosting
from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.rates import RateTable, effective_from
from elastic_trainer.data.synthetic import COST_FIELDS
from elastic_trainer.elastic.instructions import INITIAL
from elastic_trainer.models.registry import load_model
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.testing.crew import ThreadedCrew
from elastic_trainer.testing.oracle import SynchronousOracle
from elastic_trainer.types import BatchInfo, LayerProfile, Profile

STAGES = ("stage-0", "stage-1")
BATCH, MICROBATCH, SEGMENT, DEPTH = 24, 6, 2, 1
SLOW = 4  # how many times as long as predicted text takes
TEXT_SLOW, VISION_SLOW = ((1.0, 0.0), (0.0, 9.0)), ((9.0, 0.0), (0.0, 1.0))


def settings(cost: str, model: Mapping[str, Any], num_loaders: int = 1) -> Config:
    base = {
        "model": model,
        "data": {
            "format": "synthetic",
            "sequence_length": 4,
            "size_sigma": 0.7,
            "cost": cost,
            "num_loaders": num_loaders,
            "prefetch_updates": DEPTH,
        },
        "train": {"global_batch_size": BATCH, "max_steps": 40, "max_grad_norm": 0.0},
        "pipeline": {"microbatch_size": MICROBATCH},
        "elastic": {"stall_limit_s": 20.0},
    }
    return load_config(base, [])


def emulated(unit_s: float = 0.0) -> dict[str, Any]:
    """Two stages, one as slow as pictures are large, and one as texts are long."""
    layers = [
        {"cost_field": name, "forward_s": unit_s * times, "backward_s": 2 * unit_s * times}
        for name, times in zip(COST_FIELDS, (1, SLOW), strict=True)
    ]
    return {"name": "emulated", "args": {"layers": layers}}


@contextmanager
def crew(config: Config) -> Iterator[ThreadedCrew]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        with ThreadedCrew(config, f"{folder}/s") as made:
            made.start(*STAGES)
            yield made


def configure(made: ThreadedCrew, rates: Rates | None) -> None:
    layers = load_model(made.config).names
    made.configure(made.make_plan(1, STAGES), 0, dict.fromkeys(layers, INITIAL), rates=rates)


def stream(config: Config, rates: Rates | None, count: int) -> list[Any]:
    table = None if rates is None else RateTable(rates)
    batches = BatchStream(config, "train", BATCH, rates=table)
    return [batch for _, batch in zip(range(count), batches, strict=False)]


def ids(info: BatchInfo) -> list[str]:
    return sorted(i for m in info.microbatches for i in m.sample_ids)


def guess(config: Config) -> Profile:
    """A profile that takes all layers to be alike."""
    layers = tuple(
        LayerProfile(
            name=name,
            forward_s=1.0,
            backward_s=2.0,
            activation_bytes=1,
            saved_bytes=1,
            parameter_bytes=1,
        )
        for name in load_model(config).names
    )
    return Profile(device_class="cpu", microbatch_size=MICROBATCH, layers=layers)


def largest_over_mean(infos: Sequence[BatchInfo], costs: Mapping[str, Any]) -> float:
    """Of what microbatches keep the slowest stage busy for, on average over batches."""
    found = []
    for info in infos:
        loads = [sum(costs[i] for i in m.sample_ids) for m in info.microbatches]
        seconds = np.array(loads) * (1, SLOW)
        found.append(seconds.max() / seconds.mean(axis=0).max())
    return float(np.mean(found))


def trained(cost: str, num_segments: int) -> tuple[list[BatchInfo], list[str]]:
    """Train as the coordinator does; the batches, and what was told of packing."""
    config, told = settings(cost, emulated(0.001)), list[str]()
    costing = SampleCosting(config, lambda kind, message: told.append(message))
    infos: list[BatchInfo] = []
    with crew(config) as made:
        costing.profiled(guess(config), {})
        configure(made, costing.begin(made.make_plan(1, STAGES)))
        for _ in range(num_segments):
            rates = costing.news(made.committed + 1)
            segment = made.segment(made.prepare(SEGMENT, rates))
            costing.observe(segment.batches, made.run(segment))
            infos += segment.batches
    return infos, told


def test_packing_follows_a_stage_that_is_slower_than_predicted() -> None:
    config = settings("frozen", emulated())
    costs = {
        sample: np.array([fields[name][place] for name in COST_FIELDS])
        for info, microbatches in stream(config, None, 16)
        for micro, fields in zip(info.microbatches, microbatches, strict=True)
        for place, sample in enumerate(micro.sample_ids)
    }
    frozen, _ = trained("frozen", 8)
    adaptive, told = trained("adaptive", 8)
    assert [info for info, _ in stream(config, None, 16)] == frozen
    # The first segment is observed before the second is ordered.
    first = effective_from(1 + SEGMENT, DEPTH)
    assert "packed anew" in told[1] and f"from update {first} on" in told[1]
    for before, after in zip(frozen, adaptive, strict=True):
        assert ids(before) == ids(after) and before.costs == after.costs
    even = [info for info, _ in stream(config, ((1.0, 0.0), (0.0, 1.0)), first - 1)]
    assert adaptive[: first - 1] == even
    was = largest_over_mean(frozen[first - 1 :], costs)
    now = largest_over_mean(adaptive[first - 1 :], costs)
    assert now - 1 < 0.7 * (was - 1), (was, now)


def test_loaders_agree_on_the_update_from_which_on_packing_changes() -> None:
    config = settings("adaptive", emulated(), num_loaders=2)
    with crew(config) as made:
        configure(made, VISION_SLOW)
        assert made.feeding is not None and len(made.feeding.serving) == 2
        found = made.prepare(3)
        made.committed = 3  # nothing is run here
        found += made.prepare(5, TEXT_SLOW)
    first = effective_from(4, DEPTH)
    before = [info for info, _ in stream(config, VISION_SLOW, 8)]
    after = [info for info, _ in stream(config, TEXT_SLOW, 8)]
    assert all(a != b for a, b in zip(before, after, strict=True)), "else nothing is shown"
    assert found == before[: first - 1] + after[first - 1 :]


def test_a_new_generation_packs_from_its_first_batch_on_by_its_own_rates() -> None:
    config = settings("adaptive", emulated(), num_loaders=2)
    with crew(config) as made:
        configure(made, VISION_SLOW)
        made.train(2)
        abandoned = made.prepare(3)
        layers = {n: STAGES[i] for i, n in enumerate(load_model(config).names)}
        made.take_stock(2)
        made.configure(made.make_plan(2, STAGES), 2, layers, rates=TEXT_SLOW)
        again = made.prepare(3)
        made.committed = 5
        later = made.prepare(4, VISION_SLOW)
    before = [info for info, _ in stream(config, TEXT_SLOW, 9)]
    after = [info for info, _ in stream(config, VISION_SLOW, 9)]
    first = effective_from(6, DEPTH)
    assert again + later == before[2 : first - 1] + after[first - 1 :]
    for old, new in zip(abandoned, again, strict=True):
        assert ids(old) == ids(new) and (old.end, old.update) == (new.end, new.update)
        assert old.microbatches != new.microbatches


def test_the_gradient_does_not_depend_on_rates() -> None:
    model = {
        "name": "gpt",
        "args": {"vocab_size": 256, "num_layers": 1, "dim": 8, "num_heads": 2, "max_positions": 4},
    }
    config = settings("adaptive", model)
    found = []
    for rates in (None, VISION_SLOW_4, TEXT_SLOW_4):
        ((info, microbatches),) = stream(config, rates, 1)
        oracle = SynchronousOracle(load_model(config), config)
        oracle.update(1, [{n: torch.from_numpy(a) for n, a in m.items()} for m in microbatches])
        found.append((info, oracle.gradients[0]))
    (frozen, gradients), *others = found
    assert max(float(grad.abs().max()) for grad in gradients.values()) > 1e-3
    for info, theirs in others:
        assert info.microbatches != frozen.microbatches and ids(info) == ids(frozen)
        for name, grad in gradients.items():
            assert (grad - theirs[name]).abs().max() < 1e-5, name


VISION_SLOW_4: Rates = ((9.0, 0.0, 0.0, 0.0), (0.0, 1.0, 1.0, 1.0))
TEXT_SLOW_4: Rates = ((1.0, 0.0, 0.0, 0.0), (0.0, 9.0, 9.0, 9.0))


@pytest.mark.parametrize("cost", ["frozen", "adaptive"])
def test_only_under_frozen_a_loader_keeps_what_it_has_packed(cost: str) -> None:
    config = settings(cost, emulated())
    with crew(config) as made:
        rates = TEXT_SLOW if cost == "adaptive" else None
        configure(made, rates)
        made.train(1)
        window = made.loader._window
        layers = {n: STAGES[i] for i, n in enumerate(load_model(config).names)}
        made.take_stock(2)
        made.configure(made.make_plan(2, STAGES), 1, layers, rates=rates)
        assert (made.loader._window is window) == (cost == "frozen")
