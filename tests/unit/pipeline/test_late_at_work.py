"""Stages that leave gradients of weights for later: when they compute them, and what is said."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.errors import NonFiniteError
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.models.losses import squared_error
from elastic_trainer.pipeline import late as late_module
from elastic_trainer.pipeline import profiler
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.pipeline.overheads import Taken
from elastic_trainer.pipeline.profiler import profile_layers
from elastic_trainer.pipeline.stage import Activation, Stage
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.toys import tiny_gpt, token_batches
from elastic_trainer.transport.channel import Message, Tag
from elastic_trainer.transport.tree import flatten
from elastic_trainer.types import StagePlan


def noted(model: ModelSpec) -> tuple[ModelSpec, dict[str, nn.Module]]:
    """The model, and its layers by name as soon as they are built."""
    built: dict[str, nn.Module] = {}

    def noting(spec: LayerSpec) -> LayerSpec:
        def build() -> nn.Module:
            return built.setdefault(spec.name, spec.build())

        return replace(spec, build=build)

    return replace(model, layers=tuple(map(noting, model.layers))), built


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async_1f1b"])
@pytest.mark.parametrize("split", [False, True])
def test_the_input_gradient_leaves_first(split: bool, schedule: str) -> None:
    """What there is on a middle stage when the first message of that kind is sent."""
    model, built = noted(tiny_gpt())
    there: list[set[str]] = []

    def sends(peer: str, tag: Tag) -> bool:
        if tag.kind == "B" and not there:
            block = built["blocks.1"]
            there.append({n for n, p in block.named_parameters() if p.grad is not None})
        return True

    train = {"max_grad_norm": 0.0} if schedule == "async_1f1b" else {}
    config = with_settings(Config(), pipeline={"split_backward": split}, train=train)
    batches = token_batches(4, (4,) if schedule == "async_1f1b" else (4, 4, 2))
    pipeline = InProcessPipeline(
        model,
        config,
        even_plan(model, 3, schedule),
        batches,
        hooks={1: RuntimeHooks(sends=sends)},
    )
    pipeline.train(1, 4)
    assert "norm1.weight" in there[0]
    assert ("up.weight" in there[0]) is not split
    pipeline.close()


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", [0, 1, 2]), ("async_1f1b", [0, 0, 0])])
def test_a_stage_leaves_no_more_than_it_may(schedule: str, most: list[int]) -> None:
    model = tiny_gpt()
    groups = (2, 2, 2, 2, 2, 2) if schedule == "1f1b" else (2,)
    config = with_settings(Config(), train={"max_grad_norm": 0.0})
    seen = [set[int]() for _ in most]

    def count(stage: int, action: Action) -> None:
        left = pipeline.runtimes[stage].num_left
        if action.kind is Kind.SEND_B:
            seen[stage].add(left)
        assert action.kind is not Kind.OPT or left == 0

    pipeline = InProcessPipeline(
        model,
        config,
        even_plan(model, 3, schedule),
        token_batches(4, groups),
        hooks={s: RuntimeHooks(after=partial(count, s)) for s in range(3)},
    )
    pipeline.train(1, 4)
    assert [max(left, default=0) for left in seen] == most
    pipeline.close()


@pytest.mark.parametrize("comes", ["at once", "soon", "late"])
def test_gaps_are_filled(comes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage does what is left before it waits, bit by bit, and only if it has to wait."""
    model = tiny_gpt()
    pipeline = InProcessPipeline(
        model, Config(), even_plan(model, 3, "1f1b"), token_batches(1, (2,) * 6)
    )
    runtime, channel = pipeline.runtimes[2], pipeline.channels[2]
    recv, seen = channel.recv, list[int]()

    def watched(peer: str, tag: Tag, timeout_s: float) -> Message:
        seen.append(runtime.num_left)
        return recv(peer, tag, timeout_s)

    asked = set[Tag]()

    def has(peer: str, tag: Tag) -> bool:
        is_first = tag not in asked
        asked.add(tag)
        return {"at once": True, "soon": not is_first, "late": False}[comes]

    monkeypatch.setattr(channel, "has", has)
    monkeypatch.setattr(channel, "recv", watched)
    pipeline.train(1, 1)
    assert (max(seen) > 0) is (comes != "late")
    pipeline.close()


def linear_stage() -> Stage:
    """The middle one of three: two maps."""
    layers = (
        LayerSpec("before", nn.Identity),
        LayerSpec("one", lambda: nn.Linear(6, 6)),
        LayerSpec("two", lambda: nn.Linear(6, 6)),
        LayerSpec("after", nn.Identity),
    )
    model = ModelSpec(layers, lambda output, fields: output.sum())
    plan = StagePlan(stage=1, first=1, stop=len(layers) - 1, worker="")
    return Stage(plan, 3, model, Config(), torch.device("cpu"))


