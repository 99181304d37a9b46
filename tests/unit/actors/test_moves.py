"""Layers that move between workers keep their bits; what an aborted segment left does not count."""

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from elastic_trainer.actors.stage_worker import StageWorker
from elastic_trainer.checkpoint.layers import write_layer
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.elastic.instructions import INITIAL, STORAGE
from elastic_trainer.errors import CheckpointError, FencedError, TransportError
from elastic_trainer.models.registry import load_model
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.testing.crew import WAIT_S, ThreadedCrew
from elastic_trainer.testing.in_process import with_settings
from elastic_trainer.testing.oracle import SynchronousOracle
from elastic_trainer.testing.toys import assert_same_states
from elastic_trainer.types import Restore

A, B, C, D = "stage-0", "stage-1", "stage-2", "stage-3"
States = Mapping[str, Mapping[str, Tensor]]


def settings(**sections: Mapping[str, Any]) -> Config:
    """Six layers with tied embeddings, clipping, and a learning rate that moves every update."""
    base: dict[str, Mapping[str, Any]] = {
        "model": {
            "name": "gpt",
            "args": {
                "vocab_size": 31,
                "num_layers": 4,
                "dim": 8,
                "num_heads": 2,
                "dropout": 0.0,  # threads of one process share torch's generator
                "tie_embeddings": True,
            },
        },
        "data": {"format": "synthetic", "sequence_length": 6},
        "train": {"global_batch_size": 4, "max_steps": 20, "max_grad_norm": 0.2},
        "optim": {"warmup_steps": 2},
        "pipeline": {"microbatch_size": 2},
        "elastic": {"stall_limit_s": 20.0},
    }
    return with_settings(Config(), **(base | sections))


CONFIG = settings()
LAYERS = load_model(CONFIG).names


def undisturbed(update: int) -> States:
    """The state of every layer after `update`, from one process without stages."""
    oracle = SynchronousOracle(load_model(CONFIG), CONFIG)
    stream = BatchStream(CONFIG, "train", CONFIG.train.global_batch_size)
    for number in range(1, update + 1):
        _, microbatches = next(stream)
        oracle.update(
            number, [{k: torch.from_numpy(v) for k, v in fields.items()} for fields in microbatches]
        )
    return oracle.layer_states()


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[ThreadedCrew]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        private = f"{folder}/s"
        with ThreadedCrew(CONFIG, private, tcp=getattr(request, "param", "") == "tcp") as made:
            made.start(A, B, C)
            made.configure(made.make_plan(1, (A, B, C)), 0, dict.fromkeys(LAYERS, INITIAL))
            yield made


def owners(crew: ThreadedCrew) -> dict[str, str]:
    """Who holds each layer in the present plan."""
    assert crew.plan is not None
    return {
        layer: crew.plan.stages[crew.plan.stage_of_layer(i)].worker
        for i, layer in enumerate(LAYERS)
    }


@pytest.mark.parametrize("crew", ["ipc", "tcp"], indirect=True)
@pytest.mark.parametrize(
    ("workers", "cuts"),
    [
        ((A, B), [3]),  # one leaves
        ((C,), None),
        ((A, B, C), [1, 2]),
        ((C, A, B), None),  # everything moves; owner and follower of the tie change places
        ((A, B, C, D), None),  # one joins
        ((A, B, C, D), [1, 4, 5]),
    ],
)
def test_moved_layers_keep_their_bits(
    crew: ThreadedCrew, workers: tuple[str, ...], cuts: list[int] | None
) -> None:
    crew.train(2)
    before = crew.states()
    assert_same_states(before, undisturbed(2))
    if D in workers:
        crew.start(D)
    stock = crew.take_stock(2)
    assert {layer for held in stock.values() for layer in held.get(2, ())} == set(LAYERS)
    sources = owners(crew)
    reports = crew.configure(crew.make_plan(2, workers, cuts), 2, sources)
    assert_same_states(crew.states(), before)
    sizes = {layer: sum(t.nbytes for t in state.values()) for layer, state in before.items()}
    now = owners(crew)
    moved = sum(size for layer, size in sizes.items() if now[layer] != sources[layer])
    stayed = sum(size for layer, size in sizes.items() if now[layer] == sources[layer])
    assert sum(report.peer_bytes for report in reports.values()) == moved
    assert sum(report.own_bytes for report in reports.values()) == stayed
    assert not any(report.snapshot_bytes or report.storage_bytes for report in reports.values())
    crew.train(3)
    assert_same_states(crew.states(), undisturbed(5))


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def waits(stage: StageWorker) -> bool:
    """Whether it waits for a message."""
    standing = stage.ping().standing
    return standing is not None and standing.waits_for is not None


