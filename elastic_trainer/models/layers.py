"""A model is an ordered list of named layers, and a loss.

Vocabulary: a *tree* is what flows between layers: a tensor, None, a number, a string, or a tuple,
list or dict of trees. A *field* is a named tensor of a microbatch. A tied parameter has one *owner*
layer, which steps it, and *followers*, later layers that hold a copy.

Initial weights and dropout masks are keyed by layer name, so they do not depend on where the model
is cut or on which worker holds what.
"""

import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from elastic_trainer.errors import ElasticTrainerError, ModelError

Tree = Any
LossFn = Callable[[Tree, Mapping[str, Tensor]], Tensor]
StateDict = dict[str, Tensor]

_LAYER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_GLOBAL_GENERATOR = threading.RLock()


@dataclass(frozen=True)
class LayerSpec:
    """One layer: how it is built and what it shares.

    Args:
        name: stable name; part of checkpoint file names.
        build: makes the module, drawing its initial weights from torch's global CPU generator.
        tied: parameter of this layer -> `owner_layer.parameter` of an earlier layer.
        batch_fields: fields of the microbatch that `forward` gets as keyword arguments.
    """

    name: str
    build: Callable[[], nn.Module]
    tied: Mapping[str, str] = field(default_factory=dict)
    batch_fields: tuple[str, ...] = ()


@dataclass(frozen=True)
class HuggingFaceLayout:
    """How a model is written in Hugging Face's layout.

    Args:
        config: what `config.json` says.
        convert: (layer, parameter, tensor) -> (Hugging Face's name, tensor as stored there).
    """

    config: Mapping[str, Any]
    convert: Callable[[str, str, Tensor], tuple[str, Tensor]]


@dataclass(frozen=True)
class ModelSpec:
    """An ordered list of layers and the loss of what the last one returns.

    The first layer gets the tensor itself when there is one input field, else a dict of fields.
    The loss gets the last layer's tree and the label fields, and returns the *sum* over the valid
    items of the microbatch. `max_positions` limits the sequence length, None: no limit.
    """

    layers: tuple[LayerSpec, ...]
    loss: LossFn
    input_fields: tuple[str, ...] = ("input_ids",)
    label_fields: tuple[str, ...] = ("labels",)
    max_positions: int | None = None
    hugging_face: HuggingFaceLayout | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise ModelError("The model has no layers", "Return at least one layer")
        seen: dict[str, LayerSpec] = {}
        for spec in self.layers:
            _check_name(spec.name, seen)
            for parameter, source in spec.tied.items():
                _check_tie(spec.name, parameter, source, seen)
            seen[spec.name] = spec

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.layers)


class Tie(NamedTuple):
    """A parameter of layer `follower` that is a copy of a parameter of layer `owner` (indices)."""

    owner: int
    follower: int
    owner_param: str
    follower_param: str


def _check_name(name: str, seen: Mapping[str, LayerSpec]) -> None:
    if not isinstance(name, str) or not _LAYER_NAME.fullmatch(name):
        raise ModelError(
            f"Layer name {name!r} is not usable",
            "Use letters, digits, `_`, `-` and `.`; names become file names",
        )
    if name in seen:
        raise ModelError(f"Two layers are named {name!r}", "Give each layer its own name")


def _check_tie(name: str, parameter: str, source: str, seen: Mapping[str, LayerSpec]) -> None:
    found = split_tie(source, seen)
    if found is None:
        raise ModelError(
            f"Layer {name!r} ties {parameter!r} to {source!r}, which names no earlier layer",
            "Write `layer.parameter` of a layer that comes before it",
        )
    owner, owner_param = found
    if owner_param in seen[owner].tied:
        raise ModelError(
            f"Layer {name!r} ties {parameter!r} to {source!r}, which is tied itself",
            f"Tie it to {seen[owner].tied[owner_param]!r} instead",
        )


def split_tie(source: str, layers: Mapping[str, Any]) -> tuple[str, str] | None:
    """Layer and parameter that `source` names; layer names may contain dots, so longest first."""
    parts = source.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:cut])
        if name in layers:
            return name, ".".join(parts[cut:])
    return None


def ties(model: ModelSpec) -> list[Tie]:
    """All tied parameters, ordered by follower."""
    index = {name: i for i, name in enumerate(model.names)}
    found = []
    for i, spec in enumerate(model.layers):
        for parameter, source in spec.tied.items():
            owner = split_tie(source, index)
            assert owner is not None  # ModelSpec checked it
            found.append(Tie(index[owner[0]], i, owner[1], parameter))
    return found


def layer_key(seed: int, update: int, microbatch: int, layer_name: str) -> int:
    """Seed (63 bits) of a layer's random numbers in one microbatch, the same on every machine."""
    return _hash(f"{seed}/{update}/{microbatch}/{layer_name}")


