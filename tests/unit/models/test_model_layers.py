"""Names, ties, keys and initial weights of layers."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.gpt import gpt
from elastic_trainer.models.layers import (
    LayerSpec,
    ModelSpec,
    Tie,
    build_blank,
    build_layer,
    build_layers,
    first_input,
    layer_key,
    layer_kwargs,
    seeded,
    ties,
)
from elastic_trainer.models.losses import default_loss


def linear(name: str, width: int = 4, **tied: str) -> LayerSpec:
    return LayerSpec(name, partial(nn.Linear, 4, width), tied=tied)


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec(layers, default_loss)


def state(modules: dict[str, nn.Module]) -> dict[str, Tensor]:
    return {f"{n}/{k}": t for n, m in modules.items() for k, t in m.state_dict().items()}


def test_initial_weights_do_not_depend_on_the_cut() -> None:
    spec = model(*[linear(f"l{i}") for i in range(4)], linear("head", weight="l0.weight"))
    whole = state(build_layers(spec, 0, 5, seed=3))
    for cut in range(1, 5):
        torch.manual_seed(cut)  # nor on what the process drew before
        parts = build_layers(spec, cut, 5, seed=3) | build_layers(spec, 0, cut, seed=3)
        split = state(parts)
        assert split.keys() == whole.keys()
        assert all(torch.equal(split[key], whole[key]) for key in whole)


def test_initial_weights_depend_on_seed_and_name() -> None:
    weights = [
        build_layer(linear(name), seed).weight for name, seed in (("a", 0), ("b", 0), ("a", 1))
    ]
    assert not torch.equal(weights[0], weights[1])  # type: ignore[arg-type]
    assert not torch.equal(weights[0], weights[2])  # type: ignore[arg-type]


def test_building_leaves_the_global_generator_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_layer(linear("a"), 0)
    with pytest.raises(RuntimeError), seeded(1):
        raise RuntimeError
    assert torch.equal(torch.rand(3), expected)


def test_tied_copies_are_equal_but_separate() -> None:
    spec = model(linear("a"), linear("b.c", weight="a.weight", bias="a.bias"))
    assert ties(spec) == [Tie(0, 1, "weight", "weight"), Tie(0, 1, "bias", "bias")]
    built = build_layers(spec, 0, 2, seed=0)
    ours, theirs = built["a"].get_parameter("weight"), built["b.c"].get_parameter("weight")
    assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    alone = build_layers(spec, 1, 2, seed=0)
    assert list(alone) == ["b.c"]
    assert torch.equal(alone["b.c"].get_parameter("weight"), ours)


def test_tie_to_a_layer_with_dots_in_its_name() -> None:
    spec = model(linear("x"), linear("x.0"), linear("y", weight="x.0.weight"))
    assert ties(spec) == [Tie(1, 2, "weight", "weight")]


def test_layer_keys_are_fixed_for_ever() -> None:
    # Goldens: a checkpoint resumed with another version must draw the same masks.
    assert layer_key(0, 1, 0, "embed") == 3126282186246138199
    assert layer_key(7, 123, 4, "blocks.3") == 5565624906811687737
    keys = {
        layer_key(s, u, m, n) for s in (0, 1) for u in (1, 11) for m in (0, 1) for n in ("a", "b")
    }
    assert len(keys) == 16
    assert all(0 <= key < 2**63 for key in keys)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "no layers"),
        ((linear("a"), linear("a")), "Two layers are named 'a'"),
        ((linear("a/b"),), "'a/b' is not usable"),
        ((linear(""),), "'' is not usable"),
        ((linear("a", weight="b.weight"), linear("b")), "names no earlier layer"),
        ((linear("a"), linear("b", weight="a")), "names no earlier layer"),
        (
            (linear("a"), linear("b", weight="a.weight"), linear("c", weight="b.weight")),
            "which is tied itself. Tie it to 'a.weight' instead",
        ),
    ],
)
def test_bad_lists_of_layers_are_refused(layers: tuple[LayerSpec, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        model(*layers)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (linear("b", weight="a.wait"), "names parameter 'wait', which layer 'a' lacks"),
        (linear("b", wait="a.weight"), "names parameter 'wait', which layer 'b' lacks"),
        (linear("b", 5, weight="a.weight"), r"b.weight \(5, 4\) is tied to a.weight \(4, 4\)"),
    ],
)
def test_bad_ties_are_refused_when_built(second: LayerSpec, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_layers(model(linear("a"), second), 0, 2, seed=0)


def test_layers_that_cannot_be_built_are_named() -> None:
    def broken() -> nn.Module:
        raise ValueError("too wide")

    with pytest.raises(ModelError, match="Layer 'x' could not be built: ValueError: too wide"):
        build_layer(LayerSpec("x", broken), 0)
    with pytest.raises(ModelError, match="Building layer 'x' gave int, not a torch module"):
        build_layer(LayerSpec("x", lambda: 3), 0)  # type: ignore[arg-type, return-value]


def test_fields_reach_the_first_layer_and_those_that_ask() -> None:
    batch = {"a": torch.ones(1), "b": torch.zeros(1)}
    one = ModelSpec((linear("l"),), default_loss, ("a",))
    two = ModelSpec((linear("l"),), default_loss, ("b", "a"))
    assert first_input(one, batch) is batch["a"]
    assert list(first_input(two, batch)) == ["b", "a"]
    assert layer_kwargs(LayerSpec("l", nn.Identity, batch_fields=("b",)), batch) == {
        "b": batch["b"]
    }
    with pytest.raises(ModelError, match=r"needs field 'input_ids'; .* has \['a', 'b'\]"):
        first_input(model(linear("l")), batch)
    with pytest.raises(ModelError, match=r"'l' needs field 'c'; the microbatch has \['a', 'b'\]"):
        layer_kwargs(LayerSpec("l", nn.Identity, batch_fields=("a", "c")), batch)


class Noisy(nn.Module):
    """Holds parameters and what is no part of its state, made in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.conv = nn.Conv1d(3, 4, 2)
        self.free = nn.Parameter(torch.empty(4, 4))
        nn.init.trunc_normal_(self.free) if way == "rejected" else nn.init.orthogonal_(self.free)
        noise = torch.arange(20.0)
        if way == "drawn":
            noise = torch.rand(20)
        elif way == "computed":
            noise = self.linear.weight.detach() * 2
        elif way == "by data":
            noise = self.linear.weight.data.flatten()[:20]
        self.register_buffer("noise", noise.clone(), persistent=False)
        self.norm = self.free.norm().item() if way == "number" else 1.0


