"""The unsplit model: states in, logits, generated tokens and evaluation out."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.gpt import gpt
from elastic_trainer.models.inference import Unsplit, sample
from elastic_trainer.models.layers import LayerSpec, ModelSpec, build_layers
from elastic_trainer.models.losses import default_loss
from elastic_trainer.models.mlp import mlp

SMALL: dict[str, Any] = {
    "vocab_size": 11,
    "num_layers": 2,
    "dim": 24,
    "num_heads": 3,
    "max_positions": 8,
}


def states(layers: dict[str, nn.Module]) -> dict[str, dict[str, Tensor]]:
    return {
        name: {f"param/{k}": p.detach().clone() for k, p in layer.named_parameters()}
        | {f"buffer/{k}": b.clone() for k, b in layer.named_buffers()}
        | {"optim/x/step": torch.ones(())}
        for name, layer in layers.items()
    }


def counter(vocab_size: int = 11) -> Unsplit:
    """A model whose likeliest next token is the last one plus 1, by far."""

    class Next(nn.Module):
        def forward(self, ids: Tensor) -> Tensor:
            return 9.0 * nn.functional.one_hot((ids + 1) % vocab_size, vocab_size).float()

    return Unsplit(ModelSpec((LayerSpec("next", Next),), default_loss))


def test_states_of_stages_make_the_whole_model() -> None:
    model = gpt(**SMALL, tie_embeddings=True, dropout=0.5)
    layers = build_layers(model, 0, 4, seed=5)
    unsplit = Unsplit(model, states(layers), seed=1)
    x = ids = torch.randint(0, 11, (2, 8))
    for layer in layers.values():
        x = layer.eval()(x)
    assert torch.equal(unsplit.logits(ids), x)
    assert not torch.equal(Unsplit(model, seed=1).logits(ids), x)


def test_buffers_that_are_saved_are_needed_others_not() -> None:
    class Counted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("made", torch.ones(()), persistent=False)

    model = ModelSpec((LayerSpec("a", Counted),), default_loss)
    state = states(build_layers(model, 0, 1, seed=0))
    state["a"]["buffer/seen"] += 7
    del state["a"]["buffer/made"]
    assert Unsplit(model, state).layers["a"].get_buffer("seen").item() == 7
    del state["a"]["buffer/seen"]
    with pytest.raises(ModelError, match="layer 'a' lacks 'buffer/seen'"):
        Unsplit(model, state)


def test_states_of_another_model_are_refused() -> None:
    model = gpt(**SMALL)
    state = states(build_layers(model, 0, 4, seed=0))
    wide = states(build_layers(gpt(**SMALL | {"vocab_size": 12}), 0, 4, seed=0))
    with pytest.raises(ModelError, match=r"shape \(12, 24\), the model wants \(11, 24\)"):
        Unsplit(model, wide)
    del state["blocks.1"]["param/qkv.bias"]
    with pytest.raises(ModelError, match="layer 'blocks.1' lacks 'param/qkv.bias'"):
        Unsplit(model, state)
    del state["blocks.1"]
    with pytest.raises(ModelError, match="The state has no layer 'blocks.1'"):
        Unsplit(model, state)


def test_temperature_zero_takes_the_likeliest() -> None:
    assert counter().generate([3], 5, temperature=0) == [4, 5, 6, 7, 8]
    assert counter().generate([3], 5, temperature=0, eos_id=6) == [4, 5, 6]
    assert counter().generate([3], 0) == []


def test_the_seed_decides_what_is_drawn() -> None:
    unsplit = Unsplit(gpt(**SMALL), seed=0)
    draws = [unsplit.generate([1, 2], 20, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    # Longer than the model's positions: the window slides.
    assert len(draws[0]) == 20 and all(0 <= token < 11 for token in draws[0])


def test_the_window_holds_the_newest_tokens() -> None:
    unsplit = Unsplit(gpt(**SMALL), seed=0)
    context = list(range(10)) * 2
    expected = int(unsplit.logits(torch.tensor([context[-8:]]))[0, -1].argmax())
    assert unsplit.generate(context, 1, temperature=0) == [expected]


def test_draws_follow_temperature_and_top_k() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    generator = torch.Generator().manual_seed(0)

    def shares(temperature: float, top_k: int) -> list[float]:
        draws = [sample(logits, temperature, top_k, generator) for _ in range(4000)]
        return [draws.count(i) / 4000 for i in range(4)]

    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits / temperature, 0).tolist()
        assert shares(temperature, 0) == pytest.approx(expected, abs=0.03)
    two = shares(1.0, 2)
    assert two[1] == two[3] == 0.0
    assert two[0] == pytest.approx(1 / (1 + math.exp(-1)), abs=0.03)
    assert shares(1.0, 1) == [1.0, 0.0, 0.0, 0.0]


def test_evaluation_sums_over_unequal_batches() -> None:
    unsplit = Unsplit(gpt(**SMALL), seed=0)
    ids = torch.randint(0, 11, (3, 8))
    labels = torch.randint(0, 11, (3, 8))
    labels[0, 2:] = -100
    labels[2] = -100
    whole = unsplit.evaluate([{"input_ids": ids, "labels": labels}])
    parts = unsplit.evaluate(
        {"input_ids": ids[i : i + 1], "labels": labels[i : i + 1]} for i in range(3)
    )
    assert whole[1] == parts[1] == 10
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    log_probabilities = unsplit.logits(ids).log_softmax(-1)
    expected = sum(
        -log_probabilities[i, j, labels[i, j]].item()
        for i in range(3)
        for j in range(8)
        if labels[i, j] >= 0
    )
    assert whole[0] == pytest.approx(expected, rel=1e-6)


def test_samples_are_counted_where_labels_are_floats() -> None:
    unsplit = Unsplit(mlp(input_dim=4, output_dim=2))
    batch = {"inputs": torch.randn(3, 4), "labels": torch.randn(3, 2)}
    assert unsplit.evaluate([batch, batch])[1] == 6


def test_what_cannot_be_generated_is_explained() -> None:
    with pytest.raises(ModelError, match="The prompt has no tokens"):
        counter().generate([], 3)
    with pytest.raises(ModelError, match="The temperature is -1"):
        counter().generate([1], 3, temperature=-1)
    with pytest.raises(ModelError, match="Only language models generate text"):
        Unsplit(mlp(input_dim=1, output_dim=2)).generate([1], 3)
