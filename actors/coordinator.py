"""The coordinator: hands facts to the elastic core, and what that decides to the executor.

A plain class; `handles.py` makes it a named actor. It holds no tensors. If its process dies, Ray
starts another one, which goes on where the journal in the run folder ends.
"""

import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elastic_trainer.actors.calls import Calls, Wait
from elastic_trainer.actors.departures import Departures
from elastic_trainer.actors.executor import Executor
from elastic_trainer.actors.faults import full_name, one_line
from elastic_trainer.actors.journal import RunJournal
from elastic_trainer.actors.judge import Judge
from elastic_trainer.actors.orders import Orders
from elastic_trainer.actors.pending import wait_any
from elastic_trainer.actors.priority import yield_to_compute
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.requests import Requests
from elastic_trainer.actors.saving import Saving
from elastic_trainer.actors.site import RaySite, Site
from elastic_trainer.actors.succession import Succession
from elastic_trainer.actors.vigil import Vigil
from elastic_trainer.actors.watch import Mark
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config, fewest_workers, fixed_stages
from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import Goal, State
from elastic_trainer.errors import ElasticTrainerError
from elastic_trainer.schedule.build import is_asynchronous
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
        self.config = config
        self.journal = RunJournal(run_dir, start["launch"])
        goes_on = self.journal.found is not None
        first = start["update"]
        self.state = State(goal_of(config, start))
        self.recorder = Recorder(run, config, run_dir, first, goes_on=goes_on)
        self.saving = Saving(config, run_dir, first, start["cursor"], goes_on=goes_on)
        self.vigil = Vigil(config)
        self.calls = Calls(self.vigil, self._failed, wait)
        site = site or RaySite(config, run_dir, start["launch"])
        self.crew = Crew(
            config, site, self.calls, self.vigil.start_limit_s, self._joined, self._keep
        )
        self._facts: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        report = self._facts.put
        self.judge = Judge(self, self.crew, self.vigil, report, self._trace)
        self.orders = Orders(
            config, self.calls, self.crew, self.vigil, self.saving, self.recorder, report
        )
        self.executor = Executor(
            config,
            start,
            self.calls,
            self.crew,
            self.vigil,
            self.saving,
            self.recorder,
            self.orders,
            report,
        )
        self.departures = Departures(site, self.crew, report)
        self.requests = Requests(config, site, self)
        self.succession = Succession(self)
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
        if (ended := self.succession.ended()) is not None:
            return ended
        try:
            self.recorder.begin()
            self._execute(self.succession.begin())
            while self._summary is None:
                self._step()
        except Exception as error:  # whatever it is, the run must end recorded
            self._crash(error)
        finally:
            self.crew.close(CLOSE_S)
            self.saving.close(self.config.elastic.stall_limit_s)
        assert self._summary is not None
        self.recorder.finish(self._summary)
        self.succession.end(self._summary)
        return self._summary
