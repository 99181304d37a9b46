"""Any script of joins, losses, aborts and moves gives the bits of a run that nothing disturbed.

Real workers over real sockets, with the real choice of buddies and of the recovery point.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from elastic_trainer.actors.buddies import choose_buddies
from elastic_trainer.config import Config
from elastic_trainer.data.batches import BatchStream
from elastic_trainer.elastic.instructions import INITIAL
from elastic_trainer.elastic.recovery import recovery_point
from elastic_trainer.errors import FencedError
from elastic_trainer.models.registry import load_model
from elastic_trainer.testing.crew import WAIT_S, ThreadedCrew
from elastic_trainer.testing.in_process import with_settings
from elastic_trainer.testing.oracle import DelayedOracle, State, SynchronousOracle
from elastic_trainer.testing.toys import assert_same_states

SEGMENT = 3  # updates; asynchronous bits depend on where the pipe drains
CUTS = [2, 4]  # asynchronous ones on the stages, too


def config(schedule: str) -> Config:
    return with_settings(
        Config(),
        model={
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
        data={"format": "synthetic", "sequence_length": 6},
        train={"global_batch_size": 4, "max_steps": 60, "max_grad_norm": 0.2},
        optim={"warmup_steps": 2},
        pipeline={"microbatch_size": 2, "schedule": schedule},
        elastic={"stall_limit_s": 20.0},
    )


@cache
def undisturbed(schedule: str) -> list[State]:
    """The states at all commit points, from one process without stages."""
    settled, model = config(schedule), load_model(config(schedule))
    size = 4 if schedule == "1f1b" else 2
    stream = BatchStream(settled, "train", size)
    batches: Iterator[list[dict[str, torch.Tensor]]] = (
        [{k: torch.from_numpy(v) for k, v in fields.items()} for fields in batch]
        for _, batch in stream
    )
    states = []
    if schedule == "1f1b":
        oracle = SynchronousOracle(model, settled)
    else:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            plan = ThreadedCrew(settled, folder).make_plan(1, ("a", "b", "c"), CUTS)
        delayed = DelayedOracle(model, settled, plan)
    for first in range(1, 12 * SEGMENT, SEGMENT):
        if schedule == "1f1b":
            states.append(oracle.layer_states())
            for update in range(first, first + SEGMENT):
                oracle.update(update, next(batches))
        else:
            states.append(delayed.layer_states())
            delayed.segment(first, [next(batches)[0] for _ in range(SEGMENT)])
    return [{n: {k: v.clone() for k, v in s.items()} for n, s in state.items()} for state in states]


class Script:
    """Carries out one script, as a coordinator would."""

    def __init__(self, crew: ThreadedCrew, schedule: str) -> None:
        self.crew = crew
        self.schedule = schedule
        self.layers = crew.model.names
        self.generation = 1
        self.num_started = 0
        self.stored = 0
        for _ in range(3):
            self.join()
        plan = crew.make_plan(1, list(crew.stages), CUTS)
        crew.configure(plan, 0, dict.fromkeys(self.layers, INITIAL), buddies=self.buddies())

    def buddies(self) -> dict[str, str]:
        chosen = choose_buddies(list(self.crew.stages)[:3], list(self.crew.stages)[3:], {})
        return {worker: buddy for worker, buddy in chosen.items() if buddy is not None}

    def join(self) -> None:
        self.crew.start(f"stage-{self.num_started}")
        self.num_started += 1

    def train(self, snapshot: bool) -> None:
        self.crew.train(SEGMENT, snapshot=snapshot)
        for stage in self.crew.stages.values():
            stage.ping(self.generation, stored=self.stored, committed=self.crew.committed)

    def abort(self) -> None:
        """End a segment wherever it is."""
        crew = self.crew
        assert crew.plan is not None
        segment = crew.segment(crew.prepare(SEGMENT), snapshot=True)
        calls = [crew.call(s.worker, "run_segment", segment) for s in crew.plan.stages]
        for worker in crew.stages.values():
            worker.abort(self.generation, "the script says so")
        for call in calls:
            error = call.exception(WAIT_S)
            assert error is None or isinstance(error, FencedError), error

    def regroup(self, workers: Sequence[str]) -> None:
        """A new generation, from the newest state that is still there."""
        crew = self.crew
        self.generation += 1
        stock = crew.take_stock(self.generation)
        plan = crew.make_plan(self.generation, workers, CUTS[: len(workers) - 1])
        point = recovery_point(plan, stock, {}, saved=0, newest=max(crew.cursors))
        crew.configure(plan, point.update, point.sources, buddies=self.buddies())
        self.stored = min(self.stored, point.update)
        assert point.update % SEGMENT == 0
        assert_same_states(crew.states(), self.expected())

    def expected(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return undisturbed(self.schedule)[self.crew.committed // SEGMENT]


STEPS = st.sampled_from(["train", "train", "snapshot", "lose", "join", "abort", "shuffle"])


@pytest.mark.parametrize("schedule", ["1f1b", "async_1f1b"])
@settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # each example takes a second
    suppress_health_check=[HealthCheck.too_slow],
)
@given(steps=st.lists(STEPS, min_size=3, max_size=8), choice=st.randoms(use_true_random=False))
def test_any_script_gives_the_same_bits(schedule: str, steps: list[str], choice: object) -> None:
    rng = choice
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        with ThreadedCrew(config(schedule), f"{folder}/s") as crew:
            script = Script(crew, schedule)
            for step in steps:
                if step in ("train", "snapshot"):
                    script.train(step == "snapshot")
                    continue
                if step == "abort":
                    script.abort()
                elif step == "lose" and len(crew.stages) > 2:
                    crew.stop(rng.choice(sorted(crew.stages)))  # type: ignore[attr-defined]
                elif step == "join" and len(crew.stages) < 5:
                    script.join()
                # Asynchronous bits hold for as many stages as before.
                while schedule != "1f1b" and len(crew.stages) < 3:
                    script.join()
                workers = sorted(crew.stages)
                rng.shuffle(workers)  # type: ignore[attr-defined]
                script.regroup(workers[:3])
            script.train(False)
            assert_same_states(crew.states(), script.expected())
