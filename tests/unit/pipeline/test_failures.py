"""NaN, overflow, stalls and interruptions: found, named, and nothing applied that must not be."""

import pickle
import re
import threading
import time

import pytest
import torch

from elastic_trainer.config import Config
from elastic_trainer.errors import (
    ElasticTrainerError,
    FencedError,
    ModelError,
    NonFiniteError,
    StallError,
)
from elastic_trainer.models.layers import LayerSpec, ModelSpec
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.oracle import State
from elastic_trainer.testing.toys import (
    Batches,
    add_poison,
    assert_same_states,
    tiny_gpt,
    token_batches,
    with_poison,
)
from elastic_trainer.transport.channel import Tag
from elastic_trainer.transport.in_process import Fault

NAN = float("nan")
INF = float("inf")


def settings(**train: object) -> Config:
    return with_settings(Config(), train={"max_steps": 8, "max_grad_norm": 1.0, **train})


def poisoned(
    batches: Batches, num_stages: int, at: int, config: Config, schedule: str = "1f1b"
) -> InProcessPipeline:
    model = with_poison(tiny_gpt(), at)
    return InProcessPipeline(model, config, even_plan(model, num_stages, schedule), batches)


def clean_states(num_updates: int, at: int, schedule: str, num_stages: int) -> State:
    size = (4,) if schedule == "async_1f1b" else (4, 4, 2)
    batches = add_poison(token_batches(8, size))
    pipeline = poisoned(batches, num_stages, at, settings(), schedule)
    pipeline.train(1, num_updates)
    states = pipeline.states()
    pipeline.close()
    return states


@pytest.mark.parametrize(("at", "stage"), [(1, 0), (3, 1), (6, 2)])
def test_nan_in_a_forward(at: int, stage: int) -> None:
    """Stages hold 7 layers as 0-1, 2-3, 4-6."""
    batches = add_poison(token_batches(8), output={(4, 1): NAN})
    pipeline = poisoned(batches, 3, at, settings())
    pipeline.train(1, 3)
    with pytest.raises(NonFiniteError) as caught:
        pipeline.train(4, 8)
    error = caught.value
    assert (error.update, error.microbatch, error.layer, error.stage) == (4, 1, "poison", stage)
    for text in ("'poison'", "update 4", "microbatch 1", f"stage {stage}"):
        assert text in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert_same_states(pipeline.states(), clean_states(3, at, "1f1b", 3))
    pipeline.close()


def test_nan_in_the_loss() -> None:
    model = tiny_gpt()
    bad = ModelSpec(model.layers, lambda out, batch: out.sum() * NAN)
    pipeline = InProcessPipeline(bad, settings(), even_plan(bad, 2, "1f1b"), token_batches(1))
    with pytest.raises(NonFiniteError) as caught:
        pipeline.train(1, 1)
    assert (caught.value.layer, caught.value.stage) == ("loss", 1)
    assert "the loss became NaN" in str(caught.value)
    pipeline.close()


@pytest.mark.parametrize(("at", "stage", "microbatch"), [(1, 0, -1), (3, 1, 2), (5, 2, 2)])
def test_infinite_gradient(at: int, stage: int, microbatch: int) -> None:
    """In the first stage nothing flows on, so only the norms tell, once the batch is through."""
    batches = add_poison(token_batches(8), gradient={(2, 2): INF})
    pipeline = poisoned(batches, 3, at, settings())
    pipeline.train(1, 1)
    with pytest.raises(NonFiniteError) as caught:
        pipeline.train(2, 8)
    error = caught.value
    assert (error.update, error.layer, error.stage) == (2, "poison", stage)
    assert error.microbatch == microbatch
    assert_same_states(pipeline.states(), clean_states(1, at, "1f1b", 3))
    pipeline.close()


@pytest.mark.parametrize("schedule", ["1f1b", "async_1f1b"])
def test_infinite_gradient_without_clipping(schedule: str) -> None:
    size = (4,) if schedule == "async_1f1b" else (4, 4, 2)
    batches = add_poison(token_batches(8, size), gradient={(2, 0): INF})
    pipeline = poisoned(batches, 2, 1, settings(max_grad_norm=0.0), schedule)
    with pytest.raises(NonFiniteError) as caught:
        pipeline.train(1, 8)
    assert (caught.value.update, caught.value.layer, caught.value.stage) == (2, "poison", 0)
    assert all(runtime.committed == 0 for runtime in pipeline.runtimes)
    pipeline.close()


def test_one_stage_overflows_and_all_skip() -> None:
    """fp16: the overflow is stage 0's alone, the last stage's gradients are fine."""
    config = settings(precision="fp16", max_grad_norm=0.0)
    batches = add_poison(token_batches(8), gradient={(2, 1): INF})
    pipeline = poisoned(batches, 3, 1, config)
    pipeline.train(1, 1)
    before = pipeline.states()
    reports = pipeline.train(2, 2)
    assert [r.updates[0].skipped for r in reports] == [True] * 3
    assert_same_states(pipeline.states(), before)
    scales = [runtime.scaler_state for runtime in pipeline.runtimes]
    assert scales == [{"scale": 32768.0, "num_good": 0}] * 3
    reports = pipeline.train(3, 4)
    assert not any(u.skipped for r in reports for u in r.updates)
    assert [runtime.scaler_state for runtime in pipeline.runtimes] == [
        {"scale": 32768.0, "num_good": 2}
    ] * 3
    pipeline.close()


