"""The loader actors of one run, and which of them feeds which stage."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.handles import LoaderHandle
from elastic_trainer.actors.planning import routes
from elastic_trainer.actors.site import Site
from elastic_trainer.config import Config
from elastic_trainer.errors import DataError
from elastic_trainer.planner.loaders import assign_loaders
from elastic_trainer.types import BatchInfo, Plan, WorkerId

Description = Mapping[str, Any]
Routes = Mapping[str, Sequence[WorkerId]]  # by field, who gets it


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeding:
    """Who feeds whom in one generation.

    `routes` says for each loader which field it sends to which workers, nothing for idle ones.
    `loader_of` is the loader of each worker that needs data.
    """

    routes: Mapping[WorkerId, Routes]
    loader_of: Mapping[WorkerId, WorkerId]

    @property
    def serving(self) -> list[WorkerId]:
        """Loaders that feed anybody."""
        return [loader for loader, sent in self.routes.items() if sent]

    def receivers(self, loader: WorkerId) -> list[WorkerId]:
        """Whom a loader feeds."""
        return [worker for worker, its in self.loader_of.items() if its == loader]


def feeding(
    plan: Plan,
    workers: Mapping[WorkerId, Description],
    loaders: Mapping[WorkerId, Description],
) -> Feeding:
    """Share out the stages of a plan among loaders.

    Args:
        plan: its stages are to be fed.
        workers: what those who hold them said of themselves.
        loaders: the same of all loaders.
    """
    every = routes(plan, workers)
    fed = {worker for receivers in every.values() for worker in receivers}
    nodes = {s.stage: str(workers[s.worker]["node_ip"]) for s in plan.stages if s.worker in fed}
    shares = assign_loaders(nodes, {w: str(known["node_ip"]) for w, known in loaders.items()})
    loader_of = {plan.stages[s].worker: loader for loader, held in shares.items() for s in held}
    sent: dict[WorkerId, dict[str, list[WorkerId]]] = {loader: {} for loader in loaders}
    for name, receivers in every.items():
        for worker in receivers:
            sent[loader_of[worker]].setdefault(name, []).append(worker)
    return Feeding(routes=sent, loader_of=loader_of)


def agreed(answers: Mapping[WorkerId, list[BatchInfo]]) -> list[BatchInfo]:
    """What all loaders say of the batches that each has sent its part of.

    Raises:
        DataError: they do not say the same.
    """
    (first, batches), *others = answers.items()
    for loader, told in others:
        if told == batches:
            continue
        pairs = zip(batches, told, strict=False)
        differing = [a.update for a, b in pairs if a != b]
        where = f"the batch of update {differing[0]}" if differing else "where the data ends"
        raise DataError(
            f"{loader} reads other data than {first}: they differ in {where}",
            "data.path must lead to the same files on all nodes; or set data.num_loaders=1",
        )
    return batches


class Run(Protocol):
    """The run that the loaders work for."""

    def starting(self) -> None: ...
    def joined(self, worker: WorkerId) -> None: ...


class Loaders:
    """The loader actors, as many as `data.num_loaders`. Nothing waits.

    Each has a place, which its successor takes over: so nobody else's work changes. The first place
    is on the coordinator's node; the others are spread over all nodes. Loaders end with their
    coordinator.

    Args:
        config: the resolved configuration.
        site: the cluster.
        calls: where their answers are awaited.
        descriptions: what actors said of themselves; the loaders' are added to it.
        start_limit_s: how long a started actor may take until it answers.
        run: told who starts and joins.
    """

    def __init__(
        self,
        config: Config,
        site: Site,
        calls: Calls,
        descriptions: dict[WorkerId, Description],
        start_limit_s: float,
        run: Run,
    ) -> None:
        self.next_number = 0  # names are never used twice
        self._site = site
        self._calls = calls
        self._descriptions = descriptions
        self._start_limit_s = start_limit_s
        self._run = run
        self._places: list[LoaderHandle | None] = [None] * config.data.num_loaders

    @property
    def handles(self) -> dict[WorkerId, LoaderHandle]:
        """All living loaders, in the order of their places."""
        return {handle.worker: handle for handle in self._places if handle is not None}

    def present(self) -> dict[WorkerId, Description] | None:
        """What all of them said of themselves; None while one that was started has yet to."""
        known = {w: self._descriptions[w] for w in self.handles if w in self._descriptions}
        return known if len(known) == len(self.handles) else None

    def start(self, avoided: Collection[str]) -> None:
        """Start those that are missing, none of them on the nodes with the ids in `avoided` if
        there are others.
        """
        for place in [i for i, handle in enumerate(self._places) if handle is None]:
            worker = f"loader-{self.next_number}"
            self.next_number += 1
            self._run.starting()
            handle = self._site.start_loader(worker, spread=place > 0, avoid=avoided)
            self._places[place] = handle
            described = partial(self._described, worker)
            self._calls.ask(handle.describe(), described, limit_s=self._start_limit_s)

    def lose(self, worker: WorkerId) -> None:
        """Part with one that is dead or must not live."""
        for place, handle in enumerate(self._places):
            if handle is not None and handle.worker == worker:
                handle.kill()
                self._places[place] = None

    def facts(self, serving: Collection[WorkerId]) -> dict[WorkerId, dict[str, str]]:
        """Where each is and what it does, JSON-able."""
        found = {}
        for worker in self.handles:
            known = self._descriptions.get(worker)
            state = "serving" if worker in serving else "idle"
            found[worker] = {
                "node": "" if known is None else str(known["node_ip"]),
                "state": "starting" if known is None else state,
            }
        return found

    def _described(self, worker: WorkerId, description: Description) -> None:
        self._descriptions[worker] = description
        self._run.joined(worker)
