"""Recorded comings and goings of nodes, replayed on a run's workers. Pure.

A trace is a CSV file without a header: milliseconds since its start, `add` or `remove`, the node's
name. A run that has fewer workers than the trace has nodes takes the first nodes; the others wait,
as they do for a run that has all the workers it wants, and step in when one of these goes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

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

    A node that a worker stood on goes without notice: some worker is killed, chosen by the seed,
    and the run may not replace it before another node is there. The nodes of a trace are not those
    of the run, so which worker it is means nothing.
    """
    steps: list[Step] = []
    present: list[str] = []  # in the order of their coming: the first ones are used
    allowed = -1
    for change in changes:
        used = present[:most]
        num_killed = sum(node in used for node in change.removed)
        present = [node for node in present if node not in change.removed]
        present += change.added
        gone = ", ".join(change.removed)
        steps += [
            Step(
                what=Fault(kind=FaultKind.KILL),
                text=f"kill: {gone} removed",
                at_s=change.at_s,
                any_stage=True,
            )
            for _ in range(num_killed)
        ]
        now = min(most, max(fewest, len(present)))
        if now != allowed:
            allowed = now
            came = ", ".join(change.added)
            why = "; ".join(
                text for text in (came and f"{came} added", gone and f"{gone} removed") if text
            )
            steps.append(
                Step(
                    what=Scale(min_workers=fewest, max_workers=now),
                    text=f"scale {fewest}:{now}: {why}",
                    at_s=change.at_s,
                )
            )
    return steps
