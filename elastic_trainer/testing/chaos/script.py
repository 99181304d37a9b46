"""What is to happen to a run, and when: one event per line. Pure.

    kill  stage=1                @update=30     # as soon as stage 1 comes to update 30
    hang  stage=any action=B     @update=60     # any: chosen by the seed
    stop  worker=stage-3         @time=12.5     # so many seconds after the start of the chaos
    drain node=10.0.0.3 deadline=20 @update=80  # once update 80 is committed
    scale workers=2:4            @update=+100   # that many updates after the start

Without a time an event is due at once. Kinds of faults and their words are those of
`elastic_trainer.testing.faults`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic_trainer.config import parse_workers
from elastic_trainer.errors import ConfigError
from elastic_trainer.testing.faults import LETHAL, Fault, FaultKind
from elastic_trainer.types import WorkerId

ANY = "any"
_SEPARATORS = re.compile(r"[\s,@]+")
_KINDS = [*FaultKind, "drain", "scale"]


@dataclass(frozen=True, kw_only=True)
class Drain:
    """A node is announced to leave: named, or the one of a stage or worker."""

    node: str | None = None
    stage: int | None = None
    worker: WorkerId | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Other limits on the number of workers."""

    min_workers: int
    max_workers: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One event.

    Attributes:
        text: as it was written.
        at_s: seconds after the start at which it is due.
        at_update: committed update at which it is due; of a fault, the update of its address.
        worker: a fault of this worker, whichever stage it has.
        any_stage: a fault of some stage.
        relative: updates count from the start of the chaos.
    """

    what: Fault | Drain | Scale
    text: str
    at_s: float | None = None
    at_update: int | None = None
    worker: WorkerId | None = None
    any_stage: bool = False
    relative: bool = False

    @property
    def lethal(self) -> bool:
        """Whether a worker must be replaced after it."""
        return (
            isinstance(self.what, Fault) and self.what.kind in LETHAL and self.what.seconds is None
        )


def parse_step(text: str) -> Step:
    """An event from its text.

    Raises:
        ConfigError: saying which word is wrong.
    """
    kind, *words = [word for word in _SEPARATORS.split(text) if word] or [""]
    if kind not in _KINDS:
        raise ConfigError(f"`{kind}` is no event", f"Events are {', '.join(_KINDS)}.")
    at_s, words = _take_time(words)
    relative = any(word.startswith("update=+") for word in words)
    words = [word.replace("update=+", "update=", 1) for word in words]
    if kind in ("drain", "scale"):
        update, words = _take_update(words)
        what = _drain(words) if kind == "drain" else _scale(words)
        step = Step(what=what, text=text.strip(), at_s=at_s, at_update=update)
    else:
        step = _fault_step(kind, words, text.strip(), at_s)
    return replace(step, relative=relative)


def parse_script(text: str, name: str = "the script") -> list[Step]:
    """The events of a script, in its order; what follows a # is a comment.

    Raises:
        ConfigError: with the number of the wrong line.
    """
    steps = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        try:
            steps.append(parse_step(line))
        except ConfigError as error:
            raise ConfigError(f"{name}, line {number}: {error.what}", error.hint) from error
    if not steps:
        raise ConfigError(f"{name} holds no event", "Write one per line: kill stage=1 @update=30")
    return steps


def count_from(steps: Sequence[Step], update: int) -> list[Step]:
    """The steps with all their updates absolute; relative ones count from `update`."""
    return [_shifted(step, update) if step.relative else step for step in steps]


def _shifted(step: Step, by: int) -> Step:
    what = step.what
    if isinstance(what, Fault) and what.updates is not None:
        first, last = what.updates
        what = replace(what, updates=(first + by, None if last is None else last + by))
    due = None if step.at_update is None else step.at_update + by
    return replace(step, what=what, at_update=due, relative=False)


def check_steps(
    steps: Sequence[Step], *, update: int, total: int, nodes: Mapping[WorkerId, str]
) -> None:
    """Refuse what cannot happen in a run as it stands.

    Args:
        update: newest committed update.
        total: update at which the run ends.
        nodes: workers, and where they are.

    Raises:
        ConfigError: naming the step.
    """
    for step in steps:
        due = step.at_update
        if due is not None and due <= update and isinstance(step.what, Fault):
            raise ConfigError(f"`{step.text}`: the run is at update {update} already")
        if due is not None and due > total:
            raise ConfigError(f"`{step.text}`: the run ends at update {total}")
        worker = step.what.worker if isinstance(step.what, Drain) else step.worker
        if worker is not None and worker not in nodes:
            known = ", ".join(sorted(nodes)) or "none yet"
            raise ConfigError(f"`{step.text}`: there is no worker {worker}", f"Workers: {known}.")
        node = step.what.node if isinstance(step.what, Drain) else None
        if node is not None and node not in nodes.values():
            known = ", ".join(sorted(set(nodes.values()))) or "none yet"
            raise ConfigError(f"`{step.text}`: the run has no worker on {node}", f"Nodes: {known}.")


def _fault_step(kind: str, words: list[str], text: str, at_s: float | None) -> Step:
    rest, worker, any_stage = [], None, False
    for word in words:
        if word.startswith("worker="):
            worker = word.partition("=")[2]
        elif word == f"stage={ANY}":
            any_stage = True
        else:
            rest.append(word)
    fault = Fault.parse(" ".join([kind, *rest]))
    if worker is not None and (any_stage or fault.stage is not None):
        raise ConfigError("a fault has a stage or a worker, not both")
    if worker is None and not any_stage and fault.stage is None:
        raise ConfigError(f"{kind} of what?", "Add stage=NUMBER, stage=any or worker=NAME.")
    first = fault.updates[0] if fault.updates else None
    return Step(
        what=fault, text=text, at_s=at_s, at_update=first, worker=worker, any_stage=any_stage
    )


def _take_time(words: list[str]) -> tuple[float | None, list[str]]:
    text, words = _take("time", words)
    if text is None:
        return None, words
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(f"`time={text}` cannot be read", "Write seconds: time=12.5.")
    if any(word.startswith("update=") for word in words):
        raise ConfigError("an event is due at a time or at an update, not both")
    return seconds, words


def _take_update(words: list[str]) -> tuple[int | None, list[str]]:
    text, words = _take("update", words)
    if text is None:
        return None, words
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"`update={text}` cannot be read", "Write update=30.")
    return int(text), words


def _take(key: str, words: list[str]) -> tuple[str | None, list[str]]:
    """The value of `key` and the other words."""
    found = [word.partition("=")[2] for word in words if word.startswith(f"{key}=")]
    if len(found) > 1:
        raise ConfigError(f"{key} is said twice")
    return (found[0] if found else None), [w for w in words if not w.startswith(f"{key}=")]


def _drain(words: list[str]) -> Drain:
    deadline, words = _take("deadline", words)
    seconds = None
    if deadline is not None:
        try:
            seconds = float(deadline.removesuffix("s"))
        except ValueError:
            seconds = math.nan
        if not 0 <= seconds < math.inf:
            raise ConfigError(
                f"`deadline={deadline}` cannot be read", "Write seconds: deadline=20."
            )
    if len(words) != 1:
        raise ConfigError(
            f"drain what? `{' '.join(words)}`", "Write one of node=IP, stage=NUMBER, worker=NAME."
        )
    key, _, value = words[0].partition("=")
    match key:
        case "node" if value:
            return Drain(node=value, deadline_s=seconds)
        case "worker" if value:
            return Drain(worker=value, deadline_s=seconds)
        case "stage" if value.isdecimal():
            return Drain(stage=int(value), deadline_s=seconds)
    raise ConfigError(
        f"`{words[0]}` cannot be drained", "Write one of node=IP, stage=NUMBER, worker=NAME."
    )


def _scale(words: list[str]) -> Scale:
    if len(words) != 1:
        raise ConfigError(f"scale to what? `{' '.join(words)}`", "Write workers=4 or workers=2:6.")
    key, _, value = words[0].rpartition("=")
    if key not in ("", "workers"):
        raise ConfigError(f"scale has no `{key}`", "Write workers=4 or workers=2:6.")
    fewest, most = parse_workers(value)
    return Scale(min_workers=fewest, max_workers=most)
