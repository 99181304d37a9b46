"""Asynchronous pipelines: exact staleness, one version per backward and per tied weight."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from elastic_trainer.config import Config
from elastic_trainer.errors import ConfigError
from elastic_trainer.models.gpt import gpt
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.oracle import DelayedOracle
from elastic_trainer.testing.toys import assert_same_states, tiny_gpt, token_batches

NUM_UPDATES = 14
BATCHES = token_batches(NUM_UPDATES, sizes=(3,))


def settings(name: str = "nadam", max_grad_norm: float = 0.3, recompute: bool = False) -> Config:
    return with_settings(
        Config(),
        train={"max_steps": NUM_UPDATES, "max_grad_norm": max_grad_norm},
        optim={"name": name, "beta1": 0.95},
        model={"recompute": recompute},
    )


@pytest.mark.parametrize(
    ("optimizer", "num_stages", "recompute"),
    [
        ("nadam", 2, False),
        ("nadam", 4, False),
        ("nadam", 4, True),
        ("adamw", 1, False),
        ("adamw", 3, False),
        ("sgd", 4, False),
    ],
)
def test_equals_a_simulation_of_delayed_updates(
    optimizer: str, num_stages: int, recompute: bool
) -> None:
    """Two segments, the second shorter than the pipe is deep; tied embeddings and dropout."""
    config = settings(optimizer, recompute=recompute)
    plan = even_plan(tiny_gpt(), num_stages, "async_1f1b")
    want = DelayedOracle(tiny_gpt(), config, plan)
    want.segment(1, [BATCHES[u][0] for u in range(1, 13)])
    want.segment(13, [BATCHES[u][0] for u in range(13, NUM_UPDATES + 1)])
    pipeline = InProcessPipeline(tiny_gpt(), config, plan, BATCHES)
    reports = [pipeline.train(1, 12), pipeline.train(13, NUM_UPDATES)]
    assert_same_states(pipeline.states(), want.layer_states())
    losses = [u.loss for segment in reports for u in segment[-1].updates]
    assert losses == want.losses
    late = [num_stages - 1 - stage for stage in range(num_stages)]
    assert [r.max_staleness for r in reports[0]] == late
    assert [r.max_staleness for r in reports[1]] == [min(1, lag) for lag in late]
    assert [r.peak_live_activations for r in reports[0]] == [lag + 1 for lag in late]
    assert [r.stash_copies for r in reports[0]] == [12 * (lag > 0) for lag in late]
    rings = [runtime._weights.ring.depth for runtime in pipeline.runtimes]
    assert rings == [lag + 1 for lag in late]
    pipeline.close()


def test_a_tie_that_skips_stages_and_one_within_a_stage() -> None:
    """The follower in the middle of the pipe has versions of its own to keep."""
    model = gpt(
        vocab_size=31, num_layers=2, dim=16, num_heads=2, max_positions=8, tie_embeddings=True
    )
    for cuts in ([1], [1, 2], [2, 3], [1, 2, 3]):
        plan = even_plan(model, len(cuts) + 1, "async_1f1b", cuts=cuts)
        want = DelayedOracle(model, settings(), plan)
        want.segment(1, [BATCHES[u][0] for u in range(1, 11)])
        pipeline = InProcessPipeline(model, settings(), plan, BATCHES)
        pipeline.train(1, 10)
        states = pipeline.states()
        assert_same_states(states, want.layer_states())
        tied = states["head"]["param/linear.weight"]
        assert torch.equal(tied, states["embed"]["param/tokens.weight"])
        pipeline.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_follower_before_the_last_stage(recompute: bool) -> None:
    """Tie two middle layers, so that the follower itself runs late."""
    model = tiny_gpt(tie_embeddings=False)
    layers = list(model.layers)
    layers[3] = replace(layers[3], tied={"qkv.weight": "blocks.0.qkv.weight"})
    model = replace(model, layers=tuple(layers))
    config = settings(recompute=recompute)
    plan = even_plan(model, 4, "async_1f1b", cuts=[1, 3, 4])
    want = DelayedOracle(model, config, plan)
    want.segment(1, [BATCHES[u][0] for u in range(1, NUM_UPDATES + 1)])
    pipeline = InProcessPipeline(model, config, plan, BATCHES)
    pipeline.train(1, NUM_UPDATES)
    assert_same_states(pipeline.states(), want.layer_states())
    pipeline.close()


def test_one_stage_equals_synchronous() -> None:
    found = []
    for schedule in ("async_1f1b", "1f1b"):
        plan = even_plan(tiny_gpt(), 1, schedule)
        pipeline = InProcessPipeline(tiny_gpt(), settings(), plan, BATCHES)
        reports = pipeline.train(1, NUM_UPDATES)
        found.append((pipeline.states(), [(u.loss, u.grad_norm) for u in reports[0].updates]))
        pipeline.close()
    assert_same_states(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_each_backward_sees_the_weights_of_its_forward() -> None:
    """Read the weights that autograd will use, from outside, at both moments."""
    plan = even_plan(tiny_gpt(), 3, "async_1f1b")
    config = settings(recompute=True)
    forward: dict[int, Tensor] = {}
    newest: dict[int, Tensor] = {}
    backward: dict[int, Tensor] = {}
    pipeline: InProcessPipeline

    def qkv() -> Tensor:
        module = pipeline.runtimes[0]._layers.layers["blocks.0"]
        return module.qkv.weight.detach().clone()  # type: ignore[union-attr,operator]

    def before(action: Action) -> None:
        if action.kind is Kind.B:
            newest[action.microbatch] = states(pipeline)["blocks.0"]["param/qkv.weight"].clone()

    def after(action: Action) -> None:
        if action.kind is Kind.F:
            forward[action.microbatch] = qkv()
        if action.kind is Kind.B:
            backward[action.microbatch] = qkv()

    hooks = {0: RuntimeHooks(before=before, after=after)}
    pipeline = InProcessPipeline(tiny_gpt(), config, plan, BATCHES, hooks=hooks)
    pipeline.train(1, NUM_UPDATES)
    for j in range(NUM_UPDATES):
        assert torch.equal(backward[j], forward[j]), j
        assert torch.equal(backward[j], newest[j]) == (j == 0), "it ran on the newest"
    pipeline.close()


def states(pipeline: InProcessPipeline) -> Mapping[str, Mapping[str, Tensor]]:
    return pipeline.runtimes[0].layer_states()


def test_a_wrong_order_is_noticed() -> None:
    """Staleness is asserted: a schedule that updates too early does not go unseen."""
    plan = even_plan(tiny_gpt(), 2, "async_1f1b")
    pipeline = InProcessPipeline(tiny_gpt(), settings(), plan, BATCHES)
    segment = pipeline.segment("train", [1, 2, 3])
    early = list(segment.actions[0])
    forward = Action(Kind.F, 0, 2)
    early.remove(forward)
    early.insert(early.index(Action(Kind.OPT, 0, 0)), forward)
    broken = replace(segment, actions=(tuple(early), segment.actions[1]))
    with pytest.raises(AssertionError, match="0B2 is 2 updates late"):
        pipeline.run(broken)
    pipeline.close()


def test_fp16_is_refused() -> None:
    config = with_settings(settings(), train={"precision": "fp16"})
    with pytest.raises(ConfigError, match="synchronous"):
        InProcessPipeline(tiny_gpt(), config, even_plan(tiny_gpt(), 2, "async_1f1b"), BATCHES)
