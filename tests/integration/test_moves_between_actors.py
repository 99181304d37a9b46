"""Layers move between workers that are actors of a real cluster, and keep their bits."""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from elastic_trainer.actors.handles import NAMESPACE, LoaderHandle, StageHandle
from elastic_trainer.actors.pending import Pending
from elastic_trainer.actors.planning import Schedules, routes
from elastic_trainer.actors.rooms import Room
from elastic_trainer.checkpoint.layers import write_layer
from elastic_trainer.checkpoint.store import CheckpointStore
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.elastic.instructions import INITIAL
from elastic_trainer.errors import FencedError
from elastic_trainer.models.registry import load_model, ties
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.testing.in_process import even_plan, with_settings
from elastic_trainer.testing.oracle import SynchronousOracle
from elastic_trainer.types import Cursor, Plan, Restore

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

WAIT_S = 90.0
A, B, C = "stage-0", "stage-1", "stage-2"
CONFIG = with_settings(
    Config(),
    model={
        "name": "gpt",
        "args": {
            "vocab_size": 31,
            "num_layers": 4,
            "dim": 16,
            "num_heads": 2,
            "dropout": 0.1,
            "tie_embeddings": True,
        },
    },
    data={"format": "synthetic", "sequence_length": 8},
    train={"global_batch_size": 4, "max_steps": 10, "max_grad_norm": 0.2},
    pipeline={"microbatch_size": 2},
)
MODEL = load_model(CONFIG)


class Run:
    """Three workers and a loader; the test is their coordinator."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder / "checkpoints")
        self._run_dir, private = str(folder / "run"), str(folder / "s")
        self._rooms = [Room.ask(self._run_dir, {"CPU": 1}) for _ in range(3)]
        for room in self._rooms:
            room.ready().get(WAIT_S)
        self.stages = {
            worker: StageHandle.start(
                worker,
                CONFIG,
                private,
                run_dir=self._run_dir,
                resources={"CPU": 1},
                group=room.group,
                env={},
            )
            for worker, room in zip((A, B, C), self._rooms, strict=True)
        }
        self.loader = LoaderHandle("loader-0", CONFIG, private, {})
        self.members: list[StageHandle | LoaderHandle] = [*self.stages.values(), self.loader]
        self.described = {m.worker: m.describe().get(WAIT_S) for m in self.members}
        self.plan: Plan | None = None
        self.committed = 0
        self._cursors = {0: Cursor()}

    def peers(self, worker: str) -> dict[str, Mapping[str, Any]]:
        return {w: d for w, d in self.described.items() if w != worker}

    def configure(self, generation: int, workers: tuple[str, ...], cuts: list[int]) -> list[Any]:
        """Give these workers layers, those that move from whoever holds them now."""
        sources = dict.fromkeys(MODEL.names, INITIAL)
        if self.plan is not None:
            held = enumerate(MODEL.names)
            sources = {n: self.plan.stages[self.plan.stage_of_layer(i)].worker for i, n in held}
        plan = even_plan(MODEL, len(workers), "1f1b", cuts=cuts)
        named = zip(plan.stages, workers, strict=True)
        stages = tuple(replace(stage, worker=worker) for stage, worker in named)
        self.plan = plan = replace(plan, generation=generation, stages=stages)
        stock = [s.take_stock(generation, self.peers(w)) for w, s in self.stages.items()]
        self.held = {call.worker: call.get(WAIT_S) for call in stock}
        restore = Restore(update=self.committed, sources=sources)
        calls: list[Pending[Any]] = [
            stage.configure(plan, self.peers(worker), restore, None)
            for worker, stage in self.stages.items()
        ]
        members = {w: self.described[w] for w in workers}
        where = routes(plan, self.described)
        cursor = self._cursors[self.committed]
        self.loader.configure(generation, members, where, cursor, self.committed + 1).get(WAIT_S)
        return [call.get(WAIT_S) for call in calls]

    def train(self, num_updates: int) -> None:
        assert self.plan is not None
        batches = self.loader.prepare(self.plan.generation, self.committed + 1, num_updates)
        infos = batches.get(WAIT_S)
        groups = [len(batch.microbatches) for batch in infos]
        pairs = [(owner, follower) for owner, follower, *_ in ties(MODEL)]
        segment = Segment(
            generation=self.plan.generation,
            index=infos[0].update,
            kind="train",
            batches=tuple(infos),
            actions=Schedules(CONFIG, self.plan, pairs).train(groups),
            schedule=self.plan.schedule,
        )
        calls = [self.stages[stage.worker].run_segment(segment) for stage in self.plan.stages]
        for call in calls:
            call.get(WAIT_S)
        self.committed = segment.last_update
        self._cursors.update({batch.update: batch.end for batch in infos})

    def digests(self) -> dict[str, str]:
        """Of the file of each layer's state."""
        assert self.plan is not None
        found = {}
        for stage in self.plan.stages:
            worker = self.stages[stage.worker]
            saving = worker.save(self.plan.generation, self.committed, self.root).get(WAIT_S)
            assert saving == {"scaler": None}
            while (progress := worker.saved(self.committed).get(WAIT_S)).writing:
                pass  # each asks for a while
            assert progress.problem is None
            found.update({file.name: file.sha256 for file in progress.files})
        return found

    def close(self) -> None:
        for member in self.members:
            member.close().get(WAIT_S)
            member.kill()
        for room in self._rooms:
            room.release()


@pytest.fixture
def run(cluster: Any) -> Iterator[Run]:
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = Run(Path(folder))
        try:
            yield made
        finally:
            made.close()
            ray.shutdown()


def undisturbed(update: int, folder: Path) -> dict[str, str]:
    """The digests that a single process without stages gives."""
    oracle, store = SynchronousOracle(MODEL, CONFIG), CheckpointStore(folder)
    stream = BatchStream(CONFIG, "train", CONFIG.train.global_batch_size)
    for number in range(1, update + 1):
        fields = [{k: torch.from_numpy(v) for k, v in f.items()} for f in next(stream)[1]]
        oracle.update(number, fields)
    states = oracle.layer_states()
    files = [write_layer(store, update, MODEL.names.index(n), n, s) for n, s in states.items()]
    return {file.name: file.sha256 for file in files}


def test_layers_that_move_keep_their_bits(run: Run, tmp_path: Path) -> None:
    run.configure(1, (A, B), [3])
    run.train(2)
    before = run.digests()
    reports = run.configure(2, (C, B, A), [2, 5])  # of B's layers 3 to 5, 5 goes to A
    assert run.held[A] == {2: list(MODEL.names[:3])} and run.held[C] == {}
    assert run.digests() == before == undisturbed(2, tmp_path)
    assert all(report.peer_bytes for report in reports), "each got a layer from another one"
    run.train(2)
    assert run.digests() == undisturbed(4, tmp_path)

    # A segment whose other stages never run, and one queued behind it, end when they are told to.
    assert run.plan is not None
    batch = run.loader.prepare(2, 5, 1).get(WAIT_S)
    pairs = [(owner, follower) for owner, follower, *_ in ties(MODEL)]
    actions = Schedules(CONFIG, run.plan, pairs).train([2])
    segment = Segment(2, 5, "train", tuple(batch), actions, "1f1b")
    calls = [run.stages[B].run_segment(segment) for _ in range(2)]
    run.stages[B].abort(2, "a test").get(WAIT_S)
    for call in calls:
        with pytest.raises(FencedError):
            call.get(WAIT_S)
