"""Names of workers, and what an error that nobody raised on purpose says in one line."""

import re

from ray.exceptions import RayError, RayTaskError

from elastic_trainer.pipeline.failures import find_update
from elastic_trainer.types import Plan, WorkerId

_LONGEST = 300
_UNSERIALIZABLE = re.compile(r"^Exception (?:\S+\.)?(\w+) isn't serializable", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?:[^"]*/)?([^"/]+)", line (\d+)', re.MULTILINE)


def full_name(worker: WorkerId, plan: Plan | None, node_ip: str | None) -> str:
    """A worker with its stage and node, as far as they are known."""
    stages = plan.stages if plan is not None else ()
    place = [f"stage {s.stage}" for s in stages if s.worker == worker]
    if node_ip:
        place.append(f"node {node_ip}")
    return f"{worker} ({', '.join(place)})" if place else worker


def one_line(error: BaseException, where: str = "") -> str:
    """Type and message of what went wrong, and where, without Ray's traceback around it.

    Args:
        error: from a remote call, or any other.
        where: the worker, in words; the update is added if the traceback knows it.
    """
    name, message = _cause(error)
    text = f"{name}: {message}" if message else name + _last_frame(error)
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    place = " ".join(part for part in (where, find_update(str(error))) if part)
    return f"{text} on {place}" if place else text


def _cause(error: BaseException) -> tuple[str, str]:
    """Name and first line of the error that was raised on the worker."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    text = str(cause)
    if isinstance(cause, RayError) and (lost := _UNSERIALIZABLE.search(text)):
        # Ray could not send the error itself, only its traceback.
        said = re.findall(rf"^(?:[\w.]+\.)?{lost[1]}(?:: (.*))?$", text, re.MULTILINE)
        return lost[1], said[-1] if said else ""
    lines = (line.strip() for line in text.splitlines())
    return type(cause).__name__, next(filter(None, lines), "")


def _last_frame(error: BaseException) -> str:
    frames = _FRAME.findall(str(error))
    return f" in {frames[-1][0]}:{frames[-1][1]}" if frames else ""
