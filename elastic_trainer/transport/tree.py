"""What flows between layers: a tree of tensors, taken apart for the wire and put together.

    tree = Tensor | None | bool | int | float | str
         | tuple[tree, ...] | list[tree] | dict[str, tree]

The spec is JSON: null for None, "T" for the next tensor, and one-entry objects for the rest.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from elastic_trainer.errors import ModelError, TransportError

Tree = Any
Spec = Any


def flatten(tree: Tree) -> tuple[Spec, list[Tensor]]:
    """The shape of a tree, and its tensors in depth-first order."""
    tensors: list[Tensor] = []
    return _spec(tree, tensors, ""), tensors


def unflatten(spec: Spec, tensors: Sequence[Tensor]) -> Tree:
    """The tree that `flatten` took apart; `tensors` may be other ones in the same order."""
    rest = iter(tensors)
    try:
        tree = _tree(spec, rest)
    except StopIteration:
        raise TransportError(
            f"a tree needs more than the {len(tensors)} tensors that came"
        ) from None
    if next(rest, None) is not None:
        raise TransportError(f"a tree needs fewer than the {len(tensors)} tensors that came")
    return tree


def _spec(tree: Tree, tensors: list[Tensor], where: str) -> Spec:
    # Exact types only: a named tuple or a model-output class would come back as something else.
    kind = type(tree)
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return "T"
    if tree is None:
        return None
    if kind in (bool, int, float, str):
        return {"value": tree}
    if kind in (tuple, list):
        items = [_spec(item, tensors, f"{where}[{i}]") for i, item in enumerate(tree)]
        return {kind.__name__: items}
    if kind is dict and all(type(key) is str for key in tree):
        return {"dict": {key: _spec(tree[key], tensors, f"{where}[{key!r}]") for key in tree}}
    raise ModelError(
        f"a layer's output{where} is a {kind.__module__}.{kind.__qualname__}, which cannot travel",
        "layers may pass on tensors, None, numbers, strings, and tuples, lists and dicts (with "
        "string keys) of them",
    )


def _tree(spec: Spec, rest: Iterator[Tensor]) -> Tree:
    if spec == "T":
        return next(rest)
    if spec is None:
        return None
    if type(spec) is dict and len(spec) == 1:
        ((kind, value),) = spec.items()
        if kind == "value" and type(value) in (bool, int, float, str):
            return value
        if kind == "tuple" and type(value) is list:
            return tuple([_tree(item, rest) for item in value])
        if kind == "list" and type(value) is list:
            return [_tree(item, rest) for item in value]
        if kind == "dict" and type(value) is dict:
            return {key: _tree(item, rest) for key, item in value.items()}
    raise TransportError(f"not the description of a tree: {str(spec)[:80]}")
