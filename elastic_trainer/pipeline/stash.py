"""Weight stashing: a backward runs on the version of the weights that its forward used.

A *version* counts the updates of this segment: version v holds the weights after v of them. Stage s
of P applies a gradient `delay` = P-1-s updates late, so `delay` + 1 versions are in use at once.

Each version is a set of leaf Parameters of its own, put into the modules before a forward: autograd
then sends a backward's gradients to the version that its forward used, without a copy and without
knowing of the others. The optimizer steps *handles*, Parameters that point at the buffers of the
version being made; torch.optim needs no change. A stage without delay has one version, its handles
are the modules' own Parameters, and it copies nothing.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class StageParam:
    """One parameter of a stage, and every place in the modules that holds it."""

    __slots__ = ("_dicts", "_modules", "layer", "leaf", "name")

    def __init__(self, layer: str, name: str, leaf: nn.Parameter) -> None:
        self.layer = layer
        self.name = name
        self.leaf = leaf
        self._dicts: list[tuple[dict[str, nn.Parameter | None], str]] = []
        self._modules: list[tuple[nn.Module, str]] = []

    def add_holder(self, module: nn.Module, name: str) -> None:
        """Note that `module` holds this parameter as `name`."""
        # Modules that watch assignments (LSTM keeps a second list) need a real one; for all others
        # writing the dictionary is ten times faster, and it happens before every forward.
        if type(module).__setattr__ is nn.Module.__setattr__:
            self._dicts.append((module._parameters, name))
        else:
            self._modules.append((module, name))

    def install(self, leaf: nn.Parameter) -> None:
        """Make the modules compute with `leaf`."""
        self.leaf = leaf
        for holder, name in self._dicts:
            holder[name] = leaf
        for module, name in self._modules:
            setattr(module, name, leaf)


def collect_params(layers: Mapping[str, nn.Module]) -> list[StageParam]:
    """Every parameter once, in the order of layers and of `named_parameters`."""
    found: dict[int, StageParam] = {}
    for layer, module in layers.items():
        for path, owner in module.named_modules():
            for name, leaf in owner._parameters.items():
                if leaf is None:
                    continue
                if id(leaf) not in found:
                    full = f"{path}.{name}" if path else name
                    found[id(leaf)] = StageParam(layer, full, leaf)
                found[id(leaf)].add_holder(owner, name)
    return list(found.values())


class VersionRing:
    """The versions of the parameters that this stage steps.

    Args:
        owned: parameters that the optimizer steps here.
        shared: (owner, follower) pairs tied on this stage; a follower is a leaf of its own on the
            owner's memory, so it has the owner's value in every version.
        delay: updates by which gradients are applied late.
    """

    def __init__(
        self,
        owned: Sequence[StageParam],
        shared: Sequence[tuple[StageParam, StageParam]],
        delay: int,
    ) -> None:
        self.delay = delay
        self.copies = 0
        position = {id(param): i for i, param in enumerate(owned)}
        self._owner_of = [position[id(owner)] for owner, _ in shared]
        self._params = [*owned, *(follower for _, follower in shared)]
        self._num_owned = len(owned)
        self._slots: list[list[nn.Parameter]] = []
        self._data: list[list[Tensor]] = []
        first = [param.leaf for param in owned]
        self._add_slot(first)
        for _ in range(delay):
            self._add_slot([nn.Parameter(torch.empty_like(leaf)) for leaf in first])
        # .data, not detach(): a handle must not count its writes on the leaf that it starts from,
        # which autograd may still need unchanged while the handle points elsewhere.
        self.handles = [nn.Parameter(leaf.data) for leaf in first] if delay else first
        self._versions = [0] * (delay + 1)
        self._newest = 0
        self._installed = -1
        self.begin()

    @property
    def depth(self) -> int:
        """How many versions there is room for."""
        return len(self._slots)

    @property
    def newest(self) -> int:
        """Number of the newest version."""
        return self._versions[self._newest]

    def begin(self) -> None:
        """Start a segment: the newest weights become version 0, and older ones are forgotten."""
        self._versions = [-1] * self.depth
        self._versions[self._newest] = 0
        self.copies = 0
        self.install_newest()

    def install_newest(self) -> int:
        """Make the modules compute with the newest version, and say which that is."""
        self._install(self._newest)
        return self._versions[self._newest]

    def install(self, version: int) -> None:
        """Make the modules compute with `version`, which must still be held."""
        self._install(self._slot_of(version))

    def take_gradients(self, version: int) -> None:
        """Move what the backwards on `version` left to the handles, tied copies added to owners.

        A parameter that got no gradient gets zeros.
        """
        leaves = self._slots[self._slot_of(version)]
        for handle, leaf in zip(self.handles, leaves, strict=False):
            grad = leaf.grad
            if handle is not leaf:
                leaf.grad = None
            handle.grad = torch.zeros_like(leaf) if grad is None else grad
        for owner, follower in zip(self._owner_of, leaves[self._num_owned :], strict=True):
            if follower.grad is not None:
                total = self.handles[owner].grad
                assert total is not None
                total.add_(follower.grad)
                follower.grad = None

    def open_next(self) -> None:
        """Point the handles at the buffers of the next version, filled with the newest one.

        They are those of the oldest version, whose last backward must be over.
        """
        if self.delay == 0:
            return
        buffers = self._data[(self._newest + 1) % self.depth]
        if buffers:
            torch._foreach_copy_(buffers, self._data[self._newest])
        for handle, buffer in zip(self.handles, buffers, strict=True):
            handle.data = buffer
        self.copies += 1

    def close_next(self) -> None:
        """The handles have been stepped: what they point at is the newest version now."""
        version = self._versions[self._newest] + 1
        self._newest = (self._newest + 1) % self.depth
        self._versions[self._newest] = version
        for handle in self.handles:
            handle.grad = None

    def _add_slot(self, leaves: list[nn.Parameter]) -> None:
        followers = [nn.Parameter(leaves[owner].detach()) for owner in self._owner_of]
        self._data.append([leaf.detach() for leaf in leaves])
        self._slots.append([*leaves, *followers])

    def _install(self, slot: int) -> None:
        if slot == self._installed:
            return
        for param, leaf in zip(self._params, self._slots[slot], strict=True):
            param.install(leaf)
        self._installed = slot

    def _slot_of(self, version: int) -> int:
        slot = (self._newest - (self.newest - version)) % self.depth
        assert self._versions[slot] == version, f"version {version} of {self._versions} is gone"
        return slot
