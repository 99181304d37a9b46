"""What one sample costs each part of a model, predicted from its sizes.

Vocabulary: a *group* is a part of the model that stands in a row in the pipeline and whose cost
grows with one size of a sample: the vision encoder with patches, the audio encoder with tokens of
sound, the language model with all tokens, its head with those of the text. A *share* is the part
of a group that one stage holds; a *rate* is what a stage takes per predicted second of a group: its
share, times how slow the group has proved to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from elastic_trainer.planner.sizes import ItemSize, audio_tokens

Costs = NDArray[np.float64]
Shares = tuple[tuple[float, ...], ...]  # by stage and group
Rates = tuple[tuple[float, ...], ...]  # by stage and group

GROUPS = ("vision", "audio", "language", "head")  # in the order in which they are passed

_FLOPS_PER_S = 1e12  # makes seconds of operations; only ratios matter
_TRAINED, _FROZEN = 3, 1  # forward alone, or a backward of twice its work, too


def lengths(group: str, size: ItemSize) -> Sequence[int]:
    """Lengths of the sequences that a sample gives a group."""
    if group == "vision":
        return size.image_patches
    if group == "audio":
        return [audio_tokens(frames) for frames in size.audio_frames]
    return (size.num_tokens if group == "language" else size.text_tokens,)


@dataclass(frozen=True, slots=True)
class GroupCost:
    """Seconds of a group, forward and backward: per sequence of length n, l n + q n n."""

    group: str
    linear_s: float = 0.0
    quadratic_s: float = 0.0

    def seconds(self, lengths: Sequence[int]) -> float:
        """Cost of sequences of these lengths."""
        return self.linear_s * sum(lengths) + self.quadratic_s * sum(n * n for n in lengths)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of all groups of a model, in the order of the pipeline."""

    groups: tuple[GroupCost, ...]

    def predict_all(self, sizes: Sequence[ItemSize]) -> Costs:
        """Seconds that each sample (row) costs each group (column)."""
        columns = [[g.seconds(lengths(g.group, size)) for size in sizes] for g in self.groups]
        return np.array(columns, np.float64).T.reshape(len(sizes), len(self.groups))


def of_stages(costs: Costs, rates: Rates) -> Costs:
    """Seconds that each sample (row) costs each stage (column), from those of the groups."""
    return costs @ np.array(rates, np.float64).T


def even_stages(totals: Sequence[float], num_stages: int) -> Shares:
    """Shares of each group that the stages of an even cut hold: as a planner that may cut anywhere
    would cut a pipeline whose groups take `totals` seconds, one behind the other.
    """
    whole = sum(totals)
    if whole <= 0:
        return (tuple(1.0 for _ in totals),)
    edges = list(pairwise(accumulate(totals, initial=0.0)))
    cuts = [whole * stage / num_stages for stage in range(num_stages)] + [edges[-1][1]]
    return tuple(
        tuple(_overlap(first, stop, *edge) for edge in edges) for first, stop in pairwise(cuts)
    )


def deciding_stages(shares: Shares) -> Shares:
    """Those stages that decide whether all are even: where two stages are, one that mixes what they
    hold is even, too.
    """
    held = [tuple(group for group, part in enumerate(row) if part > 0) for row in shares]
    alone = {groups[0]: row for groups, row in zip(held, shares, strict=True) if len(groups) == 1}
    mixed = [row for groups, row in zip(held, shares, strict=True) if set(groups) - set(alone)]
    return (*alone.values(), *mixed)


def _overlap(first: float, stop: float, begin: float, end: float) -> float:
    """The part of [begin, end] that lies in [first, stop]."""
    return max(0.0, min(stop, end) - max(first, begin)) / (end - begin) if end > begin else 0.0


_GROUP_OF = {"vision": "vision", "audio": "audio", "lm": "language"}


def group_of(layer: str) -> str | None:
    """The group to which a layer of the shipped multimodal model belongs, by its name."""
    return "head" if layer == "lm.head" else _GROUP_OF.get(layer.partition(".")[0])


def shares_of(
    layers: Sequence[tuple[str, float]], stages: Sequence[tuple[int, int]], groups: Sequence[str]
) -> Shares:
    """Shares of the groups that the stages of a plan hold.

    Args:
        layers: group and seconds of each layer, in order.
        stages: first layer of each stage, and the one behind its last.
        groups: in the order of the shares.
    """
    seconds = np.array([[cost * (own == group) for group in groups] for own, cost in layers])
    whole = np.maximum(seconds.sum(axis=0), 1e-300)
    return tuple(tuple((seconds[a:b].sum(axis=0) / whole).tolist()) for a, b in stages)


