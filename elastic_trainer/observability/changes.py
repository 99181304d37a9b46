"""A change of the membership: what happened, who was guilty, and what it took to go on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from elastic_trainer.elastic.events import Cause
from elastic_trainer.observability.progress import format_bytes
from elastic_trainer.types import Plan

START = "start"
RESUMED = "resumed"  # the first generation of a trainer that goes on from a checkpoint
JOINED = "joined"
SCALED_UP = "scaled_up"
DISTURBED = "disturbed"  # the work broke off, though nobody is known to be lost
LOADER_LOST = "loader_lost"
TAKEN_OVER = "taken_over"  # the coordinator was replaced
CAUSES = (*Cause, START, RESUMED, JOINED, SCALED_UP, DISTURBED, LOADER_LOST, TAKEN_OVER)
UNPLANNED = frozenset(
    {Cause.CRASHED, Cause.LEASE_EXPIRED, Cause.WEDGED, DISTURBED, LOADER_LOST, TAKEN_OVER}
)

COMMITTED = "committed"  # updates are committed with what came of it
NO_NEW_PLAN = "no_new_plan"  # the plan stands: nobody with a stage was concerned
REFUSED = "refused"  # a new plan would not have paid
UNFINISHED = "unfinished"  # the run ended before

SOURCES = ("own", "peer", "snapshot", "storage")  # where a layer's state was


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One change of the membership, as a line of membership.jsonl has it.

    `update` was committed when it became known, `restored_update` is where it was gone on from.
    What several changes led to together is counted with the first of them.

    Seconds, None where it did not come to it: `detect_s` from the guilty worker's last sign of
    life, or of work if it was wedged, until its loss was known: the most that it can have been
    dead. `first_commit_s` from the change being known until an update was committed again; in it
    are `wait_s` for workers to plan with, and of a planned change for the commit point, `plan_s`
    for the plan, and `transfer_s` until all workers held their layers.
    """

    time: float
    cause: str
    reason: str
    update: int
    workers_before: int
    workers_after: int
    worker: str = ""
    stage: int | None = None
    node: str = ""
    outcome: str = UNFINISHED
    note: str = ""
    generation: int | None = None
    restored_update: int | None = None
    detect_s: float | None = None
    wait_s: float | None = None
    plan_s: float | None = None
    transfer_s: float | None = None
    first_commit_s: float | None = None
    updates_replayed: int = 0
    samples_reread: int = 0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    stages: tuple[Mapping[str, Any], ...] = ()


def stages_of(plan: Plan, nodes: Mapping[str, str]) -> tuple[Mapping[str, Any], ...]:
    """Who holds what, JSON-able.

    Args:
        nodes: the node of each worker.
    """
    return tuple(
        {
            "stage": stage.stage,
            "worker": stage.worker,
            "node": nodes.get(stage.worker, ""),
            "first": stage.first,
            "stop": stage.stop,
            "layers": [plan.layers[stage.first], plan.layers[stage.stop - 1]],
        }
        for stage in plan.stages
    )


def headline(change: Mapping[str, Any]) -> str:
    """What happened, to whom, and what became of the workers."""
    when = datetime.fromtimestamp(change["time"]).strftime("%Y-%m-%d %H:%M:%S")
    before, after = change["workers_before"], change["workers_after"]
    text = f"{when}  {change['cause']}"
    if change["worker"]:
        text += f" {full_name(change)}"
    if change["generation"] is not None:
        text += f", generation {change['generation']}"
    text += f", at update {change['update']}"
    text += f": {before} → {after} workers" if before != after else f": {after} workers"
    if change["outcome"] != COMMITTED:
        text += f", {change['outcome'].replace('_', ' ')}"
    return text


def full_name(change: Mapping[str, Any]) -> str:
    """The worker with its stage and node, as in the log."""
    place = [] if change["stage"] is None else [f"stage {change['stage']}"]
    place += [f"node {change['node']}"] if change["node"] else []
    return f"{change['worker']} ({', '.join(place)})" if place else str(change["worker"])


def costs(change: Mapping[str, Any]) -> str:
    """What it took; empty if nothing is known."""
    words = {
        "detect_s": "detected after",
        "wait_s": "waited",
        "plan_s": "planned in",
        "transfer_s": "transferred in",
        "first_commit_s": "committed after",
    }
    known = {key: change[key] for key in words if change[key] is not None}
    if not known.get("wait_s"):
        known.pop("wait_s", None)
    parts = [f"{words[key]} {seconds:.2f} s" for key, seconds in known.items()]
    if change["updates_replayed"] or change["samples_reread"]:
        parts.append(
            f"{change['updates_replayed']} updates trained again from update "
            f"{change['restored_update']}, {change['samples_reread']} samples read again"
        )
    return ", ".join([*parts, *moved(change["moved_bytes"])])


def moved(num_bytes: Mapping[str, int]) -> list[str]:
    """Bytes by where they were."""
    where = {"own": "own memory", "peer": "peers", "snapshot": "snapshots", "storage": "storage"}
    known = [(where[source], num_bytes.get(source, 0)) for source in SOURCES]
    return [f"{format_bytes(amount)} from {name}" for name, amount in known if amount]


def seats(change: Mapping[str, Any]) -> list[str]:
    """The plan that came of it, a line per stage."""
    lines = []
    for stage in change["stages"]:
        first, last = stage["layers"]
        count = stage["stop"] - stage["first"]
        span = first if count == 1 else f"{first} … {last} ({count})"
        node = f" on {stage['node']}" if stage["node"] else ""
        lines.append(f"stage {stage['stage']}: {stage['worker']}{node}: {span}")
    return lines
