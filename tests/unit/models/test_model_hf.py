"""Unmodified Hugging Face models, cut at every place (case C24)."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.hf import hf
from elastic_trainer.models.layers import ModelSpec, build_layers, ties

transformers = pytest.importorskip("transformers")

IDS: dict[str, Any] = {"vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0}
LLAMA: dict[str, Any] = {
    **IDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", **IDS, "n_embd": 32, "n_layer": 4, "n_head": 4},
    "gpt2-untied": {
        **{"model_type": "gpt2", **IDS, "n_embd": 32, "n_layer": 4, "n_head": 4},
        "tie_word_embeddings": False,
    },
    "llama": {"model_type": "llama", **LLAMA},
    "llama-tied": {"model_type": "llama", **LLAMA, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 8},
    "qwen3-sliding-tied": {
        **{"model_type": "qwen3", **LLAMA, "head_dim": 8, "tie_word_embeddings": True},
        **{"use_sliding_window": True, "sliding_window": 5},
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "llama-rope": {
        "model_type": "llama",
        **LLAMA,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
}
every_config = pytest.mark.parametrize("kind", CONFIGS)


def without_dropout(kind: str) -> dict[str, Any]:
    config = dict(CONFIGS[kind])
    if config["model_type"] == "gpt2":
        config |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return config


def unsplit(config: Mapping[str, Any]) -> Any:
    """The library's own model, with weights that are not those of its initialisation."""
    settings = dict(config)
    torch.manual_seed(0)
    built = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return built


