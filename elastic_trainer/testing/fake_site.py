"""A cluster of workers that do nothing but keep accounts, to drive the real coordinator with.

Nothing runs in parallel: the world moves on by one step whenever the coordinator waits. A layer's
state is the history of what it was trained on, so a replay that starts from the wrong state, or
reads other samples, ends in another state.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.actors.resources import Node
from elastic_trainer.actors.watch import Mark, Standing
from elastic_trainer.checkpoint.progress import SaveProgress
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.elastic.instructions import INITIAL, STORAGE
from elastic_trainer.errors import FencedError, TransportError, WorkerLostError
from elastic_trainer.planner.sample_costs import Rates
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.types import (
    BatchInfo,
    ConfigureReport,
    Cursor,
    LayerProfile,
    MicrobatchInfo,
    Plan,
    Profile,
    Restore,
    StageReport,
    UpdateReport,
    WorkerId,
)

IDLE_S = 0.002  # what passes when nothing can move
SAMPLES = 2  # per microbatch
NUM_NODES = 4
Actor = Any


class FakeCall:
    """A call; `answer` is made when its turn has come."""

    def __init__(self, actor: Actor, line: str, answer: Callable[[], Any]) -> None:
        self.actor, self.line, self.answer = actor, line, answer
        self.worker: WorkerId = actor.worker
        self.is_ready = False
        self.result: Any = None

    def run(self) -> None:
        try:
            self.result = self.answer()
        except Exception as error:
            self.result = error
        self.is_ready = True

    def get(self, timeout_s: float) -> Any:
        if not self.is_ready and self.actor.is_dead:
            self.result, self.is_ready = WorkerLostError(f"{self.worker} is gone: killed"), True
        if not self.is_ready:
            self.run()  # only the end of the run asks for what is not there
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


@dataclass
class _Copy:
    """Layers' states after an update."""

    update: int
    layers: dict[str, str]