def init_key(seed: int, layer_name: str) -> int:
    """Seed (63 bits) of a layer's initial weights."""
    return _hash(f"init/{seed}/{layer_name}")


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Torch's global CPU generator seeded with `key` inside, as it was before outside.

    The generator belongs to the process, so only one thread at a time is inside.
    """
    with _GLOBAL_GENERATOR:
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(key)
        try:
            yield
        finally:
            torch.set_rng_state(state)


_SHAPE_ONLY = frozenset(
    {"device", "dim", "dtype", "grad_fn", "is_floating_point", "is_leaf", "layout", "ndim", "numel"}
    | {"requires_grad", "requires_grad_", "shape", "size", "__hash__", "__len__"}
)


_FILLS = frozenset({"fill_", "normal_", "uniform_", "zero_"})


class _Unfilled(TorchFunctionMode):
    """Leaves parameters as they were allocated where `torch.nn.init` or a random fill would write.

    `is_read` says whether anything has depended on what such a parameter holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_read = False
        self._left: dict[int, nn.Parameter] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        fills = name in _FILLS or getattr(func, "__module__", "") == nn.init.__name__
        if fills and isinstance(target, nn.Parameter):
            self._left[id(target)] = target
            return target
        used = [*args, *kwargs.values()]
        if name not in _SHAPE_ONLY and any(id(value) in self._left for value in used):
            self.is_read = True
        return func(*args, **kwargs)


def build_blank(spec: LayerSpec, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """One layer whose whole state will be replaced: its parameters may hold anything.

    What is no part of its state, such as buffers that are not saved, is as `build_layer` makes it.
    """

    def build() -> nn.Module:
        before = torch.get_rng_state()
        with _Unfilled() as mode:
            module = spec.build()
        if not mode.is_read and torch.equal(torch.get_rng_state(), before):
            return module
        # Something was made of the parameters, or drawn as it would be drawn after them.
        torch.set_rng_state(before)
        return spec.build()

    return build_layer(replace(spec, build=build), seed, device)


def build_layer(spec: LayerSpec, seed: int, device: torch.device | str = "cpu") -> nn.Module:
    """One layer with initial weights that depend on (seed, layer name) only.

    Tied parameters hold values of their own; `build_layers` installs the owner's.
    """
    try:
        with seeded(init_key(seed, spec.name)):
            module = spec.build()
    except ElasticTrainerError:
        raise
    except Exception as error:
        raise ModelError(
            f"Layer {spec.name!r} could not be built: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"Building layer {spec.name!r} gave {type(module).__name__}, not a torch module"
        )
    return module.to(device)


def build_layers(
    model: ModelSpec,
    first: int,
    stop: int,
    seed: int,
    device: torch.device | str = "cpu",
    given: Mapping[str, nn.Module] | None = None,
) -> dict[str, nn.Module]:
    """Layers `first` up to, not including, `stop`, each tied parameter equal to its owner's.

    Every layer has its own Parameters, also where owner and follower are both in the range. An
    owner outside of it is built too and dropped: that needs no other worker. Layers that are
    `given` are left as they are.
    """
    given = given or {}
    wanted = model.layers[first:stop]
    fresh = [spec for spec in wanted if spec.name not in given]
    built = {spec.name: build_layer(spec, seed, device) for spec in fresh}
    outside: dict[str, nn.Module] = {}
    for tie in ties(model):
        owner, follower = model.layers[tie.owner], model.layers[tie.follower]
        if follower.name not in built:
            continue
        if owner.name not in built and owner.name not in outside:
            outside[owner.name] = build_layer(owner, seed, device)
        source = built[owner.name] if owner.name in built else outside[owner.name]
        _copy_tied(owner.name, source, tie.owner_param, follower.name, built, tie.follower_param)
    return {spec.name: given.get(spec.name) or built[spec.name] for spec in wanted}


def _copy_tied(
    owner: str,
    source: nn.Module,
    owner_param: str,
    follower: str,
    built: Mapping[str, nn.Module],
    follower_param: str,
) -> None:
    have = dict(source.named_parameters(remove_duplicate=False)).get(owner_param)
    want = dict(built[follower].named_parameters(remove_duplicate=False)).get(follower_param)
    for name, parameter, tensor in ((owner, owner_param, have), (follower, follower_param, want)):
        if tensor is None:
            raise ModelError(f"A tie names parameter {parameter!r}, which layer {name!r} lacks")
    assert have is not None and want is not None
    if have.shape != want.shape:
        raise ModelError(
            f"{follower}.{follower_param} {tuple(want.shape)} is tied to "
            f"{owner}.{owner_param} {tuple(have.shape)}, which has another shape"
        )
    with torch.no_grad():
        want.copy_(have)


def first_input(model: ModelSpec, batch: Mapping[str, Tensor]) -> Tree:
    """What the first layer gets: the tensor itself when there is one input field, else a dict."""
    missing = [name for name in model.input_fields if name not in batch]
    if missing:
        raise ModelError(
            f"The first layer needs field {missing[0]!r}; the microbatch has {sorted(batch)}",
            "Set data.input_columns, or the model's input_fields",
        )
    if len(model.input_fields) == 1:
        return batch[model.input_fields[0]]
    return {name: batch[name] for name in model.input_fields}


def layer_kwargs(spec: LayerSpec, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fields of the microbatch that this layer's forward gets by name."""
    try:
        return {name: batch[name] for name in spec.batch_fields}
    except KeyError as error:
        raise ModelError(
            f"Layer {spec.name!r} needs field {error.args[0]!r}; the microbatch has "
            f"{sorted(batch)}",
            "Set data.format and data.input_columns, or the layer's batch_fields (an emulated "
            "layer's cost_field)",
        ) from None
