"""Measure what each layer costs, one layer at a time, so that no worker needs the whole model."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.models.layers import ModelSpec, build_layer, first_input, layer_kwargs
from elastic_trainer.pipeline.late import LateGradients
from elastic_trainer.pipeline.optim import build_optimizer, take_step
from elastic_trainer.pipeline.overheads import Taken, measure_stage
from elastic_trainer.pipeline.reduce import parameter_norms
from elastic_trainer.transport.tree import flatten, unflatten
from elastic_trainer.types import LayerProfile, Overheads, Profile

REPEATS = 3  # the fastest counts: the others were disturbed, or warmed something up


def profile_layers(
    model: ModelSpec,
    config: Config,
    sample: Mapping[str, Tensor],
    device: torch.device,
    advanced: Callable[[], None] = lambda: None,
) -> Profile:
    """Run each layer forward and backward on a real microbatch.

    Args:
        model: the layers and the loss; the loss counts as part of the last layer.
        config: precision, seed and microbatch size.
        sample: fields of one microbatch, as the loader sends them.
        device: where to run.
        advanced: called before each layer: the whole may take long, one layer should not.

    Returns:
        Seconds and bytes per layer. Layers alike in structure and input are measured once.
    """
    fields = {name: tensor.to(device) for name, tensor in sample.items()}
    value: Any = first_input(model, fields)
    known: dict[str, LayerProfile] = {}
    profiles = []
    last = len(model.layers) - 1
    for index, spec in enumerate(model.layers):
        advanced()
        module = build_layer(spec, config.train.seed, device)
        extra = layer_kwargs(spec, fields)
        loss = model.loss if index == last else None
        measured = known.get(key := _signature(module, value, index == last))
        if measured is None:
            measured = known[key] = _measure(module, value, extra, loss, fields, config)
        profiles.append(replace(measured, name=spec.name))
        with torch.no_grad(), _autocast(config, device):
            value = module(value, **extra)
    return Profile(
        device_class=device_class(device),
        microbatch_size=config.pipeline.microbatch_size,
        layers=tuple(profiles),
        overheads=_stage_overheads(config, profiles, device),
    )


def _stage_overheads(
    config: Config, profiles: Sequence[LayerProfile], device: torch.device
) -> Overheads:
    """What stages do besides their layers, on an activation of middling size."""
    sizes = sorted(profile.activation_bytes for profile in profiles)
    activation = torch.zeros(max(1, sizes[len(sizes) // 2] // 4), device=device)
    return measure_stage(config, activation)


def device_class(device: torch.device) -> str:
    """Name under which profiles of like devices are shared."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _measure(
    module: nn.Module,
    value: Any,
    extra: Mapping[str, Tensor],
    loss: Callable[..., Tensor] | None,
    fields: Mapping[str, Tensor],
    config: Config,
) -> LayerProfile:
    parameters = list(module.parameters())
    device = parameters[0].device if parameters else next(iter(fields.values())).device
    spec, leaves = flatten(value)
    optimizer = build_optimizer(parameters, config.optim)
    late = LateGradients()
    if config.pipeline.split_backward and not config.model.recompute:
        late.take_over([module])
    forward: list[Taken] = []
    backward: list[_Backward] = []
    step: list[Taken] = []
    saved_bytes, wire_bytes = 0, 0
    for _ in range(REPEATS):
        saved: dict[int, int] = {}
        inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in leaves]
        with torch.autograd.graph.saved_tensors_hooks(_recorder(saved), lambda t: t):
            begin = _now(device)
            with _autocast(config, device):
                out = module(unflatten(spec, inputs), **extra)
                _, outputs = flatten(out)
                roots = [loss(out, fields)] if loss else outputs
            forward.append(_since(begin, device))
        backward.append(_backward([t for t in roots if t.requires_grad], late, device))
        step.append(_step(optimizer, parameters, device))
        for parameter in parameters:
            parameter.grad = None
        own = {p.untyped_storage().data_ptr() for p in parameters}
        saved_bytes = sum(size for pointer, size in saved.items() if pointer not in own)
        wire_bytes = sum(t.numel() * t.element_size() for t in outputs)
    late.release()
    whole, rest, late_bytes = min(backward)
    return LayerProfile(
        name="",
        forward_s=min(forward)[0],
        backward_s=whole.seconds,
        late_s=rest.seconds,
        optimizer_s=min(step)[0],
        forward_cpu_s=min(forward)[1],
        backward_cpu_s=whole.cpu_s,
        late_cpu_s=rest.cpu_s,
        late_bytes=late_bytes,
        optimizer_cpu_s=min(step)[1],
        activation_bytes=wire_bytes,
        saved_bytes=max(saved_bytes, sum(t.numel() * t.element_size() for t in leaves)),
        parameter_bytes=sum(p.numel() * p.element_size() for p in parameters),
    )


class _Backward(NamedTuple):
    """What a backward takes, what of it comes late, and the memory that waits for that."""

    whole: Taken
    late: Taken
    late_bytes: int


def _backward(roots: Sequence[Tensor], late: LateGradients, device: torch.device) -> _Backward:
    late.begin_backward()
    begin = _now(device)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    late.end_backward()
    early = _since(begin, device)
    late_bytes = late.left_bytes
    begin = _now(device)
    late.finish()
    rest = _since(begin, device)
    whole = Taken(early.seconds + rest.seconds, early.cpu_s + rest.cpu_s)
    return _Backward(whole, rest, late_bytes)


def _step(
    optimizer: torch.optim.Optimizer | None,
    parameters: Sequence[nn.Parameter],
    device: torch.device,
) -> Taken:
    """What an optimizer step takes with its look at the gradients."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if optimizer is None or not grads:
        return Taken(0.0, 0.0)
    begin = _now(device)
    parameter_norms(grads)
    take_step(optimizer)
    return _since(begin, device)


def _autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.train.precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _recorder(saved: dict[int, int]) -> Callable[[Tensor], Tensor]:
    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    return record


def _now(device: torch.device) -> Taken:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Taken.now()


def _since(begin: Taken, device: torch.device) -> Taken:
    return _now(device).since(begin)


def _signature(module: nn.Module, value: Any, is_last: bool) -> str:
    """Equal for layers that cost the same: same structure, settings and input shapes."""
    settings = [
        (name, sorted((k, repr(v)) for k, v in vars(m).items() if isinstance(v, int | float | str)))
        for name, m in module.named_modules()
    ]
    shapes = [tuple(t.shape) for t in [*module.parameters(), *flatten(value)[1]]]
    return f"{is_last}{module}{settings}{shapes}"
