"""When updates were committed, and how long a run was held up. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Commit:
    """An update in the metrics file.

    `seen_at`: when its line was found there, to tell what a reader of the file waits for;
    `time`: when its work was done, as the line says. Both by the calendar's clock.
    """

    update: int
    generation: int
    time: float
    seen_at: float


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Seconds from a loss to the next update that was committed without the lost, and to the first
    that had not been committed before it."""

    commit_s: float
    regained_s: float


def recovery(commits: Sequence[Commit], at: float) -> Recovery | None:
    """What a loss at the time `at` has cost; None as long as it is not regained.

    What the lost worker had taken part in may be committed after its end. That is no recovery, so
    only updates of a later generation count.
    """
    before = [c for c in commits if c.seen_at <= at]
    if not before:
        raise ValueError("nothing was committed before the loss")
    generation, newest = before[-1].generation, max(c.update for c in before)
    after = [c for c in commits if c.seen_at > at and c.generation > generation]
    regained = next((c for c in after if c.update > newest), None)
    if regained is None:
        return None
    return Recovery(commit_s=after[0].seen_at - at, regained_s=regained.seen_at - at)


def pause_s(commits: Sequence[Commit], since: float, usual: int) -> float | None:
    """By how much the longest gap between two updates, around the change of generation after
    `since`, exceeds the usual one; None as long as `usual` updates have not followed the change.

    Looks from the last two updates of the old generation to the first of the new one and the
    `usual` ones after it: what comes before, such as a newcomer's start on the same machine, is no
    pause. The usual gap is the median of those after it, as their step is the one that goes on.
    """
    old = [c for c in commits if c.time <= since]
    if not old:
        raise ValueError("nothing was committed before the change")
    generation = old[-1].generation
    first = next((i for i, c in enumerate(commits) if c.generation > generation), None)
    if first is None or len(commits) <= first + usual:
        return None
    found = gaps(commits[max(0, first - 2) : first + usual + 1])
    return max(found) - statistics.median(found[-usual:])


def gaps(commits: Sequence[Commit]) -> list[float]:
    """Seconds between each update and the next."""
    times = [c.time for c in commits]
    return [after - before for before, after in zip(times, times[1:], strict=False)]
