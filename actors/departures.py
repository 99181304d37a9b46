"""Nodes that are about to go: announced by Ray, or by whoever runs `elastic-trainer drain`."""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from elastic_trainer.actors.site import Site
from elastic_trainer.elastic import events as ev
from elastic_trainer.types import WorkerId

LOOK_S = 1.0  # how often Ray is asked


class Placement(Protocol):
    """Where workers are, and where none may come; `Crew` knows."""

    avoided: set[str]

    def on_nodes(self, node_ids: set[str]) -> list[WorkerId]: ...
    def avoid(self, node_ids: set[str]) -> None: ...


class Departures:
    """Tells the core of workers that must leave, and keeps others away from their nodes.

    Args:
        site: the cluster.
        crew: who is where.
        report: takes facts.
    """

    def __init__(
        self,
        site: Site,
        crew: Placement,
        report: Callable[[ev.Event], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._site = site
        self._crew = crew
        self._report = report
        self._clock = clock
        self._requests: queue.SimpleQueue[tuple[set[str], str, float | None]] = queue.SimpleQueue()
        self._known: dict[str, tuple[str, float | None]] = {}  # by node: why, and by what time
        self._next = 0.0

    def request(self, node_ids: set[str], reason: str, deadline_s: float | None) -> None:
        """Somebody wants these nodes empty; from any thread."""
        by = None if deadline_s is None else self._clock() + deadline_s
        self._requests.put((node_ids, reason, by))

    def look(self) -> None:
        """See what has been asked for, and what Ray announces."""
        while not self._requests.empty():
            node_ids, reason, by = self._requests.get()
            self._announce(node_ids, reason, by)
        if self._clock() < self._next:
            return
        self._next = self._clock() + LOOK_S
        for node_id, by in self._site.draining().items():
            known = self._known.get(node_id)
            if known is None or (by is not None and (known[1] is None or by < known[1])):
                self._announce({node_id}, f"Ray drains node {self._ip(node_id)}", by)

    def joined(self, worker: WorkerId) -> None:
        """A worker has joined; its node may have been announced while it was starting."""
        for node_id, (reason, by) in self._known.items():
            if worker in self._crew.on_nodes({node_id}):
                self._tell([worker], reason, by)

    def facts(self) -> dict[str, Any]:
        """All of it, JSON-able."""
        return {node_id: [reason, by] for node_id, (reason, by) in self._known.items()}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take over what `facts` gave another process."""
        for node_id, (reason, by) in facts.items():
            self._announce({node_id}, reason, by)

    def _announce(self, node_ids: set[str], reason: str, by: float | None) -> None:
        self._known.update(dict.fromkeys(node_ids, (reason, by)))
        self._crew.avoid(node_ids)
        if workers := self._crew.on_nodes(node_ids):
            self._tell(workers, reason, by)

    def _tell(self, workers: Sequence[WorkerId], reason: str, by: float | None) -> None:
        left_s = None if by is None else max(0.0, by - self._clock())
        self._report(ev.WorkersDraining(workers=tuple(workers), reason=reason, deadline_s=left_s))

    def _ip(self, node_id: str) -> str:
        return next((n.ip for n in self._site.nodes() if n.node_id == node_id), node_id)
