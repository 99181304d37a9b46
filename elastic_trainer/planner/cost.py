"""What the actions of a stage cost, by a profile: for the simulator."""

import math
from collections.abc import Mapping, Sequence

from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.types import Profile


class StageCosts:
    """Durations of the actions of stages that are cut at `cuts`.

    Reductions and what tied parameters exchange count as free. `late_s` and `late_cpu_s` are by
    stage what each backward leaves for later: no part of any action.

    Args:
        profile: layers and overheads.
        cuts: index of the first layer of each stage but the first.
    """

    def __init__(self, profile: Profile, cuts: Sequence[int]) -> None:
        layers, over = profile.layers, profile.overheads
        ranges = list(zip((0, *cuts), (*cuts, len(layers)), strict=True))

        def total(name: str, beside: float = 0.0) -> list[float]:
            return [math.fsum(getattr(x, name) for x in layers[a:b]) + beside for a, b in ranges]

        # The first stage has nobody to whom it would send a gradient early.
        self.late_s: Sequence[float] = [0.0, *total("late_s")[1:]]
        self.late_cpu_s: Sequence[float] = [0.0, *total("late_cpu_s")[1:]]
        self._seconds = {
            Kind.F: total("forward_s", over.forward_s),
            Kind.B: _minus(total("backward_s", over.backward_s), self.late_s),
            Kind.OPT: total("optimizer_s"),
        }
        self._cpu_seconds = {
            Kind.F: total("forward_cpu_s", over.forward_cpu_s),
            Kind.B: _minus(total("backward_cpu_s", over.backward_cpu_s), self.late_cpu_s),
            Kind.OPT: total("optimizer_cpu_s"),
        }
        # A gradient is as big as the activation that it belongs to.
        leaving = [layers[b - 1].activation_bytes for _, b in ranges]
        entering = [0, *leaving]
        self._bytes = {Kind.SEND_F: leaving, Kind.SEND_B: entering}
        self._overheads = over

    def duration(self, action: Action) -> float:
        """Seconds for which the action keeps its stage busy."""
        return self._look_up(action, self._seconds, self._overheads.send_s)

    def need(self, action: Action) -> float:
        """Seconds of `duration` in which a stage on CPUs needs a core."""
        return self._look_up(action, self._cpu_seconds, self._overheads.send_cpu_s)

    def _look_up(
        self, action: Action, seconds: Mapping[Kind, Sequence[float]], send_s: float
    ) -> float:
        if (found := seconds.get(action.kind)) is not None:
            return found[action.stage]
        if (sizes := self._bytes.get(action.kind)) is None:
            return 0.0
        return send_s + self._overheads.send_s_per_byte * sizes[action.stage]

    def link(self, action: Action) -> float:
        """Seconds that the message of a SEND travels."""
        if (sizes := self._bytes.get(action.kind)) is None:
            return self._overheads.link_s
        return self._overheads.link_s + self._overheads.link_s_per_byte * sizes[action.stage]


def _minus(whole: Sequence[float], part: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(whole, part, strict=True)]
