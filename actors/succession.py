"""How a coordinator takes the place of one that died: what is kept, and how it goes on from there.

Workers outlive their coordinator. They are found again by name, told that their generation is over
and asked what they hold; whatever was under way is done again.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.departures import Departures
from elastic_trainer.actors.executor import Executor
from elastic_trainer.actors.historian import Historian
from elastic_trainer.actors.journal import RunJournal, plan_from
from elastic_trainer.actors.planning import segment_updates
from elastic_trainer.actors.recorder import Recorder
from elastic_trainer.actors.saving import Saving
from elastic_trainer.actors.workers import Crew
from elastic_trainer.config import Config
from elastic_trainer.elastic.events import Cause
from elastic_trainer.elastic.state import Goal, State
from elastic_trainer.errors import RunError
from elastic_trainer.observability.changes import TAKEN_OVER
from elastic_trainer.types import RunResult, WorkerId, to_jsonable

MAX_DEATHS = 3  # of coordinators, without an update between them
POLL_S = 0.1


class Succession:
    """Writes the journal, and takes over from it.

    Args:
        config: the resolved configuration.
        journal: the file.
        goal: as the run was started.
        find_s: how long workers may take to answer their new coordinator.
    """

    def __init__(
        self,
        config: Config,
        journal: RunJournal,
        goal: Goal,
        calls: Calls,
        crew: Crew,
        saving: Saving,
        recorder: Recorder,
        departures: Departures,
        executor: Executor,
        historian: Historian,
        find_s: float,
    ) -> None:
        self.limits = goal.min_workers, goal.max_workers
        self.inherited: frozenset[WorkerId] = frozenset()  # workers of the coordinator before
        self.highest = 0  # of all generations that were ever given out
        self._config = config
        self._journal = journal
        self._goal = goal
        self._calls = calls
        self._crew = crew
        self._saving = saving
        self._recorder = recorder
        self._departures = departures
        self._executor = executor
        self._historian = historian
        self._find_s = find_s
        self._deaths, self._died_at = 0, -1
        self._kept: Any = None

    def keep(self, state: State, result: RunResult | None = None) -> None:
        """Write down how the run stands, where that has changed."""
        plan = self._executor.plan
        key = (
            result is None,
            self.highest,
            state.generation,
            plan and plan.generation,
            state.committed,
            state.saved,
            state.evaluated,
            self.limits,
            state.spent,
            self._crew.next_worker,
            self._crew.loaders.next_number,
            tuple(self._crew.berths),
            len(self._crew.avoided),
        )
        if key == self._kept:
            return
        self._kept = key
        self._journal.write(
            {
                "result": None if result is None else to_jsonable(result),
                "generation": max(self.highest, state.generation),
                "plan": None if plan is None else to_jsonable(plan),
                "committed": state.committed,
                "saved": state.saved,
                "evaluated": state.evaluated,
                "spent": state.spent,
                "limits": self.limits,
                "workers": {
                    worker: [berth.room.room_id, dict(berth.room.resources), berth.node_id]
                    for worker, berth in self._crew.berths.items()
                },
                "next_worker": self._crew.next_worker,
                "next_loader": self._crew.loaders.next_number,
                "departures": self._departures.facts(),
                "positions": self._saving.positions.facts(),
                "recorder": self._recorder.facts(),
                "history": self._historian.facts(),
                "newest": self._executor.newest,
                "deaths": [self._deaths, self._died_at],
            }
        )

    def take_over(self, look: Callable[[], None]) -> State:
        """Find the living workers of the coordinator before; the state to go on from.

        Args:
            look: sees who does not answer.

        Raises:
            RunError: coordinators die and die, and nothing is committed between.
        """
        found = self._journal.found
        assert found is not None
        committed = found["committed"]
        self._count_death(found)
        self._recorder.restore(found["recorder"])
        newest = self._saving.newest
        saved = found["saved"]
        if newest is not None and saved < newest.update <= committed:
            saved = newest.update
        self._saving.positions.restore(found["positions"], saved)
        self.limits = fewest, most = tuple(found["limits"])
        self._crew.fewest = fewest
        self.highest = found["generation"]
        self._executor.plan = plan = plan_from(found["plan"])
        self._executor.newest = found["newest"]
        self._historian.restore(found["history"])
        self._historian.begin(TAKEN_OVER, committed, plan)
        self._crew.next_worker = found["next_worker"]
        self._crew.loaders.next_number = found["next_loader"]
        self.inherited = frozenset(found["workers"])
        for worker, (room_id, resources, node_id) in found["workers"].items():
            if not self._crew.adopt(worker, room_id, resources, node_id, self._find_s):
                self._historian.detected(worker, "it is gone", Cause.CRASHED, None)
        self._crew.clear_away()
        self._departures.restore(found["departures"])
        deadline = time.monotonic() + self._find_s
        while set(self._crew.stages) - set(self._crew.present()) and time.monotonic() < deadline:
            self._calls.collect(POLL_S)
            look()
        return State.resumed(
            replace(self._goal, min_workers=fewest, max_workers=most),
            generation=self.highest,
            workers=list(self._crew.present()),
            plan=plan,
            committed=committed,
            saved=saved,
            segment_updates=1 if plan is None else segment_updates(self._config, plan),
            evaluated=found["evaluated"],
            spent=found["spent"],
        )

    def _count_death(self, found: Mapping[str, Any]) -> None:
        deaths, died_at = found["deaths"]
        self._deaths = deaths + 1 if found["committed"] <= died_at else 1
        self._died_at = max(found["committed"], died_at)
        if self._deaths > MAX_DEATHS:
            raise RunError(
                f"the coordinator died {self._deaths} times at update {self._died_at}",
                "See Ray's logs of this node; is its memory used up?",
            )
