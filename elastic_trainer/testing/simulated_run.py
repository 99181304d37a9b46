"""Situations for the elastic core: a simulated cluster, and how far to let it come."""

from typing import Any

from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import Goal, Phase, State
from elastic_trainer.testing.simulated_cluster import SimCluster


def cluster(capacity: int | None = None, begin: bool = True, **changes: Any) -> SimCluster:
    """A cluster whose run wants one to three workers, for ever; see `Goal` and `SimCluster`."""
    own = {k: changes.pop(k) for k in ("step_s", "fewest", "data_end") if k in changes}
    fields: dict[str, Any] = {
        "min_workers": 1,
        "max_workers": 3,
        "max_steps": 100_000,
        "eval_steps": 0,
        "save_steps": 0,
        "max_failures": 3,
        **changes,
    }
    sim = SimCluster(State(Goal(**fields)), segment_updates=4, **own)
    sim.capacity = sim.capacity if capacity is None else capacity
    if begin:
        sim.begin()
    return sim


def run(sim: SimCluster, updates: int = 10, stages: int | None = None) -> SimCluster:
    """Let it train so many more updates, with so many stages."""
    start = sim.state.committed
    sim.run_until(
        lambda: (
            sim.state.phase is Phase.RUNNING
            and sim.state.committed >= start + updates
            and (stages is None or len(names(sim)) == stages)
        )
    )
    return sim


def names(sim: SimCluster) -> list[str]:
    """Who holds a stage, in stage order."""
    assert sim.plan is not None
    return [stage.worker for stage in sim.plan.stages]


def phase(sim: SimCluster, *phases: Phase) -> None:
    sim.run_until(lambda: sim.state.phase in phases)


def newest(sim: SimCluster, kind: type[do.Instruction]) -> Any:
    return sim.orders(kind)[-1]
