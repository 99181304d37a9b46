"""The fault injector: addresses, counts and seeds, and every fault at every kind of action."""

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from elastic_trainer.config import Config
from elastic_trainer.errors import ConfigError, ElasticTrainerError, FencedError, StallError
from elastic_trainer.schedule.actions import Action, Kind
from elastic_trainer.schedule.build import build
from elastic_trainer.schedule.culprit import find_culprits
from elastic_trainer.schedule.segment import Segment
from elastic_trainer.testing import faults
from elastic_trainer.testing.faults import Fault, FaultKind, InjectedError, Injector, hold_gil
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan, with_settings
from elastic_trainer.testing.processes import wait_for
from elastic_trainer.testing.toys import assert_same_states, tiny_gpt, token_batches

NUM_STAGES = 3
LIMIT_S = 1.0


def settings(**elastic: object) -> Config:
    train = {"max_steps": 8, "max_grad_norm": 1.0}
    return with_settings(Config(), train=train, elastic=elastic)


def pipeline(
    schedule: str, injectors: dict[int, Injector] | None = None, limit_s: float = 60.0
) -> InProcessPipeline:
    """Three stages of a tiny GPT with tied embeddings, so that every kind of action occurs."""
    model = tiny_gpt()
    hooks = {stage: injector.hooks for stage, injector in (injectors or {}).items()}
    batches = token_batches(4, (2,) if schedule == "async_1f1b" else (2, 2))
    plan = even_plan(model, NUM_STAGES, schedule)
    return InProcessPipeline(model, settings(stall_limit_s=limit_s), plan, batches, hooks=hooks)


LISTS = {
    "1f1b": build("1f1b", NUM_STAGES, [2] * 4, ties=[(0, 2)], reduce=True),
    "async_1f1b": build("async_1f1b", NUM_STAGES, [1] * 4, ties=[(0, 2)]),
}
PLACES = [
    (schedule, stage, kind)
    for schedule, lists in LISTS.items()
    for stage, actions in enumerate(lists)
    for kind in sorted({action.kind for action in actions})
]


def test_the_places_are_those_of_the_pipelines() -> None:
    for schedule, lists in LISTS.items():
        made = pipeline(schedule)
        assert tuple(made.segment("train", range(1, 5)).actions) == tuple(map(tuple, lists))
        made.close()


@pytest.mark.parametrize(
    "text",
    [
        "kill stage=1 update=30",
        "hang stage=0 action=SEND_F update=30..60 microbatch=2 seconds=1.5",
        "error action=OPT update=7.. count=3 probability=0.25",
        "slow stage=2 factor=3.0",
        "drop action=REDUCE count=all",
        "gil seconds=60.0",
        "stop",
    ],
)
def test_a_fault_prints_as_it_reads(text: str) -> None:
    assert str(Fault.parse(text)) == text
    assert Fault.parse(str(Fault.parse(text))) == Fault.parse(text)


def test_separators_are_free() -> None:
    assert Fault.parse("kill stage=1@update=30") == Fault.parse("kill  stage=1, @ update=30")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`` is no kind of fault"),
        ("explode stage=1", "`explode` is no kind of fault. Kinds are kill, stop, hang"),
        ("kill stage", "`stage` cannot be read. Write stage=1"),
        ("kill stage=one", "`stage=one` cannot be read. Write stage=1"),
        ("kill where=1", "`where=1`: a fault has no `where`. It has stage, action"),
        ("kill stage=1 stage=2", "`stage=2`: stage is said twice"),
        ("kill action=X", "`action=X` cannot be read. Write action=B, or another of F, B"),
        ("kill update=0", "updates count from 1"),
        ("kill update=9..3", "the first comes first"),
        ("kill stage=-1", "stages count from 0"),
        ("kill microbatch=-1", "microbatches count from 0"),
        ("kill count=0", "count is at least 1"),
        ("kill probability=0", "a probability is above 0"),
        ("kill factor=2", "factor belongs to slow"),
        ("kill action=OPT microbatch=1", "OPT happens once per update"),
        ("gil", "gil needs seconds"),
        ("delay", "delay needs seconds"),
        ("hang seconds=-1", "seconds are a number of at least 0"),
        ("hang seconds=nan", "seconds are a number of at least 0"),
        ("slow", "slow needs either factor=… or seconds=…"),
        ("slow factor=2 seconds=1", "slow needs either factor=… or seconds=…"),
        ("slow factor=0.5", "is at least 1"),
        ("drop action=F", "drop happens to messages: SEND_F, SEND_B"),
    ],
)
def test_wrong_faults_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Fault.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(("schedule", "stage", "kind"), PLACES)
def test_an_error_at_every_kind_of_action(schedule: str, stage: int, kind: Kind) -> None:
    injector = Injector(Fault(kind=FaultKind.ERROR, action=kind, updates=(2, 2)))
    made = pipeline(schedule, {stage: injector})
    began = time.monotonic()
    with pytest.raises(InjectedError) as caught:
        made.train(1, 4)
    assert time.monotonic() - began < LIMIT_S + 5
    (firing,) = injector.fired
    assert (firing.stage, firing.update) == (stage, 2)
    said = str(caught.value)
    assert f"stage {stage} (stage-{stage}) was at {stage}{kind}" in said and "<-- HERE" in said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said
    made.close()