def test_fp16_does_not_depend_on_the_cuts() -> None:
    found = []
    for num_stages in (1, 3):
        model = tiny_gpt()
        config = settings(precision="fp16")
        plan = even_plan(model, num_stages, "1f1b")
        pipeline = InProcessPipeline(model, config, plan, token_batches(8))
        reports = pipeline.train(1, 8)
        assert not any(u.skipped for u in reports[0].updates)
        found.append((pipeline.states(), [u.grad_norm for u in reports[0].updates]))
        pipeline.close()
    assert_same_states(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_fp16_gives_up_when_no_scale_helps() -> None:
    batches = add_poison(token_batches(1), gradient={(1, 0): INF})
    pipeline = poisoned(batches, 2, 1, settings(precision="fp16"))
    for runtime in pipeline.runtimes:
        runtime.load_scaler({"scale": 1.0, "num_good": 0})
    with pytest.raises(NonFiniteError) as caught:
        pipeline.train(1, 1)
    assert (caught.value.layer, caught.value.stage) == ("poison", 0)
    pipeline.close()


def test_a_wedged_stage() -> None:
    """Stage 1 stops acting; its neighbours find out within the limit, and show the place."""
    wedged, release = threading.Event(), threading.Event()

    def before(action: Action) -> None:
        if (action.kind, action.microbatch) == (Kind.B, 1):
            wedged.set()
            release.wait(30)

    limit_s = 1.0
    model = tiny_gpt()
    pipeline = InProcessPipeline(
        model,
        with_settings(settings(), elastic={"stall_limit_s": limit_s}),
        even_plan(model, 3, "1f1b"),
        token_batches(2),
        hooks={1: RuntimeHooks(before=before)},
    )
    began = time.monotonic()
    with pytest.raises(StallError) as caught:
        pipeline.train(1, 2)
    assert wedged.is_set()
    assert time.monotonic() - began < limit_s + 5
    text = str(caught.value)
    # Stage 2 may be the first whose wait ends: it waits for stage 0, which waits for stage 1.
    assert re.search(r"stage-[02] waited .* from stage-[01]", text)
    assert "<-- HERE" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    release.set()
    pipeline.close()


def test_a_lost_message() -> None:
    def lose(sender: str, receiver: str, tag: Tag) -> Fault:
        return Fault(drop=(tag.kind, tag.step, tag.microbatch) == ("F", 2, 1))

    model = tiny_gpt()
    config = with_settings(settings(), elastic={"stall_limit_s": 1.0})
    plan = even_plan(model, 2, "1f1b")
    pipeline = InProcessPipeline(model, config, plan, token_batches(2), fault=lose)
    with pytest.raises(StallError):
        pipeline.train(1, 2)
    pipeline.close()


def test_interruption_ends_every_wait() -> None:
    """Stage 0 waits for a gradient that will not come; an interruption ends that at once."""
    release = threading.Event()
    pipeline: InProcessPipeline

    def before(action: Action) -> None:
        if action.kind is Kind.B:
            pipeline.runtimes[0].interrupt(FencedError("the coordinator said so"))
            release.wait(30)

    model = tiny_gpt()
    pipeline = InProcessPipeline(
        model,
        settings(),  # a limit of a minute
        even_plan(model, 2, "1f1b"),
        token_batches(1),
        hooks={1: RuntimeHooks(before=before)},
    )
    began = time.monotonic()
    with pytest.raises(FencedError, match="the coordinator said so"):
        pipeline.train(1, 1)
    assert time.monotonic() - began < 20
    release.set()
    pipeline.close()


class Broken(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            raise RuntimeError("shapes do not match")
        return x


def test_a_layer_that_raises_is_named() -> None:
    model = tiny_gpt()
    layers = (*model.layers[:3], LayerSpec("mine", Broken), *model.layers[3:])
    model = ModelSpec(layers, model.loss)
    pipeline = InProcessPipeline(model, settings(), even_plan(model, 2, "1f1b"), token_batches(1))
    with pytest.raises(
        ModelError, match="'mine' failed in the forward of microbatch 0 of update 1"
    ):
        pipeline.train(1, 1)
    pipeline.close()


def test_a_layer_that_writes_its_input_cannot_be_recomputed() -> None:
    model = tiny_gpt()
    layers = (model.layers[0], LayerSpec("mine", lambda: torch.nn.ReLU(inplace=True)))
    model = ModelSpec((*layers, *model.layers[1:]), model.loss)
    config = with_settings(settings(), model={"recompute": True})
    pipeline = InProcessPipeline(model, config, even_plan(model, 2, "1f1b"), token_batches(1))
    with pytest.raises(ElasticTrainerError, match="recompute=false"):
        pipeline.train(1, 1)
    pipeline.close()


def test_a_missing_state_is_named() -> None:
    model = tiny_gpt()
    pipeline = InProcessPipeline(model, settings(), even_plan(model, 1, "1f1b"), token_batches(1))
    states = pipeline.states()
    del states["head"]["param/norm.bias"]
    with pytest.raises(ElasticTrainerError, match="norm.bias"):
        pipeline.load(states, 3)
    pipeline.close()