def exported(model: ModelSpec, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    assert model.hugging_face is not None
    return dict(
        model.hugging_face.convert(layer, name, parameter.detach())
        for layer, module in layers.items()
        for name, parameter in module.named_parameters()
    )


def install(model: ModelSpec, layers: Mapping[str, nn.Module], theirs: Any) -> None:
    """Put the unsplit model's weights into the layers."""
    weights = dict(theirs.named_parameters(remove_duplicate=False))
    assert model.hugging_face is not None
    with torch.no_grad():
        for layer, module in layers.items():
            for name, parameter in module.named_parameters():
                parameter.copy_(weights[model.hugging_face.convert(layer, name, parameter)[0]])


def run_in_two(layers: Mapping[str, nn.Module], cut: int, ids: Tensor) -> tuple[Tensor, Any]:
    """Logits of two stages, and the function that walks back through both."""
    modules = list(layers.values())
    x = ids
    for module in modules[:cut]:
        x = module(x)
    sent = x.detach().clone()
    received = sent.requires_grad_(sent.is_floating_point())
    y = received
    for module in modules[cut:]:
        y = module(y)

    def backward(loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if cut:
            x.backward(received.grad)  # type: ignore[no-untyped-call]

    return y, backward


@every_config
def test_logits_and_gradients_equal_the_unsplit_models_at_every_cut(kind: str) -> None:
    config = without_dropout(kind)
    theirs = unsplit(config)
    model = hf(config=config)
    assert model.names == ("embed", *[f"layers.{i}" for i in range(4)], "head")
    ids, labels = torch.randint(0, 61, (2, 3, 17)).unbind()
    expected = theirs(ids, use_cache=False).logits
    model.loss(expected, {"labels": labels}).backward()  # type: ignore[no-untyped-call]
    wanted = {n: p.grad for n, p in theirs.named_parameters()}
    assert len(ties(model)) == (1 if theirs.config.tie_word_embeddings else 0)
    for cut in range(len(model.layers)):
        # Each stage builds its own part.
        layers = build_layers(model, 0, cut, 0) | build_layers(model, cut, len(model.layers), 0)
        install(model, layers, theirs)
        logits, backward = run_in_two(layers, cut, ids)
        assert torch.equal(logits, expected)
        backward(model.loss(logits, {"labels": labels}))
        grads = gradients(model, layers)
        assert grads.keys() == wanted.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, wanted[name]), name


def gradients(model: ModelSpec, layers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Gradients by the library's names; those of tied copies are added to their owner's."""
    assert model.hugging_face is not None
    found: dict[str, Tensor] = {}
    copies = {(t.follower, t.follower_param): t for t in ties(model)}
    for index, (layer, module) in enumerate(layers.items()):
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            if tie := copies.get((index, name)):
                layer, name = model.names[tie.owner], tie.owner_param
            full, grad = model.hugging_face.convert(layer, name, parameter.grad)
            found[full] = found[full] + grad if full in found else grad
    return found


@every_config
def test_initial_weights_load_strictly_and_follow_the_class(kind: str) -> None:
    model = hf(config=CONFIGS[kind])
    layers = build_layers(model, 0, 6, seed=0)
    alone = {n: m for i in range(6) for n, m in build_layers(model, i, i + 1, seed=0).items()}
    weights = exported(model, layers)
    assert all(torch.equal(t, weights[n]) for n, t in exported(model, alone).items())
    settings = dict(CONFIGS[kind])
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    )
    theirs.load_state_dict(weights, strict=True)
    for name, parameter in unmoved(theirs):
        ours = weights[name]
        if parameter.std() == 0:
            assert torch.equal(ours, parameter), name
        elif ours.numel() > 500:
            assert ours.std().item() == pytest.approx(parameter.std().item(), rel=0.15), name
    assert not torch.equal(
        weights[next(iter(weights))], exported(model, build_layers(model, 0, 1, 1)).popitem()[1]
    )


def unmoved(model: Any) -> list[tuple[str, Tensor]]:
    """Parameters as the class itself draws them."""
    torch.manual_seed(3)
    fresh = type(model)(model.config)
    return [(name, parameter.detach()) for name, parameter in fresh.named_parameters()]


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_dropout_is_the_models_own(kind: str) -> None:
    config = dict(CONFIGS[kind]) | (
        {"resid_pdrop": 0.5} if kind == "gpt2" else {"attention_dropout": 0.5}
    )
    layer = build_layers(hf(config=config), 1, 2, seed=0)["layers.0"]
    x = torch.randn(1, 8, 32)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-tied"])
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_weights_of_a_local_folder(kind: str, shard_bytes: int, tmp_path: Path) -> None:
    theirs = unsplit(CONFIGS[kind]).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=shard_bytes)
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes == 10**9)
    model = hf(path=str(tmp_path))
    x = ids = torch.randint(0, 61, (2, 9))
    for layer in build_layers(model, 0, 6, seed=0).values():
        x = layer.eval()(x)
    assert torch.equal(x, theirs(ids, use_cache=False).logits)
    fresh = build_layers(hf(path=str(tmp_path), pretrained=False), 0, 1, seed=0)
    assert not torch.equal(
        exported(model, fresh).popitem()[1], theirs.get_input_embeddings().weight
    )


def test_names_without_the_base_models_prefix(tmp_path: Path) -> None:
    theirs = unsplit(CONFIGS["gpt2"]).eval()
    theirs.config.save_pretrained(tmp_path)
    from safetensors.torch import save_file

    bare = {n.removeprefix("transformer."): p.detach() for n, p in theirs.named_parameters()}
    save_file(bare, tmp_path / "model.safetensors")
    layers = build_layers(hf(path=str(tmp_path)), 0, 6, seed=0)
    assert torch.equal(layers["head"].get_parameter("lm_head.weight"), bare["wte.weight"])
    assert torch.equal(
        layers["layers.3"].get_parameter("block.ln_2.weight"), bare["h.3.ln_2.weight"]
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "needs either a config or a path"),
        ({"config": {}, "path": "x"}, "needs either a config or a path"),
        ({"config": {}}, "no model_type None .for example gpt2, llama or qwen3"),
        ({"config": {"model_type": "qwen33"}}, r"no model_type 'qwen33' \(nearest: qwen3\)"),
        (
            {"config": {"model_type": "llama", "num_hidden_layer": 2}},
            r"'llama' has no setting 'num_hidden_layer' \(nearest: num_hidden_layers\)",
        ),
        (
            {"config": {"model_type": "llama", "q": 2}},
            r"'llama' has no setting 'q' \(nothing like it among \d+ known\)",
        ),
        (
            {"config": {"model_type": "llama", "hidden_size": 33}},
            "transformers refuses the config of 'llama'",
        ),
        ({"config": {"model_type": "vit"}}, "cannot build model type 'vit' as a language model"),
        ({"config": {"model_type": "opt"}}, "'opt' carries no base_model_pp_plan"),
        (
            {"config": {"model_type": "granite", **LLAMA, "embedding_multiplier": 3.0}},
            "'granite' changes embeddings outside of the layers",
        ),
        ({"path": "/no/such/folder"}, "there is no /no/such/folder/config.json"),
    ],
)
def test_bad_models_are_explained(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        hf(**args)


def test_bad_folders_are_explained(tmp_path: Path) -> None:
    theirs = unsplit(CONFIGS["llama"])
    theirs.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no model.safetensors. Save the weights as safe"):
        hf(path=str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ModelError, match="model.safetensors is damaged"):
        hf(path=str(tmp_path))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for changes, message in (
        ({"intermediate_size": 50}, r"has shape \(48, 32\), config.json asks for \(50, 32\)"),
        ({"num_hidden_layers": 5}, "has no tensor 'model.layers.4"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        model = hf(path=str(tmp_path))
        with pytest.raises(ModelError, match=message):
            build_layers(model, 0, len(model.layers), seed=0)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json cannot be used"):
        hf(path=str(tmp_path))


def test_the_library_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"pip install 'elastic-trainer\[hf\]'"):
        hf(config=CONFIGS["llama"])
