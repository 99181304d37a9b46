"""What must hold after each step of the elastic core, whatever happens around it."""

from collections.abc import Sequence

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.phase import Phase
from elastic_trainer.elastic.state import State
from elastic_trainer.types import Plan


class Rules:
    """Watches a `State` from outside.

    Args:
        state: the core.
        data_end: the last update for which there is data.
    """

    def __init__(self, state: State, data_end: int | None) -> None:
        self._state = state
        self._data_end = data_end
        self._evaluated: set[int] = set()
        self._least = state.goal.min_workers
        self._reported = ev.StockTaken(generation=-1, copies={}, nodes={})

    def handle(self, event: ev.Event, now: float) -> list[do.Instruction]:
        """Pass an event on, and check what comes of it."""
        state = self._state
        match event:
            case ev.StockTaken():
                self._reported = event
            case ev.EvaluationDone() if event.generation == state.generation:
                self._evaluated.add(event.update)
            case ev.ScaleRequested():
                self._least = min(self._least, event.min_workers, event.max_workers)
        generation, committed, saved = state.generation, state.committed, state.saved
        out = state.handle(event, now)
        assert state.generation >= generation
        assert saved <= state.saved <= state.committed
        made = [i for i in out if isinstance(i, do.Configure)]
        if state.committed < committed:
            assert made, "committed updates are given up without a new generation"
        for configure in made:
            self._check_configuration(configure, committed, saved)
        return out

    def _check_configuration(self, configure: do.Configure, committed: int, saved: int) -> None:
        state, plan = self._state, configure.plan
        held = {stage.worker for stage in plan.stages}
        assert len(held) >= min(self._least, state.goal.max_layers), "below the minimum"
        assert held <= set(state.workers), "a stage for a worker that is gone"
        sources = set(configure.sources.values()) - {do.STORAGE, do.INITIAL}
        assert sources <= set(state.workers), "a layer from a worker that is gone"
        assert configure.update == state.committed
        if plan.generation == self._reported.generation:
            assert configure.update == self._best(plan, committed, saved)
        if lost := committed - configure.update:
            assert f"{lost} committed updates are trained again" in configure.reason

    def _best(self, plan: Plan, committed: int, saved: int) -> int:
        """The newest state that is left."""
        stock = [c for w, c in self._reported.copies.items() if w in self._state.workers]
        whole = [saved]
        for update in range(committed + 1):
            held = {layer for copies in stock for layer in copies.get(update, ())}
            if held >= set(plan.layers):
                whole.append(update)
        return max(whole)

    def check_stop(self, instruction: do.StopWorkers, holders: Sequence[str]) -> None:
        """Nobody is dismissed who is needed."""
        state = self._state
        assert state.phase in (Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.WAITING)
        assert not set(instruction.workers) & set(state.workers)
        if state.phase is Phase.WAITING:
            assert state.saved == state.committed, "it holds what is nowhere else"
        else:
            assert not set(instruction.workers) & set(holders), "it holds a stage"

    def check_end(self, finish: do.Finish) -> None:
        """A run that has not failed has done all it was to do."""
        state, goal = self._state, self._state.goal
        if finish.status != "failed":
            assert finish.update == state.saved, "the end is not saved"
        if finish.status == "completed":
            end = min(e for e in (goal.max_steps, self._data_end) if e is not None)
            assert finish.update == state.committed == max(end, goal.start_update)
            due = range(goal.eval_steps, end, goal.eval_steps) if goal.eval_steps else ()
            missing = {u for u in due if u > goal.start_update} - self._evaluated
            assert not missing, f"never evaluated: {missing}"
