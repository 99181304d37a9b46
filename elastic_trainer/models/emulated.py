"""Layers that sleep instead of computing: many stages run on few cores, everything else is real.

A layer sleeps `forward_s` and `backward_s` for a full microbatch, and for a smaller one in
proportion to its samples, or to what a field of the microbatch says that its samples cost. What it
hands on has the profile's size; one number per sample of it is computed, so that gradients, updates
and their order still matter and can be compared.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from elastic_trainer.models import outline
from elastic_trainer.models.layers import LayerSpec, ModelSpec

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT_BYTES = 4
MAX_DEBT_S = 0.05


class Pacer:
    """Sleeps such that the sum of sleeps is exact: what one overslept is taken off the next.

    The operating system wakes a sleeper late. Spinning through the last moments would be exact
    too, but sixteen spinning stages would starve each other on two cores. The debt is kept per
    thread, and bounded so that one long stop is not made up for.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._local = threading.local()

    def wait(self, duration_s: float, since: float) -> None:
        """Return when `duration_s` have passed since `since` (a reading of `now`)."""
        if duration_s <= 0:
            return
        end = since + duration_s - self.debt_s
        left = end - self._clock()
        if left > 0:
            self._sleep(left)
        self._local.debt_s = min(max(self._clock() - end, 0.0), MAX_DEBT_S)

    def now(self) -> float:
        return self._clock()

    @property
    def debt_s(self) -> float:
        """How much this thread has overslept so far and not made up for."""
        debt: float = getattr(self._local, "debt_s", 0.0)
        return debt


PACER = Pacer()


class _Emulate(torch.autograd.Function):
    """tanh(first column * weight + bias) in the first column, zeros beside it; sleeps both ways.

    Numbers are made by numpy: after a sleep torch needs a tenth of a millisecond for any operation,
    and what a stage computes is to cost nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: "Emulated", part: float
    ) -> Tensor:
        started = PACER.now()
        scale = _array(weight)
        column = _first_column(x).astype(scale.dtype, copy=False)
        y = np.tanh(column * scale + _array(bias))
        out = np.zeros((len(y), layer.width), y.dtype)
        out[:, 0] = y
        ctx.kept = column, y, scale.copy()  # of the version that this forward used
        ctx.layer, ctx.shape, ctx.dtype, ctx.device = layer, x.shape, x.dtype, x.device
        ctx.part = part
        result = torch.from_numpy(out).to(x.device)
        PACER.wait(layer.forward_s * part, started)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        started = PACER.now()
        column, y, scale = ctx.kept
        inner = _array(grads[0])[:, 0] * (1 - y * y)
        grad_x = None
        if ctx.needs_input_grad[0]:
            whole = np.zeros(ctx.shape, y.dtype)
            whole.reshape(len(y), -1)[:, 0] = inner * scale
            grad_x = torch.from_numpy(whole).to(ctx.device, ctx.dtype)
        grad_weight = torch.from_numpy((inner * column).sum(keepdims=True)).to(ctx.device)
        grad_bias = torch.from_numpy(inner.sum(keepdims=True)).to(ctx.device)
        layer: Emulated = ctx.layer
        PACER.wait(layer.backward_s * ctx.part, started)
        return grad_x, grad_weight, grad_bias, None, None


class _SquaredDistance(torch.autograd.Function):
    """Sum of the squared distances of the first column from one half."""

    @staticmethod
    def forward(ctx: Any, output: Tensor) -> Tensor:
        distance = _array(output)[:, 0] - 0.5
        ctx.kept = distance, output.shape, output.device
        return torch.from_numpy((distance * distance).sum(keepdims=True)).to(output.device)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        distance, shape, device = ctx.kept
        whole = np.zeros(shape, distance.dtype)
        whole[:, 0] = 2 * distance * grads[0].item()
        return torch.from_numpy(whole).to(device)


def _array(tensor: Tensor) -> Array:
    """The tensor's numbers, in its own memory where it lies on the host."""
    found: Array = tensor.numpy(force=True)
    return found


def _first_column(x: Tensor) -> Array:
    column = _array(x).reshape(len(x), -1)[:, 0]
    # Token ids are brought to the order of one.
    return column if column.dtype.kind == "f" else column.astype(np.float32) / np.float32(1000)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """One layer's costs for a full microbatch."""

    forward_s: float
    backward_s: float
    activation_bytes: int


class Emulated(nn.Module):
    """A layer that takes its time; `width` floats per sample leave it.

    It takes a full microbatch's time for `microbatch_size` samples, or for as much in the field
    `cost_field`, if it has one.
    """

    def __init__(self, costs: Costs, microbatch_size: int, cost_field: str | None = None):
        super().__init__()
        self.forward_s = costs.forward_s
        self.backward_s = costs.backward_s
        self.microbatch_size = microbatch_size
        self.cost_field = cost_field
        self.width = max(1, round(costs.activation_bytes / (FLOAT_BYTES * microbatch_size)))
        self.weight = nn.Parameter(torch.empty(1).uniform_(0.5, 1.5))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, **fields: Tensor) -> Tensor:
        work = len(x) if self.cost_field is None else float(_array(fields[self.cost_field]).sum())
        part = work / self.microbatch_size
        y: Tensor = _Emulate.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.bias, self, part
        )
        return y


def squared_distance(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Sum over samples of the squared distance of their number from one half."""
    del batch
    distance: Tensor = _SquaredDistance.apply(output)  # type: ignore[no-untyped-call]
    return distance


def emulated(
    *,
    layers: Sequence[Mapping[str, Any]] | None = None,
    num_layers: int = 8,
    forward_s: float = 0.005,
    backward_s: float = 0.01,
    activation_bytes: int = 65536,
    microbatch_size: int = 4,
) -> ModelSpec:
    """Layers `layers.0` …, from a list of profiles or all alike.

    A profile is a mapping with any of forward_s, backward_s, activation_bytes; what it leaves out
    comes from the arguments of the same name. All are for a microbatch of `microbatch_size`. With
    `cost_field` it also names a field of the microbatch, one number per sample of about 1 on
    average: samples then take as long as these say.
    """
    common: dict[str, Any] = {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "activation_bytes": activation_bytes,
    }
    outline.emulated(
        layers=layers, num_layers=num_layers, microbatch_size=microbatch_size, **common
    )
    profiles = [{}] * num_layers if layers is None else list(layers)
    specs = []
    for i, profile in enumerate(profiles):
        costs, field = _costs(i, profile, common), profile.get(outline.COST_FIELD)
        build = partial(Emulated, costs, microbatch_size, field)
        specs.append(LayerSpec(f"layers.{i}", build, {}, (field,) if field else ()))
    return ModelSpec(tuple(specs), squared_distance)


def _costs(index: int, profile: Mapping[str, Any], common: Mapping[str, Any]) -> Costs:
    values = outline.emulated_costs(index, profile, common)
    return Costs(
        forward_s=float(values["forward_s"]),
        backward_s=float(values["backward_s"]),
        activation_bytes=int(values["activation_bytes"]),
    )
