"""What actions cost: layers, what stages do beside them, and messages."""

from dataclasses import replace

import pytest

from elastic_trainer.config import Config, PipelineConfig, TrainConfig
from elastic_trainer.planner.cost import StageCosts
from elastic_trainer.planner.plan import make_plan
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.types import LayerProfile, Overheads, Profile

LAYERS = tuple(
    LayerProfile(
        name=f"layer.{i}",
        forward_s=0.1 * (i + 1),
        backward_s=0.2 * (i + 1),
        optimizer_s=0.01 * (i + 1),
        activation_bytes=1000 * (i + 1),
        saved_bytes=4,
        parameter_bytes=4,
    )
    for i in range(4)
)
OVERHEADS = Overheads(
    forward_s=0.003,
    backward_s=0.004,
    send_s=0.001,
    send_s_per_byte=1e-6,
    link_s=0.002,
    link_s_per_byte=2e-6,
)
PROFILE = Profile(device_class="cpu", microbatch_size=1, layers=LAYERS, overheads=OVERHEADS)


def test_an_action_costs_its_layers_and_what_the_stage_does_beside_them() -> None:
    costs = StageCosts(PROFILE, [1])
    assert costs.duration(Action(Kind.F, 1, 0)) == pytest.approx(0.2 + 0.3 + 0.4 + 0.003)
    assert costs.duration(Action(Kind.B, 0, 0)) == pytest.approx(0.2 + 0.004)
    assert costs.duration(Action(Kind.OPT, 1, 0)) == pytest.approx(0.09)
    assert costs.duration(Action(Kind.REDUCE, 1, 0)) == 0.0


def test_a_gradient_is_as_big_as_the_activation_that_came() -> None:
    costs = StageCosts(PROFILE, [1, 3])
    forth, back = Action(Kind.SEND_F, 1, 0), Action(Kind.SEND_B, 1, 0)
    assert costs.duration(forth) == pytest.approx(0.001 + 3000e-6)
    assert costs.duration(back) == pytest.approx(0.001 + 1000e-6)
    assert costs.link(forth) == pytest.approx(0.002 + 2 * 3000e-6)
    assert costs.link(back) == pytest.approx(0.002 + 2 * 1000e-6)


def test_what_comes_late_is_no_part_of_the_backward() -> None:
    """On all stages but the first, from which no gradient leaves."""
    layers = tuple(replace(x, late_s=x.backward_s / 4, late_cpu_s=0.01) for x in LAYERS)
    early, split = StageCosts(PROFILE, [1]), StageCosts(replace(PROFILE, layers=layers), [1])
    late = (0.4 + 0.6 + 0.8) / 4
    forth, back, send = Action(Kind.F, 1, 0), Action(Kind.B, 1, 0), Action(Kind.SEND_B, 1, 0)
    assert split.late_s == [0.0, pytest.approx(late)]
    assert split.late_cpu_s == [0.0, pytest.approx(0.03)]
    assert early.late_s == early.late_cpu_s == [0.0, 0.0]
    for action in (forth, send):
        assert split.duration(action) == early.duration(action)
        assert split.need(action) == early.need(action)
    assert split.duration(back) == pytest.approx(early.duration(back) - late)
    assert split.need(back) == pytest.approx(early.need(back) - 0.03)
    first = Action(Kind.B, 0, 0)
    assert split.duration(first) == early.duration(first)
    assert split.need(first) == early.need(first)


def test_the_part_that_needs_a_core() -> None:
    layers = tuple(
        replace(x, forward_cpu_s=0.01, backward_cpu_s=0.02, optimizer_cpu_s=0.003) for x in LAYERS
    )
    over = replace(OVERHEADS, forward_cpu_s=0.001, backward_cpu_s=0.002, send_cpu_s=0.0005)
    costs = StageCosts(replace(PROFILE, layers=layers, overheads=over), [1])
    assert costs.need(Action(Kind.F, 1, 0)) == pytest.approx(0.031)
    assert costs.need(Action(Kind.B, 0, 0)) == pytest.approx(0.022)
    assert costs.need(Action(Kind.OPT, 1, 0)) == pytest.approx(0.009)
    assert costs.need(Action(Kind.SEND_F, 0, 0)) == pytest.approx(0.0005 + 1000e-6)
    assert costs.need(Action(Kind.REDUCE, 1, 0)) == 0.0


