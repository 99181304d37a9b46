"""Plays a script on a run: watches its folder, pulls the levers, waits until it has recovered."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from elastic_trainer.errors import ConfigError, ElasticTrainerError, WorkerLostError
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.testing.chaos.script import Drain, Scale, Step
from elastic_trainer.testing.chaos.verdict import FAILURES, Commit, Done, Loss, recovered_at
from elastic_trainer.testing.faults import Fault, Injector
from elastic_trainer.types import WorkerId

LOOK_S = 0.05
ENDED = ("completed", "stopped", "failed", "interrupted")


class View(Protocol):
    """What can be seen of a run."""

    def look(self) -> None:
        """Read what is new."""

    @property
    def state(self) -> str: ...

    @property
    def stages(self) -> Mapping[int, WorkerId]:
        """Who has which stage."""

    @property
    def nodes(self) -> Mapping[WorkerId, str]:
        """Where the workers are."""

    @property
    def commits(self) -> Sequence[Commit]: ...

    @property
    def losses(self) -> Sequence[Loss]: ...


class Levers(Protocol):
    """What can be done to a run."""

    def inject(self, worker: WorkerId, name: str, hooks: RuntimeHooks | None) -> None: ...

    def scale(self, fewest: int, most: int) -> None: ...

    def drain(self, node: str, deadline_s: float | None) -> None: ...


class Player:
    """Does the steps when they are due.

    A fault that waits for its update lies on one worker at a time, the one with its stage. When the
    plan changes before, it moves; when that worker is gone, the run's history must first tell why,
    since the fault may have happened, and must not happen again in the replay.

    Args:
        patience_s: how long to wait for the run to go on after a step.
        tell: is told what was done.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        view: View,
        levers: Levers,
        *,
        seed: int,
        patience_s: float,
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._steps = dict(enumerate(steps))
        self._view = view
        self._levers = levers
        self._seed = seed
        self._patience_s = patience_s
        self._tell = tell
        self._clock = clock
        self._sleep = sleep
        self._armed: dict[int, Done] = {}
        self._done: dict[int, Done] = {}

    def play(self) -> list[Done]:
        """Until all steps are done and the run has gone on after each, or will not."""
        began = self._clock()
        while True:
            self._view.look()
            self._settle()
            self._act(self._clock() - began)
            if self._is_over():
                break
            self._sleep(LOOK_S)
        for index, step in self._steps.items():
            if index not in self._done:
                self._done[index] = Done(step=step, problem=self._why_not(step))
        return [self._done[index] for index in self._steps]

    @property
    def _update(self) -> int:
        commits = self._view.commits
        return commits[-1].update if commits else 0

    def _act(self, elapsed_s: float) -> None:
        for index, step in self._steps.items():
            if index in self._done:
                continue
            if isinstance(step.what, Fault) and step.at_update is not None:
                self._arm(index, step)
            elif elapsed_s >= (step.at_s or 0.0) and self._update >= (step.at_update or 0):
                self._do(index, step)

    def _do(self, index: int, step: Step) -> None:
        """Do what is due now; what the run refuses is a problem of the step."""
        done = Done(step=step, at=self._clock())
        try:
            match step.what:
                case Scale(min_workers=fewest, max_workers=most):
                    self._levers.scale(fewest, most)
                case Drain():
                    node = self._node(step.what)
                    there = [w for w, where in self._view.nodes.items() if where == node]
                    done = replace(done, workers=tuple(sorted(there)))
                    self._levers.drain(node, step.what.deadline_s)
                case Fault():
                    worker = self._target(index, step)
                    if worker is None:
                        return
                    done = replace(done, workers=(worker,))
                    self._inject(index, worker, step)
        except ElasticTrainerError as error:
            done = replace(done, problem=str(error))
        self._done[index] = done
        whom = f" ({', '.join(done.workers)})" if done.workers else ""
        self._tell(f"{step.text}{whom}{f': {done.problem}' if done.problem else ''}")

    def _arm(self, index: int, step: Step) -> None:
        """Place a fault on the worker that has its stage now."""
        worker = self._target(index, step)
        armed = self._armed.get(index)
        if worker is None or (armed is not None and armed.workers == (worker,)):
            return
        assert isinstance(step.what, Fault)
        try:
            if armed is not None:
                if armed.workers[0] not in self._view.nodes:
                    return
                self._levers.inject(armed.workers[0], _name(index), None)
            at = self._clock()
            self._inject(index, worker, step)
        except ElasticTrainerError:
            return  # the worker is going: another one will have the stage
        self._armed[index] = Done(step=step, workers=(worker,), at=at)
        self._tell(f"{step.text}: waits on {worker}")

    def _inject(self, index: int, worker: WorkerId, step: Step) -> None:
        assert isinstance(step.what, Fault)
        # The worker is the address; whichever stage it comes to have.
        here = replace(step.what, stage=None)
        hooks = Injector(here, seed=self._seed).hooks
        try:
            self._levers.inject(worker, _name(index), hooks)
        except WorkerLostError:
            # Its end may come before its answer. Whether it was this, the run's history tells.
            if not step.lethal:
                raise

    def _settle(self) -> None:
        """Faults that waited for their update: has it come?"""
        elsewhere = self._harmed()
        lost = {loss.worker: loss.cause in FAILURES for loss in self._view.losses}
        gone = {worker for worker, failed in lost.items() if failed} - elsewhere
        by_update = sorted(self._armed.items(), key=lambda item: item[1].step.at_update or 0)
        for index, done in by_update:
            step, (worker,) = done.step, done.workers
            assert isinstance(step.what, Fault) and step.what.updates is not None
            first, last = step.what.updates
            if worker in gone:
                gone.remove(worker)  # others on the same worker were not due, and move
                self._settled(index, done, f"has happened ({worker} is gone)")
            elif worker in lost:
                del self._armed[index]  # it went for another reason, or by another fault
            elif not step.lethal and self._update >= first:
                self._settled(index, done, "has happened")
            elif last is not None and self._update > last and worker in self._view.nodes:
                problem = f"update {last} went by without that action, or before it was in place"
                self._settled(index, replace(done, problem=problem), problem)

    def _harmed(self) -> set[WorkerId]:
        """Workers that are going, or gone, by what was done to them."""
        deadly = [done for done in self._done.values() if done.deadly]
        return {worker for done in deadly for worker in done.workers}

    def _settled(self, index: int, done: Done, how: str) -> None:
        del self._armed[index]
        self._done[index] = done
        self._tell(f"{done.step.text}: {how}")

    def _target(self, index: int, step: Step) -> WorkerId | None:
        """Whom a fault hits; None: nobody, yet."""
        if step.worker is not None:
            return step.worker
        assert isinstance(step.what, Fault)
        if not step.any_stage:
            return self._view.stages.get(step.what.stage if step.what.stage is not None else -1)
        armed = self._armed.get(index)
        if armed is not None and armed.workers[0] in self._view.stages.values():
            return armed.workers[0]
        harmed = self._harmed()
        free = [worker for _, worker in sorted(self._view.stages.items()) if worker not in harmed]
        # Each step draws for itself, so that one more step changes nothing for the others.
        return random.Random(f"{self._seed} {index}").choice(free) if free else None

    def _node(self, drain: Drain) -> str:
        if drain.node is not None:
            return drain.node
        worker = drain.worker or self._view.stages.get(-1 if drain.stage is None else drain.stage)
        if worker is None:
            raise ConfigError(f"there is no stage {drain.stage}")
        if worker not in self._view.nodes:
            raise ConfigError(f"there is no worker {worker}")
        return self._view.nodes[worker]

    def _is_over(self) -> bool:
        if self._view.state in ENDED:
            return True
        commits = self._view.commits
        idle_s = self._clock() - max((c.at for c in commits), default=self._clock())
        acted = max((done.at for done in self._done.values()), default=0.0)
        if len(self._done) < len(self._steps):
            return idle_s > self._patience_s and self._clock() - acted > self._patience_s
        return all(self._has_gone_on(done) for done in self._done.values())

    def _has_gone_on(self, done: Done) -> bool:
        """Whether the run went on after it, or has had its time for that."""
        losses = [
            loss for loss in self._view.losses if loss.worker in done.workers and loss.at >= done.at
        ]
        known = [done.at, *(loss.at for loss in losses)]
        if done.problem or self._clock() - max(known) > self._patience_s:
            return True
        if done.deadly and len(losses) < len(done.workers):
            return False
        return recovered_at(done, losses, self._view.commits) is not None

    def _why_not(self, step: Step) -> str:
        if self._view.state in ENDED:
            return f"the run ended before, at update {self._update}: {self._view.state}"
        if isinstance(step.what, Fault) and step.what.stage is not None:
            if step.what.stage not in self._view.stages:
                return f"there is no stage {step.what.stage}"
        return f"the run stands still at update {self._update}"


def _name(index: int) -> str:
    return f"chaos-{index}"
