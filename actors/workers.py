"""The actors of one run: asking for room, starting, losing and dismissing them. Nothing waits."""

import logging
import shutil
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from elastic_trainer.actors.calls import Calls
from elastic_trainer.actors.handles import LoaderHandle, StageHandle
from elastic_trainer.actors.loaders import Loaders
from elastic_trainer.actors.resources import Resources, bundles, next_bundle, no_room
from elastic_trainer.actors.rooms import Room
from elastic_trainer.actors.site import Site
from elastic_trainer.config import Config, fewest_workers
from elastic_trainer.errors import ClusterError
from elastic_trainer.types import WorkerId

Description = Mapping[str, Any]
ASK_AGAIN_S = 5.0  # after the cluster has refused to look for room at all
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Berth:
    """A worker and the room that it works in."""

    handle: StageHandle
    room: Room
    node_id: str


class Run(Protocol):
    """The run that the crew works for."""

    def starting(self) -> None: ...
    def joined(self, worker: WorkerId) -> None: ...


class Crew:
    """The actors of one run: stage workers, spares and newcomers among them, and loaders.

    Args:
        config: the resolved configuration.
        site: the cluster.
        calls: where their answers are awaited.
        start_limit_s: how long a started actor may take until it answers.
        run: told who starts and joins.
    """

    def __init__(
        self,
        config: Config,
        site: Site,
        calls: Calls,
        start_limit_s: float,
        run: Run,
    ) -> None:
        self.config = config
        self.descriptions: dict[WorkerId, Description] = {}
        self.loaders = Loaders(config, site, calls, self.descriptions, start_limit_s, run)
        self.fewest = fewest_workers(config)  # needed to train
        self.avoided: set[str] = set()  # ids of nodes that are about to go
        self.next_worker = 0  # names are never used twice
        self._site = site
        self._calls = calls
        self._start_limit_s = start_limit_s
        self._run = run
        self._berths: dict[WorkerId, Berth] = {}
        self._leaving: dict[WorkerId, tuple[Berth, float]] = {}  # and by when they are ended
        self._asked: dict[Any, Room] = {}  # rooms that are not ours yet, by their calls
        self._wanted = 0
        self._not_before = 0.0
        self._begun = time.monotonic()
        self._has_begun = False
        self._bundle: dict[str, float] | None = None  # what was asked for last

    @property
    def stages(self) -> dict[WorkerId, StageHandle]:
        """All living workers, those included that have not described themselves yet."""
        return {worker: berth.handle for worker, berth in self._berths.items()}

    @property
    def berths(self) -> Mapping[WorkerId, Berth]:
        """Where the living workers are."""
        return self._berths

    @property
    def num_pending(self) -> int:
        """Rooms that the cluster has yet to give."""
        return len(self._asked)

    def present(self) -> dict[WorkerId, StageHandle]:
        """Living workers that have described themselves."""
        return {w: b.handle for w, b in self._berths.items() if w in self.descriptions}

    def members(self) -> list[StageHandle | LoaderHandle]:
        """All living actors."""
        return [*self.stages.values(), *self.loaders.handles.values()]

    def on_nodes(self, node_ids: Collection[str]) -> list[WorkerId]:
        """Living workers there."""
        return [w for w, berth in self._berths.items() if berth.node_id in node_ids]

    # Coming.

    def want(self, number: int) -> None:
        """Have so many workers, living or on their way. Never ends one that lives."""
        self._wanted = number
        self._fill()

    def tick(self) -> None:
        """Do what has become due."""
        self._fill()
        now = time.monotonic()
        for worker in [w for w, (_, by) in self._leaving.items() if now > by]:
            self._end(worker)

    def avoid(self, node_ids: Iterable[str]) -> None:
        """Place no worker on these nodes any more."""
        new = set(node_ids) - self.avoided
        if not new:
            return
        self.avoided |= new
        for call in list(self._asked):  # the cluster may be about to give one there
            self._cancel(call)
        self._fill()

    def missing_room(self) -> ClusterError | None:
        """That the fewest workers of the run have found no room in time, if so."""
        waited_s = self.config.cluster.start_timeout_s
        self._has_begun = self._has_begun or len(self._berths) >= self.fewest
        if self._has_begun or time.monotonic() - self._begun <= waited_s:
            return None
        total = self._site.total()
        wanted = bundles(self.config.cluster, total, self.fewest)
        return ClusterError(
            no_room(wanted, total, self._site.free(), waited_s),
            "Ask for fewer --workers or smaller cluster.resources_per_worker, or add nodes.",
        )

    def start_loaders(self) -> None:
        """Start the loaders that are missing."""
        self.loaders.start(self.avoided)

    def adopt(
        self, worker: WorkerId, room_id: str, resources: Resources, node_id: str, limit_s: float
    ) -> bool:
        """Take over a worker of an earlier coordinator; False if Ray knows it no more.

        It must answer within `limit_s` seconds.
        """
        handle = self._site.find_stage(worker)
        if handle is None:
            return False
        room = self._site.known_room(room_id, resources)
        self._berths[worker] = Berth(handle=handle, room=room, node_id=node_id)
        self._has_begun = True
        self._calls.ask(handle.describe(), partial(self._described, worker), limit_s=limit_s)
        return True

    def clear_away(self) -> None:
        """End what other trainers in this folder have left behind, and all rooms not used."""
        self._site.clear_away({berth.room.room_id for berth in self._berths.values()})

    def _fill(self) -> None:
        missing = self._wanted - len(self._berths) - len(self._asked)
        for call in list(self._asked)[max(0, len(self._asked) + missing) :] if missing < 0 else ():
            self._cancel(call)
        if missing > 0 and time.monotonic() >= self._not_before:
            total = self._site.total()
            for _ in range(missing):
                room = self._site.ask_room(self._next_bundle(total), self.avoided)
                call = room.ready()
                self._asked[call] = room
                self._calls.whenever(call, partial(self._ready, call), partial(self._refused, call))

    def _next_bundle(self, total: Resources) -> dict[str, float]:
        held = [berth.room.resources for berth in self._berths.values()]
        held += [room.resources for room in self._asked.values()]
        try:
            self._bundle = next_bundle(self.config.cluster, total, held, self.fewest)
        except ClusterError:
            if self._bundle is None:
                raise  # else the nodes that had it may come back
        return self._bundle

    def _cancel(self, call: Any) -> None:
        self._calls.drop(call)
        self._asked.pop(call).release()

    def _refused(self, call: Any, reason: str) -> None:
        _log.warning("no room: %s", reason)
        self._not_before = time.monotonic() + ASK_AGAIN_S
        if (room := self._asked.pop(call, None)) is not None:
            room.release()

    def _ready(self, call: Any, _: Any) -> None:
        """There is room: start a worker in it."""
        room = self._asked.pop(call)
        if not (node_id := room.node_id()) or node_id in self.avoided:
            room.release()  # its node is about to go, or has gone already
            self._fill()
            return
        worker = f"stage-{self.next_worker}"
        self.next_worker += 1
        self._run.starting()
        handle = self._site.start_stage(worker, room)
        self._berths[worker] = Berth(handle=handle, room=room, node_id=node_id)
        self._calls.ask(
            handle.describe(), partial(self._described, worker), limit_s=self._start_limit_s
        )

    def _described(self, worker: WorkerId, description: Description) -> None:
        self.descriptions[worker] = description
        self._run.joined(worker)

    # Going.

    def lose(self, worker: WorkerId, reason: str) -> None:
        """Part with a worker, or a loader, that is dead or must not live.

        Its process may still run on a node that cannot be reached: it finds its generation over.
        """
        if worker in self.loaders.handles:
            self.loaders.lose(worker)
        elif (berth := self._berths.pop(worker, None)) is not None:
            _end(berth)
        else:
            self._end(worker)
            return
        self.descriptions.pop(worker, None)
        self._calls.drop_worker(worker, reason)

    def dismiss(self, workers: Iterable[WorkerId]) -> None:
        """Let these end what they write, then end them."""
        limit_s = self.config.elastic.stall_limit_s
        for worker in workers:
            if (berth := self._berths.pop(worker, None)) is None:
                continue
            self.descriptions.pop(worker, None)
            self._leaving[worker] = berth, time.monotonic() + limit_s
            self._calls.forget(worker)
            closed = partial(self._closed, worker)
            self._calls.when(berth.handle.close(), closed, failed=closed, judged=False)

    def close(self, timeout_s: float) -> None:
        """Close what answers in time, end everything, give all room back."""
        for call in list(self._asked):
            self._cancel(call)
        closing = [member.close() for member in self.members()]
        deadline = time.monotonic() + timeout_s
        for pending in closing:
            try:
                pending.get(max(0.1, deadline - time.monotonic()))
            except Exception:  # noqa: BLE001, S112 - it is dead or wedged: what follows settles it
                continue
        for loader in self.loaders.handles.values():
            loader.kill()
        for berth in (*self._berths.values(), *(berth for berth, _ in self._leaving.values())):
            _end(berth)
        try:
            self._site.clear_away(())  # what an earlier coordinator has left, too
        except Exception:  # its cluster is gone, and all that was there
            _log.exception("rooms")
        shutil.rmtree(self._site.private_dir, ignore_errors=True)

    def _closed(self, worker: WorkerId, _: Any) -> None:
        self._end(worker)

    def _end(self, worker: WorkerId) -> None:
        if (known := self._leaving.pop(worker, None)) is not None:
            _end(known[0])
            self._calls.drop_worker(worker, f"{worker} was dismissed")


def _end(berth: Berth) -> None:
    berth.handle.kill()
    berth.room.release()
