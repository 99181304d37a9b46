"""Stages at work of which one stops: they stand as simulated, and the culprit is named."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from elastic_trainer.config import Config, load_config
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.schedule.culprit import LOADER, find_culprits
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan
from elastic_trainer.testing.processes import wait_for
from elastic_trainer.testing.standstill import Play
from elastic_trainer.testing.toys import tiny_gpt, token_batches

PLACES = 8  # of each schedule
UPDATES = 4


def settings(schedule: str) -> Config:
    return load_config(None, ["data.format=synthetic", f"pipeline.schedule={schedule}"])


class Standing:
    """A pipeline at work, of which `stage` does not begin its action `index`."""

    def __init__(self, schedule: str, num_stages: int, place: Callable[..., tuple[int, int]]):
        model = tiny_gpt()
        plan = even_plan(model, num_stages, schedule)
        self._go_on = threading.Event()
        self._stop: Action | None = None
        size = 1 if schedule == "async_1f1b" else 2
        batches = {u: m[:size] for u, m in token_batches(UPDATES).items()}
        hooks = {s: RuntimeHooks(before=self._before) for s in range(num_stages)}
        self.pipeline = InProcessPipeline(model, settings(schedule), plan, batches, hooks=hooks)
        self.segment = self.pipeline.segment("train", range(1, UPDATES + 1))
        self.stage, self.index = place(self.segment.actions)
        self._stop = self.segment.actions[self.stage][self.index]
        self._run = threading.Thread(target=self.pipeline.run, args=(self.segment,))

    def _before(self, action: Action) -> None:
        if action == self._stop:
            assert self._go_on.wait(60)

    def now(self) -> tuple[list[int], dict[int, int]]:
        runtimes = self.pipeline.runtimes
        waiting = {r.stage: r.waits_for for r in runtimes if r.waits_for is not None}
        return [r.progress for r in runtimes], waiting

    def __enter__(self) -> "Standing":
        self._run.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._go_on.set()
        self._run.join(60)
        assert not self._run.is_alive(), "it ends once nothing is in its way"
        self.pipeline.close()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "async_1f1b"])
def test_stages_stand_as_simulated_and_the_culprit_is_named(schedule: str) -> None:
    chosen = random.Random(3)

    def anywhere(actions: Any) -> tuple[int, int]:
        return chosen.choice([(s, i) for s, row in enumerate(actions) for i in range(len(row))])

    for _ in range(PLACES):
        check(Standing(schedule, 3, anywhere))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_inside_a_reduction(stage: int) -> None:
    def reduction(actions: Any) -> tuple[int, int]:
        return stage, [a.kind for a in actions[stage]].index(Kind.REDUCE)

    check(Standing("1f1b", 3, reduction))


def check(standing: Standing) -> None:
    actions = standing.segment.actions
    play = Play(actions, frozenset({(standing.stage, standing.index)})).run()
    assert LOADER not in play.waiting.values()
    with standing:
        wait_for(lambda: standing.now() == (play.progress, play.waiting), "all stand")
        progress, waiting = standing.now()
        assert find_culprits(actions, progress, waiting) == [standing.stage]