@pytest.mark.parametrize("way", ["plain", "drawn", "computed", "by data", "number", "rejected"])
def test_a_blank_layer_differs_in_its_parameters_at_most(way: str) -> None:
    spec = LayerSpec("noisy", lambda: Noisy(way))
    state = torch.get_rng_state()
    blank, built = build_blank(spec, 7), build_layer(spec, 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(blank.get_buffer("noise"), built.get_buffer("noise"))
    assert blank.norm == built.norm
    for (name, ours), (other, theirs) in zip(
        blank.named_parameters(), built.named_parameters(), strict=True
    ):
        assert name == other and ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert ours.requires_grad == theirs.requires_grad


@pytest.mark.parametrize("name", ["gpt", "linear"])
def test_a_blank_layer_draws_nothing_where_it_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {
        "gpt": gpt(vocab_size=11, num_layers=1, dim=8, num_heads=2).layers[1],
        "linear": linear("l"),
    }
    num_built: list[object] = []
    spec = replace(specs[name], build=lambda: num_built.append(1) or specs[name].build())  # type: ignore[func-returns-value]
    drawn: list[object] = []
    for fill in ("normal_", "uniform_"):
        monkeypatch.setattr(nn.init, f"_no_grad_{fill}", drawn.append)
    build_blank(spec, 3)
    assert len(num_built) == 1 and not drawn


def test_given_layers_stay_as_they_are_and_others_get_their_owners_initial_weights() -> None:
    tied = gpt(vocab_size=11, num_layers=1, dim=8, num_heads=2, tie_embeddings=True)
    whole = build_layers(tied, 0, 3, seed=5)
    embed = build_layer(tied.layers[0], seed=6)  # as it may be after some training
    kept = {name: p.clone() for name, p in embed.named_parameters()}
    mixed = build_layers(tied, 0, 3, 5, given={"embed": embed})
    assert list(mixed) == list(whole) and mixed["embed"] is embed
    assert all(torch.equal(p, kept[name]) for name, p in embed.named_parameters())
    for layer in list(whole)[1:]:
        for name, parameter in whole[layer].named_parameters():
            assert torch.equal(mixed[layer].get_parameter(name), parameter), (layer, name)
