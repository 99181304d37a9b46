"""Hugging Face language models, unmodified, cut into layers.

Models that carry a pipeline plan (`base_model_pp_plan`: Llama, Qwen3, …) are cut by it. Each
decoder layer is put alone into an otherwise empty model of its class, so that masks and rotary
embeddings are made by the model's own code, on the stage that needs them. The last layer is the
whole model without decoder layers: norm, head, and what else the class does to logits. GPT-2
carries no plan and adds positions in front of its blocks; it has a map of its own here.

Nothing is built whole but on torch's meta device, which takes no memory.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from elastic_trainer.errors import ModelError
from elastic_trainer.models.arguments import nearest
from elastic_trainer.models.hf_weights import FolderWeights
from elastic_trainer.models.layers import HuggingFaceLayout, LayerSpec, ModelSpec
from elastic_trainer.models.losses import cross_entropy

# Settings that published config.json files carry and transformers translates.
OLD_NAMES = ("rope_theta", "rope_scaling", "torch_dtype")


class PlannedLayer(nn.Module):
    """One decoder layer inside an otherwise empty base model."""

    def __init__(self, shell: nn.Module):
        super().__init__()
        self.shell = shell

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.shell(inputs_embeds=x, use_cache=False).last_hidden_state
        return y


class PlannedHead(nn.Module):
    """The whole model without decoder layers: from hidden states to logits."""

    def __init__(self, shell: nn.Module):
        super().__init__()
        self.shell = shell

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.shell(inputs_embeds=x, use_cache=False).logits
        return logits


class PlannedEmbed(nn.Module):
    """The token embedding."""

    def __init__(self, shell: nn.Module):
        super().__init__()
        self.shell = shell

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.shell(input_ids)
        return x


class Gpt2Embed(nn.Module):
    """GPT-2's token and position embeddings and dropout."""

    def __init__(self, base: Any):
        super().__init__()
        self.wte, self.wpe, self.drop = base.wte, base.wpe, base.drop

    def forward(self, input_ids: Tensor) -> Tensor:
        x: Tensor = self.drop(self.wte(input_ids) + self.wpe(_positions(input_ids)))
        return x


class Gpt2Layer(nn.Module):
    """One block of GPT-2 and its mask."""

    def __init__(self, block: nn.Module, config: Any):
        super().__init__()
        self.block = block
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        from transformers.masking_utils import create_causal_mask

        positions = _positions(x)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=None,
            cache=None,
            position_ids=positions,
        )
        y: Tensor = self.block(x, None, mask, use_cache=False, position_ids=positions)
        return y


