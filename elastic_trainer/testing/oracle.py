"""What a pipeline must compute: the unsplit model trained in one process, written independently.

Three references. `SynchronousOracle` is to be matched bit for bit by every number of stages and
every synchronous schedule. `DelayedOracle` simulates asynchronous training, each stage of it
P-1-s updates late. Both hold tied parameters as separate copies, as a pipeline must; `plain_steps`
is the plainest torch loop there is, with truly shared ones, and judges the oracles in float64.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.models.layers import (
    ModelSpec,
    build_layers,
    first_input,
    layer_key,
    layer_kwargs,
    ties,
)
from elastic_trainer.models.losses import count_valid
from elastic_trainer.pipeline.lr import lr_at
from elastic_trainer.pipeline.optim import build_optimizer
from elastic_trainer.types import Plan

Microbatch = Mapping[str, Tensor]
State = dict[str, dict[str, Tensor]]

_CLIP_EPS = 1e-6


class _Replica:
    """The unsplit model, with what both oracles share."""

    def __init__(self, model: ModelSpec, config: Config, dtype: torch.dtype) -> None:
        torch.set_num_threads(config.numerics.threads_per_stage)
        self.model = model
        self.config = config
        self.layers = {
            name: module.to(dtype)
            for name, module in build_layers(model, 0, len(model.layers), config.train.seed).items()
        }
        names = model.names
        self.params = {
            f"{layer}/{name}": param
            for layer, module in self.layers.items()
            for name, param in module.named_parameters()
        }
        self.ties = [
            (f"{names[t.owner]}/{t.owner_param}", f"{names[t.follower]}/{t.follower_param}")
            for t in ties(model)
        ]
        followers = {follower for _, follower in self.ties}
        self.owned = [
            name for name, p in self.params.items() if name not in followers and p.requires_grad
        ]
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        self.norms: list[float | None] = []

    def forward(
        self, update: int, index: int, batch: Microbatch, use: Mapping[str, Tensor]
    ) -> Tensor:
        """The loss, a sum, of one microbatch with the parameters `use`."""
        value = first_input(self.model, batch)
        precision = self.config.train.precision
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            for spec in self.model.layers:
                torch.manual_seed(layer_key(self.config.train.seed, update, index, spec.name))
                prefix = f"{spec.name}/"
                mine = {k.removeprefix(prefix): v for k, v in use.items() if k.startswith(prefix)}
                value = torch.func.functional_call(
                    self.layers[spec.name], mine, (value,), layer_kwargs(spec, batch)
                )
            return self.model.loss(value, batch)

    def num_valid(self, batch: Microbatch) -> int:
        return count_valid({name: batch[name] for name in self.model.label_fields})

    def sum_ties(self, grads: dict[str, Tensor]) -> None:
        """Add the gradients of copies to those of their owners, in the order of layers."""
        for owner, follower in self.ties:
            if follower in grads:
                grads[owner] = grads[owner] + grads.pop(follower)

    def copy_ties(self) -> None:
        """Make copies equal to their owners."""
        with torch.no_grad():
            for owner, follower in self.ties:
                self.params[follower].copy_(self.params[owner])

    def norm(self, grads: Mapping[str, Tensor], names: Sequence[str]) -> float:
        squares = [torch.linalg.vector_norm(grads[name]).item() ** 2 for name in names]
        return math.sqrt(math.fsum(squares))

    def clip(self, grads: dict[str, Tensor], names: Sequence[str]) -> float | None:
        """Scale the named gradients down to the limit; gives their norm before that."""
        limit = self.config.train.max_grad_norm
        if limit <= 0:
            return None
        norm = self.norm(grads, names)
        factor = min(1.0, limit / (norm + _CLIP_EPS))
        if factor != 1.0:
            for name in names:
                grads[name] = grads[name] * factor
        return norm

    def step(self, optimizer: torch.optim.Optimizer, update: int, names: Sequence[str]) -> None:
        """Step the named parameters at the learning rate of `update`."""
        optim = self.config.optim
        lr = lr_at(update, optim, self.config.train.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = lr
        if optim.name == "sgd":  # whose decay must not enter the momentum either
            with torch.no_grad():
                for name in names:
                    self.params[name].copy_(self.params[name] * (1 - lr * optim.weight_decay))
        optimizer.step()

    def state(self, optimizers: Mapping[str, torch.optim.Optimizer | None]) -> State:
        """All state by layer, with the keys of `StageRuntime.layer_states`."""
        found: State = {name: {} for name in self.layers}
        for full, param in self.params.items():
            layer, name = full.split("/")
            found[layer][f"param/{name}"] = param.detach().clone()
            optimizer = optimizers.get(full)
            if optimizer is not None:
                for key, value in optimizer.state[param].items():
                    found[layer][f"optim/{name}/{key}"] = value.clone()
        for layer, module in self.layers.items():
            for name, buffer in module.named_buffers():
                if name in module.state_dict():
                    found[layer][f"buffer/{name}"] = buffer.clone()
        return found


class SynchronousOracle(_Replica):
    """Accumulates the gradients of a batch's microbatches in order, then steps once."""

    def __init__(
        self, model: ModelSpec, config: Config, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model, config, dtype)
        self._optimizer = build_optimizer([self.params[n] for n in self.owned], config.optim)

    def update(self, number: int, microbatches: Sequence[Microbatch]) -> None:
        """Perform update `number`."""
        num_valid = max(1, sum(map(self.num_valid, microbatches)))
        total = 0.0
        for param in self.params.values():
            param.grad = None
        for index, batch in enumerate(microbatches):
            loss = self.forward(number, index, batch, self.params)
            total += loss.item()
            loss.backward(torch.full_like(loss, 1.0 / num_valid))  # type: ignore[no-untyped-call]
        grads = {name: param.grad for name, param in self.params.items() if param.grad is not None}
        for name in self.owned:
            grads.setdefault(name, torch.zeros_like(self.params[name]))
        self.sum_ties(grads)
        self.gradients.append({name: grads[name].clone() for name in self.owned})
        self.norms.append(self.clip(grads, self.owned))
        self.losses.append(total / num_valid)
        if self._optimizer is not None:
            for name in self.owned:
                self.params[name].grad = grads[name]
            self.step(self._optimizer, number, self.owned)
        self.copy_ties()

    def layer_states(self) -> State:
        return self.state(dict.fromkeys(self.owned, self._optimizer))


