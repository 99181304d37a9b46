"""What the actions of a stage cost, by a profile: for the simulator."""

import math
from collections.abc import Sequence

from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.types import Profile


class StageCosts:
    """Durations of the actions of stages that are cut at `cuts`.

    Reductions and what tied parameters exchange count as free.

    Args:
        profile: layers and overheads.
        cuts: index of the first layer of each stage but the first.
    """

    def __init__(self, profile: Profile, cuts: Sequence[int]) -> None:
        layers, over = profile.layers, profile.overheads
        ranges = list(zip((0, *cuts), (*cuts, len(layers)), strict=True))
        forward = [math.fsum(x.forward_s for x in layers[a:b]) for a, b in ranges]
        backward = [math.fsum(x.backward_s for x in layers[a:b]) for a, b in ranges]
        self._forward = [seconds + over.forward_s for seconds in forward]
        self._backward = [seconds + over.backward_s for seconds in backward]
        self._optimizer = [math.fsum(x.optimizer_s for x in layers[a:b]) for a, b in ranges]
        # A gradient is as big as the activation that it belongs to.
        leaving = [layers[b - 1].activation_bytes for _, b in ranges]
        entering = [0, *leaving]
        self._bytes = {Kind.SEND_F: leaving, Kind.SEND_B: entering}
        self._overheads = over

    def duration(self, action: Action) -> float:
        """Seconds for which the action keeps its stage busy."""
        if action.kind is Kind.F:
            return self._forward[action.stage]
        if action.kind is Kind.B:
            return self._backward[action.stage]
        if action.kind is Kind.OPT:
            return self._optimizer[action.stage]
        if (sizes := self._bytes.get(action.kind)) is None:
            return 0.0
        return self._overheads.send_s + self._overheads.send_s_per_byte * sizes[action.stage]

    def link(self, action: Action) -> float:
        """Seconds that the message of a SEND travels."""
        if (sizes := self._bytes.get(action.kind)) is None:
            return self._overheads.link_s
        return self._overheads.link_s + self._overheads.link_s_per_byte * sizes[action.stage]