def snapshot(crew: ThreadedCrew) -> None:
    """Train two updates, and wait until every stage's snapshot is with its buddy."""
    crew.train(2, snapshot=True)
    assert crew.plan is not None
    stages = [crew.stages[s.worker] for s in crew.plan.stages]
    eventually(lambda: all(s.ping().snapshot_update == crew.committed for s in stages))


@pytest.mark.parametrize("crew", ["tcp"], indirect=True)
@pytest.mark.parametrize("lost", [A, B, C])
def test_a_lost_workers_layers_come_back_from_its_buddy(crew: ThreadedCrew, lost: str) -> None:
    buddies = {A: B, B: C, C: A}
    crew.train(1)
    crew.take_stock(2)
    crew.configure(crew.make_plan(2, (A, B, C)), 1, owners(crew), buddies=buddies)
    snapshot(crew)
    crew.train(2)  # committed, but only live
    sources = owners(crew)
    crew.stop(lost)
    for worker in crew.stages.values():
        worker.abort(2, f"{lost} is lost")
    stock = crew.take_stock(3)
    for layer, owner in sources.items():
        holder = buddies[owner] if owner == lost else owner
        assert layer in stock[holder][3], "the snapshot"
        assert (layer in stock[holder].get(5, ())) == (owner != lost)
        sources[layer] = holder
    left = tuple(crew.stages)
    reports = crew.configure(crew.make_plan(3, left), 3, sources)
    assert_same_states(crew.states(), undisturbed(3))
    assert sum(report.snapshot_bytes for report in reports.values()) > 0
    assert not any(report.own_bytes or report.peer_bytes for report in reports.values())
    stock = crew.take_stock(4)
    assert all(set(held) == {3} for held in stock.values()), "what came after it is abandoned"
    crew.configure(crew.make_plan(4, left), 3, owners(crew))
    crew.train(3)
    assert_same_states(crew.states(), undisturbed(6))


def test_a_snapshot_serves_more_than_once(crew: ThreadedCrew) -> None:
    crew.train(1)
    crew.take_stock(2)
    buddies = {A: B, B: C, C: A}
    crew.configure(crew.make_plan(2, (A, B, C)), 1, owners(crew), buddies=buddies)
    snapshot(crew)
    sources = owners(crew)
    for generation, cuts in ((3, None), (4, [1, 4]), (5, None)):
        crew.train(2)  # goes on with what was restored
        crew.take_stock(generation)
        crew.configure(crew.make_plan(generation, (A, B, C), cuts), 3, sources)
        assert_same_states(crew.states(), undisturbed(3))


class Standstill:
    """Stops a worker at an action, on demand."""

    def __init__(self, kind: Kind, microbatch: int) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._at = kind, microbatch

    def hooks(self) -> RuntimeHooks:
        return RuntimeHooks(before=self._before)

    def _before(self, action: Action) -> None:
        if (action.kind, action.microbatch) == self._at:
            self.reached.set()
            assert self.go.wait(WAIT_S)