class DelayedOracle(_Replica):
    """Asynchronous training as a recurrence: no pipeline, only old parameters.

    Update j of a segment (from 0) uses, for the parameters of stage s, version max(0, j - delay_s)
    in forward and backward alike, and turns version j into j+1. A copy of a tied parameter belongs
    to its owner's stage. Each stage clips by its own norm and has its own optimizer.
    """

    def __init__(
        self, model: ModelSpec, config: Config, plan: Plan, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(model, config, dtype)
        index = {name: i for i, name in enumerate(model.names)}
        num_stages = plan.num_stages
        stage_of = {n: plan.stage_of_layer(index[n.split("/")[0]]) for n in self.params}
        for owner, follower in self.ties:
            stage_of[follower] = stage_of[owner]
        self._delay = {name: num_stages - 1 - stage for name, stage in stage_of.items()}
        self._groups = [[n for n in self.owned if stage_of[n] == s] for s in range(num_stages)]
        self._optimizers = [
            build_optimizer([self.params[n] for n in names], config.optim) for names in self._groups
        ]

    def segment(self, first: int, microbatches: Sequence[Microbatch]) -> None:
        """Perform updates `first`, `first`+1, … of one microbatch each, from a drained pipe."""
        versions = [self._copy()]
        for j, batch in enumerate(microbatches):
            use = {
                name: versions[max(0, j - self._delay[name])][name].clone().requires_grad_()
                for name in self.params
            }
            num_valid = max(1, self.num_valid(batch))
            loss = self.forward(first + j, 0, batch, use)
            loss.backward(torch.full_like(loss, 1.0 / num_valid))  # type: ignore[no-untyped-call]
            grads = {n: value.grad for n, value in use.items() if value.grad is not None}
            for name in self.owned:
                grads.setdefault(name, torch.zeros_like(self.params[name]))
            self.sum_ties(grads)
            self.gradients.append({name: grads[name].clone() for name in self.owned})
            self.losses.append(loss.item() / num_valid)
            for names, optimizer in zip(self._groups, self._optimizers, strict=True):
                self._step(first + j, names, optimizer, grads)
            self.copy_ties()
            versions.append(self._copy())

    def layer_states(self) -> State:
        return self.state(
            {n: o for names, o in zip(self._groups, self._optimizers, strict=True) for n in names}
        )

    def _step(
        self,
        update: int,
        names: Sequence[str],
        optimizer: torch.optim.Optimizer | None,
        grads: dict[str, Tensor],
    ) -> None:
        self.clip(grads, names)
        if optimizer is None:
            return
        for name in names:
            self.params[name].grad = grads[name]
        self.step(optimizer, update, names)

    def _copy(self) -> dict[str, Tensor]:
        return {name: param.detach().clone() for name, param in self.params.items()}


def plain_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_sum: Callable[[nn.Module, Microbatch], Tensor],
    batches: Sequence[tuple[Microbatch, int]],
    max_norm: float,
) -> list[float]:
    """Train `module` on whole batches of (fields, number of valid items); gives the losses."""
    losses = []
    for batch, num_valid in batches:
        optimizer.zero_grad()
        loss = loss_sum(module, batch) / num_valid
        loss.backward()  # type: ignore[no-untyped-call]
        if max_norm > 0:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    return losses
