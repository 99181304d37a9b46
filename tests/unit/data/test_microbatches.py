"""Batches of unequal samples: packed evenly, the same samples, the same again after a resume."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from elastic_trainer.config import Config, load_config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.data.info import describe
from elastic_trainer.data.media.collate import collate, opened_text_tokens
from elastic_trainer.data.microbatches import cost_model, lengths_in
from elastic_trainer.data.rates import RateTable
from elastic_trainer.data.synthetic import COST_FIELDS
from elastic_trainer.errors import ConfigError, PackingError
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.planner.sizes import ItemSize
from elastic_trainer.testing.media_toys import (
    BOTH,
    EOS_ID,
    MEL_BINS,
    ONLY_TEXT,
    PATCH_SIZE,
    SEVERAL,
    random_sample,
)
from elastic_trainer.types import BatchInfo, Cursor

BATCH, MICROBATCH = 24, 6


def settings(*overrides: str) -> Config:
    base = {
        "model": {"name": "emulated"},
        "data": {"format": "synthetic", "sequence_length": 4, "size_sigma": 1.0},
        "train": {"global_batch_size": BATCH, "max_steps": 4},
        "pipeline": {"microbatch_size": MICROBATCH},
    }
    return load_config(base, list(overrides))


def read(
    config: Config,
    count: int = 3,
    cursor: Cursor | None = None,
    first: int = 1,
    rates: Rates | None = None,
) -> list[Any]:
    table = None if rates is None else RateTable(rates)
    stream = BatchStream(config, "train", BATCH, cursor, first_update=first, rates=table)
    return list(itertools.islice(stream, count))


def ids(info: BatchInfo) -> Counter[str]:
    return Counter(i for m in info.microbatches for i in m.sample_ids)


def unevenness(fields: list[dict[str, Any]]) -> float:
    loads = np.array([[f[name].sum() for name in COST_FIELDS] for f in fields])
    return float((loads / loads.mean(axis=0)).max())


def test_the_samples_of_a_batch_do_not_depend_on_packing() -> None:
    ways = [read(settings(f"data.packing={way}")) for way in ("order", "greedy", "exact")]
    uneven = []
    for batches in zip(*ways, strict=True):
        (info, fields), *others = batches
        assert [m.num_samples for m in info.microbatches] == [MICROBATCH] * (BATCH // MICROBATCH)
        for other, packed in others:
            assert ids(other) == ids(info) and max(ids(info).values()) == 1
            assert other.end == info.end and other.num_valid == info.num_valid
            for microbatch, arrays in zip(other.microbatches, packed, strict=True):
                assert {len(a) for a in arrays.values()} == {microbatch.num_samples}
        uneven.append([unevenness(f) for _, f in batches])
    order, greedy, exact = np.mean(uneven, axis=0)
    assert greedy < 1.3 < 1.4 < order and exact <= greedy + 0.01


def test_a_sample_keeps_its_fields_wherever_it_goes() -> None:
    seen: dict[str, list[Any]] = {}
    for way in ("order", "greedy"):
        ((info, fields),) = read(settings(f"data.packing={way}"), 1)
        for microbatch, arrays in zip(info.microbatches, fields, strict=True):
            for place, sample in enumerate(microbatch.sample_ids):
                row = [arrays[name][place].tolist() for name in sorted(arrays)]
                assert seen.setdefault(sample, row) == row
    assert len(seen) == BATCH


@pytest.mark.parametrize("way", ["greedy", "exact"])
def test_a_resumed_stream_packs_alike(way: str) -> None:
    config = settings(f"data.packing={way}", "data.max_tokens_per_microbatch=9000")
    whole = read(config, 4)
    resumed = read(config, 2, whole[1][0].end, first=3)
    for (info, fields), (expected, others) in zip(resumed, whole[2:], strict=True):
        assert info == expected
        for ours, theirs in zip(fields, others, strict=True):
            assert all(ours[n].tobytes() == theirs[n].tobytes() for n in theirs)


def test_a_batch_tells_its_predicted_cost() -> None:
    model = cost_model(settings())
    ((info, fields),) = read(settings(), 1)
    ((plain, _),) = read(settings("data.packing=order"), 1)
    assert info.costs == plain.costs, "whatever shares a microbatch"
    sums = [sum(float(f[name].sum()) for f in fields) for name in COST_FIELDS]
    assert len(info.costs) == len(model.groups) == len(sums)
    assert info.costs[0] / info.costs[1] == pytest.approx(sums[0] / sums[1])
    ((unsized, _),) = read(settings("data.size_sigma=0"), 1)
    assert unsized.costs == ()


def test_packing_follows_rates_and_the_samples_stay() -> None:
    """What is to be even is the slowest stage."""
    vision_slow, text_slow = ((8.0, 0.0), (0.0, 1.0)), ((1.0, 0.0), (0.0, 8.0))
    uneven = []
    ways = [read(settings(), 6, rates=rates) for rates in (None, vision_slow, text_slow)]
    for (info, fields), *others in zip(*ways, strict=True):
        found = [loads_of(fields)]
        for other, packed in others:
            assert ids(other) == ids(info) and other.microbatches != info.microbatches
            assert (other.end, other.costs, other.num_valid) == (
                info.end,
                info.costs,
                info.num_valid,
            )
            found.append(loads_of(packed))
        uneven.append(found)
    frozen, by_vision, by_text = np.mean(uneven, axis=0)
    assert by_vision[0] < frozen[0] and by_text[1] < frozen[1]
    assert by_vision[1] > by_text[1] and by_text[0] > by_vision[0]


def loads_of(fields: list[dict[str, Any]]) -> list[float]:
    """Largest over mean cost of a microbatch, of each kind."""
    loads = np.array([[f[name].sum() for name in COST_FIELDS] for f in fields])
    return [float(x) for x in (loads / loads.mean(axis=0)).max(axis=0)]


def test_packing_does_not_depend_on_workers_or_cuts() -> None:
    few, many = settings("cluster.num_workers=2"), settings("cluster.num_workers=8")
    assert [i for i, _ in read(few)] == [i for i, _ in read(many)]


def test_a_limit_of_tokens_makes_more_microbatches_or_names_the_sample() -> None:
    ((info, _),) = read(settings("data.max_tokens_per_microbatch=2800"), 1)
    assert len(info.microbatches) > BATCH // MICROBATCH and len(ids(info)) == BATCH
    with pytest.raises(PackingError, match=r"sample \d+ has \d+ tokens, more than the 600"):
        read(settings("data.max_tokens_per_microbatch=600"), 1)


def test_small_microbatches_stand_at_the_ends() -> None:
    for _, fields in read(settings()):
        sums = [sum(float(f[name].sum()) for name in COST_FIELDS) for f in fields]
        assert sums[-1] == min(sums) and sums[0] == sorted(sums)[1]


def test_sizes_are_log_normal_and_disturb_nothing_else() -> None:
    plain, sized = settings("data.size_sigma=0"), settings("data.packing=order")
    for (_, ours), (_, theirs) in zip(read(sized), read(plain), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert set(a) - set(b) == set(COST_FIELDS)
            assert all(np.array_equal(a[name], b[name]) for name in b)
    batches = read(sized, 40)
    for name in COST_FIELDS:
        costs = np.concatenate([f[name] for _, fields in batches for f in fields])
        assert np.std(np.log(costs)) == pytest.approx(1.0, abs=0.05)
        assert np.mean(costs) == pytest.approx(1.0, abs=0.15)
    assert (
        abs(
            np.corrcoef(
                *[
                    np.log(np.concatenate([f[n] for _, fs in batches for f in fs]))
                    for n in COST_FIELDS
                ]
            )[0, 1]
        )
        < 0.08
    )
    assert describe(plain).fingerprint != describe(sized).fingerprint


def test_costs_follow_the_models_dimensions() -> None:
    picture, text = ItemSize((256,), (), 4), ItemSize((), (), 300)
    base = {"model": {"name": "multimodal", "args": {"vocab_size": 300, "dim": 64}}}
    model = cost_model(load_config(base, ["data.format=media"]))
    deep = cost_model(load_config(base, ["data.format=media", "model.args.vision_layers=6"]))
    costs, of_deep = (m.predict_all([picture, text]).tolist() for m in (model, deep))
    assert of_deep[0][0] > 1.8 * costs[0][0]
    assert of_deep[0][1:] == costs[0][1:]
    assert costs[1][0] == 0 < costs[1][2]


def test_lengths_in_a_microbatch_are_those_of_its_samples() -> None:
    rng = np.random.default_rng(0)
    shapes = [SEVERAL, ONLY_TEXT, BOTH]
    samples = [random_sample(shape, rng) for shape in shapes]
    fields = collate(samples, eos_id=EOS_ID, patch_size=PATCH_SIZE, mel_bins=MEL_BINS)
    sizes = [
        ItemSize(
            tuple(4 * rows * columns for rows, columns in pictures),
            tuple(clips),
            opened_text_tokens(num_tokens),
        )
        for pictures, clips, num_tokens in shapes
    ]
    model = cost_model(load_config({"model": {"name": "multimodal"}}, ["data.format=media"]))
    found = lengths_in(fields)
    for group, cost in zip(model.groups, model.predict_all(sizes).sum(axis=0), strict=True):
        assert group.seconds(found[group.group]) == pytest.approx(cost) and cost > 0, group.group
    nothing = collate([], eos_id=EOS_ID, patch_size=PATCH_SIZE, mel_bins=MEL_BINS)
    assert not any(sum(lengths) for lengths in lengths_in(nothing).values())


def test_lengths_in_an_emulated_microbatch() -> None:
    ((_, (fields, *_)),) = read(settings(), 1)
    assert lengths_in(fields) == {
        "vision": fields["vision_cost"].tolist(),
        "head": fields["text_cost"].tolist(),
    }
    ((_, (plain, *_)),) = read(settings("data.size_sigma=0"), 1)
    assert lengths_in(plain) == {}


def test_arguments_of_other_models_may_mean_anything() -> None:
    args = {"freeze": True, "dim": None, "vocab_size": [5], "patch_size": "4x4", "lm_layers": 0}
    usual = cost_model(load_config({"model": {"target": "mine:model"}}, []))
    assert cost_model(load_config({"model": {"target": "mine:model", "args": args}}, [])) == usual


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.packing=best"], "`data.packing` is 'best'"),
        (["data.cost=thawed"], "`data.cost` is 'thawed'"),
        (["data.max_tokens_per_microbatch=-1"], "is -1"),
        (
            ["pipeline.schedule=async_1f1b", "data.max_tokens_per_microbatch=900"],
            "needs a synchronous schedule",
        ),
        (["data.format=tokens"], "`data.size_sigma` is not used by format tokens"),
    ],
)
def test_bad_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(*overrides)