class FakeStage:
    """A stage worker, and its handle."""

    def __init__(self, site: "FakeSite", worker: WorkerId, node: Node) -> None:
        self.worker, self.line = worker, "stages"
        self.site, self.node = site, node
        self.is_dead = self.is_frozen = False
        self.generation = 0
        self.over = 0  # work of this generation and older ones ends at once
        self.live: _Copy | None = None
        self.before: _Copy | None = None
        self.copies: dict[WorkerId, list[_Copy]] = {}
        self.buddy: WorkerId | None = None
        self.loaders: list[WorkerId] = []  # that feed it
        self.compute: deque[FakeCall] = deque()
        self.segment: Segment | None = None
        self.stored = -1

    # Calls.

    def _call(self, answer: Callable[[], Any]) -> FakeCall:
        call = FakeCall(self, f"{self.worker} control", answer)
        self.site.control.append(call)
        return call

    def _compute(self, answer: Callable[[], Any]) -> FakeCall:
        call = FakeCall(self, self.line, answer)
        self.compute.append(call)
        return call

    def describe(self) -> FakeCall:
        return self._call(
            lambda: {
                "node_ip": self.node.ip,
                "pid": 1,
                "device_class": "cpu",
                "memory_bytes": None,
                "layers": self.site.layers,
                "ties": [],
                "input_fields": ["inputs"],
                "label_fields": ["labels"],
                "batch_fields": [[f"of {name}"] for name in self.site.layers],
                "profile_facts": {},
            }
        )

    def ping(self, generation: int = 0, stored: int = -1, committed: int = -1) -> FakeCall:
        return self._call(lambda: self.site.mark(self))

    def profile(self, sample: Any) -> FakeCall:
        return self._compute(lambda: self.site.profile)

    def abort(self, generation: int, reason: str) -> FakeCall:
        self.over = max(self.over, generation)
        return self._call(lambda: None)

    def take_stock(self, generation: int, peers: Any) -> FakeCall:
        def answer() -> Any:
            self.generation = generation
            held = [c for copies in self.copies.values() for c in copies]
            held += [self.live] if self.live is not None else []
            stock: dict[int, list[str]] = {}
            for copy in held:
                stock.setdefault(copy.update, []).extend(copy.layers)
            return stock

        return self._compute(answer)

    def configure(self, plan: Plan, peers: Any, restore: Restore, buddy: Any) -> FakeCall:
        def answer() -> ConfigureReport:
            self.generation = plan.generation
            mine = next((s for s in plan.stages if s.worker == self.worker), None)
            self.loaders = [w for w, d in peers.items() if d.get("role") == "loader"]
            names = plan.layers[mine.first : mine.stop] if mine else ()
            self.site.plan = plan
            layers = {n: self.site.state_of(n, restore, self) for n in names}
            # Others may yet ask for what it held.
            self.before, self.live = self.live, _Copy(restore.update, layers) if mine else None
            self.buddy, self.stored = buddy, -1
            return ConfigureReport(update=restore.update, peer_bytes=len(layers))

        return self._compute(answer)

    def run_segment(self, segment: Segment) -> FakeCall:
        call = self._compute(lambda: self._trained(segment))
        call.segment = segment  # type: ignore[attr-defined]
        return call

    def _trained(self, segment: Segment) -> StageReport:
        stage = self.site.stage_of(self.worker)
        last = stage == self.site.num_stages - 1
        if segment.kind == "train":
            self._train(segment)
        return StageReport(
            stage=stage,
            worker=self.worker,
            generation=segment.generation,
            segment=segment.index,
            updates=tuple(
                UpdateReport(
                    update=b.update,
                    loss=float(b.update) if last else None,
                    grad_norm=None,
                    finished_at=time.time(),
                )
                for b in segment.batches
            ),
            busy_s=self.site.busy_s(segment, stage) if segment.kind == "train" else {},
            wall_s=1e-3,
            peak_live_activations=1,
            peak_activation_bytes=1,
            stash_copies=0,
            max_staleness=0,
            sent_bytes=0,
            received_bytes=0,
            snapshot_s=1e-6,
            snapshot_update=self.stored,
        )

    def _train(self, segment: Segment) -> None:
        if self.live is None or self.live.update != segment.first_update - 1:
            raise FencedError(f"{self.worker} does not hold update {segment.first_update - 1}")
        layers = dict(self.live.layers)
        for batch in segment.batches:
            samples = [s for m in batch.microbatches for s in m.sample_ids]
            self._receive(segment.generation, batch.update, samples)
            layers = {n: digest(state, batch.update, samples) for n, state in layers.items()}
        self.live = _Copy(segment.last_update, layers)
        if segment.snapshot:
            copy = _Copy(segment.last_update, dict(layers))
            keepers = [self.site.stages.get(w) for w in (self.worker, self.buddy) if w]
            for keeper in keepers:
                if keeper is not None and not keeper.is_dead:
                    keeper.copies[self.worker] = [*keeper.copies.get(self.worker, []), copy][-2:]
            self.stored = segment.last_update

    def _receive(self, generation: int, update: int, samples: Sequence[str]) -> None:
        """What it was sent of a batch: all that it needs, once, by its one loader."""
        assert self.live is not None
        (loader,) = self.loaders
        received = self.site.sent.pop((generation, update, self.worker))
        (fields,) = (what for who, what, ids in received if (who, ids) == (loader, tuple(samples)))
        assert len(received) == 1 and {f"of {name}" for name in self.live.layers} <= set(fields)

    def save(self, generation: int, update: int, root: str) -> FakeCall:
        def answer() -> Any:
            assert self.live is not None and self.live.update == update
            self.writing = dict(self.live.layers)
            return {"scaler": None}

        return self._compute(answer)

    def saved(self, update: int) -> FakeCall:
        def answer() -> SaveProgress:
            store = CheckpointStore(self.site.root)
            files = [
                store.write_layer_file(update, self.site.layers.index(name), name, [state.encode()])
                for name, state in self.writing.items()
            ]
            return SaveProgress(files=tuple(files))

        return self._call(answer)

    def close(self) -> FakeCall:
        return self._call(lambda: None)

    def kill(self) -> None:
        if self.site.is_obeyed(self):
            self.is_dead = True


