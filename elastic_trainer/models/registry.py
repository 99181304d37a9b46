"""From the configuration to a `ModelSpec`: shipped models by name, a user's own by import target.

A target is `package.module:function`. What it returns may be a `ModelSpec`, a list of `LayerSpec`,
an `nn.Sequential`, a list of modules, a list of (name, module), or a dict of modules.
"""

import copy
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from elastic_trainer.config import Config
from elastic_trainer.errors import ElasticTrainerError, ModelError
from elastic_trainer.models.arguments import check_arguments, nearest
from elastic_trainer.models.layers import LayerSpec, ModelSpec, init_key, seeded, ties
from elastic_trainer.models.losses import CheckedLoss, default_loss

__all__ = ["SHIPPED", "load_model", "load_target", "ties"]

SHIPPED = {
    name: f"elastic_trainer.models.{name}:{name}"
    for name in ("gpt", "vit", "mlp", "multimodal", "emulated", "hf")
}


def load_model(config: Config) -> ModelSpec:
    """The model and loss that `config` names.

    Called by every worker: the result must depend on nothing but the configuration.
    """
    if config.model.target is not None:
        spec = _own_model(config)
    else:
        spec = _shipped_model(config)
    if config.data.format == "columns":
        spec = replace(
            spec,
            input_fields=tuple(config.data.input_columns) or spec.input_fields,
            label_fields=tuple(config.data.label_columns) or spec.label_fields,
        )
    return replace(spec, loss=_loss(config, spec))


def _shipped_model(config: Config) -> ModelSpec:
    name = config.model.name
    if name not in SHIPPED:
        raise ModelError(
            f"There is no model {name!r} ({nearest(name, tuple(SHIPPED))})",
            "Correct model.name, or set model.target to your own",
        )
    function = load_target(SHIPPED[name], "model.name")
    args = dict(config.model.args)
    if name == "gpt":
        args.setdefault("max_positions", config.data.sequence_length)
    if name == "multimodal":
        args.setdefault("patch_size", config.data.patch_size)
        args.setdefault("mel_bins", config.data.mel_bins)
    if name == "emulated":
        args.setdefault("microbatch_size", config.pipeline.microbatch_size)
    check_arguments(f"Model {name!r}", function, args)
    spec = function(**args)
    assert isinstance(spec, ModelSpec)
    return spec


def _own_model(config: Config) -> ModelSpec:
    target = str(config.model.target)
    function = load_target(target, "model.target")
    check_arguments(f"model.target {target}", function, config.model.args)
    try:
        # Seeded here for targets that build all layers at once: whole, whatever the cuts.
        with seeded(init_key(config.train.seed, "model")):
            result = function(**config.model.args)
    except ElasticTrainerError:
        raise
    except Exception as error:
        raise ModelError(
            f"model.target {target} failed: {type(error).__name__}: {error}",
            "Call it by itself with model.args to see where",
        ) from error
    return as_model(result, f"model.target {target}")


def as_model(result: Any, what: str) -> ModelSpec:
    """A `ModelSpec` from whatever a model function may return."""
    if isinstance(result, ModelSpec):
        return result
    items = _named_items(result, what)
    if not items:
        raise ModelError(f"{what} returned no layers", "Return at least one")
    if all(isinstance(item, LayerSpec) for _, item in items):
        return ModelSpec(tuple(item for _, item in items), default_loss)
    for name, item in items:
        if not isinstance(item, nn.Module):
            raise ModelError(
                f"{what} returned {type(item).__name__} as layer {name!r}, not a torch module",
                "Return modules, or LayerSpecs only",
            )
    return ModelSpec(_prebuilt(items, what), default_loss)