@pytest.mark.parametrize("kind", [Kind.F, Kind.B, Kind.OPT])
def test_what_an_aborted_segment_left_is_no_state(crew: ThreadedCrew, kind: Kind) -> None:
    crew.train(1)
    crew.take_stock(2)
    buddies = {A: B, B: C, C: A}
    crew.configure(crew.make_plan(2, (A, B, C)), 1, owners(crew), buddies=buddies)
    snapshot(crew)
    stop = Standstill(kind, 3)
    crew.stages[B].inject("stop", stop.hooks())
    segment = crew.segment(crew.prepare(3))
    calls = [crew.call(w, "run_segment", segment) for w in (A, B, C)]
    queued = [crew.call(w, "run_segment", segment) for w in (A, B, C)]
    assert stop.reached.wait(WAIT_S)
    for worker in crew.stages.values():
        worker.abort(2, "a test")
    stop.go.set()
    crew.stages[B].inject("stop", None)
    for call in (*calls, *queued):
        with pytest.raises(FencedError):
            call.result(WAIT_S)
    stock = crew.take_stock(3)
    assert all(set(held) == {3} for held in stock.values()), "only the snapshot"
    with pytest.raises(TransportError, match="does not hold layer"):
        crew.stages[A]._state.fetch(4, {LAYERS[-1]: C})
    crew.configure(crew.make_plan(3, (A, B, C)), 3, owners(crew))
    crew.train(3)
    assert_same_states(crew.states(), undisturbed(6))


@pytest.mark.parametrize("where", ["feed", "recv"])
def test_abort_wakes_a_worker_wherever_it_waits(crew: ThreadedCrew, where: str) -> None:
    crew.train(1)
    worker = {"feed": A, "recv": B}[where]
    batch = crew.prepare(1)[0]
    longer = replace(batch, microbatches=batch.microbatches * 2)  # more than the loader has sent
    segment = crew.segment([longer if where == "feed" else batch])
    calls = [crew.call(worker, "run_segment", segment) for _ in range(2)]
    eventually(lambda: waits(crew.stages[worker]))
    begin = time.monotonic()
    crew.stages[worker].abort(1, "a test")
    for call in calls:
        with pytest.raises(FencedError):
            call.result(WAIT_S)
    assert time.monotonic() - begin < 0.5


def test_an_abort_that_comes_late_does_not_harm_the_next_generation(crew: ThreadedCrew) -> None:
    crew.train(1)
    crew.take_stock(2)
    for worker in crew.stages.values():
        worker.abort(1, "late")
    crew.configure(crew.make_plan(2, (A, B, C)), 1, owners(crew))
    for worker in crew.stages.values():
        worker.abort(1, "later")
    crew.train(1)
    assert_same_states(crew.states(), undisturbed(2))


def test_an_abort_ends_a_configure_that_waits_for_a_peer(crew: ThreadedCrew) -> None:
    crew.train(1)
    crew.call(A, "take_stock", 2, crew.peers(A)).result(WAIT_S)  # the others do not hear of it
    plan = crew.make_plan(2, (A, B, C), [4, 5])
    restore = Restore(update=1, sources=owners(crew))
    call = crew.call(A, "configure", plan, crew.peers(A), restore, None)
    eventually(lambda: bool(crew.stages[A]._state._answers))
    crew.stages[A].abort(2, "C is lost")
    with pytest.raises(FencedError, match="C is lost"):
        call.result(WAIT_S)
    with pytest.raises(FencedError):
        crew.call(A, "take_stock", 2, crew.peers(A)).result(WAIT_S)
    # What it held before is untouched.
    assert set(crew.take_stock(3)[A][1]) == set(LAYERS[:2])
    crew.configure(crew.make_plan(3, (A, B, C), [4, 5]), 1, owners(crew))
    crew.train(1)
    assert_same_states(crew.states(), undisturbed(2))


def test_older_generations_are_refused(crew: ThreadedCrew) -> None:
    crew.train(1)
    segment = crew.segment(crew.prepare(1))
    crew.take_stock(3)
    a = crew.stages[A]
    old = crew.make_plan(2, (A, B, C))
    refused: list[Callable[[], Any]] = [
        lambda: a.run_segment(segment),
        lambda: a.take_stock(2, crew.peers(A)),
        lambda: a.configure(old, crew.peers(A), Restore(update=1, sources=owners(crew)), None),
        lambda: a.save(1, 1, "nowhere"),
        lambda: crew.loader.prepare(2, 3, 1),
        lambda: crew.loader.configure(0, {}, {}, crew.cursors[1], 2),
    ]
    for call in refused:
        with pytest.raises(FencedError, match="works for generation [13], not"):
            call()