class FakeLoader:
    """A loader, and its handle: sample i of the data is called `i`."""

    def __init__(self, site: "FakeSite", worker: WorkerId, node: Node) -> None:
        self.worker, self.line, self.site, self.node = worker, worker, site, node
        self.is_dead = self.is_frozen = False
        self.generation = self.over = 0
        self.row = 0
        self.shift = 0  # of the data that it reads, which all should read alike
        # By generation and first update: the rates that it was told, where it was told any.
        self.rates: dict[tuple[int, int], Rates] = {}
        self.routes: Mapping[str, Sequence[WorkerId]] = {}
        self.compute: deque[FakeCall] = deque()

    def _compute(self, answer: Callable[[], Any], generation: int | None = None) -> FakeCall:
        def fenced() -> Any:
            if generation is not None and generation < max(self.generation, self.over + 1):
                raise FencedError(f"generation {generation} is over")
            return answer()

        call = FakeCall(self, self.line, fenced)
        self.compute.append(call)
        return call

    def describe(self) -> FakeCall:
        return self._compute(lambda: {"role": "loader", "node_ip": self.node.ip, "pid": 1})

    def ping(self) -> FakeCall:
        call = FakeCall(self, f"{self.worker} control", lambda: Mark((self.site.turn, 0), ""))
        self.site.control.append(call)
        return call

    def sample(self) -> FakeCall:
        return self._compute(dict)

    def abort(self, generation: int, reason: str) -> FakeCall:
        self.over = max(self.over, generation)
        return self._compute(lambda: None)

    def configure(
        self,
        generation: int,
        peers: Any,
        routes: Any,
        cursor: Cursor,
        first_update: int,
        rates: Rates | None,
    ) -> FakeCall:
        def answer() -> None:
            assert set(peers) == {w for workers in routes.values() for w in workers}
            self.generation, self.row, self.routes = generation, cursor.row, routes
            self._tell(first_update, rates)

        return self._compute(answer)

    def _tell(self, update: int, rates: Rates | None) -> None:
        if rates is not None:
            self.rates[self.generation, update] = rates

    def prepare(
        self, generation: int, first: int, count: int, rates: Rates | None = None
    ) -> FakeCall:
        def answer() -> list[BatchInfo]:
            self._tell(first, rates)
            batches = list(self._batches(first, count))
            for batch in batches:
                self._send(generation, batch)
            return batches

        return self._compute(answer, generation)

    def _send(self, generation: int, batch: BatchInfo) -> None:
        samples = tuple(s for m in batch.microbatches for s in m.sample_ids)
        for worker in dict.fromkeys(w for workers in self.routes.values() for w in workers):
            fields = [name for name, workers in self.routes.items() if worker in workers]
            sent = self.site.sent.setdefault((generation, batch.update, worker), [])
            sent.append((self.worker, fields, samples))

    def _batches(self, first: int, count: int) -> Iterator[BatchInfo]:
        for update in range(first, first + count):
            if self.site.num_samples is not None and self.row >= self.site.num_samples:
                return
            micros = []
            for _ in range(self.site.num_microbatches):
                row = self.row + self.shift
                ids = tuple(str(i) for i in range(row, row + SAMPLES))
                self.row += SAMPLES
                micros.append(
                    MicrobatchInfo(num_samples=SAMPLES, num_tokens=8, num_valid=8, sample_ids=ids)
                )
            end = Cursor(row=self.row)
            yield BatchInfo(
                update=update, microbatches=tuple(micros), end=end, costs=self.site.costs
            )

    def prepare_eval(self, generation: int, first_key: int) -> FakeCall:
        return self._compute(list, generation)

    def close(self) -> FakeCall:
        return self._compute(lambda: None)

    def kill(self) -> None:
        if self.site.is_obeyed(self):
            self.is_dead = True


@dataclass
class FakeRoom:
    """A room that is ours when the site has a free place."""

    site: "FakeSite"
    room_id: str
    resources: Mapping[str, float]
    avoid: frozenset[str]
    node: Node | None = None
    worker: WorkerId = "room"
    is_dead: bool = False
    is_frozen: bool = False
    is_released: bool = field(default=False)

    def ready(self) -> FakeCall:
        return self.site.ask(self)

    def node_id(self) -> str:
        return self.node.node_id if self.node is not None else ""

    def release(self) -> None:
        if not self.site.is_obeyed(self):
            return
        self.is_released = True
        for stage in self.site.stages.values():
            if self.site.rooms_of.get(stage.worker) is self:
                stage.is_dead = True