@pytest.mark.parametrize(("schedule", "stage", "kind"), PLACES)
def test_a_hang_at_every_kind_of_action(schedule: str, stage: int, kind: Kind) -> None:
    """The stage that hangs is found, though all others have come to a standstill, too."""
    injector = Injector(Fault(kind=FaultKind.HANG, action=kind, updates=(2, 2)))
    made = pipeline(schedule, {stage: injector}, LIMIT_S * 20)
    segment = made.segment("train", range(1, 5))
    ended: list[Exception] = []

    def work() -> None:
        try:
            made.run(segment)
        except ElasticTrainerError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_for(lambda: injector.fired, "the fault happens")
        wait_for(lambda: at_a_standstill(made, segment, stage), "the others wait")
        progress = [runtime.progress for runtime in made.runtimes]
        waits = {r.stage: r.waits_for for r in made.runtimes if r.waits_for is not None}
        assert find_culprits(segment.actions, progress, waits) == [stage]
        made.interrupt(FencedError("the culprit is known"))
    finally:
        injector.release()
        thread.join(20)
    assert ended and "the culprit is known" in str(ended[0])
    made.close()


def at_a_standstill(made: InProcessPipeline, segment: Segment, hung: int) -> bool:
    """Whether all stages but one wait for a message that is not there, or have finished."""

    def look() -> list[tuple[int, int | None]]:
        return [(runtime.progress, runtime.waits_for) for runtime in made.runtimes]

    before = look()
    blocked = all(
        stage == hung or waits is not None or done == len(segment.actions[stage])
        for stage, (done, waits) in enumerate(before)
    )
    if not blocked:
        return False
    time.sleep(0.05)  # a message that has arrived would wake its stage by then
    return look() == before


@pytest.mark.parametrize("schedule", list(LISTS))
@pytest.mark.parametrize(
    ("stage", "kind"), [(0, Kind.SEND_F), (1, Kind.SEND_B), (0, Kind.SEND_W), (2, Kind.SEND_G)]
)
def test_a_dropped_message(schedule: str, stage: int, kind: Kind) -> None:
    injector = Injector(Fault(kind=FaultKind.DROP, action=kind, updates=(2, 2)))
    made = pipeline(schedule, {stage: injector}, LIMIT_S)
    began = time.monotonic()
    with pytest.raises(StallError, match=r"waited .* from stage-"):
        made.train(1, 4)
    assert time.monotonic() - began < LIMIT_S + 5
    assert [(f.stage, f.update) for f in injector.fired] == [(stage, 2)]
    made.close()


@pytest.mark.parametrize(
    "text",
    [
        "delay action=SEND_F seconds=0.2",
        "delay action=REDUCE seconds=0.2",
        "slow factor=3",
        "slow seconds=0.01",
        "hang action=B seconds=0.2",
        "gil action=F seconds=0.2",
    ],
)
def test_what_only_takes_time_changes_no_bit(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    injector = Injector(Fault.parse(text))
    slept: list[float] = []

    def sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        slept.append(seconds)
        sleep(seconds)

    spent: list[float] = []
    pace = injector._pace

    def paced(action: Action, spent_s: float) -> None:
        spent.append(spent_s)
        pace(action, spent_s)

    monkeypatch.setattr(faults, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))
    monkeypatch.setattr(injector, "_pace", paced)
    found = []
    for injectors in ({}, {0: injector}):
        made = pipeline("1f1b", injectors)
        began = time.monotonic()
        reports = made.train(1, 4)
        found.append((made.states(), time.monotonic() - began, reports[0]))
        made.close()
    assert injector.fired
    assert_same_states(found[0][0], found[1][0])
    if injector.fired[0].fault.kind is FaultKind.SLOW:
        assert sum(f.fault.kind is FaultKind.SLOW for f in injector.fired) > 10
        # What it took counts as work of the stage, as on a machine that is slow.
        busy_s = sum(found[1][2].busy_s.values())
        assert busy_s > sum(slept)
        if (factor := injector.fired[0].fault.factor) is not None:
            assert sum(slept) == pytest.approx((factor - 1) * sum(spent)) and sum(spent) > 0
    else:
        assert len(injector.fired) == 1
        assert found[1][1] > 0.2


