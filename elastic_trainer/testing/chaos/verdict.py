"""Whether a run took what was done to it as it should. Pure: facts in, verdict out."""

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_trainer.elastic.events import Cause
from elastic_trainer.testing.chaos.script import Drain, Step
from elastic_trainer.testing.faults import Fault
from elastic_trainer.types import WorkerId

FAILURES = frozenset({Cause.CRASHED, Cause.LEASE_EXPIRED, Cause.WEDGED})
ENDED_WELL = ("completed", "stopped")


@dataclass(frozen=True, kw_only=True)
class Done:
    """A step, and what was done of it.

    Attributes:
        workers: whom it hit; empty for a change of scale.
        at: when; of a fault that waits for its update, when it was last placed on a worker.
        problem: why it did not happen; empty if it did.
    """

    step: Step
    workers: tuple[WorkerId, ...] = ()
    at: float = 0.0
    problem: str = ""

    @property
    def deadly(self) -> bool:
        """Whether the workers must be gone after it."""
        return not self.problem and (self.step.lethal or isinstance(self.step.what, Drain))


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A worker that the run has lost or let go, as its history tells.

    Attributes:
        at: when the run found out.
        detect_s: how long that took, as far as the run knows.
        commit_s: how long it then took until an update was committed again, if the run tells.
        idle: it held no stage, so that nothing had to change.
    """

    worker: WorkerId
    cause: Cause
    at: float
    detect_s: float = 0.0
    commit_s: float | None = None
    idle: bool = False


@dataclass(frozen=True, kw_only=True)
class Commit:
    """An update that all stages hold, and in which generation that came about."""

    update: int
    generation: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of the run in the end.

    Attributes:
        audit: what is wrong with the samples; empty if each was read exactly as often as it should.
        num_audited: updates whose samples were compared.
    """

    state: str
    reason: str
    now: float
    losses: tuple[Loss, ...]
    commits: tuple[Commit, ...]
    audit: str
    num_audited: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One step in the verdict. `recovery_s`: from the fault to the next committed update."""

    text: str
    workers: tuple[WorkerId, ...]
    found: str
    recovery_s: float | None
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The rows, and what is wrong with the run as a whole."""

    rows: tuple[Row, ...]
    state: str
    update: int
    num_audited: int
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems and all(row.passed for row in self.rows)


def judge(done: Sequence[Done], facts: Facts, limit_s: float) -> Verdict:
    """The verdict. `limit_s`: from a fault to the next committed update."""
    losses = _explain(done, facts)
    rows = [_row(one, losses[index], facts, limit_s) for index, one in enumerate(done)]
    explained = {loss for of_one in losses.values() for loss in of_one}
    problems = [_standstill(done, facts, limit_s), facts.audit]
    for loss in facts.losses:
        if loss.cause in FAILURES and loss not in explained:
            problems.append(
                f"{loss.worker} was blamed ({_words(loss.cause)}), and nothing was done to it"
            )
    return Verdict(
        rows=tuple(rows),
        state=facts.state,
        update=max((commit.update for commit in facts.commits), default=0),
        num_audited=facts.num_audited,
        problems=tuple(problem for problem in problems if problem),
    )


def recovered_at(one: Done, losses: Sequence[Loss], commits: Sequence[Commit]) -> float | None:
    """When the run went on after a step; None: it has not, yet."""
    if losses:
        told = [loss.at + loss.commit_s for loss in losses if loss.commit_s is not None]
        if len(told) == len(losses):
            return max(told)
        last = max(loss.at for loss in losses)
        # A segment that was complete before the loss may be told later.
        old = max((c.generation for c in commits if c.at <= last), default=0)
        if all(loss.idle for loss in losses):
            old = -1
        after = [c.at for c in commits if c.at > last and c.generation > old]
    elif isinstance(one.step.what, Fault) and one.step.at_update is not None:
        after = [c.at for c in commits if c.update >= one.step.at_update]
    else:
        after = [c.at for c in commits if c.at > one.at]
    return min(after, default=None)


def _explain(done: Sequence[Done], facts: Facts) -> dict[int, list[Loss]]:
    """The losses that each step accounts for: of the workers that it hit, after it.

    What must cost a worker goes first; that another fault did so, too, is then out of question.
    """
    found: dict[int, list[Loss]] = {}
    left = list(facts.losses)
    for index in sorted(range(len(done)), key=lambda i: not done[i].deadly):
        one = done[index]
        found[index] = [
            loss
            for loss in left
            if loss.worker in one.workers
            and loss.at >= one.at
            and not one.problem
            and (loss.cause in FAILURES or isinstance(one.step.what, Drain))
        ]
        left = [loss for loss in left if loss not in found[index]]
    return found


def _row(one: Done, losses: Sequence[Loss], facts: Facts, limit_s: float) -> Row:
    end = None if one.problem else recovered_at(one, losses, facts.commits)
    recovery_s = None if end is None else max(0.0, _took(one, losses, facts.commits, end))
    found = ", ".join(f"{loss.worker} {_words(loss.cause)}" for loss in losses)
    return Row(
        text=one.step.text,
        workers=one.workers,
        found=found,
        recovery_s=recovery_s,
        problem=_problem(one, losses, facts, recovery_s, limit_s),
    )


def _problem(
    one: Done, losses: Sequence[Loss], facts: Facts, recovery_s: float | None, limit_s: float
) -> str:
    if one.problem:
        return f"did not happen: {one.problem}"
    who = ", ".join(one.workers)
    if one.step.lethal and not losses:
        return f"{who} was not found guilty"
    if isinstance(one.step.what, Drain):
        blamed = [loss for loss in losses if loss.cause in FAILURES]
        if blamed:
            return f"{blamed[0].worker} was announced to leave, and counted as a failure"
        if not losses and facts.state not in ENDED_WELL:
            return f"{who} has not left"
    if recovery_s is None:
        if facts.state in ENDED_WELL:
            return ""
        return f"no update committed after it: {facts.state}"
    if recovery_s > limit_s:
        return f"{recovery_s:.1f} s to the next committed update, more than {limit_s:g} s"
    return ""


def _took(one: Done, losses: Sequence[Loss], commits: Sequence[Commit], end: float) -> float:
    """Seconds until the run went on at `end`.

    When a fault happened that waited for its update is known from the losses. Without them it is
    the wait for that update, or for what had to be done again before it.
    """
    due = one.step.at_update
    if due is None or not isinstance(one.step.what, Fault):
        return end - one.at
    if losses:
        return end - min(loss.at - loss.detect_s for loss in losses)
    reached = next(c for c in commits if c.at == end)
    began = [c.at for c in commits if c.update < due and c.at < end]
    took = end - max(began, default=one.at)
    before = [c.at for c in commits if c.generation < reached.generation]
    again = [c.at for c in commits if c.generation == reached.generation]
    return max(took, min(again) - max(before)) if before else took


def _standstill(done: Sequence[Done], facts: Facts, limit_s: float) -> str:
    """Why the run counts as neither completed nor going on; empty if it does."""
    if facts.state in ENDED_WELL:
        return ""
    if facts.state in ("failed", "interrupted", "not responding"):
        return (
            f"the run {facts.state}: {facts.reason}" if facts.reason else f"the run {facts.state}"
        )
    last = max((commit.at for commit in facts.commits), default=None)
    if last is None:
        return "no update was committed"
    since_s = facts.now - last
    if since_s > limit_s:
        return f"no update committed for {since_s:.0f} s: {facts.state}, {facts.reason}"
    return ""


def _words(cause: Cause) -> str:
    return cause.value.replace("_", " ")
