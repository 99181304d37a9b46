"""Carries out what the elastic core decides: each instruction becomes calls, each result a fact."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from elastic_trainer.actors.buddies import choose_buddies
from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.loaders import feeding
from elastic_trainer.actors.orders import Orders
from elastic_trainer.actors.planning import (
    Schedules,
    load_profile,
    plan_for,
    profile_key,
    segment_updates,
    store_profile,
)
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.saving import Saving
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config, fewest_workers
from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.errors import PlanError
from elastic_trainer.types import (
    ConfigureReport,
    LayerName,
    Plan,
    Profile,
    Restore,
    WorkerId,
)

Stock = Mapping[int, Collection[LayerName]]


@dataclass
class _Gathering:
    """Answers of several actors that are awaited together; those that are lost are not."""

    kind: str  # stock or configure
    generation: int
    waiting: set[WorkerId]
    complete: Callable[[], None]
    answers: dict[WorkerId, Any] = field(default_factory=dict)

    def take(self, worker: WorkerId, answer: Any) -> None:
        self.answers[worker] = answer
        self._discard(worker)

    def lost(self, worker: WorkerId) -> None:
        self.answers.pop(worker, None)
        self._discard(worker)

    def _discard(self, worker: WorkerId) -> None:
        if worker in self.waiting:
            self.waiting.discard(worker)
            if not self.waiting:
                self.complete()


class Executor:
    """Has the crew plan, take stock, configure, work and break off.

    Args:
        config: the resolved configuration.
        start: `update` and `checkpoint` (its root folder, or None) to start from.
        report: takes facts.
    """

    def __init__(
        self,
        config: Config,
        start: Mapping[str, Any],
        calls: Calls,
        crew: Crew,
        vigil: Vigil,
        saving: Saving,
        recorder: Recorder,
        orders: Orders,
        report: Callable[[ev.Event], None],
    ) -> None:
        self.plan: Plan | None = None
        # How the newest generation began: what each worker did, and updates and samples to repeat.
        self.restored: dict[WorkerId, ConfigureReport] = {}
        self.replayed = 0, 0
        self._config = config
        self._start = start
        self._calls = calls
        self._crew = crew
        self._vigil = vigil
        self._saving = saving
        self._recorder = recorder
        self._orders = orders
        self._report = report
        self._profile: Profile | None = None
        self._gathering: _Gathering | None = None
        self._awaits_loaders: do.Configure | None = None

    @property
    def newest(self) -> int:
        """The last update that stages were given to train."""
        return self._orders.newest

    @newest.setter
    def newest(self, update: int) -> None:
        self._orders.newest = update

    @property
    def taking_stock(self) -> bool:
        """Whether workers are being asked what they hold."""
        return self._gathering is not None and self._gathering.kind == "stock"

    def is_idle(self, loader: WorkerId) -> bool:
        """Whether a loader feeds nobody, and none is waited for either."""
        serving = self._orders.serving
        return bool(serving) and loader not in serving and self._awaits_loaders is None

    def carry_out(self, instruction: do.Instruction) -> None:
        """Begin what an instruction says; nothing waits for its end."""
        match instruction:
            case do.StartWorkers(num_workers=number):
                self._crew.want(number)
            case do.StopWorkers(workers=workers):
                self._crew.dismiss(workers)
            case do.MakePlan():
                self._make_plan(instruction)
            case do.TakeStock():
                self._take_stock(instruction)
            case do.Configure():
                self._configure(instruction)
            case do.RunSegment():
                self._orders.segment(instruction)
            case do.Evaluate():
                self._orders.evaluation(instruction)
            case do.SaveCheckpoint():
                self._orders.checkpoint(instruction)
            case do.Abort(generation=generation, reason=reason):
                self._abort(generation, reason)

    def lost(self, worker: WorkerId) -> None:
        """A worker, or a loader, is gone: do not wait for what it would have answered."""
        if self._gathering is not None:
            self._gathering.lost(worker)

    def loader_joined(self) -> None:
        """A loader has started: it may be what a generation waits for."""
        if (instruction := self._awaits_loaders) is not None:
            self._configure(instruction)

    # Plans.

    def _make_plan(self, instruction: do.MakePlan) -> None:
        if self._profile is not None:
            self._plan_with(self._profile, instruction)
            return
        loader, first = next(iter(self._crew.loaders.handles.values())), instruction.workers[0]

        def profiled(sample: Any, profile: Profile) -> None:
            self._orders.costing.profiled(profile, sample)
            self._plan_with(profile, instruction)

        def measured(key: str, sample: Any, profile: Profile) -> None:
            store_profile(key, profile)
            profiled(sample, profile)

        def sampled(sample: Any) -> None:
            if first not in self._crew.descriptions:
                return  # lost meanwhile: another plan is asked for
            key = profile_key(self._config, self._crew.descriptions[first], sample)
            if (known := load_profile(key)) is not None:
                profiled(sample, known)
                return
            call = self._crew.stages[first].profile(sample)
            then = partial(measured, key, sample)
            self._calls.when(call, then, limit_s=self._vigil.start_limit_s)

        self._calls.when(loader.sample(), sampled, limit_s=self._vigil.start_limit_s)

    def _plan_with(self, profile: Profile, instruction: do.MakePlan) -> None:
        self._profile = profile
        known, workers = self._crew.descriptions, instruction.workers
        if not set(workers) <= set(known):
            return  # somebody was lost meanwhile: another plan is asked for
        if fewest_workers(self._config) <= len(profile.layers):
            workers = workers[: len(profile.layers)]  # the others find no layer to hold
        try:
            plan = plan_for(self._config, profile, workers, instruction.generation, known)
        except PlanError as error:
            reason = str(error)
            self._report(ev.NotPlanned(generation=instruction.generation, reason=reason))
            return
        updates = segment_updates(self._config, plan)
        self._report(ev.Planned(plan=plan, segment_updates=updates))

    # From one generation to the next.

    def _take_stock(self, instruction: do.TakeStock) -> None:
        generation = instruction.generation
        present = self._crew.present()
        workers = [w for w in instruction.workers if w in present]

        def complete() -> None:
            copies: dict[WorkerId, dict[int, tuple[LayerName, ...]]] = {
                worker: {
                    update: tuple(layers)
                    for update, layers in held.items()
                    if update in self._saving.positions
                }
                for worker, held in gathering.answers.items()
            }
            nodes = {w: self._node(w) for w in copies}
            self._report(ev.StockTaken(generation=generation, copies=copies, nodes=nodes))

        gathering = self._gather("stock", generation, workers, complete)
        for worker in workers:
            call = present[worker].take_stock(generation, self._peers(worker))
            self._calls.when(call, partial(gathering.take, worker), generation=generation)

    def _configure(self, instruction: do.Configure) -> None:
        self._crew.start_loaders()  # an idle one that was lost is wanted only now
        loaders, present = self._crew.loaders.present(), self._crew.present()
        plan, update = instruction.plan, instruction.update
        holders = [stage.worker for stage in plan.stages]
        if not set(holders) <= set(present):
            return  # lost just now, which ends the generation
        self._awaits_loaders = None
        if loaders is None:
            self._awaits_loaders = instruction  # they may be slower to start than the stages
            return
        generation = plan.generation
        first = self._crew.descriptions[holders[0]]
        self.plan = plan
        fed = feeding(plan, {w: self._crew.descriptions[w] for w in holders}, loaders)
        self._orders.begin(plan, Schedules(self._config, plan, first["ties"]), fed)
        rates = self._orders.costing.begin(plan)
        self._vigil.planned(plan)
        positions, newest = self._saving.positions, self._orders.newest
        self.replayed = max(0, newest - update), positions.samples_between(update, newest)
        self._orders.newest = update
        positions.rewind(update)
        self._recorder.planned(plan, update, instruction.reason)

        def complete() -> None:
            self.restored = {
                w: r for w, r in gathering.answers.items() if isinstance(r, ConfigureReport)
            }
            self._report(ev.Configured(generation=generation, update=update))

        gathering = self._gather("configure", generation, [*present, *loaders], complete)
        restore = Restore(update=update, sources=instruction.sources, root=self._root(update))
        leaving = self._crew.on_nodes(self._crew.avoided)
        idle = [w for w in present if w not in holders and w not in leaving]
        buddies = choose_buddies(holders, idle, {w: self._node(w) for w in present})
        for worker, handle in present.items():
            own = {w: loaders[w] for w in (fed.loader_of.get(worker),) if w is not None}
            call = handle.configure(
                plan, {**self._peers(worker), **own}, restore, buddies.get(worker)
            )
            self._configuring(call, gathering, worker)
        for worker, loader in self._crew.loaders.handles.items():
            receivers = {w: self._crew.descriptions[w] for w in fed.receivers(worker)}
            cursor = positions.at(update)
            served = loader.configure(
                generation, receivers, fed.routes[worker], cursor, update + 1, rates
            )
            self._configuring(served, gathering, worker)

    def _configuring(self, call: Any, gathering: _Gathering, worker: WorkerId) -> None:
        self._calls.when(
            call,
            partial(gathering.take, worker),
            generation=gathering.generation,
            limit_s=self._vigil.start_limit_s,
        )

    def _root(self, update: int) -> str | None:
        """Where the checkpoint of this update lies."""
        given: str | None = self._start["checkpoint"]
        return given if given and update == self._start["update"] else self._saving.root

    def _abort(self, generation: int, reason: str) -> None:
        self._awaits_loaders = self._gathering = None
        self._calls.drop_generation(generation, reason)
        self._vigil.ended(generation)
        self._orders.clear(generation)
        for handle in self._crew.stages.values():
            handle.abort(generation, reason)
        for loader in self._crew.loaders.handles.values():
            loader.abort(generation, reason)

    def _gather(
        self,
        kind: str,
        generation: int,
        workers: Collection[WorkerId],
        complete: Callable[[], None],
    ) -> _Gathering:
        """Await these workers' answers in place of any others."""

        def done() -> None:
            self._gathering = None
            complete()

        self._gathering = _Gathering(kind, generation, set(workers), done)
        return self._gathering

    def _peers(self, worker: WorkerId) -> dict[WorkerId, Mapping[str, Any]]:
        """Descriptions of all other living workers."""
        return {w: self._crew.descriptions[w] for w in self._crew.present() if w != worker}

    def _node(self, worker: WorkerId) -> str:
        return str(self._crew.descriptions[worker]["node_ip"])
