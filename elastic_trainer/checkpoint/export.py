"""A checkpoint in Hugging Face's layout: `config.json`, `model.safetensors`, the tokenizer."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from elastic_trainer.checkpoint.layers import read_layer
from elastic_trainer.checkpoint.storage import Storage, storage_errors
from elastic_trainer.checkpoint.store import CheckpointStore, Manifest
from elastic_trainer.checkpoint.tensor_file import encode
from elastic_trainer.config import Config
from elastic_trainer.errors import CheckpointError, ModelError
from elastic_trainer.models.layers import HuggingFaceLayout, LayerSpec, ModelSpec
from elastic_trainer.models.registry import load_model

TOKENIZER = "tokenizer.json"
# How common tokenizers call the end of a document, the most specific first.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


def export_hf(
    store: CheckpointStore,
    manifest: Manifest,
    config: Config,
    out: str | Path,
    *,
    model: ModelSpec | None = None,
    tokenizer: str | Path | None = None,
) -> None:
    """Write the parameters of a checkpoint so that `transformers` loads them.

    Args:
        store: where the checkpoint lies.
        manifest: the checkpoint.
        config: the configuration it was trained with.
        out: folder to fill; a path or URI.
        model: the model; None builds it from `config`.
        tokenizer: a `tokenizer.json`; None takes what `config.data` names, if it exists.

    Raises:
        ModelError: the model has no Hugging Face layout, or does not fit the checkpoint.
        CheckpointError: a file of the checkpoint is damaged, or `out` cannot be written.
    """
    spec = load_model(config) if model is None else model
    layout = spec.hugging_face
    if layout is None:
        name = config.model.target or config.model.name
        raise ModelError(
            f"The model {name!r} has no Hugging Face layout",
            "Models gpt and hf have; yours does when its ModelSpec sets `hugging_face`",
        )
    _check_layers(spec, manifest)
    tensors: dict[str, Tensor] = {}
    for layer in spec.layers:
        tensors.update(_exported(layer, layout, read_layer(store, manifest, layer.name)))
    target = Storage(out)
    hf_config = dict(layout.config)
    with storage_errors(f"cannot write the export to {target.label()}"):
        if spec.input_fields == ("input_ids",):
            hf_config |= _write_tokenizer(target, config, tokenizer, spec.max_positions)
        target.write("model.safetensors", encode(tensors, {"format": "pt"}))
        # What transformers looks for first comes last: an export that was cut off does not load.
        target.write("config.json", [_json(hf_config)])


def _check_layers(spec: ModelSpec, manifest: Manifest) -> None:
    saved = tuple(layer.name for layer in manifest.layers)
    if saved != spec.names:
        raise ModelError(
            f"The checkpoint of update {manifest.update} holds layers {', '.join(saved)}; "
            f"the model has {', '.join(spec.names)}",
            "Export with the configuration it was trained with",
        )


def _exported(
    spec: LayerSpec, layout: HuggingFaceLayout, state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """One layer's parameters and buffers under Hugging Face's names; no copies of tied ones."""
    exported = {}
    for key, tensor in state.items():
        kind, _, name = key.partition("/")
        if kind in ("param", "buffer") and name not in spec.tied:
            hf_name, value = layout.convert(spec.name, name, tensor)
            exported[hf_name] = value
    return exported


def _write_tokenizer(
    target: Storage, config: Config, given: str | Path | None, max_positions: int | None
) -> dict[str, Any]:
    """Copy the tokenizer and describe it; return the token ids that belong in `config.json`."""
    content = _tokenizer(config, given)
    if content is None:
        return {}
    described: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if max_positions is not None:
        described["model_max_length"] = max_positions
    added = {token["content"]: token["id"] for token in json.loads(content)["added_tokens"]}
    end = next((name for name in END_NAMES if name in added), None)
    ids = {}
    if end is not None:
        # Documents are told apart by their end alone, so it is also what precedes a first token.
        described |= {"bos_token": end, "eos_token": end}
        ids = {"bos_token_id": added[end], "eos_token_id": added[end]}
    target.write(TOKENIZER, [content])
    target.write("tokenizer_config.json", [_json(described)])
    return ids


def _tokenizer(config: Config, given: str | Path | None) -> bytes | None:
    """The tokenizer asked for, which must exist, or the dataset's, if it has one."""
    asked = given or config.data.tokenizer
    if asked is None and config.data.format == "synthetic":
        return None
    base, mark, query = str(asked or config.data.path).partition("?")
    base = base.rstrip("/")
    folder = base.rpartition("/")[0] or "." if base.endswith(".parquet") else base
    path = base if base.endswith(".json") else f"{folder}/{TOKENIZER}"
    source = Storage(path + mark + query)
    with storage_errors(f"cannot read {source.label()}"):
        if source.exists(""):
            return source.read("")
    if asked is None:
        return None
    raise CheckpointError(
        f"there is no tokenizer {asked}", "Set data.tokenizer to a tokenizer.json"
    )


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"