def test_a_plan_knows_who_shares_cores() -> None:
    """Four equal stages that compute all the time: on two cores they take at least twice as long
    as their share of the work.
    """
    layers = tuple(
        replace(x, forward_s=0.1, backward_s=0.2, forward_cpu_s=0.1, backward_cpu_s=0.2)
        for x in LAYERS
    )
    config = Config(
        pipeline=PipelineConfig(microbatch_size=1), train=TrainConfig(global_batch_size=8)
    )
    profile = Profile(device_class="cpu", microbatch_size=1, layers=layers)

    def step_s(*cores: tuple[str, int] | None) -> float:
        return make_plan(profile, config, list("abcd"), 1, cores=cores).predicted.step_s

    apart = step_s(("a", 1), ("b", 1), ("c", 1), ("d", 1))
    assert apart == step_s(("a", 4), ("a", 4), ("a", 4), ("a", 4)) == step_s(*[None] * 4)
    assert apart == make_plan(profile, config, list("abcd"), 1).predicted.step_s
    together = step_s(*[("a", 2)] * 4)
    assert together >= 4 * 8 * 0.3 / 2 > apart
    assert together > step_s(("a", 2), ("a", 2), ("a", 2), None) > apart


def test_turns_on_shared_cores_decide_no_cut() -> None:
    """Eight equal blocks between a cheap first and last layer, four stages on two cores: simulated
    turns once made three, two, three and one blocks look 4% faster than two each.
    """
    block = replace(LAYERS[0], forward_s=0.0135, backward_s=0.0267, activation_bytes=524288)
    embed = replace(block, forward_s=0.0006, backward_s=0.0006)
    head = replace(block, forward_s=0.0016, backward_s=0.0023)
    layers = tuple(
        replace(x, name=f"layer.{i}", forward_cpu_s=x.forward_s, backward_cpu_s=x.backward_s)
        for i, x in enumerate([embed, *[block] * 8, head])
    )
    over = Overheads(
        forward_s=0.00038,
        backward_s=0.00017,
        send_s=0.00042,
        send_s_per_byte=2.3e-10,
        link_s=0.0006,
        link_s_per_byte=9.4e-10,
        forward_cpu_s=0.00037,
        backward_cpu_s=0.00017,
        send_cpu_s=0.00041,
    )
    config = Config(
        pipeline=PipelineConfig(microbatch_size=4), train=TrainConfig(global_batch_size=32)
    )
    profile = Profile(device_class="cpu", microbatch_size=4, layers=layers, overheads=over)
    plan = make_plan(profile, config, list("abcd"), 1, cores=[("a", 2)] * 4)
    assert [stage.stop - stage.first for stage in plan.stages] == [3, 2, 2, 3]
    assert plan.predicted.step_s > 8 * 8 * 0.0402 / 2, "predicted with the cores that are there"


def test_a_plan_predicts_messages_and_overheads() -> None:
    """One microbatch on two stages: every cost lies on the critical path once."""
    config = Config(
        pipeline=PipelineConfig(cuts=[2], microbatch_size=1), train=TrainConfig(global_batch_size=1)
    )
    plan = make_plan(PROFILE, config, ["a", "b"], 1)
    costs = StageCosts(PROFILE, [2])
    actions = [
        Action(kind, stage, 0)
        for kind, stage in [
            (Kind.F, 0),
            (Kind.SEND_F, 0),
            (Kind.F, 1),
            (Kind.B, 1),
            (Kind.SEND_B, 1),
            (Kind.B, 0),
            (Kind.OPT, 0),
        ]
    ]
    sends = [action for action in actions if action.kind in (Kind.SEND_F, Kind.SEND_B)]
    expected = sum(map(costs.duration, actions)) + sum(map(costs.link, sends))
    assert plan.predicted.step_s == pytest.approx(expected)
    bare = make_plan(replace(PROFILE, overheads=Overheads()), config, ["a", "b"], 1)
    assert bare.predicted.step_s < plan.predicted.step_s