def analytic_cost(
    *,
    dim: int = 128,
    vision_layers: int = 3,
    audio_layers: int = 2,
    lm_layers: int = 4,
    vocab_size: int = 256,
    patch_size: int = 16,
    mel_bins: int = 40,
    freeze: Sequence[str] = (),
) -> CostModel:
    """Costs of the shipped multimodal model by counting its multiplications.

    A block of width d costs 24 d d per token and, for attention, 4 d n n per sequence.
    """

    def group(name: str, num_blocks: int, per_token: float) -> GroupCost:
        passes = (_FROZEN if name in freeze else _TRAINED) / _FLOPS_PER_S
        return GroupCost(
            name,
            linear_s=passes * (num_blocks * 24 * dim * dim + per_token),
            quadratic_s=passes * num_blocks * 4 * dim,
        )

    convolutions = 2 * 3 * (2 * mel_bins * dim + dim * dim)
    return CostModel(
        (
            group("vision", vision_layers, 2 * 3 * patch_size**2 * dim + 2 * dim * dim),
            group("audio", audio_layers, convolutions + 2 * dim * dim),
            group("language", lm_layers, 0),
            group("head", 0, 2 * dim * vocab_size),
        )
    )


class Adaptive:
    """Corrects a cost model by what is observed: one factor per group.

    A factor is a moving average of observed over predicted seconds, in logarithms so that twice
    and half weigh alike. One observation moves it by at most `limit`.

    Args:
        model: what is corrected.
        weight: of one observation.
        limit: largest ratio of observed to predicted that is believed.
    """

    def __init__(self, model: CostModel, weight: float = 0.2, limit: float = 16.0) -> None:
        self._model = model
        self._weight = weight
        self._limit = float(np.log(limit))
        self._logs: dict[str, float] = {}

    def observe(self, group: str, predicted_s: float, observed_s: float) -> None:
        """A group was predicted to take `predicted_s` (uncorrected) and took `observed_s`."""
        if not (predicted_s > 0 and observed_s > 0):
            return  # nothing was done, or nothing was measured
        seen = float(np.clip(np.log(observed_s / predicted_s), -self._limit, self._limit))
        known = self._logs.get(group)
        self._logs[group] = seen if known is None else known + self._weight * (seen - known)

    def observe_stages(
        self, predicted_s: Sequence[float], shares: Shares, observed_s: Sequence[float]
    ) -> None:
        """Stages that hold these shares of the groups were busy for `observed_s`.

        Only proportions count, as they do for packing: on a machine that is slow at everything
        nothing changes. A stage that holds several groups speaks for each by its part, as far as it
        is known by then, so that the parts become clear one observation after the other.

        Args:
            predicted_s: of the groups, in the model's order, for the same work (uncorrected).
            shares: of the groups that each stage holds.
            observed_s: of the stages.
        """
        parts = np.array(self.rates(shares), np.float64) * np.array(predicted_s)
        expected, observed = parts.sum(axis=1), np.array(observed_s, np.float64)
        if not (expected.sum() > 0 and observed.sum() > 0):
            return
        pace = observed.sum() / expected.sum()
        ratios = np.divide(
            observed, expected * pace, out=np.ones_like(observed), where=expected > 0
        )
        for group, seconds, part in zip(self._model.groups, predicted_s, parts.T, strict=True):
            if part.sum() > 0:
                self.observe(group.group, seconds, float(part @ ratios))

    def factor(self, group: str) -> float:
        """How many times as slow as predicted; groups never seen: as the others on average."""
        if group in self._logs:
            return float(np.exp(self._logs[group]))
        return float(np.exp(sum(self._logs.values()) / len(self._logs))) if self._logs else 1.0

    def factors(self) -> tuple[float, ...]:
        """Those of all groups, in the model's order."""
        return tuple(self.factor(group.group) for group in self._model.groups)

    def rates(self, shares: Shares) -> Rates:
        """Rates of stages that hold these shares."""
        factors = self.factors()
        return tuple(tuple(s * f for s, f in zip(row, factors, strict=True)) for row in shares)
