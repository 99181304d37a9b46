"""A worker of the simulated cluster, and a plan for some of them."""

from collections import deque
from dataclasses import dataclass, field

from elastic_trainer.elastic import instructions as do
from elastic_trainer.types import Plan, Prediction, StagePlan, WorkerId

KEPT = 2  # snapshots of each origin
Order = do.RunSegment | do.Evaluate | do.SaveCheckpoint


def even_cut(generation: int, workers: tuple[WorkerId, ...], layers: int, step_s: float) -> Plan:
    """A plan that gives every worker as many layers as the others."""
    count = len(workers)
    return Plan(
        generation=generation,
        schedule="1f1b",
        num_microbatches=4,
        layers=tuple(f"layer{i}" for i in range(layers)),
        stages=tuple(
            StagePlan(stage=i, first=layers * i // count, stop=layers * (i + 1) // count, worker=w)
            for i, w in enumerate(workers)
        ),
        predicted=Prediction(
            step_s=step_s,
            bubble_ratio=0.0,
            stage_busy_s=(step_s,) * count,
            stage_memory_bytes=(1,) * count,
        ),
        reasons=(),
    )


@dataclass
class SimWorker:
    """A worker: `live` is the update whose state it holds, None in the middle of a segment."""

    name: WorkerId
    node: str
    generation: int = 0
    live: int | None = None
    layers: tuple[str, ...] = ()
    copies: dict[WorkerId, dict[int, tuple[str, ...]]] = field(default_factory=dict)
    orders: deque[Order] = field(default_factory=deque)
    begun: bool = False

    def enter(self, generation: int) -> None:
        """Drop what is under way."""
        assert generation > self.generation, "a worker goes back to an older generation"
        self.generation = generation
        self.orders.clear()
        if self.begun:
            self.begun, self.live = False, None

    def keep(self, origin: WorkerId, update: int, layers: tuple[str, ...]) -> None:
        kept = self.copies.setdefault(origin, {})
        kept[update] = layers
        for old in sorted(kept)[:-KEPT]:
            del kept[old]

    def stock(self) -> dict[int, tuple[str, ...]]:
        held: dict[int, set[str]] = {}
        if self.live is not None:
            held[self.live] = set(self.layers)
        for kept in self.copies.values():
            for update, layers in kept.items():
                held.setdefault(update, set()).update(layers)
        return {update: tuple(sorted(layers)) for update, layers in held.items()}
