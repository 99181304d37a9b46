"""Small models and batches whose difficulties are chosen: for tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastic_trainer.models.gpt import gpt
from elastic_trainer.models.layers import LayerSpec, ModelSpec

VOCAB_SIZE = 31
LENGTH = 8

Batches = dict[int, list[dict[str, Tensor]]]


def tiny_gpt(**settings: Any) -> ModelSpec:
    """Six layers; tied embeddings and dropout unless told otherwise."""
    defaults = {
        "vocab_size": VOCAB_SIZE,
        "num_layers": 4,
        "dim": 16,
        "num_heads": 2,
        "max_positions": LENGTH,
        "dropout": 0.1,
        "tie_embeddings": True,
    }
    return gpt(**{**defaults, **settings})


def token_batches(num_updates: int, sizes: Sequence[int] = (4, 4, 2), seed: int = 1) -> Batches:
    """Microbatches of `sizes` samples, the i-th with i+1 labels per sample that do not count."""
    generator = torch.Generator().manual_seed(seed)
    batches: Batches = {}
    for update in range(1, num_updates + 1):
        batches[update] = []
        for index, size in enumerate(sizes):
            ids = torch.randint(0, VOCAB_SIZE, (size, LENGTH + 1), generator=generator)
            labels = ids[:, 1:].clone()
            labels[:, LENGTH - 1 - index :] = -100
            batches[update].append({"input_ids": ids[:, :-1].contiguous(), "labels": labels})
    return batches


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (factor,) = ctx.saved_tensors
        return grads[0] * factor.to(grads[0].dtype), None


class Poison(nn.Module):
    """Multiplies its output, and its gradient, by fields of the microbatch: 1, or NaN, or more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, poison_output: Tensor, poison_gradient: Tensor) -> Tensor:
        y: Tensor = _ScaleGradient.apply(x * self.scale, poison_gradient)  # type: ignore[no-untyped-call]
        return y * poison_output.to(y.dtype)


def with_poison(model: ModelSpec, at: int) -> ModelSpec:
    """`model` with a `poison` layer before layer `at`."""
    layer = LayerSpec("poison", Poison, batch_fields=("poison_output", "poison_gradient"))
    return replace(model, layers=(*model.layers[:at], layer, *model.layers[at:]))


def add_poison(
    batches: Batches,
    output: Mapping[tuple[int, int], float] | None = None,
    gradient: Mapping[tuple[int, int], float] | None = None,
) -> Batches:
    """The batches with the fields of `Poison`: by (update, microbatch), 1 where none is given."""
    for update, microbatches in batches.items():
        for index, fields in enumerate(microbatches):
            fields["poison_output"] = torch.tensor((output or {}).get((update, index), 1.0))
            fields["poison_gradient"] = torch.tensor((gradient or {}).get((update, index), 1.0))
    return batches


def assert_same_states(
    got: Mapping[str, Mapping[str, Tensor]], want: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Fail with the first tensor that differs in a single bit."""
    assert got.keys() == want.keys()
    for layer, state in want.items():
        assert got[layer].keys() == state.keys(), layer
        for key, value in state.items():
            other = got[layer][key]
            same = other.dtype == value.dtype and torch.equal(other, value)
            assert same, f"{layer} {key} differs by up to {(other - value).abs().max():.3g}"