class FakeSite:
    """The cluster of a run.

    Args:
        folder: for checkpoints and sockets.
        layers: names of the model's layers.
        places: how many workers find room.
        num_microbatches: of a batch.
        num_samples: of the data; None: they never end.
    """

    def __init__(
        self,
        folder: str,
        layers: Sequence[str],
        *,
        places: int,
        num_microbatches: int = 2,
        num_samples: int | None = None,
    ) -> None:
        self.private_dir = f"{folder}/private"
        self.root = f"{folder}/run/checkpoints"
        self.address = "fake:1"
        self.layers = list(layers)
        self.places = places
        self.num_microbatches, self.num_samples = num_microbatches, num_samples
        self.stages: dict[WorkerId, FakeStage] = {}
        self.loaders: dict[WorkerId, FakeLoader] = {}
        # By generation, update and stage worker: loaders, with the fields and samples they sent.
        self.sent: dict[tuple[int, int, WorkerId], list[tuple[WorkerId, list[str], Any]]] = {}
        self.rooms: list[FakeRoom] = []
        self.rooms_of: dict[WorkerId, FakeRoom] = {}
        self.asked: list[tuple[FakeRoom, FakeCall]] = []
        self.control: list[FakeCall] = []
        self.told: dict[str, float | None] = {}  # nodes that Ray drains
        self.turn = 0
        self.hooks: list[Callable[[], None]] = []
        self.obeys: Any = None  # None: everybody; else objects of an earlier coordinator are deaf
        self.profile = Profile(
            device_class="cpu",
            microbatch_size=2,
            layers=tuple(
                LayerProfile(
                    name=name,
                    forward_s=0.01,
                    backward_s=0.01,
                    activation_bytes=1,
                    saved_bytes=1,
                    parameter_bytes=1,
                )
                for name in self.layers
            ),
        )
        self.plan: Plan | None = None
        self.costs: tuple[float, ...] = ()  # predicted of a batch, by group
        # What a stage is busy with in a segment.
        self.busy_s: Callable[[Segment, int], Mapping[str, float]] = lambda segment, stage: {}

    # What a coordinator sees.

    def total(self) -> Mapping[str, float]:
        return {"CPU": float(self.places)}

    def free(self) -> Mapping[str, float]:
        return {"CPU": 0.0}

    def nodes(self) -> list[Node]:
        each = -(-self.places // NUM_NODES)
        return [
            Node(node_id=f"node{i}", ip=f"10.0.0.{i}", name=f"host{i}", total={"CPU": each})
            for i in range(NUM_NODES)
        ]

    def draining(self) -> Mapping[str, float | None]:
        return self.told

    def ask_room(self, resources: Mapping[str, float], avoid: Collection[str]) -> Any:
        room = FakeRoom(self, f"{len(self.rooms):04x}", resources, frozenset(avoid))
        self.rooms.append(room)
        return room

    def known_room(self, room_id: str, resources: Mapping[str, float]) -> Any:
        return self.rooms[int(room_id, 16)]

    def clear_away(self, keep: Collection[str]) -> None:
        for room in self.rooms:
            if room.room_id not in keep:
                room.release()

    def start_stage(self, worker: WorkerId, room: Any) -> Any:
        assert worker not in self.stages, f"{worker} is used twice"
        self.stages[worker] = FakeStage(self, worker, room.node)
        self.rooms_of[worker] = room
        return self.stages[worker]

    def find_stage(self, worker: WorkerId) -> Any:
        found = self.stages.get(worker)
        return None if found is None or found.is_dead else found

    def start_loader(self, worker: WorkerId, *, spread: bool, avoid: Collection[str]) -> Any:
        assert worker not in self.loaders, f"{worker} is used twice"
        nodes = self.nodes()
        if spread:
            nodes = [n for n in nodes if n.node_id not in avoid]
            load = [loader.node for loader in self.loaders.values() if not loader.is_dead]
            nodes.sort(key=load.count)
        self.loaders[worker] = FakeLoader(self, worker, nodes[0])
        return self.loaders[worker]

    # The world.

    def ask(self, room: FakeRoom) -> FakeCall:
        call = FakeCall(room, "room", lambda: None)
        self.asked.append((room, call))
        return call

    def wait(self, calls: Sequence[Any], timeout_s: float) -> list[Any]:
        """Move the world on by a step; what is ready then."""
        self.turn += 1
        for hook in list(self.hooks):
            hook()
        self._give_rooms()
        for call in self.control:
            if not (call.actor.is_frozen or call.actor.is_dead):
                call.run()
        self.control = [c for c in self.control if c.actor.is_frozen]
        actors: list[Actor] = [*self.stages.values(), *self.loaders.values()]
        for actor in actors:
            if not (actor.is_frozen or actor.is_dead):
                self._work(actor)
        ready = [c for c in calls if c.is_ready or c.actor.is_dead]
        if not ready:
            time.sleep(min(timeout_s, IDLE_S))
        return ready

    def _give_rooms(self) -> None:
        taken = sum(room.node is not None and not room.is_released for room in self.rooms)
        for room, call in list(self.asked):
            free = [n for n in self.nodes() if n.node_id not in {*room.avoid, *self.told}]
            if room.is_released:
                self.asked.remove((room, call))
            elif taken < self.places and free:
                load = [r.node for r in self.rooms if r.node and not r.is_released]
                room.node = min(free, key=lambda n: load.count(n))
                taken += 1
                call.run()
                self.asked.remove((room, call))

    def _work(self, actor: Any) -> None:
        """Let an actor do its next calls: those that need nobody, or for which all are there."""
        while actor.compute:
            call = actor.compute[0]
            segment: Segment | None = getattr(call, "segment", None)
            if segment is not None:
                if segment.generation <= max(actor.over, actor.generation - 1):
                    actor.live = None  # broken off in the middle
                    call.answer = _interrupted
                elif not self._gathered(segment):
                    return
            actor.compute.popleft()
            call.run()

    def mark(self, stage: FakeStage) -> Mark:
        """How far a worker says that it is."""
        begun = stage.segment
        standing = None if begun is None else Standing(begun.generation, begun.index, 0)
        return Mark((self.turn, 0), "somewhere", stage.stored, standing)

    def _gathered(self, segment: Segment) -> bool:
        """Whether all stages have begun the segment: it then ends for all of them."""
        assert self.plan is not None
        begun = segment in [a.segment for a in self.stages.values() if a.segment is not None]
        heads = [self.stages[s.worker] for s in self.plan.stages]
        if not begun:
            for stage in heads:
                head = stage.compute[0] if stage.compute else None
                there = getattr(head, "segment", None) is segment
                if stage.is_dead or stage.is_frozen or not there:
                    return False
            for stage in heads:
                stage.segment = segment
        return True

    def stage_of(self, worker: WorkerId) -> int:
        assert self.plan is not None
        return next(s.stage for s in self.plan.stages if s.worker == worker)

    @property
    def num_stages(self) -> int:
        assert self.plan is not None
        return self.plan.num_stages

    def state_of(self, layer: str, restore: Restore, to: FakeStage) -> str:
        """What the source gives; it must have it."""
        source = restore.sources[layer]
        if source == INITIAL:
            assert restore.update == 0
            return ""
        if source == STORAGE:
            store = CheckpointStore(restore.root or "")
            return store.read_layer_file(store.manifest(restore.update), layer).decode()
        giver = self.stages[source]
        if giver.is_dead:
            raise TransportError(f"{source} does not answer")
        held = [c for copies in giver.copies.values() for c in copies]
        held += [c for c in (giver.live, giver.before) if c is not None]
        return next(
            c.layers[layer] for c in held if c.update == restore.update and layer in c.layers
        )

    def is_obeyed(self, thing: Any) -> bool:
        return self.obeys is None or self.obeys(thing)

    def alive(self) -> list[WorkerId]:
        return [w for w, stage in self.stages.items() if not stage.is_dead]

    def alive_loaders(self) -> list[WorkerId]:
        return [w for w, loader in self.loaders.items() if not loader.is_dead]


def digest(state: str, update: int, samples: Sequence[str]) -> str:
    """The state of a layer after one more update."""
    return hashlib.sha256(f"{state}:{update}:{samples}".encode()).hexdigest()


def _interrupted() -> Any:
    raise FencedError("the coordinator ended this generation")
