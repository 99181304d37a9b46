"""What a failed segment says of itself, and a wait that cannot become one."""

import contextlib
import copy
import re
import threading
from collections.abc import Iterator

from elastic_trainer.errors import (
    ElasticTrainerError,
    FencedError,
    NonFiniteError,
    StallError,
)
from elastic_trainer.schedule.grid import format_grid
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import WorkerId


def explain(
    error: Exception, segment: Segment, stage: int, worker: WorkerId, index: int
) -> Exception:
    """The error that ended a segment, with the place in the schedule and the grid around it.

    Args:
        index: how many actions of its list the stage had done.
    """
    if isinstance(error, NonFiniteError | FencedError):
        return error  # they say themselves what happened, and the schedule had no part in it
    picture = (
        f"stage {stage} ({worker}) was at {place(segment, stage, index)}, in "
        f"segment {segment.index} of generation {segment.generation}\n"
        f"{format_grid(segment.actions, None, (stage, index))}"
    )
    if not isinstance(error, ElasticTrainerError):
        error.add_note(update_of(segment, stage, index))
        error.add_note(picture)
        return error
    told = copy.copy(error)  # an interruption may be raised on several threads
    told.hint = f"{error.hint}; {picture}" if error.hint else picture
    told.args = (told.what, told.hint, *error.args[2:])
    return told


def place(segment: Segment, stage: int, index: int) -> str:
    """The stage's action with this index, in words."""
    actions = segment.actions[stage]
    action = str(actions[index]) if index < len(actions) else "the end"
    return f"{action}, action {index + 1} of {len(actions)}"


def update_of(segment: Segment, stage: int, index: int) -> str:
    """`at update 7`: the update that the stage's action with this index works for."""
    if segment.kind == "eval":
        return "at an evaluation"
    actions = segment.actions[stage]
    if not actions:
        return f"at update {segment.last_update}"
    position, _ = segment.locate(actions[min(index, len(actions) - 1)].microbatch)
    return f"at update {segment.batches[position].update}"


def find_update(text: str) -> str:
    """What `explain` noted of the update in a traceback; empty where it did not."""
    found = re.search(r"^at (?:update \d+|an evaluation)$", text, re.MULTILINE)
    return found[0] if found else ""


@contextlib.contextmanager
def locked(lock: threading.Lock, timeout_s: float) -> Iterator[None]:
    """Hold `lock` inside, and wait for it no longer than `timeout_s`."""
    if not lock.acquire(timeout=timeout_s):
        raise StallError(
            f"the other stages of this process computed for {timeout_s:.1f} s without a pause"
        )
    try:
        yield
    finally:
        lock.release()
