"""The coordinator: hands facts to the elastic core, and what that decides to the executor.

A plain class; `handles.py` makes it a named actor. It holds no tensors. If its process dies, Ray
starts another one, which goes on where the journal in the run folder ends.
"""

import os
import queue
import time
import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any

from elastic_trainer.actors.calls import Calls, Wait
from elastic_trainer.actors.departures import Departures
from elastic_trainer.actors.executor import Executor
from elastic_trainer.actors.faults import full_name, one_line
from elastic_trainer.actors.handles import StageHandle
from elastic_trainer.actors.historian import Historian
from elastic_trainer.actors.journal import RunJournal, result_from
from elastic_trainer.actors.judge import Judge
from elastic_trainer.actors.orders import Orders
from elastic_trainer.actors.pending import Pending, wait_any
from elastic_trainer.actors.priority import yield_to_compute
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.requests import Requests
from elastic_trainer.actors.saving import Saving
from elastic_trainer.actors.site import RaySite, Site
from elastic_trainer.actors.succession import Succession
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.watch import Mark
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config
from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.goal import goal_of
from elastic_trainer.elastic.state import Phase, State
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.observability import changes
from elastic_trainer.types import RunResult, WorkerId

SETTLE_S = 5.0  # how long the end waits for a storage's answer to say which checkpoint is newest
POLL_S = 0.5  # how soon a request is seen while nothing else happens
CLOSE_S = 5.0  # how long actors may take to close