class Gpt2Head(nn.Module):
    """GPT-2's final norm and head."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module):
        super().__init__()
        self.ln_f, self.lm_head = norm, lm_head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def _positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1], device=x.device).unsqueeze(0)


@dataclass(frozen=True)
class Split:
    """A model cut into layers: per layer a builder on the meta device and the names it came from.

    Args:
        builders: layer name -> function that makes the module on the meta device.
        rename: (layer, parameter) -> name in the unsplit model.
        embedding, head: (layer, parameter) that are tied when the model ties them.
    """

    builders: Mapping[str, Callable[[], nn.Module]]
    rename: Callable[[str, str], str]
    embedding: tuple[str, str]
    head: tuple[str, str]


def hf(
    *,
    config: Mapping[str, Any] | None = None,
    path: str | None = None,
    pretrained: bool = True,
    attn_implementation: str | None = None,
) -> ModelSpec:
    """A causal language model of the transformers library.

    Args:
        config: `{model_type: qwen3, hidden_size: …}`; weights are drawn from the seed.
        path: local folder with a `config.json`, instead of `config`.
        pretrained: whether weights come from the folder's safetensors files.
        attn_implementation: as transformers names it; None: its own choice.
    """
    if (config is None) == (path is None):
        raise ModelError(
            "hf needs either a config or a path", "Set model.args.config or model.args.path"
        )
    transformers = _transformers()
    settings = _from_folder(transformers, path) if path else _from_dict(transformers, config or {})
    try:
        if attn_implementation is not None:
            settings._attn_implementation = attn_implementation
        with torch.device("meta"):
            full = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build model type {settings.model_type!r} as a language model: "
            f"{type(error).__name__}: {error}"
        ) from error
    split = _split(full)
    weights = FolderWeights(path, full.base_model_prefix) if path and pretrained else None
    return _spec(full, split, weights)


def _spec(full: Any, split: Split, weights: FolderWeights | None) -> ModelSpec:
    embeddings, head = full.get_input_embeddings(), full.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    tie = {split.head[1]: ".".join(split.embedding)} if is_tied else {}
    layers = [
        LayerSpec(
            name,
            partial(_materialise, name, builder, full._init_weights, split, weights),
            tied=tie if name == split.head[0] else {},
        )
        for name, builder in split.builders.items()
    ]
    layout = HuggingFaceLayout(
        {**full.config.to_dict(), "architectures": [type(full).__name__]},
        lambda layer, name, tensor: (split.rename(layer, name), tensor),
    )
    return ModelSpec(
        tuple(layers),
        cross_entropy,
        max_positions=getattr(full.config, "max_position_embeddings", None),
        hugging_face=layout,
    )


def _materialise(
    name: str,
    builder: Callable[[], nn.Module],
    init: Callable[[nn.Module], None],
    split: Split,
    weights: FolderWeights | None,
) -> nn.Module:
    """A layer with memory and values: the class's own initialisation, or the folder's weights."""
    # The device is named for initialisations that make tensors: a caller may have set another.
    with torch.no_grad(), torch.device("cpu"):
        module = builder().to_empty(device="cpu")
        module.apply(init)
        if weights is not None:
            for parameter, tensor in module.named_parameters():
                is_head = (name, parameter) == split.head
                otherwise = split.rename(*split.embedding) if is_head else None
                weights.copy(split.rename(name, parameter), otherwise, tensor)
    return module


def _split(full: Any) -> Split:
    if full.config.model_type == "gpt2":
        return _split_gpt2(full)
    plan = getattr(full.config, "base_model_pp_plan", None)
    if not plan:
        raise ModelError(
            f"Model type {full.config.model_type!r} carries no base_model_pp_plan and has no map "
            "here",
            "Use one that does (llama, qwen3, …) or gpt2, or write its layers in model.target",
        )
    return _split_planned(full, list(plan))


def _split_planned(full: Any, pieces: list[str]) -> Split:
    base, prefix = full.base_model, full.base_model_prefix
    lists = [name for name in pieces if isinstance(getattr(base, name), nn.ModuleList)]
    if len(lists) != 1 or pieces.index(lists[0]) != 1:
        raise ModelError(
            f"The pipeline plan of {full.config.model_type!r} is {pieces}: an embedding, then one "
            "list of layers, is needed"
        )
    embed, layers, *tail = pieces
    _check_passes_through(full, embed, layers, tail)
    head_name = next(n for n, m in full.named_modules() if m is full.get_output_embeddings())

    def rename(layer: str, parameter: str) -> str:
        rest = parameter.removeprefix("shell.")
        if layer == "embed":
            return f"{prefix}.{embed}.{rest}"
        if layer == "head":
            return rest
        return f"{prefix}.{layers}.{layer.removeprefix('layers.')}{rest.removeprefix(layers)[2:]}"

    def block(index: int) -> nn.Module:
        shell = _empty_shell(type(base), base.config, index, embed)
        setattr(shell, layers, nn.ModuleList([copy.deepcopy(getattr(base, layers)[index])]))
        for name in tail:
            setattr(shell, name, nn.Identity())
        return PlannedLayer(shell)

    def head() -> nn.Module:
        shell = copy.deepcopy(full)
        setattr(shell.base_model, layers, nn.ModuleList())
        setattr(shell.base_model, embed, None)
        return PlannedHead(shell)

    return Split(
        {
            "embed": lambda: PlannedEmbed(copy.deepcopy(getattr(base, embed))),
            **{f"layers.{i}": partial(block, i) for i in range(len(getattr(base, layers)))},
            "head": head,
        },
        rename,
        ("embed", "shell.weight"),
        ("head", f"shell.{head_name}.weight"),
    )


def _check_passes_through(full: Any, embed: str, layers: str, tail: list[str]) -> None:
    """Without its pieces the base model must hand on what it gets: else each shell would repeat it.

    Some classes scale embeddings or add positions in front of their layers.
    """
    shell = _empty_shell(type(full.base_model), full.base_model.config, 0, embed)
    setattr(shell, layers, nn.ModuleList())
    for name in tail:
        setattr(shell, name, nn.Identity())
    shell = shell.to_empty(device="cpu").apply(full._init_weights)
    x = torch.linspace(-1, 1, 2 * full.config.hidden_size).view(1, 2, -1)
    with torch.no_grad():
        if not torch.equal(shell(inputs_embeds=x, use_cache=False).last_hidden_state, x):
            raise ModelError(
                f"Model type {full.config.model_type!r} changes embeddings outside of the layers "
                "of its pipeline plan, so it cannot be cut by it",
                "Write its layers in model.target",
            )


def _empty_shell(base_class: Any, config: Any, index: int, embed: str) -> Any:
    """A base model of one layer, of the kind (full or sliding attention) that layer `index` has."""
    settings = copy.deepcopy(config)
    kinds = getattr(settings, "layer_types", None)
    settings.num_hidden_layers = 1
    if kinds:
        settings.layer_types = [kinds[index]]
    with torch.device("meta"):
        shell = base_class(settings)
    setattr(shell, embed, None)
    return shell


def _split_gpt2(full: Any) -> Split:
    base = full.transformer

    def rename(layer: str, parameter: str) -> str:
        if layer == "head":
            return parameter if parameter.startswith("lm_head") else f"transformer.{parameter}"
        if layer == "embed":
            return f"transformer.{parameter}"
        return f"transformer.h.{layer.removeprefix('layers.')}{parameter.removeprefix('block')}"

    def block(index: int) -> nn.Module:
        return Gpt2Layer(copy.deepcopy(base.h[index]), base.config)

    return Split(
        {
            "embed": lambda: copy.deepcopy(Gpt2Embed(base)),
            **{f"layers.{i}": partial(block, i) for i in range(len(base.h))},
            "head": lambda: copy.deepcopy(Gpt2Head(base.ln_f, full.lm_head)),
        },
        rename,
        ("embed", "wte.weight"),
        ("head", "lm_head.weight"),
    )


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "Model 'hf' needs the transformers library, which is not installed",
            "pip install 'elastic-trainer[hf]'",
        ) from error
    return transformers


def _from_dict(transformers: Any, config: Mapping[str, Any]) -> Any:
    settings = dict(config)
    kind = settings.pop("model_type", None)
    known = transformers.CONFIG_MAPPING.keys()
    if kind not in known:
        close = nearest(kind, list(known)) if kind else "for example gpt2, llama or qwen3"
        raise ModelError(
            f"hf: transformers {transformers.__version__} knows no model_type {kind!r} ({close})",
            "Set model.args.config.model_type",
        )
    fields = transformers.AutoConfig.for_model(kind)
    for name in settings:
        if not hasattr(fields, name) and name not in OLD_NAMES:
            raise ModelError(
                f"hf: {kind!r} has no setting {name!r} ({nearest(name, list(fields.to_dict()))})",
                "Correct model.args.config",
            )
    try:
        return transformers.AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise ModelError(
            f"hf: transformers refuses the config of {kind!r}: {error}", "Correct model.args.config"
        ) from error


def _from_folder(transformers: Any, path: str) -> Any:
    if not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"hf: there is no {Path(path) / 'config.json'}",
            "model.args.path is a local folder in Hugging Face's layout",
        )
    try:
        return transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:
        raise ModelError(f"hf: {path}/config.json cannot be used: {error}") from error
