"""Emulated pipelines, and what the simulator expects of them."""

from collections.abc import Sequence
from typing import Any

from elastic_trainer.planner.simulate import simulate
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.schedule.build import build


def emulated(
    schedule: str,
    num_stages: int,
    num_microbatches: int,
    forward_s: float,
    backward_s: float,
    max_steps: int,
    **pipeline: Any,
) -> dict[str, Any]:
    """A run whose stages sleep `forward_s` and `backward_s` per microbatch of one sample."""
    return {
        "model": {
            "name": "emulated",
            "args": {
                "num_layers": num_stages,
                "forward_s": forward_s,
                "backward_s": backward_s,
            },
        },
        "data": {"format": "synthetic", "sequence_length": 8},
        "train": {
            "global_batch_size": num_microbatches,
            "max_steps": max_steps,
            "max_grad_norm": 0.0,
        },
        "pipeline": {
            "schedule": schedule,
            "microbatch_size": 1,
            "cuts": list(range(1, num_stages)),
            **pipeline,
        },
        "cluster": {"address": "local", "num_workers": num_stages},
    }


def nominal_s(
    schedule: str, num_stages: int, groups: Sequence[int], forward_s: float, backward_s: float
) -> float:
    """Makespan of a segment of these groups if nothing but the layers took time."""
    seconds = {Kind.F: forward_s, Kind.B: backward_s}

    def duration(action: Action) -> float:
        return seconds.get(action.kind, 0.0)

    return simulate(build(schedule, num_stages, groups), duration).makespan_s
