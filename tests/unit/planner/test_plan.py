"""Plans: stages, predictions, reasons, and what cannot be planned."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.config import Config, OptimConfig, PipelineConfig, TrainConfig
from elastic_trainer.errors import PlanError
from elastic_trainer.planner.memory import (
    live_activations,
    num_moments,
    parameter_copies,
    stage_memory_bytes,
)
from elastic_trainer.planner.plan import commit_every, make_plan, stage_ties
from elastic_trainer.planner.reasons import format_bytes, format_seconds
from elastic_trainer.planner.simulate import simulate
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.schedule.build import build
from elastic_trainer.types import LayerProfile, Plan, Profile, StagePlan


def profile(times: Sequence[float], parameter_bytes: int = 100, saved_bytes: int = 10) -> Profile:
    """Layers whose backward takes twice their forward."""
    layers = tuple(
        LayerProfile(
            name=f"layer.{i}",
            forward_s=time,
            backward_s=2 * time,
            activation_bytes=4,
            saved_bytes=saved_bytes,
            parameter_bytes=parameter_bytes,
        )
        for i, time in enumerate(times)
    )
    return Profile(device_class="cpu", microbatch_size=4, layers=layers)


def config(batch: int = 32, **pipeline: Any) -> Config:
    return Config(pipeline=PipelineConfig(**pipeline), train=TrainConfig(global_batch_size=batch))


def workers(count: int) -> list[str]:
    return [f"stage-{i}" for i in range(count)]


def cuts(plan: Plan) -> list[int]:
    return [stage.first for stage in plan.stages[1:]]


def test_cuts_follow_the_times_not_the_number_of_layers() -> None:
    plan = make_plan(profile([0.3, 0.1, 0.1, 0.1]), config(), workers(2), generation=5)
    assert cuts(plan) == [1]
    assert plan.stages == (
        StagePlan(stage=0, first=0, stop=1, worker="stage-0"),
        StagePlan(stage=1, first=1, stop=4, worker="stage-1"),
    )
    assert (plan.generation, plan.schedule, plan.num_microbatches) == (5, "1f1b", 8)
    assert plan.layers == ("layer.0", "layer.1", "layer.2", "layer.3")


def test_a_balanced_synchronous_step_is_predicted_by_the_closed_form() -> None:
    plan = make_plan(profile([0.1] * 8), config(), workers(4), 0)
    assert plan.predicted.step_s == pytest.approx((8 + 3) * 0.6)
    assert plan.predicted.stage_busy_s == pytest.approx([8 * 0.6] * 4)
    assert plan.predicted.bubble_ratio == pytest.approx(3 / 11)


def test_an_asynchronous_step_is_that_many_updates_of_a_long_segment() -> None:
    plan = make_plan(profile([0.1] * 8), config(schedule="async_1f1b"), workers(4), 0)
    assert plan.predicted.step_s == pytest.approx(8 * 0.6 * 153 / 150)
    assert plan.predicted.stage_busy_s == pytest.approx([8 * 0.6] * 4)
    assert plan.predicted.bubble_ratio < 0.02


@pytest.mark.parametrize("num_stages", range(1, 17))
def test_the_drain_costs_under_two_percent(num_stages: int) -> None:
    updates = commit_every(num_stages, 0)
    lists = build("async_1f1b", num_stages, [1] * updates)
    timeline = simulate(lists, lambda a: {Kind.F: 1.0, Kind.B: 2.0}.get(a.kind, 0.0))
    assert 1 - updates * 3.0 / timeline.makespan_s < 0.02


def test_the_user_may_set_how_often_to_commit() -> None:
    assert commit_every(4, 7) == 7


def test_tied_layers_become_tied_stages() -> None:
    plan = make_plan(profile([0.1] * 6), config(), workers(3), 0, ties_layers=[(0, 5), (0, 1)])
    assert stage_ties(plan.stages, [(0, 5), (0, 1), (1, 4), (2, 5)]) == ((0, 2), (1, 2))


def test_reasons_name_the_runner_up_and_its_step() -> None:
    plan = make_plan(profile([0.125, 0.125, 0.125, 0.1875]), config(), workers(2), 0)
    assert cuts(plan) == [2]
    assert plan.reasons == (
        "2 stages, one per worker",
        "cuts before layers [2], balanced so that the slowest stage is as fast as can be: stage 1 "
        "is the slowest with 938 ms per microbatch, the mean is 844 ms",
        "predicted step 8.25 s; runner-up: cuts [3] with 9.19 s (+11.4%)",
        "1f1b with 8 microbatches per batch: stages idle 18.2% of the time",
        "stage 0 on stage-0 needs the most memory: 840 B, no limit known",
    )


def test_the_runner_up_is_never_faster() -> None:
    times = [0.05, 0.3, 0.11, 0.21, 0.17, 0.02, 0.29, 0.13]
    for schedule in ("gpipe", "1f1b", "async_1f1b"):
        for count in range(2, 7):
            plan = make_plan(profile(times), config(schedule=schedule), workers(count), 0)
            assert "(-" not in plan.reasons[2]


def test_a_neighbour_of_the_most_even_cut_wins_when_it_is_faster() -> None:
    """Under GPipe forwards and backwards pass one after the other: even sums are not all."""
    times = ((0.125, 0.625), (0.625, 0.125), (0.625, 0.125))
    layers = tuple(
        replace(layer, forward_s=f, backward_s=b)
        for layer, (f, b) in zip(profile([1.0] * 3).layers, times, strict=True)
    )
    plan = make_plan(
        replace(profile([]), layers=layers), config(16, schedule="gpipe"), workers(2), 0
    )
    assert cuts(plan) == [2]
    assert "faster when simulated than the most even cut" in plan.reasons[1]
    assert "runner-up: cuts [1]" in plan.reasons[2]


def test_one_stage_has_no_cut_and_no_runner_up() -> None:
    plan = make_plan(profile([0.1, 0.1]), config(), workers(1), 0)
    assert cuts(plan) == []
    assert plan.reasons[1] == "no cuts: one stage holds the whole model"
    assert "no other cut" in plan.reasons[2]


def test_as_many_stages_as_layers_has_one_cut_only() -> None:
    assert "no other cut" in make_plan(profile([0.1] * 3), config(), workers(3), 0).reasons[2]


def test_cuts_of_the_user_are_kept_and_compared() -> None:
    plan = make_plan(profile([0.1] * 4), config(cuts=[1]), workers(2), 0)
    assert cuts(plan) == [1]
    assert "as pipeline.cuts says" in plan.reasons[1]
    assert "runner-up: cuts [2]" in plan.reasons[2]
    assert "(-" in plan.reasons[2]


def test_workers_that_are_not_needed_are_named() -> None:
    plan = make_plan(profile([0.1] * 4), config(num_stages=2), workers(4), 0)
    assert len(plan.stages) == 2
    assert plan.reasons[0] == "2 stages, as pipeline.num_stages says; idle: stage-2, stage-3"
    assert len(make_plan(profile([0.1] * 4), config(cuts=[1, 2]), workers(4), 0).stages) == 3


def test_the_last_microbatch_may_be_smaller() -> None:
    assert make_plan(profile([0.1]), config(batch=10), workers(1), 0).num_microbatches == 3


def test_memory_limits_move_the_cut() -> None:
    layers = profile([0.1] * 4, parameter_bytes=1000, saved_bytes=0)
    free = make_plan(layers, config(), workers(2), 0)
    tight = make_plan(layers, config(), workers(2), 0, memory_limits=[5000, None])
    assert (cuts(free), cuts(tight)) == ([2], [1])
    assert tight.predicted.stage_memory_bytes == (4000, 12000)


def test_limits_are_said_with_what_is_needed() -> None:
    limits = [2**30, 2**30]
    plan = make_plan(profile([0.1] * 4), config(), workers(2), 0, memory_limits=limits)
    assert plan.reasons[4] == "stage 0 on stage-0 needs the most memory: 840 B, of 1 GiB"


@pytest.mark.parametrize(
    ("pipeline", "count", "limits", "message"),
    [
        ({}, 5, None, "5 stages, but the model has only 4 layers"),
        ({"num_stages": 5}, 8, None, "5 stages, but the model has only 4 layers"),
        ({"num_stages": 3}, 2, None, "3 stages, but only 2 workers"),
        ({}, 0, None, "a plan without workers"),
        (
            {"cuts": [2], "num_stages": 3},
            3,
            None,
            "cuts makes 2 stages, pipeline.num_stages says 3",
        ),
        ({"cuts": [2, 2]}, 3, None, r"cuts=\[2, 2\] leaves a stage without layers"),
        ({"cuts": [0]}, 2, None, r"cuts=\[0\] leaves a stage without layers"),
        ({"cuts": [4]}, 2, None, "lie between 1 and 3"),
        ({}, 2, [100, 100], "no cut of 4 layers into 2 stages fits the memory limits"),
        ({"cuts": [2]}, 2, [839, None], r"stage 0 on stage-0 needs 840 B of 839 B"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    pipeline: dict[str, Any], count: int, limits: list[int | None] | None, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        make_plan(profile([0.1] * 4), config(**pipeline), workers(count), 0, (), limits)


@pytest.mark.parametrize(
    ("schedule", "stage", "copies", "live"),
    [
        ("gpipe", 0, 4, 8),
        ("1f1b", 0, 4, 4),
        ("1f1b", 3, 4, 1),
        ("async_1f1b", 0, 7, 4),
        ("async_1f1b", 3, 4, 1),
    ],
)
def test_memory_of_a_stage(schedule: str, stage: int, copies: int, live: int) -> None:
    layers = profile([0.1] * 6, parameter_bytes=1000, saved_bytes=10)
    needed = stage_memory_bytes(layers, 1, 4, stage, 4, schedule, 8, moments=2)
    assert needed == 3 * (1000 * copies + 10 * live)
    assert parameter_copies(schedule, stage, 4, 2) == copies


@pytest.mark.parametrize(
    ("schedule", "stage", "count", "left"),
    [
        ("1f1b", 0, 8, 0),
        ("1f1b", 1, 8, 2),
        ("1f1b", 3, 8, 4),
        ("gpipe", 2, 8, 3),
        ("1f1b", 3, 2, 2),
        ("async_1f1b", 3, 8, 1),
    ],
)
def test_memory_of_what_backwards_leave(schedule: str, stage: int, count: int, left: int) -> None:
    """Of one backward more than a stage may leave, until that has been worked off."""
    plain = profile([0.1] * 6)
    layers = replace(plain, layers=tuple(replace(x, late_bytes=1000) for x in plain.layers))
    with_late, without = (
        stage_memory_bytes(x, 1, 4, stage, 4, schedule, count, moments=2) for x in (layers, plain)
    )
    assert with_late - without == 3 * 1000 * left


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "async_1f1b"])
def test_live_activations_are_what_the_schedule_holds(name: str) -> None:
    for num_stages in range(1, 6):
        for count in range(1, 8):
            groups = [1] * count if name == "async_1f1b" else [count]
            held = simulate(build(name, num_stages, groups), _no_time).peak_live
            assert held == tuple(
                live_activations(name, stage, num_stages, count) for stage in range(num_stages)
            )


def _no_time(action: Action) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("optimizer", "count"),
    [
        (OptimConfig(name="adamw"), 2),
        (OptimConfig(name="nadam"), 2),
        (OptimConfig(name="sgd"), 1),
        (OptimConfig(name="sgd", beta1=0.0), 0),
    ],
)
def test_moments_of_each_optimizer(optimizer: OptimConfig, count: int) -> None:
    assert num_moments(Config(optim=optimizer)) == count


def test_numbers_are_readable() -> None:
    assert [format_bytes(n) for n in (0, 999, 1024, 5 * 2**20, 3 * 2**40, 2**52)] == [
        "0 B",
        "999 B",
        "1 KiB",
        "5 MiB",
        "3 TiB",
        "4.1e+03 TiB",
    ]
    assert [format_seconds(s) for s in (0.0, 0.0123, 1.5)] == ["0 ms", "12.3 ms", "1.5 s"]
