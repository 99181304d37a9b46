"""Trees of tensors taken apart and put together."""

import json
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.errors import ModelError, TransportError
from elastic_trainer.transport.tree import flatten, unflatten

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
TENSORS = st.integers(0, 5).map(lambda n: torch.full((n,), float(n)))


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(inner, max_size=3)
    return lists | lists.map(tuple) | st.dictionaries(st.text(max_size=3), inner, max_size=3)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one is other
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(st.recursive(SCALARS | TENSORS, nest, max_leaves=12))
def test_a_tree_survives_json(tree: Any) -> None:
    spec, tensors = flatten(tree)
    assert same(unflatten(json.loads(json.dumps(spec)), tensors), tree)


def test_tensors_come_in_depth_first_order() -> None:
    x, y, z = torch.ones(1), torch.ones(2), torch.ones(3)
    spec, tensors = flatten({"b": (x, [y, "T"]), "a": z, "none": None})
    assert [t is want for t, want in zip(tensors, (x, y, z), strict=True)] == [True] * 3
    assert unflatten(spec, [z, y, x]) == {"b": (z, [y, "T"]), "a": x, "none": None}


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"hidden": [torch.ones(1), {1, 2}]}, "output['hidden'][1] is a builtins.set"),
        (Pair(1, 2), "Pair"),
        ({1: torch.ones(1)}, "builtins.dict"),
        ((object(),), "output[0]"),
    ],
)
def test_what_would_come_back_different_is_refused(tree: Any, place: str) -> None:
    with pytest.raises(ModelError) as caught:
        flatten(tree)
    assert place in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["X", 3, {"set": []}, {"value": []}, {"list": 1}, {"dict": []}, {"list": [], "x": 1}]
)
def test_a_malformed_spec_is_refused(spec: Any) -> None:
    with pytest.raises(TransportError, match="not the description of a tree"):
        unflatten(spec, [])


def test_the_number_of_tensors_must_fit() -> None:
    with pytest.raises(TransportError, match="more than the 1 tensors"):
        unflatten({"list": ["T", "T"]}, [torch.ones(1)])
    with pytest.raises(TransportError, match="fewer than the 1 tensors"):
        unflatten(None, [torch.ones(1)])
