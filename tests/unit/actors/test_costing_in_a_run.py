"""The coordinator tells all loaders the same rates at the same updates, for the stages it has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_trainer.actors import coordinator as module
from elastic_trainer.actors.coordinator import Coordinator
from elastic_trainer.config import Config, load_config
from elastic_trainer.observability.runs import read_events, read_plan
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.testing.fake_site import FakeSite
from elastic_trainer.types import Cursor

VISION, TEXT = "vision_cost", "text_cost"
FIELDS = [VISION, VISION, VISION, TEXT, TEXT, TEXT]
SLOW = 4.0  # how many times as long as predicted text takes
UPDATES = 30


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "yield_to_compute", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(cost: str) -> Config:
    base = {
        "model": {"name": "emulated", "args": {"layers": [{"cost_field": f} for f in FIELDS]}},
        "data": {"format": "synthetic", "size_sigma": 1.0, "cost": cost, "num_loaders": 2},
        "train": {"max_steps": UPDATES, "eval_batches": 0},
        "pipeline": {"segment_updates": 3},
        "metrics": {"enabled": False},
        "cluster": {"num_workers": 3, "start_timeout_s": 5.0},
        "elastic": {"min_workers": 2, "stall_limit_s": 5.0, "lease_limit_s": 0.5},
    }
    return load_config(base, [])


class World:
    """A run of two or three workers and two loaders, whose layers of text are slow."""

    def __init__(self, folder: Path, cost: str) -> None:
        self.run_dir = folder / "run"
        self.site = FakeSite(str(folder), [f"layers.{i}" for i in range(6)], places=3)
        self.site.costs = (3.0, 3.0)
        self.site.busy_s = self._busy_s
        start = {"update": 0, "cursor": Cursor(), "checkpoint": None, "launch": "x"}
        self.coordinator = Coordinator(
            "run",
            config(cost),
            str(self.run_dir),
            {**start, "num_layers": None},
            site=self.site,
            wait=self.site.wait,
        )

    def _busy_s(self, segment: Segment, stage: int) -> dict[str, float]:
        assert self.site.plan is not None
        held = self.site.plan.stages[stage]
        fields = FIELDS[held.first : held.stop]
        seconds = sum(SLOW if field == TEXT else 1.0 for field in fields)
        return {"forward": seconds * len(segment.batches) / 3, "backward": seconds * 2 / 3}

    def at(self, update: int, action: Callable[[], Any]) -> None:
        def hook() -> None:
            if self.coordinator.state.committed >= update:
                self.site.hooks.remove(hook)
                action()

        self.site.hooks.append(hook)

    def lose_one(self) -> None:
        """A worker dies, and there is no room for another."""
        assert self.site.plan is not None
        self.site.places = 2
        self.site.stages[self.site.plan.stages[1].worker].is_dead = True

    def told(self, generation: int) -> list[dict[int, Rates]]:
        """By first update, what each loader was told in a generation."""
        return [
            {update: rates for (g, update), rates in loader.rates.items() if g == generation}
            for loader in self.site.loaders.values()
        ]


def slowness(rates: Rates) -> float:
    """How many times as slow as that of vision the whole of text is taken to be."""
    vision, text = np.array(rates).sum(axis=0)
    return float(text / vision)


def test_rates_follow_the_stages_through_a_loss(tmp_path: Path) -> None:
    world = World(tmp_path, "adaptive")
    world.at(15, world.lose_one)
    result = world.coordinator.run()
    assert (result.status, result.update) == ("completed", UPDATES), result.reason
    last = int(read_plan(world.run_dir)["generation"])
    before, after = world.told(1), world.told(last)
    assert before[0] == before[1] and after[0] == after[1] and last > 1
    assert slowness(before[0][1]) == 1.0, "nothing was seen yet"
    newest = before[0][max(before[0])]
    assert max(before[0]) > 1 and slowness(newest) > 2
    begun = after[0][min(after[0])]
    assert (len(newest), len(begun)) == (3, 2), "one row a stage"
    assert slowness(begun) == pytest.approx(SLOW, rel=0.3), "it goes on from what it has learnt"
    packing = [e["message"] for e in read_events(world.run_dir) if e["kind"] == "packing"]
    assert packing[0].startswith("batches are packed for 3 stages; ")
    assert "packed anew" in packing[1]
    assert any(message.startswith("batches are packed for 2 stages; ") for message in packing)


def test_frozen_runs_tell_no_rates(tmp_path: Path) -> None:
    world = World(tmp_path, "frozen")
    assert world.coordinator.run().update == UPDATES
    assert [loader.rates for loader in world.site.loaders.values()] == [{}, {}]
    assert not [e for e in read_events(world.run_dir) if e["kind"] == "packing"]