def _named_items(result: Any, what: str) -> list[tuple[str, Any]]:
    if isinstance(result, nn.Sequential):
        # Not named_children: it skips a module that stands in two places.
        return list(result._modules.items())
    if isinstance(result, nn.ModuleList):
        return [(str(i), module) for i, module in enumerate(result)]
    if isinstance(result, Mapping):
        return list(result.items())
    if isinstance(result, Sequence) and not isinstance(result, str):
        return [
            (item[0], item[1]) if isinstance(item, tuple) and len(item) == 2 else (str(i), item)
            for i, item in enumerate(result)
        ]
    if result is None:
        raise ModelError(f"{what} returned no layers but None", "Does it lack a return statement?")
    hint = "Return an nn.Sequential, or a list of modules"
    if isinstance(result, nn.Module):
        hint = f"It cannot be cut: {hint[0].lower()}{hint[1:]} in the order they run"
    raise ModelError(f"{what} returned one {type(result).__name__}, not layers", hint)


def _prebuilt(items: Sequence[tuple[str, nn.Module]], what: str) -> tuple[LayerSpec, ...]:
    """Layers of modules that exist already; what two of them share becomes a tie."""
    owners: dict[int, str] = {}
    buffers: dict[int, str] = {}
    layers = []
    for name, module in items:
        tied = {}
        mine: dict[int, str] = {}
        for parameter, tensor in module.named_parameters(remove_duplicate=False):
            if id(tensor) in owners:
                tied[parameter] = owners[id(tensor)]
            else:
                mine.setdefault(id(tensor), f"{name}.{parameter}")
        owners.update(mine)
        for buffer, shared in module.named_buffers():
            if id(shared) in buffers:
                raise ModelError(
                    f"{what}: layers {buffers[id(shared)]!r} and {name!r} share buffer {buffer!r}",
                    "Buffers belong to one layer: build the module twice",
                )
        buffers.update({id(tensor): name for tensor in module.buffers()})
        layers.append(LayerSpec(name, partial(copy.deepcopy, module), tied))
    return tuple(layers)


def _loss(config: Config, spec: ModelSpec) -> CheckedLoss:
    reduction = config.loss.reduction
    if reduction not in ("sum", "mean"):
        raise ModelError(
            f"loss.reduction is {reduction!r}", "Set it to sum or mean, whichever your loss returns"
        )
    if config.loss.target is None:
        name = getattr(spec.loss, "__name__", type(spec.loss).__name__)
        return CheckedLoss(spec.loss, name, spec.label_fields)
    function = load_target(config.loss.target, "loss.target")
    return CheckedLoss(function, config.loss.target, spec.label_fields, reduction == "mean")


def load_target(target: str, setting: str) -> Callable[..., Any]:
    """Import `package.module:function`; messages say which part of it is wrong."""
    module_name, colon, path = target.partition(":")
    if not (module_name and colon and path):
        raise ModelError(
            f"{setting} {target!r} is not of the form package.module:function",
            "Put a colon between the module and the function",
        )
    value: Any = _import(module_name, target, setting)
    for part in path.split("."):
        if not hasattr(value, part):
            public = [name for name in dir(value) if not name.startswith("_")]
            raise ModelError(
                f"{setting} {target!r}: module {module_name!r} imports, but has no {part!r} "
                f"({nearest(part, public)})",
                f"Correct the part behind the colon of {setting}",
            )
        value = getattr(value, part)
    if not callable(value):
        raise ModelError(
            f"{setting} {target!r} is {type(value).__name__}, which cannot be called",
            "Name a function",
        )
    function: Callable[..., Any] = value
    return function


def _import(name: str, target: str, setting: str) -> Any:
    # A console script does not look into the working directory, where a user's module lies.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise ModelError(
                f"{setting} {target!r} does not import: there is no module {missing!r}",
                "Install it, or run from the folder that holds it",
            ) from error
        raise ModelError(
            f"{setting} {target!r} does not import: {name!r} needs module {missing!r}, "
            "which is not installed",
            f"pip install {missing}",
        ) from error
    except Exception as error:
        raise ModelError(
            f"{setting} {target!r} does not import: {type(error).__name__}: {error}",
            f"Try: python -c 'import {name}'",
        ) from error
