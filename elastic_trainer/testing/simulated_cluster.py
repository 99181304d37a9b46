"""A cluster in which nothing is real but the order of events, to drive the elastic core with.

It carries out what the core orders, as slowly and in as odd an order as the caller chooses, and
asserts what must hold whatever happens: a layer's state is followed from worker to worker, so a
core that trains an update twice, restores what nobody holds or stops who is needed is found out.
"""

from collections import deque
from collections.abc import Callable

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import State
from elastic_trainer.elastic.work import MAX_SEGMENTS_IN_FLIGHT
from elastic_trainer.testing.simulated_rules import Rules
from elastic_trainer.testing.simulated_worker import Order, SimWorker, even_cut
from elastic_trainer.types import Plan, WorkerId

Action = tuple[str, Callable[[], None]]


class SimCluster:
    """Workers, storage and mail around a `State`.

    Args:
        state: the core, not started.
        step_s: predicted step time by number of stages.
        layers: of the model.
        fewest: stages below which the model does not fit; there is no plan for fewer.
        data_end: the last update for which there is data.
        segment_updates: that each plan names.
    """

    def __init__(
        self,
        state: State,
        *,
        step_s: Callable[[int], float] = lambda count: 1.0 / count,
        layers: int = 6,
        fewest: int = 1,
        data_end: int | None = None,
        segment_updates: int = 3,
    ) -> None:
        self.state = state
        self.rules = Rules(state, data_end)
        self.step_s, self.layers, self.fewest = step_s, layers, fewest
        self.data_end, self.segment_updates = data_end, segment_updates
        self.now = 0.0
        self.capacity = state.goal.max_workers + state.goal.num_spares
        self.workers: dict[WorkerId, SimWorker] = {}
        self.mail: dict[str, deque[ev.Event]] = {"work": deque()}
        self.told: list[ev.Event] = []
        self.storage = {state.goal.start_update}
        self.leaves: dict[WorkerId, float] = {}
        self.finished: do.Finish | None = None
        self.log: list[do.Instruction] = []
        self.plan: Plan | None = None
        self._wanted = 0
        self._names = self._letters = 0
        self._plans: list[do.MakePlan] = []
        self._stocks: list[tuple[do.TakeStock, dict[WorkerId, dict[int, tuple[str, ...]]]]] = []
        self._configuring: do.Configure | None = None
        self._configured = 0  # generation that was configured last
        self._issued = 0
        self._loader_end: int | None = None  # in this generation nothing beyond is ever sent
        self._done: dict[Order, set[WorkerId]] = {}
        self._writes: list[int] = []
        self._buddies: list[tuple[int, WorkerId, WorkerId, int, tuple[str, ...]]] = []
        self._stored: dict[int, set[str]] = {}

    def begin(self) -> None:
        self._carry_out(self.state.start())

    # Facts.

    def post(self, event: ev.Event, box: str | None = None) -> None:
        """Put an event on its way. Those of one box arrive in order."""
        if box is None:
            self._letters += 1
            box = f"letter-{self._letters}"
        self.mail.setdefault(box, deque()).append(event)

    def tell(self, event: ev.Event) -> list[do.Instruction]:
        """Let the core know, and carry out what it orders."""
        out = self.rules.handle(event, self.now)
        assert self.finished is None or not out, "instructions after the end"
        self.told.append(event)
        self._carry_out(out)
        return out

    def pass_time(self, seconds: float) -> None:
        """Whose time to leave has come is killed."""
        self.now += seconds
        for name in [w for w, by in self.leaves.items() if self.now > by]:
            del self.leaves[name]
            self.kill(name, ev.Cause.PREEMPTED)
        self.tell(ev.Tick())

    def kill(self, name: WorkerId, cause: ev.Cause = ev.Cause.CRASHED) -> None:
        if self.workers.pop(name, None) is not None:
            self.post(ev.WorkerLost(worker=name, detail="it is gone", cause=cause))

    def stillborn(self) -> None:
        """A worker dies before it has joined."""
        if len(self.workers) < min(self._wanted, self.capacity):
            self._names += 1
            self.post(ev.WorkerLost(worker=f"stage-{self._names}", detail="cannot import"))

    def drain(self, name: WorkerId, deadline_s: float | None) -> None:
        if deadline_s is not None:
            self.leaves[name] = self.now + deadline_s
        self.tell(ev.WorkersDraining(workers=(name,), reason="drain", deadline_s=deadline_s))

    # What may happen next.

    def run_until(self, condition: Callable[[], bool], most: int = 3000) -> None:
        """Let everything happen in turn, and time pass when nothing can, until it is so."""
        for turn in range(most):
            if condition():
                return
            actions = self.actions()
            if actions:
                actions[turn % len(actions)][1]()
            if turn % 10 == 0 or not actions:
                self.pass_time(0.25)
        raise AssertionError(f"it does not come to that: {self.state.phase}, {self.state.reason}")

    def actions(self) -> list[Action]:
        """All that the cluster could do now, each with a name."""
        if self.finished is not None:
            return []
        out: list[Action] = []
        for box in [b for b, letters in self.mail.items() if letters]:
            out.append((f"deliver {box}", lambda box=box: self._deliver(box)))  # type: ignore[misc]
        if len(self.workers) < min(self._wanted, self.capacity):
            out.append(("join", self._join))
        for worker in self.workers.values():
            if worker.orders:
                out.append((f"work {worker.name}", lambda w=worker: self._work(w)))  # type: ignore[misc]
        out += [("plan", self._answer_plan)] if self._plans else []
        out += [("stock", self._answer_stock)] if self._stocks else []
        out += [("write", self._write)] if self._writes else []
        out += [("buddy", self._reach_buddy)] if self._buddies else []
        out += [("configured", self._finish_configuring)] if self._can_configure() else []
        return out

    def _deliver(self, box: str) -> None:
        letters = self.mail[box]
        self.tell(letters.popleft())
        if not letters and box != "work":
            del self.mail[box]

    def _join(self) -> None:
        self._names += 1
        name = f"stage-{self._names}"
        self.workers[name] = SimWorker(name, f"node-{self._names % 3}")
        self.post(ev.WorkerJoined(worker=name, node=self.workers[name].node))

    def _answer_plan(self) -> None:
        asked = self._plans.pop(0)
        count = len(asked.workers)
        if count < self.fewest:
            self.post(ev.NotPlanned(generation=asked.generation, reason="too little memory"))
            return
        plan = even_cut(asked.generation, asked.workers, self.layers, self.step_s(count))
        self.post(ev.Planned(plan=plan, segment_updates=self.segment_updates))

    def _answer_stock(self) -> None:
        asked, copies = self._stocks.pop(0)
        alive = {w: held for w, held in copies.items() if w in self.workers}
        nodes = {w: self.workers[w].node for w in alive}
        self.post(ev.StockTaken(generation=asked.generation, copies=alive, nodes=nodes))

    def _can_configure(self) -> bool:
        made = self._configuring
        if made is None or made.plan.generation != self.state.generation:
            return False
        involved = {s.worker for s in made.plan.stages} | set(made.sources.values())
        return all(w in self.workers for w in involved - {do.STORAGE, do.INITIAL})

    def _finish_configuring(self) -> None:
        made, self._configuring = self._configuring, None
        assert made is not None
        for stage in made.plan.stages:
            worker = self.workers[stage.worker]
            worker.live = made.update
            worker.layers = made.plan.layers[stage.first : stage.stop]
        self.post(ev.Configured(generation=made.plan.generation, update=made.update))

    def _work(self, worker: SimWorker) -> None:
        """Begin the next order, or end it."""
        order = worker.orders[0]
        if isinstance(order, do.RunSegment):
            if not worker.begun:
                assert worker.live == order.first_update - 1, "trained twice, or skipped"
                worker.begun, worker.live = True, None
                return
            worker.begun, worker.live = False, order.last_update
            if order.snapshot:
                self._snapshot(worker, order)
        else:
            assert worker.live == order.update, "not the state at this commit point"
        worker.orders.popleft()
        done = self._done.setdefault(order, set())
        done.add(worker.name)
        assert self.plan is not None
        if done >= {s.worker for s in self.plan.stages}:
            self._order_done(order)

    def _snapshot(self, worker: SimWorker, order: do.RunSegment) -> None:
        assert self.plan is not None
        update, names = order.last_update, [s.worker for s in self.plan.stages]
        worker.keep(worker.name, update, worker.layers)
        buddy = names[(names.index(worker.name) + 1) % len(names)]
        self._buddies.append((order.generation, worker.name, buddy, update, worker.layers))

    def _reach_buddy(self) -> None:
        generation, origin, buddy, update, layers = self._buddies.pop(0)
        if buddy not in self.workers or self.workers[buddy].generation != generation:
            return
        self.workers[buddy].keep(origin, update, layers)
        stored = self._stored.setdefault(update, set())
        stored.update(layers)
        if len(stored) == self.layers:
            event = ev.SnapshotStored(
                generation=generation, update=update, cost_s=1e-4, segment_s=1.0
            )
            self.post(event)

    def _order_done(self, order: Order) -> None:
        generation = order.generation
        match order:
            case do.RunSegment(last_update=last):
                self.post(ev.SegmentDone(generation=generation, last_update=last), "work")
            case do.Evaluate(update=update):
                self.post(ev.EvaluationDone(generation=generation, update=update), "work")
            case do.SaveCheckpoint(update=update):
                self._writes.append(update)

    def _write(self, fails: bool = False) -> None:
        update = self._writes.pop(0)
        if fails:
            self.post(ev.CheckpointFailed(update=update, reason="disk full"))
        else:
            self.storage.add(update)
            self.post(ev.CheckpointWritten(update=update))

    def fail_write(self) -> None:
        if self._writes:
            self._write(fails=True)

    def orders(self, *kinds: type[do.Instruction]) -> list[do.Instruction]:
        """What was ordered, of these kinds."""
        return [i for i in self.log if isinstance(i, kinds)]

    # Instructions.

    def _carry_out(self, out: list[do.Instruction]) -> None:
        for instruction in out:
            self.log.append(instruction)
            match instruction:
                case do.StartWorkers():
                    self._wanted = instruction.num_workers
                case do.StopWorkers():
                    self._stop(instruction)
                case do.MakePlan():
                    self._plans.append(instruction)
                case do.TakeStock():
                    self._enter(instruction)
                case do.Configure():
                    self._configure(instruction)
                case do.RunSegment() | do.Evaluate() | do.SaveCheckpoint():
                    self._order(instruction)
                case do.Abort():
                    self._abort(instruction.generation)
                case do.Finish():
                    self._end(instruction)

    def _stop(self, instruction: do.StopWorkers) -> None:
        self.rules.check_stop(
            instruction, [s.worker for s in self.plan.stages] if self.plan else []
        )
        for name in instruction.workers:
            self.workers.pop(name, None)
            self.leaves.pop(name, None)

    def _enter(self, instruction: do.TakeStock) -> None:
        generation = instruction.generation
        assert generation == self.state.generation > self._configured
        self._configuring = None
        copies = {}
        for name in instruction.workers:
            if (worker := self.workers.get(name)) is not None:
                worker.enter(generation)
                copies[name] = worker.stock()
        self._stocks.append((instruction, copies))

    def _abort(self, generation: int) -> None:
        for worker in self.workers.values():
            if worker.generation == generation and worker.orders:
                worker.orders.clear()
                if worker.begun:
                    worker.begun, worker.live = False, None

    def _configure(self, made: do.Configure) -> None:
        generation = made.plan.generation
        assert generation == self.state.generation > self._configured, "configured twice"
        assert set(made.sources) == set(made.plan.layers)
        for layer, source in made.sources.items():
            if source == do.INITIAL:
                assert made.update == 0
            elif source == do.STORAGE:
                assert made.update in self.storage, "no such checkpoint"
            elif source in self.workers:
                assert layer in self.workers[source].stock()[made.update], "nobody holds it"
        self._configured, self._configuring, self.plan = generation, made, made.plan
        for stage in made.plan.stages:
            worker = self.workers.get(stage.worker)
            if worker is not None and worker.generation != generation:
                worker.enter(generation)  # the first generation
        self._issued, self._loader_end = made.update, None
        self._done, self._stored = {}, {}

    def _order(self, order: Order) -> None:
        assert self.plan is not None and self._configuring is None
        assert order.generation == self._configured == self.state.generation
        names = [s.worker for s in self.plan.stages]
        end = self._loader_end
        if isinstance(order, do.RunSegment):
            order_end = self._load(order)
            if order_end is None:
                return
            order = order_end
        elif end is not None and order.update > end:
            return
        for name in names:
            if name in self.workers:
                self.workers[name].orders.append(order)
                segments = [o for o in self.workers[name].orders if isinstance(o, do.RunSegment)]
                assert len(segments) <= MAX_SEGMENTS_IN_FLIGHT + 1  # one may be done elsewhere

    def _load(self, order: do.RunSegment) -> do.RunSegment | None:
        """What the loader has of a segment."""
        assert order.first_update == self._issued + 1 <= order.last_update
        self._issued = order.last_update
        end, first = self.data_end, order.first_update
        if end is None or order.last_update <= end:
            return order
        self._loader_end = end
        event = ev.DataEnded(generation=order.generation, update=max(end, first - 1))
        self.post(event, "work")
        if first > end:
            return None
        return do.RunSegment(
            generation=order.generation,
            first_update=first,
            last_update=end,
            snapshot=order.snapshot,
            reason="cut",
        )

    def _end(self, finish: do.Finish) -> None:
        self.finished = finish
        self.rules.check_end(finish)
        assert finish.status == "failed" or finish.update in self.storage
