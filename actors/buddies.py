"""Who keeps copies of whose snapshots. Pure."""

from collections.abc import Mapping, Sequence

from elastic_trainer.types import WorkerId


def choose_buddies(
    holders: Sequence[WorkerId], idle: Sequence[WorkerId], nodes: Mapping[WorkerId, str]
) -> dict[WorkerId, WorkerId | None]:
    """A buddy for each worker that holds a stage: on another node where there is one.

    Memory is spread: each keeps the copies of as few others as possible. Workers that hold nothing
    are taken where no other is on another node, or there is no other at all.

    Args:
        holders: workers with a stage, in stage order.
        idle: living workers without one.
        nodes: where each of them is.
    """
    load = dict.fromkeys([*holders, *idle], 0)
    chosen: dict[WorkerId, WorkerId | None] = {}
    for index, worker in enumerate(holders):
        others = [*holders[index + 1 :], *holders[:index]]
        apart = [w for w in (*others, *idle) if nodes.get(w) != nodes.get(worker)]
        candidates = apart or others or list(idle)
        buddy = min(candidates, key=lambda w: load[w], default=None)
        if buddy is not None:
            load[buddy] += 1
        chosen[worker] = buddy
    return chosen