def test_a_factor_multiplies_work_not_waits() -> None:
    """Stage 2 waits 0.4 s for stage 0; being thrice as slow does not make that 1.2 s."""
    slow = Injector(Fault.parse("slow factor=3 action=F"))
    late = Injector(Fault.parse("hang action=SEND_F update=2 seconds=0.4"))
    made = pipeline("1f1b", {0: late, 2: slow})
    reports = made.train(1, 4)
    assert late.fired and len(slow.fired) == 8
    assert reports[2].busy_s["recv"] > 0.3
    assert reports[2].busy_s["forward"] < 0.3
    made.close()


def test_count_and_address() -> None:
    happened: list[Fault] = []
    deeds = {FaultKind.KILL: happened.append, FaultKind.STOP: happened.append}
    twice = Fault.parse("kill action=B update=2..3 microbatch=1 count=2")
    elsewhere = Fault.parse("stop stage=0 count=all")
    first = Fault.parse("stop update=3")
    injector = Injector(twice, elsewhere, first, deeds=deeds)
    made = pipeline("1f1b", {1: injector})
    made.train(1, 4)
    assert happened == [twice, first, twice]
    assert [(f.action, f.update) for f in injector.fired] == [
        ("1B1", 2),
        ("1RECV_F0", 3),
        ("1B1", 3),
    ]
    made.close()


def test_chance_is_the_same_in_every_repetition() -> None:
    fault = Fault.parse("slow seconds=0 probability=0.5")

    def fired(seed: int) -> list[tuple[str, int]]:
        injector = Injector(fault, seed=seed)
        made = pipeline("1f1b", {1: injector})
        made.train(1, 4)
        made.close()
        return [(f.action, f.update) for f in injector.fired]

    num_actions = sum(a.kind is not Kind.RECV_F for a in LISTS["1f1b"][1])
    once, again, other = fired(1), fired(1), fired(2)
    assert once == again != other
    assert 0.2 * num_actions < len(once) < 0.8 * num_actions


def test_an_injector_travels() -> None:
    """As it does to a worker: with hooks that belong together."""
    hooks = pickle.loads(pickle.dumps(Injector(Fault.parse("error update=2")).hooks))
    assert hooks.before is not None
    model = tiny_gpt()
    made = InProcessPipeline(
        model, settings(), even_plan(model, 2, "1f1b"), token_batches(3), hooks={1: hooks}
    )
    made.train(1, 1)
    with pytest.raises(InjectedError):
        made.train(2, 3)
    made.close()


@pytest.mark.parametrize(("kind", "status"), [("kill", -9), ("stop", "T")])
def test_deadly_faults_hit_the_own_process(kind: str, status: int | str) -> None:
    code = f"""
from elastic_trainer.config import Config
from elastic_trainer.testing.faults import Fault, Injector
from elastic_trainer.testing.in_process import InProcessPipeline, even_plan
from elastic_trainer.testing.toys import tiny_gpt, token_batches
model = tiny_gpt()
hooks = {{1: Injector(Fault.parse("{kind} update=2 action=B")).hooks}}
plan = even_plan(model, 2, "1f1b")
made = InProcessPipeline(model, Config(), plan, token_batches(2), hooks=hooks)
made.train(1, 1)
print("one update", flush=True)
made.train(2, 2)
print("two updates", flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=-1, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "one update\n"
        if kind == "kill":
            assert process.wait(20) == status
        else:
            wait_for(lambda: state_of(process.pid) == status, "the process is stopped")
            process.kill()
        assert process.stdout.read() == ""


def state_of(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_holding_the_gil_stops_all_other_threads() -> None:
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.005):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    wait_for(lambda: len(ticks) > 3, "the thread runs")
    hold_gil(0.3)
    time.sleep(0.05)
    done.set()
    thread.join()
    gaps = [b - a for a, b in zip(ticks, ticks[1:], strict=False)]
    assert max(gaps) > 0.25
