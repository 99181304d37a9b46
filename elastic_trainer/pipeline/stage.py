"""The layers of one stage: forward and backward of one microbatch.

Each layer draws its random numbers from a key of (seed, update, microbatch, layer), set right
before it runs, so a recompute, another cut or a replay draws the same masks.

The graph of a stage starts at leaves cut off from the previous stage and ends at the stage's
outputs, or at the loss. With recompute, only each layer's input is kept, and a backward runs the
layers again one by one, from the last to the first.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.errors import ElasticTrainerError, ModelError, NonFiniteError
from elastic_trainer.models.layers import (
    LayerSpec,
    ModelSpec,
    build_layers,
    first_input,
    layer_key,
    layer_kwargs,
)
from elastic_trainer.pipeline.late import LateGradients
from elastic_trainer.pipeline.reduce import not_finite
from elastic_trainer.transport.tree import Spec, Tree, flatten, unflatten
from elastic_trainer.types import StagePlan

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NO_CONTEXT: AbstractContextManager[Any] = contextlib.nullcontext()


@dataclass(slots=True)
class Activation:
    """A tree on its way between stages; `wants_grad` says which tensors expect a gradient."""

    spec: Spec
    tensors: list[Tensor]
    wants_grad: list[bool]


@dataclass(slots=True)
class Held:
    """What a forward keeps for its backward.

    `inputs` are the leaves whose gradients the previous stage wants, `outputs` the tensors that
    expect gradients; `trees` the input of each layer, with recompute only.
    """

    update: int
    microbatch: int
    fields: Mapping[str, Tensor]
    inputs: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)


class Stage:
    """One contiguous range of layers on one device.

    Args:
        given: layers by name that exist already; all others are built, with initial weights.
    """

    def __init__(
        self,
        plan: StagePlan,
        num_stages: int,
        model: ModelSpec,
        config: Config,
        device: torch.device,
        given: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.stage = plan.stage
        self.is_first = plan.stage == 0
        self.is_last = plan.stage == num_stages - 1
        self.device = device
        self._model = model
        self._seed = config.train.seed
        self._recompute = config.model.recompute
        self._check = config.numerics.check_finite
        self.layers = build_layers(model, plan.first, plan.stop, self._seed, device, given)
        self._specs = model.layers[plan.first : plan.stop]
        self._modules = list(self.layers.values())
        self.left = LateGradients()
        # Nobody waits for the first stage; recompute exists to keep less than this needs.
        splits = config.pipeline.split_backward and not self._recompute
        if splits and not self.is_first:
            self.left.take_over(self._modules)
        self._mutable: dict[str, list[Tensor]] = {}
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])
        self._config = config

    @property
    def needs_fields(self) -> bool:
        """Whether this stage gets fields of the microbatch from the loader."""
        return self.is_first or self.is_last or any(spec.batch_fields for spec in self._specs)

    def begin(self, *, training: bool) -> None:
        """Start a segment: switch dropout and the like, and drop what an interrupted one left."""
        self.left.forget()
        for module in self._modules:
            module.train(training)

    def release(self) -> dict[str, nn.Module]:
        """The layers, without gradients and as they were given or built; this stage is over."""
        self.left.release()
        for module in self._modules:
            for parameter in module.parameters():
                parameter.grad = None
        return self.layers

    def forward(
        self,
        update: int,
        microbatch: int,
        activation: Activation | None,
        fields: Mapping[str, Tensor],
        *,
        training: bool = True,
    ) -> tuple[Activation | Tensor, Held]:
        """Run the layers; gives what goes to the next stage, or the loss (a sum) on the last."""
        if self.device.type != "cpu":
            fields = {k: v.to(self.device, non_blocking=True) for k, v in fields.items()}
        value, inputs = self._enter(activation, fields)
        held = Held(update, microbatch, fields, inputs)
        keep = training and not self._recompute
        with autocast(self._config, self.device), torch.set_grad_enabled(keep):
            value = self._run(value, held, training)
            if self.is_last:
                value = self._model.loss(value, fields)
        if self.is_last:
            if self._check and not math.isfinite(value.item()):
                raise self._not_finite(activation, held)
            held.outputs = [value]
            return value, held
        output = self._leave(value, inputs, training)
        if self._check and not all(map(is_finite, output.tensors)):
            raise self._not_finite(activation, held)
        held.outputs = [t for t, g in zip(output.tensors, output.wants_grad, strict=True) if g]
        return output, held

    def backward(self, held: Held, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Propagate gradients of `held.outputs`; gives those of the stage's inputs.

        Gradients of parameters add up on the leaves that the forward used, those of linear maps
        when what is `left` gets done; with recompute the modules must hold those leaves again.
        """
        if not held.trees:
            self.left.begin_backward()
            try:
                _propagate(held.outputs, grads)
            except Exception as error:
                raise self._layer_failed(self._specs[-1], "backward", held, error) from error
            self.left.end_backward()
        elif grads:
            self._backward_by_layer(held, grads)
        return [leaf.grad for leaf in held.inputs]

    def fill_gap(self) -> None:
        """Do the next bit of what is `left`, and return when it is done."""
        self.left.finish_one()
        if self.device.type == "cuda":
            # Kernels are only queued: without this, all that is left would be at once.
            torch.cuda.current_stream(self.device).synchronize()

    def _enter(
        self, activation: Activation | None, fields: Mapping[str, Tensor]
    ) -> tuple[Tree, list[Tensor]]:
        if activation is None:
            return first_input(self._model, fields), []
        leaves: list[Tensor] = []
        entries = []
        for tensor, wants_grad in zip(activation.tensors, activation.wants_grad, strict=True):
            if wants_grad:
                leaves.append(tensor.requires_grad_())
                tensor = _open(tensor)
            entries.append(tensor)
        return unflatten(activation.spec, entries), leaves

    def _leave(self, value: Tree, inputs: Sequence[Tensor], training: bool) -> Activation:
        spec, tensors = flatten(value)
        if not training:
            wants = [False] * len(tensors)
        elif self._recompute:
            # Without a graph yet: whatever can have a gradient may get one.
            has_path = bool(inputs) or any(
                p.requires_grad for m in self._modules for p in m.parameters()
            )
            wants = [has_path and t.is_floating_point() for t in tensors]
        else:
            wants = [t.requires_grad for t in tensors]
        return Activation(spec, tensors, wants)

    def _run(self, value: Tree, held: Held, training: bool) -> Tree:
        remember = training and self._recompute
        spec = self._specs[0]
        try:
            for spec, module in zip(self._specs, self._modules, strict=True):
                self._seed_layer(held, spec)
                if remember:
                    value = self._run_remembering(spec, module, value, held)
                elif spec.batch_fields:
                    value = module(value, **layer_kwargs(spec, held.fields))
                else:
                    value = module(value)
        except Exception as error:
            raise self._layer_failed(spec, "forward", held, error) from error
        return value

    def _run_remembering(self, spec: LayerSpec, module: nn.Module, value: Tree, held: Held) -> Tree:
        """Run a layer without a graph, keeping its input, and learn which buffers it changes."""
        held.trees.append(value)
        tensors = tensors_of(value)
        before = [t._version for t in tensors]
        # Values, not version counters: batch norm does not count its own writes.
        is_new = spec.name not in self._mutable
        buffers = [(b, b.clone()) for b in module.buffers()] if is_new else []
        value = module(value, **layer_kwargs(spec, held.fields))
        if [t._version for t in tensors] != before:
            raise ModelError(
                "it writes to its input in place, so it cannot be run again",
                "Set model.recompute=false, or let the layer leave its input as it is",
            )
        if is_new:
            self._mutable[spec.name] = [b for b, was in buffers if not torch.equal(b, was)]
        return value

    def _backward_by_layer(self, held: Held, grads: Sequence[Tensor | None]) -> None:
        spec = self._specs[-1]
        try:
            for index in reversed(range(len(self._modules))):
                spec, module = self._specs[index], self._modules[index]
                is_end = index == len(self._modules) - 1
                leaves, entry = self._reopen(held, index)
                with autocast(self._config, self.device), self._buffers_unchanged(spec):
                    self._seed_layer(held, spec)
                    value = module(entry, **layer_kwargs(spec, held.fields))
                    if is_end and self.is_last:
                        value = self._model.loss(value, held.fields)
                outputs = tensors_of(value)
                if is_end and not self.is_last:
                    outputs = [t for t in outputs if t.is_floating_point()]
                _propagate(outputs, grads)
                held.trees.pop()
                grads = [leaf.grad if leaf is not None else None for leaf in leaves]
        except Exception as error:
            raise self._layer_failed(spec, "backward", held, error) from error
        first = [leaf for leaf in leaves if leaf is not None]
        for kept, leaf in zip(held.inputs, first, strict=True):
            kept.grad = leaf.grad

    def _reopen(self, held: Held, index: int) -> tuple[list[Tensor | None], Tree]:
        """The input of a layer as new leaves: those that may want a gradient, None for others."""
        spec, tensors = flatten(held.trees[index])
        leaves: list[Tensor | None] = []
        entries = []
        for tensor in tensors:
            if (index > 0 and tensor.is_floating_point()) or (index == 0 and tensor.requires_grad):
                leaf = tensor.detach().requires_grad_()
                leaves.append(leaf)
                entries.append(_open(leaf))
            else:
                leaves.append(None)
                entries.append(tensor)
        return leaves, unflatten(spec, entries)

    @contextlib.contextmanager
    def _buffers_unchanged(self, spec: LayerSpec) -> Iterator[None]:
        """Let a second run of a layer not count twice in running statistics."""
        buffers = self._mutable.get(spec.name, [])
        saved = [buffer.clone() for buffer in buffers]
        yield
        for buffer, value in zip(buffers, saved, strict=True):
            buffer.data.copy_(value)

    def _seed_layer(self, held: Held, spec: LayerSpec) -> None:
        key = layer_key(self._seed, held.update, held.microbatch, spec.name)
        for generator in self._generators:
            generator.manual_seed(key)

    def _layer_failed(
        self, spec: LayerSpec, what: str, held: Held, error: Exception
    ) -> ElasticTrainerError:
        hint = ""
        if isinstance(error, ElasticTrainerError):
            text, hint = error.what, error.hint
        else:
            text = f"{type(error).__name__}: {error}"
        return ModelError(
            f"layer {spec.name!r} failed in the {what} of microbatch {held.microbatch} of update "
            f"{held.update}: {text}",
            hint,
        )

    @torch.no_grad()
    def _not_finite(self, activation: Activation | None, held: Held) -> NonFiniteError:
        """Run the layers once more to see which is the first with a bad output."""
        value: Tree
        if activation is None:
            value = first_input(self._model, held.fields)
        else:  # only the first stage is sent the model's inputs
            value = unflatten(activation.spec, [t.detach() for t in activation.tensors])
        culprit = "loss" if self.is_last else self._specs[-1].name
        for spec, module in zip(self._specs, self._modules, strict=True):
            with autocast(self._config, self.device):
                self._seed_layer(held, spec)
                value = module(value, **layer_kwargs(spec, held.fields))
            if not all(map(is_finite, tensors_of(value))):
                culprit = spec.name
                break
        return not_finite(held.update, held.microbatch, culprit, self.stage, "output")


def autocast(config: Config, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which layers and the loss run forward."""
    dtype = _AUTOCAST_DTYPES.get(config.train.precision)
    return _NO_CONTEXT if dtype is None else torch.autocast(device.type, dtype=dtype)


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite; decided by one cheap number made of all, if that is."""
    if not tensor.is_floating_point():
        return True
    if tensor.device.type == "cpu" and tensor.dtype.itemsize >= 4 and tensor.is_contiguous():
        flat = tensor.numpy(force=True).reshape(-1)
        whole = float(np.dot(flat, flat))  # BLAS reads faster than torch adds up
    else:
        dtype = torch.float32 if tensor.dtype.itemsize < 4 else None
        whole = tensor.sum(dtype=dtype).item()
    return math.isfinite(whole) or bool(torch.isfinite(tensor).all())


def _propagate(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, grads, strict=True)
        if grad is not None and output.requires_grad
    ]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def _open(leaf: Tensor) -> Tensor:
    """The leaf as a tensor that a layer may write to in place, as it may to any layer's output."""
    opened: Tensor = torch.ops.aten._unsafe_view(leaf, leaf.shape)
    return opened


def tensors_of(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, in depth-first order."""
    return [tree] if isinstance(tree, Tensor) else flatten(tree)[1]
