"""Microbatches with none to only pictures or clips, at any cuts, equal one process bit for bit."""

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from elastic_trainer.config import Config
from elastic_trainer.models.layers import build_layers, first_input, layer_kwargs
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.pipeline.stage import Activation
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.media_toys import (
    BOTH,
    CLIP,
    ONLY_TEXT,
    PICTURE,
    SEVERAL,
    Shape,
    media_batches,
    microbatch,
    random_sample,
    tiny_multimodal,
)
from elastic_trainer.testing.oracle import DelayedOracle, SynchronousOracle
from elastic_trainer.testing.toys import assert_same_states

NOTHING: list[Shape] = []  # all samples of the microbatch were skipped
UPDATES: list[list[list[Shape]]] = [
    [[ONLY_TEXT, ONLY_TEXT], [PICTURE, CLIP], [SEVERAL]],
    [[PICTURE, PICTURE], [CLIP], NOTHING, [BOTH, ONLY_TEXT]],
    [[ONLY_TEXT], [ONLY_TEXT, ONLY_TEXT]],  # encoders see nothing in a whole update
    [[SEVERAL, BOTH], [PICTURE], [ONLY_TEXT]],
]
LAYERS = tiny_multimodal().names
PAIRS = list(combinations(range(1, len(LAYERS)), 2))
TRIPLES = list(combinations(range(1, len(LAYERS)), 3))[::13]


def settings(**sections: dict[str, object]) -> Config:
    base = with_settings(Config(), train={"max_steps": len(UPDATES), "max_grad_norm": 0.5})
    return with_settings(base, **sections)


@cache
def oracle(freeze: tuple[str, ...] = ()) -> SynchronousOracle:
    reference = SynchronousOracle(tiny_multimodal(freeze=freeze), settings())
    for update, microbatches in media_batches(UPDATES).items():
        reference.update(update, microbatches)
    return reference


def run(
    cuts: Sequence[int], schedule: str = "1f1b", recompute: bool = False, **model: object
) -> InProcessPipeline:
    spec = tiny_multimodal(**model)
    plan = even_plan(spec, len(cuts) + 1, schedule, cuts=cuts)
    config = settings(model={"recompute": recompute})
    return InProcessPipeline(spec, config, plan, media_batches(UPDATES))


def check(cuts: Sequence[int], schedule: str = "1f1b", recompute: bool = False) -> None:
    pipeline = run(cuts, schedule, recompute)
    reports = pipeline.train(1, len(UPDATES))
    assert_same_states(pipeline.states(), oracle().layer_states())
    assert [u.loss for u in reports[-1].updates] == oracle().losses
    pipeline.close()


@pytest.mark.parametrize("cut", range(1, len(LAYERS)))
@pytest.mark.parametrize("recompute", [False, True])
def test_every_cut_in_two_equals_the_oracle(cut: int, recompute: bool) -> None:
    check([cut], recompute=recompute)


@pytest.mark.parametrize("group", range(5))
def test_every_cut_in_three_equals_the_oracle(group: int) -> None:
    for number, cuts in enumerate(PAIRS[group::5]):
        check(cuts, "gpipe" if number % 2 else "1f1b")


@pytest.mark.parametrize("group", range(2))
def test_cuts_in_four_equal_the_oracle(group: int) -> None:
    """Every thirteenth of them: each layer begins a stage somewhere."""
    for cuts in TRIPLES[group::2]:
        check(cuts)


def test_one_stage_equals_the_oracle() -> None:
    check([])


@pytest.mark.parametrize("cuts", [(2,), (1, 5), (3, 6, 8)])
def test_asynchronous_updates_equal_the_recurrence(cuts: tuple[int, ...]) -> None:
    flat = [[[*shapes]] for update in UPDATES for shapes in update]
    batches, spec = media_batches(flat), tiny_multimodal(tie_embeddings=True)
    config = settings(train={"max_steps": len(flat)}, pipeline={"schedule": "async_1f1b"})
    plan = even_plan(spec, len(cuts) + 1, "async_1f1b", cuts=cuts)
    want = DelayedOracle(spec, config, plan)
    want.segment(1, [microbatches[0] for microbatches in batches.values()])
    pipeline = InProcessPipeline(spec, config, plan, batches)
    pipeline.train(1, len(flat))
    assert_same_states(pipeline.states(), want.layer_states())
    pipeline.close()


