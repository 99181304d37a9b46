"""What stages are seen to take becomes rates: from the profile, from segments, for any plan."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from elastic_trainer.actors.costing import SampleCosting
from elastic_trainer.config import Config, load_config
from elastic_trainer.data.media.collate import collate
from elastic_trainer.data.microbatches import cost_model, lengths_in
from elastic_trainer.testing.media_toys import EOS_ID, MEL_BINS, PATCH_SIZE, SEVERAL, random_sample
from elastic_trainer.types import (
    BatchInfo,
    Cursor,
    LayerProfile,
    Plan,
    Prediction,
    Profile,
    StagePlan,
    StageReport,
)

VISION, TEXT = {"cost_field": "vision_cost"}, {"cost_field": "text_cost"}
LAYERS = [VISION, VISION, TEXT, TEXT]
SAMPLE = {"vision_cost": np.array([1.0, 3.0]), "text_cost": np.array([0.5, 0.5])}


def settings(*overrides: str, layers: Sequence[Mapping[str, Any]] = LAYERS) -> Config:
    base = {
        "model": {"name": "emulated", "args": {"layers": list(layers)}},
        "data": {"format": "synthetic", "size_sigma": 1.0, "cost": "adaptive"},
        "train": {"max_steps": 4},
    }
    return load_config(base, list(overrides))


def profile(seconds: Mapping[str, float]) -> Profile:
    common = {"activation_bytes": 1, "saved_bytes": 1, "parameter_bytes": 1}
    layers = tuple(
        LayerProfile(name=name, forward_s=s / 3, backward_s=s * 2 / 3, **common)
        for name, s in seconds.items()
    )
    return Profile(device_class="cpu", microbatch_size=2, layers=layers)


EVEN = profile({f"layers.{i}": 1.0 for i in range(4)})


def plan(*edges: int, generation: int = 1) -> Plan:
    ends = zip(edges, edges[1:], strict=False)
    nothing = Prediction(step_s=1.0, bubble_ratio=0.0, stage_busy_s=(), stage_memory_bytes=())
    return Plan(
        generation=generation,
        schedule="1f1b",
        num_microbatches=1,
        layers=tuple(f"layers.{i}" for i in range(edges[-1])),
        stages=tuple(
            StagePlan(stage=s, first=a, stop=b, worker=f"stage-{s}")
            for s, (a, b) in enumerate(ends)
        ),
        predicted=nothing,
        reasons=(),
    )


def report(stage: int, busy_s: float) -> StageReport:
    return StageReport(
        stage=stage, worker="", generation=1, segment=0, updates=(), wall_s=9.0,
        busy_s={"forward": busy_s / 4, "backward": busy_s * 3 / 4, "idle": 5.0, "optimizer": 2.0},
        peak_live_activations=1, peak_activation_bytes=1, stash_copies=0, max_staleness=0,
        sent_bytes=0, received_bytes=0,
    )  # fmt: skip


def batch(*costs: float) -> BatchInfo:
    return BatchInfo(update=1, microbatches=(), end=Cursor(), costs=costs)


class Costing(SampleCosting):
    """Keeps what it told."""

    def __init__(self, config: Config) -> None:
        self.told: list[tuple[str, str]] = []
        super().__init__(config, lambda kind, message: self.told.append((kind, message)))

    def segment(self, *busy_s: float, costs: Sequence[float] = (1.0, 1.0)) -> None:
        reports = [report(stage, seconds) for stage, seconds in enumerate(busy_s)]
        self.observe([batch(*costs), batch(*costs)], reports)


@pytest.mark.parametrize("way", ["data.cost=frozen", "pipeline.schedule=async_1f1b"])
def test_there_are_no_rates_to_follow(way: str) -> None:
    costing = Costing(settings(way))
    costing.profiled(EVEN, SAMPLE)
    assert costing.begin(plan(0, 2, 4)) is None
    costing.segment(1.0, 9.0)
    assert costing.news(5) is None and costing.told == []


def test_layers_of_no_known_kind_are_told_once() -> None:
    costing = Costing(settings(layers=[VISION, {}, TEXT, {}]))
    for _ in range(2):
        costing.profiled(EVEN, SAMPLE)
    assert costing.begin(plan(0, 2, 4)) is None and costing.news(1) is None
    ((kind, message),) = costing.told
    assert kind == "warning" and "layer layers.1" in message and "as under frozen" in message
    own = Costing(load_config({"model": {"target": "mine:model"}}, ["data.cost=adaptive"]))
    own.profiled(EVEN, SAMPLE)
    assert own.begin(plan(0, 2, 4)) is None and len(own.told) == 1


def test_it_starts_from_the_profile() -> None:
    """Four units of vision take 2 s, one unit of text takes 4 s."""
    costing = Costing(settings())
    seconds = {f"layers.{i}": 1.0 if i < 2 else 2.0 for i in range(4)}
    costing.profiled(profile(seconds), SAMPLE)
    rates = costing.begin(plan(0, 1, 4))
    assert rates is not None
    (first, nothing), (second, text) = rates
    assert nothing == 0 and first == second
    assert text / (first + second) == pytest.approx((4 / 1) / (2 / 4))
    assert costing.told == [("packing", costing.told[0][1])]
    assert "for 2 stages; times their predictions, parts take vision 0.42" in costing.told[0][1]


def test_a_sample_without_pictures_says_nothing_of_them() -> None:
    costing = Costing(settings())
    sample = {"vision_cost": np.array([0.0]), "text_cost": np.array([1.0])}
    costing.profiled(profile({f"layers.{i}": 1.0 + i for i in range(4)}), sample)
    assert costing.begin(plan(0, 2, 4)) == ((1.0, 0.0), (0.0, 1.0))


def test_the_shipped_model_is_known_by_the_names_of_its_layers() -> None:
    base = {"model": {"name": "multimodal"}, "data": {"format": "media", "cost": "adaptive"}}
    config = load_config(base, [])
    sample = collate(
        [random_sample(SEVERAL, np.random.default_rng(0))],
        eos_id=EOS_ID,
        patch_size=PATCH_SIZE,
        mel_bins=MEL_BINS,
    )
    groups, lengths = cost_model(config).groups, lengths_in(sample)
    cost = {g.group: g.seconds(lengths[g.group]) for g in groups}
    slow = {"vision": 20.0, "audio": 20.0, "language": 60.0, "head": 20.0}  # seconds per predicted
    names = {"vision.embed": "vision", "audio.project": "audio", "lm.embed": "language"}
    seconds = {name: cost[group] * slow[group] for name, group in names.items()}
    half = cost["language"] * slow["language"] / 2
    seconds |= {"lm.embed": half, "lm.blocks.0": half, "lm.head": cost["head"] * slow["head"]}
    costing = Costing(config)
    costing.profiled(profile(seconds), sample)
    rates = np.array(costing.begin(plan(0, 3, 5)))
    assert rates.shape == (2, 4)
    per_second = rates / rates[0, 0]
    np.testing.assert_allclose(per_second, [[1, 1, 1.5, 0], [0, 0, 1.5, 1]], rtol=1e-9)


def test_observed_stages_change_the_rates_and_say_why() -> None:
    costing = Costing(settings("data.prefetch_updates=2"))
    costing.profiled(EVEN, {})
    assert costing.begin(plan(0, 2, 4)) == ((1.0, 0.0), (0.0, 1.0))
    assert costing.news(1) is None, "nothing was seen"
    costing.segment(1.0, 4.0)
    rates = costing.news(7)
    assert rates is not None and rates[1][1] / rates[0][0] == pytest.approx(4)
    kind, message = costing.told[-1]
    assert kind == "packing" and message == (
        "from update 10 on batches are packed anew: times their predictions, parts take "
        "vision 0.40 (was 1.00), head 1.60 (was 1.00)"
    )
    assert costing.news(8) is None, "it is known already"


def test_predictions_are_those_of_the_batches() -> None:
    costing = Costing(settings())
    costing.profiled(EVEN, {})
    costing.begin(plan(0, 2, 4))
    costing.segment(1.0, 4.0, costs=(10.0, 40.0))
    assert costing.news(2) is None, "they take what they should"
    costing.observe([replace(batch(), costs=())], [report(0, 1.0), report(1, 9.0)])
    assert costing.news(3) is None, "of samples without sizes nothing is learnt"


def test_small_changes_add_up_before_packing_follows() -> None:
    costing = Costing(settings())
    costing.profiled(EVEN, {})
    costing.begin(plan(0, 2, 4))
    costing.segment(1.0, 1.0)
    news = []
    for update in range(2, 30):
        costing.segment(1.0, 1.3)
        news.append(costing.news(update))
    assert news[0] is None, "2.6% each"
    told = [rates for rates in news if rates is not None]
    assert 1 <= len(told) <= 3
    assert all(abs(rates[1][1] / rates[0][0] - 1) > 0.05 for rates in told)


def test_what_was_learnt_serves_the_next_plan() -> None:
    costing = Costing(settings())
    costing.profiled(EVEN, {})
    costing.begin(plan(0, 2, 4))
    costing.segment(1.0, 4.0)
    rates = costing.begin(plan(0, 1, 3, 4, generation=2))
    assert rates is not None
    vision, text = 0.4, 1.6
    expected = [(vision / 2, 0.0), (vision / 2, text / 2), (0.0, text / 2)]
    assert rates == tuple(pytest.approx(row) for row in expected)
    assert costing.news(9) is None, "loaders begin with it"
