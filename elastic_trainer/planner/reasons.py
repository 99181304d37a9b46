"""Says in sentences why a plan is what it is."""

from dataclasses import dataclass

from elastic_trainer.types import Prediction, WorkerId

Cuts = tuple[int, ...]
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Cuts, and what they would give."""

    cuts: Cuts
    predicted: Prediction


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was decided, what was given, and the best that was not taken."""

    schedule: str
    num_microbatches: int
    given_stages: bool
    given_cuts: bool
    balanced: bool
    workers: tuple[WorkerId, ...]
    limits: tuple[int | None, ...] | None
    commit_every: int | None
    best: Candidate
    second: Candidate | None


def explain(choice: Choice) -> tuple[str, ...]:
    """One sentence per decision: stages, cuts, runner-up, schedule, memory."""
    return (_stages(choice), _cuts(choice), _runner_up(choice), _schedule(choice), _memory(choice))


def format_bytes(count: float) -> str:
    """Bytes with a unit, three digits."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {_UNITS[-1]}"


def format_seconds(seconds: float) -> str:
    """Seconds with a unit, three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _stages(choice: Choice) -> str:
    num_stages = len(choice.best.cuts) + 1
    why = "one per worker"
    if choice.given_stages:
        why = "as pipeline.num_stages says"
    elif choice.given_cuts:
        why = "as pipeline.cuts says"
    idle = choice.workers[num_stages:]
    waste = f"; idle: {', '.join(idle)}" if idle else ""
    return f"{num_stages} stage{'s' * (num_stages > 1)}, {why}{waste}"


def _cuts(choice: Choice) -> str:
    if not choice.best.cuts:
        return "no cuts: one stage holds the whole model"
    busy = choice.best.predicted.stage_busy_s
    slowest = max(range(len(busy)), key=busy.__getitem__)
    per_microbatch = busy[slowest] / choice.num_microbatches
    if choice.given_cuts:
        why = "as pipeline.cuts says"
    elif choice.balanced:
        why = "balanced so that the slowest stage is as fast as can be"
    else:
        why = "faster when simulated than the most even cut"
    return (
        f"cuts before layers {list(choice.best.cuts)}, {why}: stage {slowest} is the slowest with "
        f"{format_seconds(per_microbatch)} per microbatch, the mean is "
        f"{format_seconds(sum(busy) / len(busy) / choice.num_microbatches)}"
    )


def _runner_up(choice: Choice) -> str:
    step_s = choice.best.predicted.step_s
    if choice.second is None:
        return f"predicted step {format_seconds(step_s)}; no other cut was worth comparing"
    other_s = choice.second.predicted.step_s
    slower = round(other_s / step_s - 1, 3) + 0.0 if step_s else 0.0  # + 0.0: never "-0.0%"
    return (
        f"predicted step {format_seconds(step_s)}; runner-up: cuts {list(choice.second.cuts)} with "
        f"{format_seconds(other_s)} ({slower:+.1%})"
    )


def _schedule(choice: Choice) -> str:
    idle = f"stages idle {choice.best.predicted.bubble_ratio:.1%} of the time"
    if choice.commit_every is not None:
        return f"{choice.schedule} drains every {choice.commit_every} updates: {idle}"
    return f"{choice.schedule} with {choice.num_microbatches} microbatches per batch: {idle}"


def _memory(choice: Choice) -> str:
    needs = choice.best.predicted.stage_memory_bytes
    largest = max(range(len(needs)), key=needs.__getitem__)
    limit = None if choice.limits is None else choice.limits[largest]
    of = "no limit known" if limit is None else f"of {format_bytes(limit)}"
    return (
        f"stage {largest} on {choice.workers[largest]} needs the most memory: "
        f"{format_bytes(needs[largest])}, {of}"
    )