def test_a_segment_begins_without_what_an_interrupted_one_left() -> None:
    stage = linear_stage()
    stage.begin(training=True)
    spec, tensors = flatten(torch.randn(5, 6))
    _, held = stage.forward(1, 0, Activation(spec, tensors, [True]), {})
    stage.backward(held, [torch.ones(5, 6)])
    stage.begin(training=True)
    stage.left.finish()
    assert all(p.grad is None for m in stage.layers.values() for p in m.parameters())


def test_layers_are_released_as_they_were() -> None:
    stage = linear_stage()
    assert "forward" in vars(stage.layers["one"])
    for module in stage.release().values():
        assert "forward" not in vars(module)


def test_recompute_is_not_made_to_keep_more() -> None:
    model = tiny_gpt()
    plan = StagePlan(stage=1, first=2, stop=4, worker="")
    for recompute in (False, True):
        config = with_settings(Config(), model={"recompute": recompute})
        stage = Stage(plan, 3, model, config, torch.device("cpu"))
        taken = ["forward" in vars(m) for top in stage.layers.values() for m in top.modules()]
        assert any(taken) is not recompute


class AsksForGradient(nn.Module):
    """Adds the gradient of its map's output by its input, a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(x)
        if not torch.is_grad_enabled():
            return y
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return y + slope.detach()


def test_a_gradient_that_a_forward_asks_for_is_not_added_up() -> None:
    grads = []
    for split in (False, True):
        layers = [LayerSpec("first", lambda: nn.Linear(6, 6)), LayerSpec("asks", AsksForGradient)]
        model = ModelSpec(tuple(layers), squared_error, input_fields=("x",))
        config = with_settings(Config(), pipeline={"split_backward": split})
        batches = {1: [{"x": torch.ones(4, 6), "labels": torch.zeros(4, 6)}]}
        pipeline = InProcessPipeline(model, config, even_plan(model, 2, "1f1b"), batches)
        pipeline.train(1, 1)
        grads.append(pipeline.runtimes[1].layer_states()["asks"]["optim/map.weight/exp_avg"])
        pipeline.close()
    assert torch.equal(*grads)


class BreaksGradient(nn.Module):
    """Passes on what comes; its gradient is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * float("nan"))  # type: ignore[no-untyped-call]
        return x


def test_the_layer_nearest_the_loss_is_blamed_though_its_gradient_comes_late() -> None:
    layers = [LayerSpec(f"map.{i}", lambda: nn.Linear(6, 6)) for i in range(5)]
    layers.insert(4, LayerSpec("breaks", BreaksGradient))
    model = ModelSpec(tuple(layers), squared_error, input_fields=("x",))
    batches = {1: [{"x": torch.randn(4, 6), "labels": torch.randn(4, 6)}]}
    plan = even_plan(model, 2, "1f1b")
    # Not the first of its stage, which is named when no gradient is there.
    stages = (replace(plan.stages[0], stop=1), replace(plan.stages[1], first=1))
    pipeline = InProcessPipeline(model, Config(), replace(plan, stages=stages), batches)
    with pytest.raises(NonFiniteError) as caught:
        pipeline.train(1, 1)
    assert (caught.value.layer, caught.value.stage) == ("map.3", 1)
    pipeline.close()


def test_a_profile_says_how_much_comes_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only what comes late moves: by a second for each parameter."""
    clock = 0.0
    add = late_module._add

    def adding(leaf: Tensor, grads: Sequence[Tensor]) -> None:
        nonlocal clock
        clock += 1.0
        add(leaf, grads)

    monkeypatch.setattr(late_module, "_add", adding)
    monkeypatch.setattr(profiler, "_now", lambda device: Taken(clock, clock))
    model = ModelSpec(
        (LayerSpec("one", lambda: nn.Linear(64, 64)), LayerSpec("two", lambda: nn.Linear(64, 64))),
        squared_error,
        input_fields=("x",),
    )
    sample = {"x": torch.randn(512, 64), "labels": torch.randn(512, 64)}
    for split in (False, True):
        config = with_settings(Config(), pipeline={"split_backward": split})
        layers = profile_layers(model, config, sample, torch.device("cpu")).layers
        for layer in layers:
            # Input and gradient of the output, for 512 rows of 64 numbers.
            assert layer.late_bytes == (2 * 512 * 64 * 4 if split else 0)
            assert layer.backward_s == layer.late_s == (2.0 if split else 0.0)
            assert layer.backward_cpu_s == layer.late_cpu_s == layer.late_s