def test_state_from_storage_and_from_nothing(crew: ThreadedCrew, tmp_path: Any) -> None:
    crew.train(2)
    store = CheckpointStore(tmp_path)
    files = [
        write_layer(store, 2, LAYERS.index(name), name, state)
        for name, state in crew.states().items()
    ]
    store.commit(2, files, cursor=crew.cursors[2], extra={"scaler": None})
    crew.train(1)
    crew.take_stock(2)
    sources = dict.fromkeys(LAYERS, STORAGE)
    plan = crew.make_plan(2, (B, A))
    reports = crew.configure(plan, 2, sources, root=str(tmp_path))
    assert sum(r.storage_bytes for r in reports.values()) > 0
    assert not any(r.own_bytes or r.peer_bytes or r.snapshot_bytes for r in reports.values())
    crew.train(2)
    assert_same_states(crew.states(), undisturbed(4))
    crew.take_stock(3)
    crew.configure(crew.make_plan(3, (C, A)), 0, dict.fromkeys(LAYERS, INITIAL))
    crew.train(3)
    assert_same_states(crew.states(), undisturbed(3))


def test_a_source_that_lacks_a_layer_is_named(crew: ThreadedCrew) -> None:
    crew.train(1)
    crew.take_stock(2)
    plan, restore = crew.make_plan(2, (A, B, C)), Restore(update=7, sources=owners(crew))
    with pytest.raises(CheckpointError, match="stage-0 does not hold embed, .* after update 7"):
        crew.stages[A].configure(plan, crew.peers(A), restore, None)


def test_an_idle_worker_keeps_copies_and_gives_back_what_it_gave_away(crew: ThreadedCrew) -> None:
    crew.start(D)
    crew.train(1)
    crew.take_stock(2)
    crew.configure(crew.make_plan(2, (A, B)), 1, owners(crew), buddies={A: D, B: C})
    assert set(crew.stages[C]._state.stock()[1]) == set(LAYERS[4:])
    snapshot(crew)
    assert set(crew.stages[D]._state.stock()[3]) == set(LAYERS[:3])
    crew.stages[C].ping(2, stored=3, committed=3)
    assert set(crew.stages[C]._state.stock()) == {3}, "neither its old layers nor older copies"
    crew.stop(A)
    crew.take_stock(3)
    sources = {layer: D if layer in LAYERS[:3] else B for layer in LAYERS}
    crew.configure(crew.make_plan(3, (D, B)), 3, sources)
    crew.train(1)
    assert_same_states(crew.states(), undisturbed(4))


def test_moves_and_aborts_over_torch_distributed() -> None:
    config = with_settings(CONFIG, transport={"channel": "torch"})
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        ThreadedCrew(config, f"{folder}/s") as crew,
    ):
        crew.start(A, B, C)
        crew.configure(crew.make_plan(1, (A, B, C)), 0, dict.fromkeys(LAYERS, INITIAL))
        for generation in range(2, 10):
            crew.train(1)
            for worker in crew.stages.values():
                worker.abort(generation - 1, "a test")
            crew.take_stock(generation)
            plan = crew.make_plan(generation, ((A, B, C), (C, A))[generation % 2])
            crew.configure(plan, crew.committed, owners(crew))
            assert_same_states(crew.states(), undisturbed(crew.committed))
            # Of those that send none; one of those that receive for each peer that has sent before.
            eventually(lambda: num_edges() <= 6)


def num_edges() -> int:
    return sum(thread.name == "torch-edge" for thread in threading.enumerate())


def test_many_changes_leave_nothing_behind(crew: ThreadedCrew) -> None:
    crew.train(1)
    counts = []
    generation = 1
    for number in range(3, 11):
        guest = f"stage-{number}"
        crew.start(guest)
        for workers in ((A, B, guest, C), (C, guest), (B, C, A)):
            generation += 1
            crew.take_stock(generation)
            plan = crew.make_plan(generation, workers)
            crew.configure(plan, crew.committed, owners(crew), buddies={B: C, C: guest})
        crew.stop(guest)
        crew.train(1, snapshot=True)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert len(set(counts[1:])) == 1, counts
    for stage in crew.stages.values():
        stage.ping(generation, stored=crew.committed, committed=crew.committed)
        assert set(stage._state.stock()) <= {crew.committed}
    assert_same_states(crew.states(), undisturbed(crew.committed))
