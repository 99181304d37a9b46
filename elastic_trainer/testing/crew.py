"""Stage workers and loaders of one process, over real sockets, without Ray.

A thread stands for each worker's compute group; the caller plays the coordinator.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from elastic_trainer.actors import links, loader, stage_worker
from elastic_trainer.actors.loader import Loader
from elastic_trainer.actors.loaders import Feeding, agreed, feeding
from elastic_trainer.actors.planning import Schedules
from elastic_trainer.actors.stage_worker import StageWorker
from elastic_trainer.config import Config
from elastic_trainer.models.registry import load_model, ties
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.testing.in_process import even_plan
from elastic_trainer.types import (
    BatchInfo,
    ConfigureReport,
    Cursor,
    Plan,
    Restore,
    StageReport,
    WorkerId,
)

T = TypeVar("T")
WAIT_S = 60.0


class ThreadedCrew:
    """A run's workers. Use it in a `with` statement.

    Args:
        config: of the run.
        folder: for sockets; its path must be short.
        tcp: whether workers believe that each is on a host of its own.
    """

    def __init__(self, config: Config, folder: str, *, tcp: bool = False) -> None:
        self.config = config
        self.model = load_model(config)
        self.stages: dict[WorkerId, StageWorker] = {}
        self.loaders: dict[WorkerId, Loader] = {}
        self.feeding: Feeding | None = None
        self.plan: Plan | None = None
        self.committed = 0
        self.cursors = {0: Cursor()}
        self._folder = folder
        self._tcp = tcp
        self._pools: dict[WorkerId, ThreadPoolExecutor] = {}
        self._num_segments = 0
        self._patches = ExitStack()

    def __enter__(self) -> "ThreadedCrew":
        enter = self._patches.enter_context
        enter(mock.patch.object(links, "own_ip", lambda: "127.0.0.1"))
        enter(mock.patch.object(stage_worker, "own_ip", lambda: "127.0.0.1"))
        enter(mock.patch.object(stage_worker, "_own_device", lambda: torch.device("cpu")))
        enter(mock.patch.object(loader, "own_ip", lambda: "127.0.0.1"))
        enter(mock.patch.object(loader, "yield_to_compute", lambda: None))
        enter(mock.patch.object(stage_worker, "leave", lambda *_: None))  # the process is a test's
        for number in range(self.config.data.num_loaders):
            self.start_loader(f"loader-{number}")
        return self

    def __exit__(self, *_: object) -> None:
        for worker in list(self.stages):
            self.stop(worker)
        for feeder in self.loaders.values():
            feeder.close()
        self._patches.close()

    @property
    def loader(self) -> Loader:
        """The first loader."""
        return next(iter(self.loaders.values()))

    def start_loader(self, worker: WorkerId, instead_of: WorkerId | None = None) -> None:
        """Start a loader; it takes the place of another one, which dies, if one is named."""
        if instead_of is not None:
            self.loaders[instead_of].close()
        new = Loader(worker, self.config, self._folder)
        kept = [(w, old) for w, old in self.loaders.items() if w != instead_of]
        place = list(self.loaders).index(instead_of) if instead_of else len(kept)
        self.loaders = dict([*kept[:place], (worker, new), *kept[place:]])

    def start(self, *workers: WorkerId) -> None:
        """Start these workers."""
        for worker in workers:
            self.stages[worker] = StageWorker(worker, self.config, self._folder)
            self._pools[worker] = ThreadPoolExecutor(1, worker)

    def stop(self, worker: WorkerId) -> None:
        """End a worker as if its process had died: nothing that it holds is left."""
        stage = self.stages.pop(worker)
        stage.abort(1 << 30, "the end")
        self._pools.pop(worker).shutdown()
        stage.close()

    def call(self, worker: WorkerId, method: str, *args: Any) -> "Future[Any]":
        """A call of the worker's compute group."""
        return self._pools[worker].submit(getattr(self.stages[worker], method), *args)

    def peers(self, worker: WorkerId) -> dict[WorkerId, Mapping[str, Any]]:
        """Descriptions of all other stage workers, and of the loader that feeds this one."""
        everybody = {w: stage.describe() for w, stage in self.stages.items()}
        feeder = self.feeding.loader_of.get(worker, "") if self.feeding is not None else ""
        if feeder in self.loaders:
            everybody[feeder] = self.loaders[feeder].describe()
        return {w: self._apart(w, d) for w, d in everybody.items() if w != worker}

    def make_plan(
        self, generation: int, workers: Sequence[WorkerId], cuts: Sequence[int] | None = None
    ) -> Plan:
        """A plan for these workers, in this order."""
        plan = even_plan(self.model, len(workers), self.config.pipeline.schedule, cuts=cuts)
        named = zip(plan.stages, workers, strict=True)
        stages = tuple(replace(stage, worker=worker) for stage, worker in named)
        return replace(plan, generation=generation, stages=stages)

    def take_stock(self, generation: int) -> dict[WorkerId, Mapping[int, Sequence[str]]]:
        """What everybody holds, in the new generation."""
        calls = {w: self.call(w, "take_stock", generation, self.peers(w)) for w in self.stages}
        return {w: call.result(WAIT_S) for w, call in calls.items()}

    def configure(
        self,
        plan: Plan,
        update: int,
        sources: Mapping[str, str],
        *,
        root: str | None = None,
        buddies: Mapping[WorkerId, WorkerId] | None = None,
        rates: Rates | None = None,
    ) -> dict[WorkerId, ConfigureReport]:
        """Bring everybody, idle workers too, into the plan's generation."""
        restore = Restore(update=update, sources=sources, root=root)
        described = {w: self._apart(w, stage.describe()) for w, stage in self.stages.items()}
        loaders = {w: self._apart(w, feeder.describe()) for w, feeder in self.loaders.items()}
        self.feeding = fed = feeding(plan, described, loaders)
        calls = {
            w: self.call(w, "configure", plan, self.peers(w), restore, (buddies or {}).get(w))
            for w in self.stages
        }
        for worker, feeder in self.loaders.items():
            receivers = {w: described[w] for w in fed.receivers(worker)}
            where = fed.routes[worker], self.cursors[update], update + 1
            feeder.configure(plan.generation, receivers, *where, rates)
        reports = {w: call.result(WAIT_S) for w, call in calls.items()}
        self.plan, self.committed = plan, update
        return reports

    def segment(self, batches: Sequence[BatchInfo], *, snapshot: bool = False) -> Segment:
        """The segment of these batches, as the coordinator would make it."""
        assert self.plan is not None
        pairs = [(owner, follower) for owner, follower, *_ in ties(self.model)]
        groups = [len(batch.microbatches) for batch in batches]
        self._num_segments += 1
        return Segment(
            generation=self.plan.generation,
            index=self._num_segments,
            kind="train",
            batches=tuple(batches),
            actions=Schedules(self.config, self.plan, pairs).train(groups),
            schedule=self.plan.schedule,
            snapshot=snapshot,
        )

    def prepare(self, num_updates: int, rates: Rates | None = None) -> list[BatchInfo]:
        """Have the loaders send the next batches."""
        assert self.plan is not None and self.feeding is not None
        work = self.plan.generation, self.committed + 1, num_updates, rates
        batches = agreed({w: self.loaders[w].prepare(*work) for w in self.feeding.serving})
        self.cursors.update({batch.update: batch.end for batch in batches})
        return batches

    def train(self, num_updates: int, *, snapshot: bool = False) -> list[StageReport]:
        """Run a segment of so many updates on all stages."""
        return self.run(self.segment(self.prepare(num_updates), snapshot=snapshot))

    def run(self, segment: Segment) -> list[StageReport]:
        """Run a segment on all stages."""
        assert self.plan is not None
        calls = [self.call(s.worker, "run_segment", segment) for s in self.plan.stages]
        reports = [call.result(WAIT_S) for call in calls]
        self.committed = segment.last_update
        return reports

    def on_all(self, act: Callable[[StageWorker], T]) -> dict[WorkerId, T]:
        """What `act` gives for each worker."""
        return {worker: act(stage) for worker, stage in self.stages.items()}

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the state of every layer that a stage holds, in model order."""
        assert self.plan is not None
        states: dict[str, dict[str, Tensor]] = {}
        for stage in self.plan.stages:
            runtime = self.stages[stage.worker]._runtime
            assert runtime is not None
            for layer, state in runtime.layer_states().items():
                states[layer] = {key: value.clone() for key, value in state.items()}
        return states

    def _apart(self, worker: WorkerId, description: Mapping[str, Any]) -> dict[str, Any]:
        """A description as of a host of its own, if workers are to believe so."""
        if not self._tcp:
            return dict(description)
        elsewhere = {n: {**a, "host": worker} for n, a in description["addresses"].items()}
        found = {**description, "addresses": elsewhere}
        if "state_address" in found:
            found["state_address"] = {**found["state_address"], "host": worker}
        return found
