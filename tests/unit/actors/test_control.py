"""The parts of the coordinator that can be seen without Ray."""

from typing import Any

import pytest

from elastic_trainer.actors.dispatch import Dispatch, Order
from elastic_trainer.actors.planning import (
    Schedules,
    routes,
    segment_updates,
)
from elastic_trainer.config import Config, load_config
from elastic_trainer.errors import ScheduleError
from elastic_trainer.schedule.actions import Kind
from elastic_trainer.schedule.build import build
from elastic_trainer.types import (
    Plan,
    Prediction,
    StagePlan,
)


def config(*overrides: str) -> Config:
    base = {"data": {"format": "synthetic"}, "train": {"max_steps": 4}}
    return load_config(base, overrides)


def plan(schedule: str = "1f1b", num_stages: int = 2, step_s: float = 0.1) -> Plan:
    return Plan(
        generation=1,
        schedule=schedule,
        num_microbatches=4,
        layers=tuple(f"layer{i}" for i in range(2 * num_stages)),
        stages=tuple(
            StagePlan(stage=s, first=2 * s, stop=2 * s + 2, worker=f"stage-{s}")
            for s in range(num_stages)
        ),
        predicted=Prediction(
            step_s=step_s,
            bubble_ratio=0.0,
            stage_busy_s=(0.1,) * num_stages,
            stage_memory_bytes=(1,) * num_stages,
        ),
        reasons=("balanced",),
    )


def order(kind: str, update: int) -> Order:
    return Order(kind=kind, generation=1, update=update)


def test_orders_leave_in_order_however_late_their_data_is() -> None:
    sent: list[int] = []
    dispatch = Dispatch(lambda o: sent.append(o.update))
    first, second = order("segment", 4), order("segment", 8)
    dispatch.add(first)
    dispatch.add(order("checkpoint", 4))
    dispatch.add(second)
    second.batches = []
    dispatch.pump()
    assert sent == [], "nothing may overtake the first segment"
    first.batches = []
    dispatch.pump()
    assert sent == [4, 4, 8]


def test_orders_beyond_the_end_of_the_data_are_forgotten() -> None:
    sent: list[tuple[str, int]] = []
    dispatch = Dispatch(lambda o: sent.append((o.kind, o.update)))
    waiting = order("segment", 4)
    for o in (waiting, order("checkpoint", 4), order("evaluation", 8), order("checkpoint", 8)):
        dispatch.add(o)
    dispatch.truncate(4)
    waiting.batches = []
    dispatch.pump()
    assert sent == [("segment", 4), ("checkpoint", 4)]


def test_fields_go_to_the_stages_that_use_them_once() -> None:
    description = {
        "input_fields": ["image", "text"],
        "label_fields": ["labels"],
        "batch_fields": [["text"], [], ["mask"], ["labels"]],
    }
    assert routes(plan(), {"stage-0": description}) == {
        "image": ["stage-0"],
        "text": ["stage-0"],
        "mask": ["stage-1"],
        "labels": ["stage-1"],
    }


@pytest.mark.parametrize(
    ("overrides", "reduces"),
    [
        ([], True),
        (["train.max_grad_norm=0"], False),
        (["train.max_grad_norm=0", "train.precision=fp16"], True),
    ],
)
def test_stages_agree_on_a_norm_only_when_something_asks_for_it(
    overrides: list[str], reduces: bool
) -> None:
    actions = Schedules(config(*overrides), plan(), []).train([4, 4])
    assert any(a.kind is Kind.REDUCE for row in actions for a in row) is reduces


def test_tied_layers_on_two_stages_exchange_gradients_and_weights() -> None:
    kinds = {a.kind for row in Schedules(config(), plan(), [(0, 3)]).train([4]) for a in row}
    assert {Kind.SEND_G, Kind.RECV_G, Kind.SEND_W, Kind.RECV_W, Kind.TIE} <= kinds
    kinds = {a.kind for row in Schedules(config(), plan(), [(0, 1)]).train([4]) for a in row}
    assert Kind.SEND_G not in kinds, "on one stage there is nothing to send"


def test_a_schedule_is_validated_before_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastic_trainer.actors import planning

    def broken(*args: Any, **options: Any) -> Any:
        rows = [list(row) for row in build(*args, **options)]
        rows[0] = [a for a in rows[0] if a.kind is not Kind.SEND_F]
        return tuple(map(tuple, rows))

    monkeypatch.setattr(planning, "build", broken)
    with pytest.raises(ScheduleError, match="HERE"):
        Schedules(config(), plan(), []).train([4])


def test_segments_last_about_two_seconds_and_asynchronous_ones_until_the_drain() -> None:
    assert segment_updates(config(), plan(step_s=0.1)) == 20
    assert segment_updates(config(), plan(step_s=30.0)) == 1
    assert segment_updates(config("pipeline.segment_updates=3"), plan()) == 3
    settings = config("pipeline.schedule=async_1f1b", "pipeline.commit_every=7")
    assert segment_updates(settings, plan("async_1f1b")) == 7
