"""One checkpoint in the making: all stages copy and write their layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.handles import StageHandle
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.store import LayerFile
from elastic_trainer.types import Plan, WorkerId


class Save:
    """Asks the stages of a plan to write the state after an update, and hears them out.

    Args:
        generation: whose state it is.
        update: the update.
        plan: says which layers there are.
        stages: the workers that hold them.
        calls: where their answers are awaited.
        root: where checkpoints lie.
        writers: of incomplete checkpoints, who may be writing; kept up to date.
        ended: called once with the save and what went wrong, None if all is written.
    """

    def __init__(
        self,
        generation: int,
        update: int,
        plan: Plan,
        stages: Mapping[WorkerId, StageHandle],
        calls: Calls,
        root: str,
        writers: dict[int, set[WorkerId]],
        ended: Callable[["Save", str | None], None],
    ) -> None:
        self.generation = generation
        self.update = update
        self.files: list[LayerFile] = []
        self.facts: dict[str, Any] = {}  # what the manifest says besides layers
        self._plan = plan
        self._stages = stages
        self._calls = calls
        self._writers = writers
        self._ended = ended
        self._waiting = set(stages)
        self._problems: list[str] = []
        self.is_over = False
        self._writers[update] = set()
        for worker, handle in stages.items():
            self._await(worker, handle.save(generation, update, root), self._copied)

    def abandon(self) -> None:
        """Nobody wants it any more: nothing is reported."""
        self.is_over = True

    def _await(self, worker: WorkerId, call: Any, then: Callable[[WorkerId, Any], None]) -> None:
        self._calls.when(
            call,
            partial(then, worker),
            generation=self.generation,
            failed=partial(self._end, worker),
        )

    def _copied(self, worker: WorkerId, facts: Mapping[str, Any] | str) -> None:
        """A stage has copied its state, and writes it."""
        if isinstance(facts, str):
            self._end(worker, facts)
            return
        # It writes one update at a time: what it wrote before has ended.
        for writers in self._writers.values():
            writers.discard(worker)
        self._writers.setdefault(self.update, set()).add(worker)
        self.facts.update(facts)  # alike on every stage
        self._ask(worker)

    def _ask(self, worker: WorkerId) -> None:
        if not self.is_over:
            self._await(worker, self._stages[worker].saved(self.update), self._answered)

    def _answered(self, worker: WorkerId, progress: SaveProgress) -> None:
        if not progress.writing:
            self._writers.get(self.update, set()).discard(worker)
        self.files.extend(progress.files)
        if progress.writing and progress.problem is None:
            self._ask(worker)  # it may take as long as it needs, while it gets on
        else:
            self._end(worker, progress.problem)

    def _end(self, worker: WorkerId, problem: str | None) -> None:
        self._waiting.discard(worker)
        if problem is not None:
            self._problems.append(problem)
        if self._waiting or self.is_over:
            return
        self.is_over = True
        if missing := sorted(set(self._plan.layers) - {file.name for file in self.files}):
            names = ", ".join(missing)
            self._problems.append(f"no worker has written {names} of update {self.update}")
        self._ended(self, self._problems[0] if self._problems else None)