class Coordinator:
    """Runs one training run from start to finish."""

    def __init__(
        self,
        run: str,
        config: Config,
        run_dir: str,
        start: Mapping[str, Any],
        *,
        site: Site | None = None,
        wait: Wait = wait_any,
    ) -> None:
        """
        Args:
            run: name of the run.
            config: the resolved configuration.
            run_dir: folder of the run, on this node.
            start: `update`, `cursor` and `checkpoint` (its root folder, or None) to start from;
                `launch` tells one start in this folder from another, `num_layers` is how many
                layers the model has, None if that is not known yet.
            site: the cluster, if not the one that this process is connected to.
            wait: blocks until some calls are ready.
        """
        self.run_name = run
        self.config = config
        self.journal = RunJournal(run_dir, start["launch"])
        self._start = start
        self._goes_on = self.journal.found is not None
        self._facts: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        report = self._facts.put
        goal = goal_of(config, start)
        first, goes_on = start["update"], self._goes_on
        self._site = site = site or RaySite(config, run_dir, start["launch"])
        self.state = State(goal)
        self.recorder = Recorder(run, config, run_dir, first, goes_on=goes_on)
        self.saving = Saving(config, run_dir, first, start["cursor"], goes_on=goes_on)
        self.vigil = Vigil(config)
        self.calls = Calls(self.vigil, self._failed, wait)
        self.crew = Crew(config, site, self.calls, self.vigil.start_limit_s, self)
        self.judge = Judge(self, self.crew, self.vigil, report)
        parts = self.calls, self.crew, self.vigil, self.saving, self.recorder
        self.orders = Orders(config, *parts, report, first)
        self.executor = Executor(config, start, *parts, self.orders, report)
        self.departures = Departures(site, self.crew, report)
        self.requests = Requests(self, config, site, self.crew, self.departures, report)
        limits = {
            "failures": config.elastic.max_failures,
            "preemptions": config.elastic.max_preemptions,
        }
        self.historian = Historian(self, self.recorder, limits)
        self.succession = Succession(
            config,
            self.journal,
            goal,
            self.calls,
            self.crew,
            self.saving,
            self.recorder,
            self.departures,
            self.executor,
            self.historian,
            self.vigil.lease_s,
        )
        self._turned = time.monotonic()
        self._summary: RunResult | None = None

    # What others may call while `run` runs, from other threads.

    def ping(self) -> float:
        """For how many seconds the run has stood at one thing; few, while all is well."""
        return time.monotonic() - self._turned

    def stop(self, reason: str) -> None:
        """End at the next commit point, with a checkpoint."""
        self._facts.put(ev.StopRequested(reason=reason))

    def scale(self, min_workers: int, max_workers: int) -> Mapping[str, Any]:
        """Go on with other numbers of workers."""
        return self.requests.scale(min_workers, max_workers)

    def drain(self, node: str, deadline_s: float | None) -> Mapping[str, Any]:
        """Move all layers off a node."""
        return self.requests.drain(node, deadline_s)

    def run(self) -> RunResult:
        """Train to the end. Never raises for a failure of the run: the summary says so."""
        yield_to_compute()
        found = self.journal.found
        if found is not None and (ended := result_from(found["result"])) is not None:
            self.recorder.record.close()
            return ended
        try:
            self._begin()
            while self._summary is None:
                self._step()
        except Exception as error:  # whatever it is, the run must end recorded
            self._crash(error)
        finally:
            self.crew.close(CLOSE_S)
            self.saving.close(self.config.elastic.stall_limit_s)
        assert self._summary is not None
        self.recorder.finish(self._summary)
        self.succession.keep(self.state, self._summary)
        return self._summary

    def _begin(self) -> None:
        self.recorder.begin(self._site.address)
        if self._goes_on:
            self.state = self.succession.take_over(self.judge.look)
            self._forget_joins_and_losses()
        else:
            self.crew.clear_away()
            first = self._start["update"]
            self.historian.begin(changes.RESUMED if first else changes.START, first, None)
        self.crew.start_loaders()
        self._execute(self.state.start())

    def _forget_joins_and_losses(self) -> None:
        """Those of workers that were looked for: the state knows who was found."""
        kept = []
        while not self._facts.empty():
            fact = self._facts.get()
            if not isinstance(fact, ev.WorkerJoined | ev.WorkerLost):
                kept.append(fact)
        for fact in kept:
            self._facts.put(fact)

    def _step(self) -> None:
        """Collect facts, decide, act."""
        self._turned = time.monotonic()
        poll_s = min(POLL_S, self.vigil.poll_s) / (10 if self.saving.busy else 1)
        if len(self.calls):
            self.calls.collect(poll_s)
        else:
            time.sleep(poll_s / 10)  # nobody is there, and no room is asked for
        self.saving.deliver()
        self._ask()
        self.judge.look()
        self.crew.tick()
        self.departures.look()
        if self.state.phase is Phase.STARTING and (trouble := self.crew.missing_room()):
            self.judge.hopeless(str(trouble))
        self._facts.put(ev.Tick())
        while self._summary is None and not self._facts.empty():
            self._decide(self._facts.get())
        self._show()
        self.succession.keep(self.state)

    def _ask(self) -> None:
        """Ask every actor now and then how far it is."""
        due = self.vigil.due()
        generation, committed = self.state.generation, self.state.committed
        for member in self.crew.members():
            if member.worker not in due:
                continue
            told = partial(self._told, member.worker, member.line)
            if isinstance(member, StageHandle):
                stored = self.orders.snapshots.stored
                self.calls.ask(member.ping(generation, stored, committed), told)
            else:
                self.calls.ask(member.ping(), told)

    def _told(self, worker: WorkerId, line: str, mark: Mark) -> None:
        self.vigil.told(worker, line, mark)
        self.orders.snapshots.told(worker, mark.snapshot_update)

    def _decide(self, event: ev.Event) -> None:
        match event:
            case ev.ScaleRequested(min_workers=fewest, max_workers=most):
                self.succession.limits = fewest, most
                self.crew.fewest = fewest
                self.recorder.limits(fewest, most)
            case ev.SnapshotStored(update=update, cost_s=cost_s):
                self.saving.positions.stored(update)
                self.recorder.metrics.observe_snapshot(update, cost_s)
            case ev.Configured(generation=generation, update=update):
                if generation == self.generation and self.state.phase is Phase.RESTORING:
                    replayed = self.executor.replayed
                    self.historian.configured(update, self.executor.restored, replayed)
        self.historian.event(event)
        saved = self.state.saved
        instructions = self.state.handle(event, time.monotonic())
        if self.state.saved > saved:
            self.saving.rely_on(self.state.saved, partial(self.recorder.event, "warning"))
        self._execute(instructions)

    def _execute(self, instructions: list[do.Instruction]) -> None:
        numbers = [getattr(i, "generation", 0) for i in instructions]
        self.succession.highest = max([self.succession.highest, *numbers])
        if instructions:
            self.succession.keep(self.state)  # before anybody hears of it
        for instruction in instructions:
            self._turned = time.monotonic()
            self.recorder.instruction(instruction)
            self.historian.instruction(instruction)
            if isinstance(instruction, do.Finish):
                self._finish(instruction.status, instruction.update, instruction.reason)
                continue
            try:
                self.executor.carry_out(instruction)
            except ElasticTrainerError as error:
                self.judge.hopeless(str(error))
                return

    def _show(self) -> None:
        held = {s.worker: s.stage for s in self.executor.plan.stages} if self.executor.plan else {}
        leaving = set(self.state.draining)
        known = self.crew.descriptions
        facts = {}
        for worker in self.crew.stages:
            state = "running" if worker in held else "idle"
            state = "leaving" if worker in leaving else state
            facts[worker] = {
                "node": known[worker]["node_ip"] if worker in known else "",
                "stage": held.get(worker),
                "state": state if worker in known else "starting",
            }
        loaders = self.crew.loaders.facts(self.orders.serving)
        self.recorder.members(facts, self.crew.num_pending, loaders)
        if self.recorder.heartbeat(self.state):
            self.historian.heartbeat()
            ages = {stage: self.vigil.silence_s(worker) or 0.0 for worker, stage in held.items()}
            self.recorder.metrics.observe_leases(self.vigil.lease_s, ages)

    # What the parts need to know of the run, and tell it.

    @property
    def generation(self) -> int:
        return self.state.generation

    @property
    def taking_stock(self) -> bool:
        return self.executor.taking_stock

    @property
    def has_trained(self) -> bool:
        return self._goes_on or self.orders.num_segments > 0

    @property
    def is_ending(self) -> bool:
        return self.state.done or self.state.phase is Phase.FINISHING

    @property
    def num_layers(self) -> int | None:
        plan = self.executor.plan
        given: int | None = self._start["num_layers"]
        return given if plan is None else len(plan.layers)

    @property
    def most_stages(self) -> int:
        most = self.succession.limits[1]
        return most if self.num_layers is None else min(most, self.num_layers)

    def node(self, worker: WorkerId) -> str:
        """Address of the node that a worker is on, empty if that is not known."""
        return str(self.crew.descriptions.get(worker, {}).get("node_ip", ""))

    def name(self, worker: WorkerId) -> str:
        """A worker in words."""
        return full_name(worker, self.executor.plan, self.node(worker))

    def starting(self) -> None:
        """A worker is about to be started under a new name."""
        self.succession.keep(self.state)

    def joined(self, worker: WorkerId) -> None:
        """An actor has described itself."""
        self.vigil.answered(worker)
        description = self.crew.descriptions[worker]
        if worker in self.crew.loaders.handles:
            self.recorder.loader_joined(worker, description)
            self.executor.loader_joined()
            return
        if worker not in self.succession.inherited:
            self.recorder.joined(worker, description)
        self._facts.put(ev.WorkerJoined(worker=worker, node=description["node_ip"]))
        self.departures.joined(worker)

    def losing(self, worker: WorkerId, detail: str, cause: ev.Cause) -> None:
        """A worker is gone; what is known of it is about to be forgotten."""
        self.recorder.lost(self.name(worker), detail, cause)
        wedged = cause is ev.Cause.WEDGED  # then it gave signs of life, but did nothing
        since_s = self.vigil.still_s(worker) if wedged else self.vigil.silence_s(worker)
        self.historian.detected(worker, detail, cause, since_s)

    def lost(self, worker: WorkerId, detail: str, cause: ev.Cause) -> None:
        """A worker is gone."""
        self._facts.put(ev.WorkerLost(worker=worker, detail=detail, cause=cause))
        self.executor.lost(worker)

    def loader_lost(self, worker: WorkerId, detail: str, cause: ev.Cause) -> bool:
        """A loader is gone; whether training needs another one in its place at once."""
        needed = not self.executor.is_idle(worker)
        self.recorder.lost(self.name(worker), detail, cause)
        silent_s = self.vigil.silence_s(worker)
        self.historian.loader_lost(worker, detail, silent_s, concerns_plan=needed)
        if needed:
            self._facts.put(ev.LoaderLost(worker=worker, node=self.node(worker), detail=detail))
        else:
            self.executor.lost(worker)
        return needed

    def trace(self, text: str) -> None:
        """A fault that nobody raised on purpose."""
        self.recorder.event("traceback", text)

    def _failed(self, call: Pending[Any], generation: int | None, error: Exception) -> None:
        self.judge.failed(call, generation, error)

    # The end.

    def _finish(self, status: str, update: int, reason: str) -> None:
        # A commit may be under way; it counts if it is quick.
        self.saving.deliver(min(SETTLE_S, self.config.elastic.stall_limit_s))
        newest = self.saving.newest
        # One that could not be restored is no good checkpoint.
        if status == "failed" and newest is not None and self.has_trained:
            line, *picture = reason.splitlines()
            line += f". Last good checkpoint: update {newest.update} at {newest.path}"
            reason = "\n".join([line, *picture])
        self.historian.finish(status, reason, update)
        self._summary = self.recorder.result(
            status, reason, update, newest.path if newest else None
        )

    def _crash(self, error: Exception) -> None:
        """A fault of the coordinator itself: recorded like any other end."""
        self.trace(traceback.format_exc())
        ours = isinstance(error, ElasticTrainerError)
        reason = str(error) if ours else f"coordinator (pid {os.getpid()}): {one_line(error)}"
        self._finish("failed", self.state.committed, reason)