def test_encoders_that_see_nothing_get_gradients_of_zero() -> None:
    seen: dict[str, Tensor] = {}
    batches = media_batches([[[ONLY_TEXT]]])
    spec = tiny_multimodal()

    def before(action: Action) -> None:
        if action.kind is Kind.OPT:
            for runtime in pipeline.runtimes:
                seen.update({n: g.clone() for n, g in runtime.gradients().items()})

    plan = even_plan(spec, 3, "1f1b")
    hooks = {0: RuntimeHooks(before=before)}
    pipeline = InProcessPipeline(spec, settings(), plan, batches, hooks=hooks)
    pipeline.train(1, 1)
    encoders = [n for n in pipeline.states() if n.startswith(("vision", "audio"))]
    of_encoders = {n: g for n, g in seen.items() if n.split("/")[0] in encoders}
    assert {n.split("/")[0] for n in of_encoders} >= set(encoders[:3])
    assert all(not grad.any() for grad in of_encoders.values())
    pipeline.close()


def test_nothing_is_sent_for_pictures_that_are_not_there() -> None:
    pipeline = run([3, 7])  # inside the vision encoder, and behind the audio encoder
    outputs = watch_first_stage(pipeline)
    pipeline.train(1, len(UPDATES))
    held = [any(p for p, _, _ in shapes) for microbatches in UPDATES for shapes in microbatches]
    assert [len(output.tensors) for output in outputs] == [int(has) for has in held]
    pipeline.close()


def watch_first_stage(pipeline: InProcessPipeline) -> list[Activation]:
    """What the first stage sends on, as it comes."""
    outputs: list[Activation] = []
    forward = pipeline.runtimes[0]._layers.forward

    def remember(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        output, held = forward(*args, **kwargs)
        assert isinstance(output, Activation)
        outputs.append(output)
        return output, held

    pipeline.runtimes[0]._layers.forward = remember  # type: ignore[method-assign]
    return outputs


@pytest.mark.parametrize("cut", [2, 3, 4, 6])
def test_frozen_encoders_stay_and_get_no_backward(cut: int) -> None:
    frozen = ("vision", "audio")
    pipeline = run([cut], freeze=frozen)
    outputs = watch_first_stage(pipeline)
    before = pipeline.states()
    pipeline.train(1, len(UPDATES))
    after = pipeline.states()
    assert_same_states(after, oracle(frozen).layer_states())
    still = [n for n in LAYERS if n.startswith(frozen) and not n.endswith("project")]
    assert_same_states({n: after[n] for n in still}, {n: before[n] for n in still})
    moved = before["vision.project"]["param/up.weight"]
    assert not torch.equal(moved, after["vision.project"]["param/up.weight"])
    # In front of the projector nothing wants a gradient; behind it what it made does.
    assert any(w for output in outputs for w in output.wants_grad) == (cut > 3)
    pipeline.close()


def test_packing_does_not_change_the_gradient() -> None:
    """The same samples in microbatches of equal numbers, and packed by size."""
    rng = np.random.default_rng(3)
    samples = [random_sample(s, rng) for s in (SEVERAL, ONLY_TEXT, PICTURE, CLIP, BOTH, SEVERAL)]
    in_order = [samples[:2], samples[2:4], samples[4:]]
    packed = [[samples[0]], [samples[5], samples[1]], [samples[2], samples[3], samples[4]]]
    found = []
    for batches in (in_order, packed, [samples]):
        reference = SynchronousOracle(tiny_multimodal(dropout=0.0), settings())
        reference.update(1, [microbatch(part) for part in batches])
        found.append(reference.gradients[0])
    assert max(grad.abs().max() for grad in found[0].values()) > 0.1
    for other in found[1:]:
        for name, grad in found[0].items():
            assert (grad - other[name]).abs().max() < 1e-5, name


def test_samples_of_a_microbatch_do_not_see_each_other() -> None:
    rng = np.random.default_rng(4)
    samples = [random_sample(s, rng) for s in (SEVERAL, BOTH, ONLY_TEXT, CLIP, PICTURE)]
    together = logits(microbatch(samples))
    apart = torch.cat([logits(microbatch([sample])) for sample in samples])
    assert (together - apart).abs().max() < 1e-5
    changed = [*samples[:-1], random_sample(PICTURE, rng)]
    other = logits(microbatch(changed))
    assert (together - other)[: -len(samples[-1].tokens) - 1].abs().max() < 1e-6
    assert (together - other)[-len(samples[-1].tokens) - 1 :].abs().max() > 1e-4


@torch.no_grad()
def logits(fields: dict[str, Tensor]) -> Tensor:
    spec = tiny_multimodal(dropout=0.0)
    value = first_input(spec, fields)
    for layer, module in zip(
        spec.layers, build_layers(spec, 0, len(spec.layers), 0).values(), strict=True
    ):
        value = module(value, **layer_kwargs(layer, fields))
    assert isinstance(value, Tensor)
    return value
