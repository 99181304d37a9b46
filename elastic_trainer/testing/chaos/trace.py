"""Recorded comings and goings of nodes, replayed on a run's workers. Pure.

A trace is a CSV file without a header: milliseconds since its start, `add` or `remove`, the node's
name. Where a trace has more nodes than a run may have workers, several nodes stand for a worker.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from elastic_trainer.errors import ConfigError
from elastic_trainer.testing.chaos.script import Scale, Step
from elastic_trainer.testing.faults import Fault, FaultKind

_LIKE = "Write milliseconds,add|remove,node: 61000,add,node7"


@dataclass(frozen=True, kw_only=True)
class Change:
    """What happened at one instant of a trace."""

    at_s: float
    added: tuple[str, ...]
    removed: tuple[str, ...]


def parse_trace(text: str, name: str = "the trace") -> list[Change]:
    """The changes of a trace, those of one instant together.

    Raises:
        ConfigError: with the number of the wrong line.
    """
    changes: list[Change] = []
    present: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            at_s, action, node = _parse_line(line)
            if changes and at_s < changes[-1].at_s:
                raise ConfigError("time goes backwards")
            if (action == "add") == (node in present):
                is_there = "is there already" if action == "add" else "is not there"
                raise ConfigError(f"{node} {is_there}")
        except ConfigError as error:
            raise ConfigError(f"{name}, line {number}: {error.what}", error.hint) from error
        if not changes or changes[-1].at_s != at_s:
            changes.append(Change(at_s=at_s, added=(), removed=()))
        changes[-1] = _extended(changes[-1], action, node)
        present.symmetric_difference_update({node})
    if not changes:
        raise ConfigError(f"{name} holds no event", _LIKE)
    return changes


def _extended(change: Change, action: str, node: str) -> Change:
    """With one more node; one that comes and goes at the same instant was never there."""
    if action == "add":
        return replace(change, added=(*change.added, node))
    if node in change.added:
        return replace(change, added=tuple(other for other in change.added if other != node))
    return replace(change, removed=(*change.removed, node))


def _parse_line(line: str) -> tuple[float, str, str]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != 3 or not cells[2]:
        raise ConfigError(f"`{line}` has not three columns", _LIKE)
    at, action, node = cells
    if not at.isdecimal():
        raise ConfigError(f"`{at}` is no number of milliseconds", _LIKE)
    if action not in ("add", "remove"):
        raise ConfigError(f"`{action}` is neither add nor remove", _LIKE)
    return int(at) / 1000, action, node


def compress(changes: Sequence[Change], speedup: float) -> list[Change]:
    """The same with all times divided by `speedup`, from the first change on."""
    if not 0 < speedup < math.inf:
        raise ConfigError(f"--speedup is {speedup}", "Give a number above 0.")
    began = changes[0].at_s if changes else 0.0
    return [
        Change(at_s=(c.at_s - began) / speedup, added=c.added, removed=c.removed) for c in changes
    ]


def trace_steps(changes: Sequence[Change], fewest: int, most: int) -> list[Step]:
    """What to do to a run of `fewest` to `most` workers, so that it sees the trace.

    Nodes go without notice: so many workers are killed, chosen by the seed, and the run may not
    replace them before nodes are there again. The nodes of a trace are not those of the run, so
    which worker it is means nothing.
    """
    peak = max(accumulate(len(c.added) - len(c.removed) for c in changes), default=0)

    def workers(num_nodes: int) -> int:
        share = num_nodes if peak <= most else round(num_nodes * most / peak)
        return min(most, max(fewest, share))

    steps: list[Step] = []
    num_nodes, allowed = 0, -1
    for change in changes:
        left = num_nodes - len(change.removed)
        num_nodes = left + len(change.added)
        why = _words(change)
        steps += [
            Step(
                what=Fault(kind=FaultKind.KILL),
                text=f"kill: {why}",
                at_s=change.at_s,
                any_stage=True,
            )
            for _ in range(allowed - workers(left))
        ]
        if workers(num_nodes) != allowed:
            allowed = workers(num_nodes)
            steps.append(
                Step(
                    what=Scale(min_workers=fewest, max_workers=allowed),
                    text=f"scale {fewest}:{allowed}: {why}",
                    at_s=change.at_s,
                )
            )
    return steps


def _words(change: Change) -> str:
    came, went = ", ".join(change.added), ", ".join(change.removed)
    return "; ".join(
        text for text in (came and f"{came} added", went and f"{went} removed") if text
    )
