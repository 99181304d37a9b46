"""Export to Hugging Face's layout: transformers loads it, with equal logits."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from elastic_trainer.checkpoint.export import export_hf
from elastic_trainer.checkpoint.layers import write_layer
from elastic_trainer.checkpoint.store import CheckpointStore, Manifest
from elastic_trainer.config import Config, DataConfig, ModelConfig
from elastic_trainer.errors import CheckpointError, ModelError
from elastic_trainer.models.inference import Unsplit
from elastic_trainer.models.registry import load_model
from elastic_trainer.types import Cursor

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT = ["def tokens(line):\n    return line.split()\n", "class Größe: pass  # ünïcode\n"]
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "gpt": ("gpt", {"vocab_size": 300, "num_layers": 3, "dim": 32, "dropout": 0.1}),
    "gpt-tied": ("gpt", {"vocab_size": 300, "num_layers": 2, "dim": 32, "tie_embeddings": True}),
    "gpt-exact": ("gpt", {"vocab_size": 300, "num_layers": 2, "dim": 32, "gelu": "exact"}),
    "gpt2": ("hf", {"config": {"model_type": "gpt2", **GPT2}}),
    "llama": ("hf", {"config": {"model_type": "llama", **SMALL}}),
    "qwen3": ("hf", {"config": {"model_type": "qwen3", "head_dim": 8, **SMALL}}),
    "qwen3-tied": (
        "hf",
        {"config": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True, **SMALL}},
    ),
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|pad|>", "<|endoftext|>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    folder = tmp_path / "dataset"
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def make_config(kind: str, **data: Any) -> Config:
    name, args = MODELS[kind]
    return Config(
        model=ModelConfig(name=name, args=dict(args)),
        data=replace(DataConfig(sequence_length=64), **data),
    )


def trained(config: Config, store: CheckpointStore) -> tuple[Manifest, Unsplit]:
    """A checkpoint whose weights are not those of an initialisation, and its unsplit model."""
    unsplit = Unsplit(load_model(config), seed=1)
    generator = torch.Generator().manual_seed(2)
    parameters = {
        (layer, name): parameter
        for layer, module in unsplit.layers.items()
        for name, parameter in module.named_parameters()
    }
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for spec in unsplit.model.layers:
            for name, source in spec.tied.items():
                owner, _, owner_name = source.partition(".")
                parameters[spec.name, name].copy_(parameters[owner, owner_name])
    files = []
    for index, (layer, module) in enumerate(unsplit.layers.items()):
        state = {f"param/{name}": p.detach() for name, p in module.named_parameters()}
        moments = {f"optim/{name}/exp_avg": p.detach() for name, p in module.named_parameters()}
        files.append(write_layer(store, 7, index, layer, state | moments))
    store.commit(7, files, cursor=Cursor())
    return store.manifest(7), unsplit


@pytest.mark.parametrize("kind", list(MODELS))
def test_transformers_loads_it_with_equal_logits(
    kind: str, store: CheckpointStore, tokenizer: Path, tmp_path: Path
) -> None:
    config = make_config(kind, path=str(tokenizer.parent))
    manifest, unsplit = trained(config, store)
    out = tmp_path / "export"
    export_hf(store, manifest, config, out)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True, local_files_only=True
    )
    assert not any(info.values()), info
    model.eval()
    input_ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(input_ids=input_ids).logits
    actual = unsplit.logits(input_ids)
    assert actual.shape == expected.shape == (2, 64, 300)
    assert expected.std() > 0.1
    if MODELS[kind][0] == "hf":
        assert torch.equal(actual, expected)  # the same code computes both
    else:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    written = load_file(out / "model.safetensors")
    assert not any("exp_avg" in name for name in written)
    assert ("lm_head.weight" in written) == (not model.config.tie_word_embeddings)


def test_the_tokenizer_loads_and_gives_the_same_ids(
    store: CheckpointStore, tokenizer: Path, tmp_path: Path
) -> None:
    config = make_config("gpt", tokenizer=str(tokenizer))
    out = tmp_path / "export"
    export_hf(store, trained(config, store)[0], config, out)
    assert (out / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    loaded = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    plain = Tokenizer.from_file(str(tokenizer))
    for text in [*TEXT, "never seen, 例"]:
        assert loaded(text)["input_ids"] == plain.encode(text).ids
        assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == "<|endoftext|>" and loaded.eos_token_id == 1
    assert loaded.model_max_length == 64
    assert len(loaded) == plain.get_vocab_size()
    settings = json.loads((out / "config.json").read_text())
    assert settings["eos_token_id"] == settings["bos_token_id"] == 1


@pytest.mark.parametrize("how", ["folder", "parquet", "argument", "setting-folder"])
def test_where_the_tokenizer_is_looked_for(
    how: str, store: CheckpointStore, tokenizer: Path, tmp_path: Path
) -> None:
    folder = tokenizer.parent
    data = {
        "folder": {"path": f"{folder}/"},
        "parquet": {"path": str(folder / "train.parquet")},
        "setting-folder": {"tokenizer": str(folder)},
    }.get(how, {})
    config = make_config("gpt", **data)
    given = tokenizer if how == "argument" else None
    export_hf(store, trained(config, store)[0], config, tmp_path / "export", tokenizer=given)
    assert (tmp_path / "export" / "tokenizer.json").exists()


def test_no_tokenizer_is_fine_unless_one_was_named(store: CheckpointStore, tmp_path: Path) -> None:
    config = make_config("gpt", path=str(tmp_path / "nowhere"))
    manifest, _ = trained(config, store)
    export_hf(store, manifest, config, tmp_path / "export")
    assert {p.name for p in (tmp_path / "export").iterdir()} == {"config.json", "model.safetensors"}
    named = make_config("gpt", tokenizer=str(tmp_path / "missing.json"))
    with pytest.raises(CheckpointError, match=r"there is no tokenizer .*missing\.json"):
        export_hf(store, manifest, named, tmp_path / "other")
    assert not (tmp_path / "other" / "config.json").exists()


def test_a_model_without_a_layout_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    args = {"in_features": 4, "hidden": 8, "out_features": 2}
    config = Config(model=ModelConfig(name="mlp", args=args))
    manifest, _ = trained(make_config("gpt"), store)
    layout = replace(load_model(make_config("gpt")), hugging_face=None)
    with pytest.raises(ModelError, match="The model 'mlp' has no Hugging Face layout"):
        export_hf(store, manifest, config, tmp_path / "export", model=layout)
    assert not (tmp_path / "export").exists()


def test_another_models_checkpoint_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    manifest, _ = trained(make_config("gpt"), store)
    with pytest.raises(ModelError, match=r"update 7 holds layers embed, blocks\.0.*the model has"):
        export_hf(store, manifest, make_config("gpt-tied"), tmp_path / "export")


def test_a_damaged_layer_stops_the_export(store: CheckpointStore, tmp_path: Path) -> None:
    config = make_config("gpt")
    manifest, _ = trained(config, store)
    path = Path(store.root) / "step-00000007" / manifest.layer("blocks.1").file
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"layer 'blocks\.1'"):
        export_hf(store, manifest, config, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_place_that_cannot_be_written_is_named(store: CheckpointStore, tmp_path: Path) -> None:
    config = make_config("gpt")
    manifest, _ = trained(config, store)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write the export to .*file/below"):
        export_hf(store, manifest, config, tmp_path / "file" / "below")
