"""A real run, seen through its folder, and the levers that its cluster gives."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_trainer.actors.handles import CoordinatorHandle, StageHandle
from elastic_trainer.config import load_config
from elastic_trainer.elastic.events import Cause
from elastic_trainer.errors import RunError
from elastic_trainer.observability.changes import NO_NEW_PLAN
from elastic_trainer.observability.lines import Follower
from elastic_trainer.observability.record import CONFIG_FILE, MEMBERSHIP_FILE, METRICS_FILE
from elastic_trainer.observability.runs import read_audit, read_plan, read_status
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.run.control import ANSWER_S, answer
from elastic_trainer.testing.chaos.verdict import Commit, Facts, Loss
from elastic_trainer.types import WorkerId

_LOSSES = {cause.value: cause for cause in Cause}


class FolderView:
    """What the run's folder tells, as of the last look."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._follow_updates = Follower(run_dir / METRICS_FILE)
        self._follow_history = Follower(run_dir / MEMBERSHIP_FILE)
        self._commits: dict[Commit, None] = {}
        self._losses: list[Loss] = []
        self._status: dict[str, Any] = {}
        self._plan: dict[str, Any] = {}

    def look(self) -> None:
        # In this order: who is missing in the status may still be in an older plan, not the other
        # way round.
        self._plan = read_plan(self._run_dir)
        self._status = read_status(self._run_dir)
        _, changes = self._follow_history.look()
        self._losses += [_loss(line) for line in changes if _is_loss(line)]
        _, updates = self._follow_updates.look()
        commits = (_commit(line) for line in updates)
        # Updates that are done again stay known from the first time, too.
        self._commits.update((commit, None) for commit in commits if commit not in self._commits)

    @property
    def state(self) -> str:
        return str(self._status["state"])

    @property
    def reason(self) -> str:
        return str(self._status.get("reason") or "")

    @property
    def stages(self) -> Mapping[int, WorkerId]:
        """Who has which stage; whoever is gone has none."""
        stages = self._plan.get("stages", ())
        return {s["stage"]: s["worker"] for s in stages if s["worker"] in self.nodes}

    @property
    def nodes(self) -> Mapping[WorkerId, str]:
        workers: Mapping[str, Any] = self._status.get("workers") or {}
        return {worker: facts["node"] for worker, facts in workers.items()}

    @property
    def commits(self) -> Sequence[Commit]:
        """In the order in which they were seen; an update may come again in a later generation."""
        return list(self._commits)

    @property
    def losses(self) -> Sequence[Loss]:
        return self._losses

    def facts(self, now: float, since: float) -> Facts:
        """What a verdict needs; losses before `since` are none of its business."""
        self.look()
        checked, problem = check_audit(self._run_dir)
        return Facts(
            state=self.state,
            reason=self.reason,
            now=now,
            losses=tuple(loss for loss in self.losses if loss.at >= since),
            commits=tuple(self.commits),
            audit=problem,
            num_audited=checked,
        )


def _commit(line: Mapping[str, Any]) -> Commit:
    return Commit(update=line["update"], generation=line["generation"], at=line["time"])


def _is_loss(line: Mapping[str, Any]) -> bool:
    return line["cause"] in _LOSSES and bool(line["worker"])


def _loss(line: Mapping[str, Any]) -> Loss:
    return Loss(
        worker=line["worker"],
        cause=_LOSSES[line["cause"]],
        at=line["time"],
        detect_s=line["detect_s"] or 0.0,
        commit_s=line["first_commit_s"],
        idle=line["outcome"] == NO_NEW_PLAN,
    )


class RayLevers:
    """Acts on the run in this folder, over the Ray connection that this process has."""

    def __init__(self, run_dir: Path, coordinator: CoordinatorHandle) -> None:
        self._run_dir = run_dir
        self._coordinator = coordinator

    def inject(self, worker: WorkerId, name: str, hooks: RuntimeHooks | None) -> None:
        try:
            handle = StageHandle.find(str(self._run_dir), worker)
        except ValueError as error:
            raise RunError(f"there is no worker {worker}") from error
        try:
            handle.inject(name, hooks).get(ANSWER_S)
        except TimeoutError as error:
            raise RunError(f"{worker} does not answer: {error}") from error

    def scale(self, fewest: int, most: int) -> None:
        answer(self._run_dir.name, self._coordinator.scale(fewest, most))

    def drain(self, node: str, deadline_s: float | None) -> None:
        answer(self._run_dir.name, self._coordinator.drain(node, deadline_s))


def check_audit(run_dir: Path) -> tuple[int, str]:
    """Compare the samples of every update with those that an undisturbed run reads.

    Returns:
        The number of updates compared, and what is wrong; empty if nothing is.
    """
    lines = read_audit(run_dir)
    if not lines:
        return 0, "the run keeps no audit of its samples"
    # Otherwise the same samples share microbatches with others, as stages turn out to be slow.
    is_frozen = load_config(run_dir / CONFIG_FILE).data.cost == "frozen"
    return compare_samples(lines, lambda: _expected(run_dir), packed_alike=is_frozen)


def compare_samples(
    lines: Sequence[Mapping[str, Any]],
    expected: Callable[[], Iterator[tuple[int, list[list[str]]]]],
    *,
    packed_alike: bool = True,
) -> tuple[int, str]:
    """The same, of lines of the audit and the samples of each update from the first one on.

    Args:
        packed_alike: whether these should also share the same microbatches.
    """

    def seen(samples: Sequence[Sequence[str]]) -> list[list[str]]:
        if packed_alike:
            return [list(ids) for ids in samples]
        return [sorted(sample for ids in samples for sample in ids)]

    numbers = [line["update"] for line in lines]
    if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return 0, "the audit has gaps or repeats"
    recorded = {line["update"]: seen(line["samples"]) for line in lines}
    checked = 0
    for update, samples in expected():
        if update > numbers[-1]:
            return checked, ""
        if update not in recorded:
            continue
        checked += 1
        if recorded[update] != seen(samples):
            return checked, f"update {update} has other samples than an undisturbed run"
    if checked < len(recorded):
        return checked, f"there are only {checked} updates in the data, and {len(recorded)} audited"
    return checked, ""


def _expected(run_dir: Path) -> Iterator[tuple[int, list[list[str]]]]:
    # Needed at the end only, and slow to import.
    from elastic_trainer.actors.loader import update_batch_size
    from elastic_trainer.data.batches import BatchStream
    from elastic_trainer.data.media.decoders import kept

    config = load_config(run_dir / CONFIG_FILE)
    size, epochs = update_batch_size(config), config.train.num_epochs
    stream = BatchStream(config, "train", size, None, first_update=1, num_epochs=epochs)
    with kept():
        for info, _ in stream:
            yield info.update, [list(m.sample_ids) for m in info.microbatches]
