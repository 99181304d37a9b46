"""Names, ties, keys and initial weights of layers."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.layers import (
    LayerSpec,
    ModelSpec,
    Tie,
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
