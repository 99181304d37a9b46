"""Losses: sums over the valid items of a microbatch, divided later by the update's number of them.

A sum, never a mean: microbatches have unequal numbers of valid items, and a mean of means would
weigh them wrongly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from elastic_trainer.errors import ElasticTrainerError, ModelError
from elastic_trainer.models.layers import LossFn

IGNORE = -100


def first_label(labels: Mapping[str, Tensor]) -> Tensor:
    """The field called `labels`, else the first one."""
    if "labels" in labels:
        return labels["labels"]
    if not labels:
        raise ModelError(
            "The loss got no label field", "Set data.label_columns, or bring your own loss.target"
        )
    return next(iter(labels.values()))


def count_valid(labels: Mapping[str, Tensor]) -> int:
    """Items that the loss counts: integer labels but -100, else (floats, booleans) samples.

    The loader counts by the same rule, see `data/columns.py`.
    """
    label = first_label(labels)
    return int((label != IGNORE).sum()) if _is_class(label) else int(label.shape[0])


def cross_entropy(output: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """Sum of cross-entropies; the last dimension of `output` is over classes."""
    logits = output.reshape(-1, output.shape[-1])
    return F.cross_entropy(
        logits.float(), first_label(labels).reshape(-1), ignore_index=IGNORE, reduction="sum"
    )


def squared_error(output: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """Sum over samples of the mean squared error of each."""
    label = first_label(labels)
    error: Tensor = (output.float().reshape(label.shape) - label.float()).square()
    return error.reshape(label.shape[0], -1).mean(dim=1).sum()


def default_loss(output: Any, labels: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy for integer labels, squared error for others."""
    return (cross_entropy if _is_class(first_label(labels)) else squared_error)(output, labels)


def _is_class(label: Tensor) -> bool:
    kind = label.dtype
    return not (kind.is_floating_point or kind.is_complex or kind == torch.bool)


@dataclass(frozen=True)
class CheckedLoss:
    """A loss that gets the label fields only, is turned into a sum, and is checked.

    Args:
        function: the loss as it came.
        name: how messages call it.
        label_fields: fields it gets, in this order.
        is_mean: whether it returns the mean over the valid items.
    """

    function: LossFn
    name: str
    label_fields: tuple[str, ...]
    is_mean: bool = False

    def __call__(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        missing = [name for name in self.label_fields if name not in batch]
        if missing:
            raise ModelError(
                f"Loss {self.name} needs field {missing[0]!r}; the microbatch has {sorted(batch)}"
            )
        labels = {name: batch[name] for name in self.label_fields}
        value = self._call(output, labels)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(
                f"Loss {self.name} returned {got}, not one number",
                "Return the sum over the valid items, or the mean with loss.reduction=mean",
            )
        if not self.is_mean:
            return value
        valid = count_valid(labels)
        # The mean over nothing is NaN; such a microbatch contributes nothing.
        return value * valid if valid else torch.zeros_like(value) * _anchor(output)

    def _call(self, output: Any, labels: Mapping[str, Tensor]) -> Tensor:
        try:
            return self.function(output, labels)
        except ElasticTrainerError:
            raise
        except Exception as error:
            raise ModelError(
                f"Loss {self.name} failed: {type(error).__name__}: {error}",
                f"It was given labels { {k: tuple(v.shape) for k, v in labels.items()} }",
            ) from error


def _anchor(output: Any) -> Tensor:
    """A zero that depends on the first tensor of a tree, so that a backward has a graph to walk."""
    if isinstance(output, Tensor):
        return output.float().sum() * 0.0
    for leaf in output.values() if isinstance(output, dict) else output:
        if isinstance(leaf, Tensor | dict | list | tuple):
            return _anchor(leaf)
    raise ModelError("The model's output holds no tensor")
