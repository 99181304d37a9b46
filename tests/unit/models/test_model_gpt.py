"""GPT against a plain formulation and against transformers; the vision transformer and MLP."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.gpt import Block, gpt
from elastic_trainer.models.layers import ModelSpec, build_layers, layer_key, seeded, ties
from elastic_trainer.models.mlp import mlp
from elastic_trainer.models.vit import vit

SMALL: dict[str, Any] = {
    "vocab_size": 41,
    "num_layers": 2,
    "dim": 24,
    "num_heads": 3,
    "max_positions": 12,
}


def plain_block(block: Block, x: Tensor, causal: bool) -> Tensor:
    """The same block written out, attention and all."""

    def norm(layer: nn.LayerNorm, y: Tensor) -> Tensor:
        centred = y - y.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * layer.weight + layer.bias

    heads, width = block.num_heads, x.shape[-1] // block.num_heads
    out = []
    qkv = norm(block.norm1, x) @ block.qkv.weight.T + block.qkv.bias
    for head in range(heads):
        q, k, v = (qkv[..., part * x.shape[-1] + head * width :][..., :width] for part in range(3))
        scores = q @ k.transpose(1, 2) / math.sqrt(width)
        if causal:
            future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        out.append(scores.softmax(-1) @ v)
    x = x + torch.cat(out, -1) @ block.proj.weight.T + block.proj.bias
    y = norm(block.norm2, x) @ block.up.weight.T + block.up.bias
    if block.approximation == "tanh":
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    else:
        y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    return x + y @ block.down.weight.T + block.down.bias


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("causal", [True, False])
def test_block_computes_what_it_says(gelu: str, causal: bool) -> None:
    torch.manual_seed(0)
    block = Block(24, 3, gelu=gelu, causal=causal).double()
    for parameter in block.parameters():  # biases and norms that are not 0 and 1
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(block(x), plain_block(block, x, causal), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gelu", ["exact", "tanh"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_gpt2(gelu: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt(**SMALL, gelu=gelu, tie_embeddings=tied)
    layers = {name: layer.double() for name, layer in build_layers(model, 0, 4, seed=1).items()}
    assert model.hugging_face is not None
    exported = dict(
        model.hugging_face.convert(layer, name, parameter.detach())
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
    )
    config = transformers.GPT2Config(**model.hugging_face.config)
    theirs = transformers.GPT2LMHeadModel(config).double()
    theirs.load_state_dict(exported, strict=True)
    ids = torch.randint(0, 41, (3, 12))
    x = run(layers, ids)
    torch.testing.assert_close(x, theirs(ids).logits, rtol=1e-12, atol=1e-12)
    assert theirs.config.tie_word_embeddings is tied


def run(layers: dict[str, nn.Module], x: Tensor) -> Tensor:
    for layer in layers.values():
        x = layer(x)
    return x


def test_tied_embeddings_are_reported_as_a_tie() -> None:
    assert ties(gpt(**SMALL)) == []
    assert ties(gpt(**SMALL, tie_embeddings=True)) == [(0, 3, "tokens.weight", "linear.weight")]


def test_initial_weights_follow_gpt2() -> None:
    layers = build_layers(gpt(**SMALL | {"dim": 96, "vocab_size": 400}), 0, 4, seed=0)
    block = layers["blocks.1"]
    for name, std in (
        ("qkv", 0.02),
        ("proj", 0.02 / math.sqrt(4)),
        ("up", 0.02),
        ("down", 0.02 / math.sqrt(4)),
    ):
        assert block.get_parameter(f"{name}.weight").std().item() == pytest.approx(std, rel=0.03)
        assert not block.get_parameter(f"{name}.bias").any()
    assert layers["embed"].get_parameter("tokens.weight").std().item() == pytest.approx(
        0.02, rel=0.03
    )


def test_dropout_masks_are_keyed_and_absent_in_evaluation() -> None:
    layer = build_layers(gpt(**SMALL, dropout=0.5), 1, 2, seed=0)["blocks.0"]
    x = torch.randn(2, 7, 24)

    def at(update: int) -> Tensor:
        with seeded(layer_key(0, update, 3, "blocks.0")):
            return layer(x)  # type: ignore[no-any-return]

    assert torch.equal(at(1), at(1))
    assert not torch.equal(at(1), at(2))
    layer.eval()
    assert torch.equal(at(1), at(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 25}, r"dim 25 does not divide into 3 heads. Set model.args.dim to 27"),
        ({"num_layers": 0}, "num_layers is 0, a whole number above 0 is needed"),
        ({"vocab_size": 4.5}, "vocab_size is 4.5"),
        ({"max_positions": True}, "max_positions is True"),
        ({"dropout": 1.0}, "dropout is 1.0, a number from 0 up to 1"),
        ({"gelu": "tan"}, r"gelu is 'tan' \(nearest: tanh\)"),
    ],
)
def test_bad_sizes_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gpt(**SMALL | changes)


def test_input_that_does_not_fit_is_explained() -> None:
    embed = build_layers(gpt(**SMALL), 0, 1, seed=0)["embed"]
    with pytest.raises(ModelError, match="13 tokens is longer than the model's 12 positions"):
        embed(torch.zeros(1, 13, dtype=torch.int64))
    with pytest.raises(ModelError, match="Token id 41 is outside the vocabulary of 41"):
        embed(torch.tensor([[3, 41]]))


def test_shorter_sequences_and_smaller_microbatches_pass() -> None:
    layers = build_layers(gpt(**SMALL), 0, 4, seed=0)
    ids = torch.randint(0, 41, (3, 12))
    whole = run(layers, ids)
    torch.testing.assert_close(run(layers, ids[:1, :5]), whole[:1, :5])


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (
            vit(num_classes=5, image_size=8, channels=2, num_layers=2, dim=16, num_heads=2),
            (2, 8, 8),
        ),
        (vit(num_classes=5, image_size=8, channels=2, num_layers=2, dim=16, num_heads=2), (128,)),
        (mlp(input_dim=12, output_dim=5, hidden_dim=16, num_layers=3, dropout=0.1), (12,)),
        (mlp(input_dim=12, output_dim=5, num_layers=1), (3, 4)),
    ],
    ids=["images", "flat images", "mlp", "wide mlp"],
)
def test_classifiers_learn(model: ModelSpec, shape: tuple[int, ...]) -> None:
    layers = nn.Sequential(*build_layers(model, 0, len(model.layers), seed=0).values())
    torch.manual_seed(0)
    x, labels = torch.randn(10, *shape), torch.arange(10) % 5
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        loss = model.loss(layers(x), {"label": labels})
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(10 * math.log(5), rel=0.3)
    assert losses[-1] < losses[0] / 5


def test_regression_for_labels_that_are_floats() -> None:
    model = mlp(input_dim=4, output_dim=2, num_layers=1)
    layer = build_layers(model, 0, 1, seed=0)["layers.0"]
    x, y = torch.randn(3, 4), torch.randn(3, 2)
    expected = F.mse_loss(layer(x), y, reduction="sum") / 2
    torch.testing.assert_close(model.loss(layer(x), {"labels": y}), expected)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(vit, num_classes=5, image_size=9), "image_size 9 does not divide into patches"),
        (partial(vit, num_classes=5, dim=10, num_heads=4), "dim 10 does not divide into 4 heads"),
        (partial(mlp, input_dim=0, output_dim=1), "input_dim is 0"),
        (partial(mlp, input_dim=1, output_dim=1, activation="gellu"), r"\(nearest: gelu\)"),
    ],
)
def test_bad_sizes_of_classifiers(build: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build()


def test_images_of_another_size_are_explained() -> None:
    layer = build_layers(vit(num_classes=5), 0, 1, seed=0)["patches"]
    with pytest.raises(ModelError, match=r"shape \(3, 16, 16\) do not hold \(3, 32, 32\)"):
        layer(torch.ones(2, 3, 16, 16))
