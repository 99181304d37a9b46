"""The parameters of one stage: versions, ties to other stages, the optimizer, and their state.

A parameter is *owned* (stepped here), *frozen* (never stepped) or a *follower* of a tied one. A
follower whose owner is on this stage shares its memory. One whose owner is on an earlier stage gets
that stage's weights by message after each of its updates; it is then a fresh leaf, so a backward
still finds the one that its forward used.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from elastic_trainer.config import Config
from elastic_trainer.errors import CheckpointError, TransportError
from elastic_trainer.models.layers import ModelSpec, ties
from elastic_trainer.pipeline.lr import lr_at
from elastic_trainer.pipeline.optim import (
    build_optimizer,
    check_state,
    decay_weights,
    export_state,
    import_state,
    set_lr,
    take_step,
)
from elastic_trainer.pipeline.reduce import Norms, parameter_norms
from elastic_trainer.pipeline.stash import StageParam, VersionRing, collect_params
from elastic_trainer.schedule.build import delay as schedule_delay
from elastic_trainer.schedule.build import is_asynchronous
from elastic_trainer.types import Plan

LayerState = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class InUse:
    """The weights that a forward used."""

    version: int
    followers: tuple[nn.Parameter, ...]


class StageWeights:
    """Everything that an update of stage `stage` changes.

    Args:
        layers: this stage's modules by layer name, in model order.
        delay: updates by which this stage applies gradients late.
    """

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        model: ModelSpec,
        plan: Plan,
        config: Config,
        stage: int,
        delay: int,
    ) -> None:
        self._config = config
        self._layers = layers
        self._stage = stage
        self._params = collect_params(layers)
        self._by_name = {(p.layer, p.name): p for p in self._params}
        # Stage of the other end -> parameters of this end, both ends in the order of `ties`.
        self._followers: dict[int, list[StageParam]] = {}
        self._owners: dict[int, list[StageParam]] = {}
        shared = self._find_ties(model, plan)
        self._remote = [param for params in self._followers.values() for param in params]
        self._tied_now = [param.leaf for param in self._remote]
        self._tied_version = dict.fromkeys(self._followers, 0)
        is_async = is_asynchronous(plan.schedule)
        self._owner_delay = {
            owner: schedule_delay(owner, plan.num_stages) if is_async else 0
            for owner in self._followers
        }
        steppable = {id(p) for p in self._params} - {id(p) for p in self._remote}
        steppable -= {id(follower) for _, follower in shared}
        owned = [p for p in self._params if id(p) in steppable and p.leaf.requires_grad]
        self._owned = {id(param): i for i, param in enumerate(owned)}
        self._names = [param.layer for param in owned]
        stepped = [(o, f) for o, f in shared if id(o) in self._owned]
        self.ring = VersionRing(owned, stepped, delay)
        self.optimizer = build_optimizer(self.ring.handles, config.optim)

    def begin(self) -> None:
        """Start a segment: what is held now is version 0."""
        self.ring.begin()
        self._tied_version = dict.fromkeys(self._tied_version, 0)

    def install_newest(self) -> InUse:
        """Put the newest weights into the modules, for a forward."""
        version = self.ring.install_newest()
        for param, leaf in zip(self._remote, self._tied_now, strict=True):
            if param.leaf is not leaf:
                param.install(leaf)
        return InUse(version, tuple(self._tied_now))

    def install(self, use: InUse) -> None:
        """Put the weights of an earlier forward back, to recompute it."""
        self.ring.install(use.version)
        for param, leaf in zip(self._remote, use.followers, strict=True):
            param.install(leaf)

    @property
    def follower_stages(self) -> Sequence[int]:
        """Stages with copies of parameters that this one owns, in order."""
        return sorted(self._owners)

    def storages(self) -> set[int]:
        """Where the parameters lie that forwards use now."""
        return {param.leaf.untyped_storage().data_ptr() for param in self._params}

    def check_tied(self, position: int) -> None:
        """All holders of a tied weight use the version that its owner uses for the forward of this
        update, counted from the segment's first.
        """
        for owner, version in self._tied_version.items():
            expected = max(0, position - self._owner_delay[owner])
            assert version == expected, f"tied weights of version {version}, not {expected}"

    def take_tied_gradients(self, owner_stage: int, use: InUse) -> list[Tensor | None]:
        """What backwards left on the followers of that stage's parameters."""
        mine = {id(param) for param in self._followers[owner_stage]}
        grads: list[Tensor | None] = []
        for param, leaf in zip(self._remote, use.followers, strict=True):
            if id(param) in mine:
                grads.append(leaf.grad)
                leaf.grad = None
        return grads

    def tied_weights(self, follower_stage: int) -> list[Tensor]:
        """The newest weights that stages after this one hold copies of."""
        weights = []
        for param in self._owners[follower_stage]:
            index = self._owned.get(id(param))
            held: Tensor = param.leaf if index is None else self.ring.handles[index]
            weights.append(held.detach())
        return weights

    def install_tied(self, owner_stage: int, weights: Sequence[Tensor], version: int) -> None:
        """Use new weights of the owner from the next forward on."""
        shapes = [tuple(param.leaf.shape) for param in self._followers[owner_stage]]
        if shapes != [tuple(weight.shape) for weight in weights]:
            raise TransportError(f"stage {owner_stage} sent tied weights that do not fit {shapes}")
        expected = self._tied_version[owner_stage] + 1
        assert version == expected, f"tied weights of version {version}, not {expected}"
        new = {id(p): w for p, w in zip(self._followers[owner_stage], weights, strict=True)}
        self._tied_now = [
            nn.Parameter(new[id(param)], leaf.requires_grad) if id(param) in new else leaf
            for param, leaf in zip(self._remote, self._tied_now, strict=True)
        ]
        self._tied_version[owner_stage] = version

    def collect_gradients(
        self, version: int, tied: Sequence[tuple[int, Sequence[Tensor | None]]]
    ) -> None:
        """Bring the gradients of the update together on the owned parameters.

        Args:
            version: the version that the backwards ran on.
            tied: gradients of (follower stage, its tied parameters), in the order of stages.
        """
        self.ring.take_gradients(version)
        for stage, grads in tied:
            for param, grad in zip(self._owners[stage], grads, strict=True):
                index = self._owned.get(id(param))
                if index is None or grad is None:
                    continue
                total = self.ring.handles[index].grad
                assert total is not None
                total.add_(grad)

    def norms(self) -> Norms:
        """Norms of the collected gradients; names the layer nearest the loss with a bad one."""
        values = parameter_norms(self.gradients())
        bad = [name for name, value in zip(self._names, values, strict=True) if _is_bad(value)]
        return Norms(values, self._stage, bad[-1] if bad else "")

    def layer_with_bad_gradient(self, use: InUse) -> str:
        """The layer nearest the loss with a gradient that is not finite, after a backward."""
        self.install(use)
        for param in reversed(self._params):
            grad = param.leaf.grad
            if grad is not None and not torch.isfinite(grad).all():
                return param.layer
        return next(iter(self._layers))

    def gradients(self) -> list[Tensor]:
        """The collected gradients of the owned parameters."""
        return [handle.grad for handle in self.ring.handles if handle.grad is not None]

    def named_gradients(self) -> dict[str, Tensor]:
        """The collected gradients as layer/parameter."""
        handles = self.ring.handles
        found = {}
        for param in self._params:
            index = self._owned.get(id(param))
            if index is not None and handles[index].grad is not None:
                found[f"{param.layer}/{param.name}"] = handles[index].grad
        return {name: grad for name, grad in found.items() if grad is not None}

    def step(self, update: int, factor: float, *, skip: bool = False) -> None:
        """Make the next version: gradients times `factor`, then the optimizer."""
        self.ring.open_next()
        if self.optimizer is not None and not skip:
            if factor != 1.0:
                torch._foreach_mul_(self.gradients(), factor)
            lr = lr_at(update, self._config.optim, self._config.train.max_steps)
            set_lr(self.optimizer, lr)
            decay_weights(self.optimizer, self._config.optim, lr)
            take_step(self.optimizer)
        self.ring.close_next()

    def states(self) -> dict[str, LayerState]:
        """Live references to all state, by layer: param/<name>, buffer/<name>, optim/<param>/<key>.

        Valid until the next segment starts.
        """
        self.install_newest()
        states: dict[str, LayerState] = {name: {} for name in self._layers}
        for param in self._params:
            states[param.layer][f"param/{param.name}"] = param.leaf.detach()
            index = self._owned.get(id(param))
            if index is not None and self.optimizer is not None:
                held = export_state(self.optimizer, self.ring.handles[index])
                for key, value in held.items():
                    states[param.layer][f"optim/{param.name}/{key}"] = value
        for layer, module in self._layers.items():
            for name, buffer in saved_buffers(module).items():
                states[layer][f"buffer/{name}"] = buffer
        return states

    def load(self, states: Mapping[str, Mapping[str, Tensor]], lent: Collection[str] = ()) -> None:
        """Replace all state by `states`, which hold at least this stage's layers.

        The tensors are copied, but for those of `lent` layers, which are this stage's from now on.
        """
        self.install_newest()
        for layer, module in self._layers.items():
            if layer not in states:
                raise CheckpointError(f"the state of layer {layer!r} is missing")
            for name, buffer in saved_buffers(module).items():
                _copy(buffer, states[layer], f"buffer/{name}", layer)
        for param in self._params:
            state = states[param.layer]
            _copy(param.leaf, state, f"param/{param.name}", param.layer)
            index = self._owned.get(id(param))
            if index is not None and self.optimizer is not None:
                prefix = f"optim/{param.name}/"
                own = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
                check_state(own, self._config.optim, f"layer {param.layer!r}, {param.name}")
                copy = param.layer not in lent
                import_state(self.optimizer, self.ring.handles[index], own, copy=copy)

    def _find_ties(self, model: ModelSpec, plan: Plan) -> list[tuple[StageParam, StageParam]]:
        """Fill the tables of ties with other stages, and return those within this one."""
        names = [spec.name for spec in model.layers]
        shared = []
        for tie in ties(model):
            owner_stage = plan.stage_of_layer(tie.owner)
            follower_stage = plan.stage_of_layer(tie.follower)
            owner = self._by_name.get((names[tie.owner], tie.owner_param))
            follower = self._by_name.get((names[tie.follower], tie.follower_param))
            if owner is not None and follower is not None:
                shared.append((owner, follower))
            elif owner is not None:
                self._owners.setdefault(follower_stage, []).append(owner)
            elif follower is not None:
                self._followers.setdefault(owner_stage, []).append(follower)
        return shared


def saved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of the state; those that modules rebuild by themselves are not."""
    persistent = module.state_dict().keys()
    return {name: buffer for name, buffer in module.named_buffers() if name in persistent}


def _is_bad(value: float) -> bool:
    return value != value or value in (float("inf"), float("-inf"))


def _copy(target: Tensor, state: Mapping[str, Tensor], key: str, layer: str) -> None:
    if key not in state or state[key].shape != target.shape:
        found = tuple(state[key].shape) if key in state else "nothing"
        raise CheckpointError(
            f"layer {layer!r}: {key} should be {tuple(target.shape)}, the state holds {found}",
            "Was it saved with another model configuration?",
        )
    with torch.no_grad():
        target.copy_(state[key])
