"""What is told of a shipped model without torch is what loading it shows."""

import inspect
from dataclasses import replace
from typing import Any

import pytest

from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import ModelError
from elastic_trainer.models import outline
from elastic_trainer.models.registry import SHIPPED, load_model, load_target

GPT = {"vocab_size": 11}
VIT = {"num_classes": 3}
MLP = {"input_dim": 2, "output_dim": 2}


def config(name: str, args: dict[str, Any], *overrides: str) -> Config:
    made = load_config(None, ["data.format=synthetic", "train.max_steps=1", *overrides])
    return replace(made, model=replace(made.model, name=name, args=args))


@pytest.mark.parametrize("name", list(outline.OUTLINES))
def test_it_takes_the_same_arguments(name: str) -> None:
    ours = inspect.signature(outline.OUTLINES[name]).parameters
    model = inspect.signature(load_target(SHIPPED[name], "model.name")).parameters
    assert list(ours.values()) == list(model.values())


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gpt", GPT),
        ("gpt", GPT | {"num_layers": 1, "tie_embeddings": True, "gelu": "exact", "dropout": 0.5}),
        ("gpt", GPT | {"max_positions": 7}),
        ("vit", VIT),
        ("vit", VIT | {"num_layers": 7, "image_size": 8, "patch_size": 2}),
        ("mlp", MLP),
        ("mlp", MLP | {"num_layers": 1, "activation": "tanh"}),
        ("multimodal", {"vocab_size": 11}),
        ("multimodal", {"vocab_size": 11, "vision_layers": 1, "audio_layers": 4, "lm_layers": 2}),
        ("emulated", {}),
        ("emulated", {"num_layers": 3}),
        ("emulated", {"layers": [{"cost_field": "sizes"}, {}]}),
        ("emulated", {"num_layers": 3, "layers": [{"forward_s": 0}, {"backward_s": 0.5}]}),
    ],
)
def test_it_counts_the_layers(name: str, args: dict[str, Any]) -> None:
    made = config(name, args)
    assert outline.num_layers(made) == len(load_model(made).layers)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("gtp", {}),
        ("gpt", {}),
        ("gpt", GPT | {"layers": 3}),
        ("gpt", GPT | {"num_layers": 0}),
        ("gpt", GPT | {"num_layers": True}),
        ("gpt", GPT | {"num_heads": 3}),
        ("gpt", GPT | {"dropout": 1}),
        ("gpt", GPT | {"gelu": "fast"}),
        ("vit", {}),
        ("vit", VIT | {"patch_size": 5}),
        ("vit", VIT | {"dim": 63}),
        ("vit", VIT | {"channels": -1}),
        ("mlp", MLP | {"hidden_dim": 0}),
        ("mlp", MLP | {"activation": "gleu"}),
        ("mlp", MLP | {"dropout": -0.5}),
        ("multimodal", {"vocab_size": 11, "freeze": ["lm"]}),
        ("multimodal", {"vocab_size": 11, "dim": 6}),
        ("emulated", {"layers": []}),
        ("emulated", {"layers": [3]}),
        ("emulated", {"layers": [{"cost_field": 3}]}),
        ("emulated", {"layers": [{"forwards_s": 1}]}),
        ("emulated", {"layers": [{}, {"backward_s": -1}]}),
        ("emulated", {"activation_bytes": True}),
        ("emulated", {"microbatch_size": 0}),
    ],
)
def test_its_errors_are_those_of_the_model(name: str, args: dict[str, Any]) -> None:
    made = config(name, args)
    with pytest.raises(ModelError) as told:
        outline.num_layers(made)
    with pytest.raises(ModelError) as met:
        load_model(made)
    assert (told.value.what, told.value.hint) == (met.value.what, met.value.hint)


def test_a_loss_is_a_sum_or_a_mean() -> None:
    made = config("mlp", MLP)
    made = replace(made, loss=replace(made.loss, reduction="max"))
    for check in (outline.num_layers, load_model):
        with pytest.raises(ModelError, match=r"loss\.reduction is 'max'"):
            check(made)


def test_own_code_is_left_to_itself() -> None:
    assert outline.num_layers(config("gpt", GPT, "model.target=mine:model")) is None
    assert outline.num_layers(config("gpt", GPT, "loss.target=mine:loss")) is None
    assert outline.num_layers(config("hf", {})) is None
