"""The elastic core under thousands of event orders, with a model of the coordinator around it."""

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import Goal, Phase, State
from elastic_trainer.elastic.work import (
    CHECKPOINT_RETRY_S,
    MAX_FINAL_CHECKPOINT_TRIES,
    MAX_SEGMENTS_IN_FLIGHT,
)
from elastic_trainer.testing.simulated_worker import even_cut


def running_state(goal: Goal, segment_updates: int = 4) -> tuple[State, list[do.Instruction]]:
    """A state that has just been configured, and its first instructions."""
    state = State(goal)
    state.start()
    for index in range(goal.max_workers):
        out = state.handle(ev.WorkerJoined(worker=f"stage-{index}"), 0.0)
    (ask,) = out
    assert isinstance(ask, do.MakePlan)
    plan = even_cut(ask.generation, ask.workers, layers=6, step_s=0.1)
    (configure,) = state.handle(ev.Planned(plan=plan, segment_updates=segment_updates), 0.0)
    assert isinstance(configure, do.Configure) and configure.update == goal.start_update
    event = ev.Configured(generation=state.generation, update=goal.start_update)
    return state, state.handle(event, 0.0)


def goal(**changes: object) -> Goal:
    fields: dict[str, object] = {
        "min_workers": 2,
        "max_workers": 2,
        "max_steps": 10,
        "eval_steps": 0,
        "save_steps": 0,
        **changes,
    }
    return Goal(**fields)  # type: ignore[arg-type]


def test_two_segments_are_handed_out_and_no_third() -> None:
    _, out = running_state(goal())
    spans = [(i.first_update, i.last_update) for i in out if isinstance(i, do.RunSegment)]
    assert spans == [(1, 4), (5, 8)]


def test_segments_end_where_evaluation_and_checkpoint_are_due() -> None:
    state, out = running_state(goal(eval_steps=3, save_steps=5, max_steps=6))
    kinds = [(type(i).__name__, getattr(i, "last_update", getattr(i, "update", 0))) for i in out]
    assert kinds == [("RunSegment", 3), ("Evaluate", 3), ("RunSegment", 5), ("SaveCheckpoint", 5)]
    out = state.handle(ev.SegmentDone(generation=1, last_update=3), 0.0)
    assert [i.last_update for i in out if isinstance(i, do.RunSegment)] == [6]


@pytest.mark.parametrize(("cost_s", "behind_s"), [(0.5, 0.0), (0.0, 0.5)])
def test_what_snapshots_cost_beside_training_sets_their_pace_too(
    cost_s: float, behind_s: float
) -> None:
    state, out = running_state(goal(max_steps=1000))
    marks = list[bool]()
    handed = deque(i for i in out if isinstance(i, do.RunSegment))
    while len(marks) < 30:
        segment = handed.popleft()
        marks.append(segment.snapshot)
        if segment.snapshot:
            news = ev.SnapshotStored(
                generation=1, update=segment.last_update, cost_s=cost_s, behind_s=behind_s,
                segment_s=4.0,
            )  # fmt: skip
            state.handle(news, 0.0)
        done = ev.SegmentDone(generation=1, last_update=segment.last_update)
        handed.extend(i for i in state.handle(done, 0.0) if isinstance(i, do.RunSegment))
    assert [i for i, taken in enumerate(marks) if taken] == [0, 9, 18, 27], "0.5 s of 36"


def test_without_a_budget_a_lost_worker_fails_the_run_and_is_named() -> None:
    state, _ = running_state(goal(max_failures=0))
    state.handle(ev.SegmentDone(generation=1, last_update=4), 0.0)
    out = state.handle(ev.WorkerLost(worker="stage-1", detail="killed by SIGKILL"), 0.0)
    assert isinstance(out[0], do.Abort)
    finish = out[1]
    assert isinstance(finish, do.Finish) and finish.status == "failed" and finish.update == 4
    assert finish.reason == "worker stage-1 (stage 1) was lost at update 4: killed by SIGKILL"
    assert state.handle(ev.Tick(), 1.0) == [] and state.done


def test_facts_of_an_older_generation_change_nothing() -> None:
    state, _ = running_state(goal())
    assert state.handle(ev.SegmentDone(generation=0, last_update=8), 0.0) == []
    assert state.handle(ev.Failed(generation=0, reason="old"), 0.0) == []
    assert state.committed == 0 and state.phase is Phase.RUNNING


def test_a_failed_checkpoint_is_retried_with_a_newer_state_and_training_goes_on() -> None:
    state, _ = running_state(goal(save_steps=4, max_steps=100))
    state.handle(ev.SegmentDone(generation=1, last_update=4), 0.0)
    assert state.handle(ev.CheckpointFailed(update=4, reason="disk full"), 1.0) == []
    out = state.handle(ev.SegmentDone(generation=1, last_update=8), 2.0)
    assert any(isinstance(i, do.RunSegment) for i in out)
    assert not any(isinstance(i, do.SaveCheckpoint) for i in out)
    out = state.handle(ev.Tick(), 1.0 + CHECKPOINT_RETRY_S)
    (save,) = [i for i in out if isinstance(i, do.SaveCheckpoint)]
    assert save.update >= 12 and "try 2" in save.reason


def test_a_final_checkpoint_that_cannot_be_written_fails_the_run_and_says_so() -> None:
    state, _ = running_state(goal(max_steps=4, final_eval=False))
    out, now = state.handle(ev.SegmentDone(generation=1, last_update=4), 0.0), 0.0
    for _ in range(MAX_FINAL_CHECKPOINT_TRIES):
        assert [type(i) for i in out] == [do.SaveCheckpoint]
        out = state.handle(ev.CheckpointFailed(update=4, reason="disk full"), now)
        if not state.done:
            now += 1000.0
            out = state.handle(ev.Tick(), now)
    assert state.phase is Phase.FAILED and "disk full" in out[-1].reason


def test_failures_before_the_end_take_no_tries_from_the_last_state() -> None:
    state, _ = running_state(goal(save_steps=4, max_steps=12, final_eval=False))
    now = 0.0
    state.handle(ev.SegmentDone(generation=1, last_update=4), now)
    state.handle(ev.CheckpointFailed(update=4, reason="disk full"), now)
    for _ in range(MAX_FINAL_CHECKPOINT_TRIES):
        now += 1000.0
        (save,) = state.handle(ev.Tick(), now)
        assert isinstance(save, do.SaveCheckpoint)
        state.handle(ev.CheckpointFailed(update=save.update, reason="disk full"), now)
    state.handle(ev.SegmentDone(generation=1, last_update=8), now)
    out = state.handle(ev.SegmentDone(generation=1, last_update=12), now)
    assert [type(i) for i in out] == [do.SaveCheckpoint], "at once, whatever the pause was"
    for _ in range(MAX_FINAL_CHECKPOINT_TRIES - 1):
        assert state.handle(ev.CheckpointFailed(update=12, reason="disk full"), now) == []
        now += 1000.0
        assert [type(i) for i in state.handle(ev.Tick(), now)] == [do.SaveCheckpoint]
    state.handle(ev.CheckpointFailed(update=12, reason="disk full"), now)
    assert state.phase is Phase.FAILED


def test_an_older_checkpoint_that_fails_at_the_end_is_not_a_try_of_the_last_state() -> None:
    state, out = running_state(goal(save_steps=4, max_steps=6, final_eval=False))
    assert any(isinstance(i, do.SaveCheckpoint) and i.update == 4 for i in out)
    for last in (4, 6):
        out = state.handle(ev.SegmentDone(generation=1, last_update=last), 0.0)
    assert out == [] and state.phase is Phase.FINISHING, "one checkpoint at a time"
    (save,) = state.handle(ev.CheckpointFailed(update=4, reason="disk full"), 0.0)
    assert isinstance(save, do.SaveCheckpoint) and save.update == 6


def test_stop_before_the_pipeline_runs_ends_at_once() -> None:
    state = State(goal())
    state.start()
    (finish,) = state.handle(ev.StopRequested(reason="SIGINT"), 0.0)
    assert isinstance(finish, do.Finish) and finish.status == "stopped"


def test_a_run_resumed_at_its_end_only_evaluates() -> None:
    state, out = running_state(goal(start_update=10))
    assert [type(i) for i in out] == [do.Evaluate]
    (finish,) = state.handle(ev.EvaluationDone(generation=1, update=10), 0.0)
    assert isinstance(finish, do.Finish) and finish.status == "completed"


class CoordinatorModel(RuleBasedStateMachine):
    """Carries out instructions in order, with failures and delays that hypothesis chooses."""

    @initialize(
        max_steps=st.integers(1, 30),
        eval_steps=st.integers(0, 7),
        save_steps=st.integers(0, 7),
        start=st.integers(0, 5),
        segment=st.integers(1, 6),
        data_end=st.one_of(st.none(), st.integers(0, 30)),
        final_eval=st.booleans(),
    )
    def begin(
        self,
        max_steps: int,
        eval_steps: int,
        save_steps: int,
        start: int,
        segment: int,
        data_end: int | None,
        final_eval: bool,
    ) -> None:
        self.now = 0.0
        self.queue: deque[do.Instruction] = deque()
        self.saving: int | None = None
        self.finished: do.Finish | None = None
        self.trained = min(start, max_steps)
        self.saved = self.trained
        self.stop_wanted = False
        self.data_end = None if data_end is None else max(data_end, self.trained)
        self.state, out = running_state(
            goal(
                max_steps=max_steps,
                eval_steps=eval_steps,
                save_steps=save_steps,
                start_update=self.trained,
                final_eval=final_eval,
            ),
            segment,
        )
        self.issued, self.expected = self.trained, self.trained + 1
        self.take(out)

    def take(self, out: list[do.Instruction]) -> None:
        assert self.finished is None or not out, "instructions after the end"
        for instruction in out:
            if isinstance(instruction, do.RunSegment):
                assert instruction.first_update == self.expected
                self.expected = instruction.last_update + 1
                assert instruction.last_update >= instruction.first_update
                self.issued = instruction.last_update
                if self.data_end is not None and self.issued > self.data_end:
                    self.cut_short(instruction)
                    continue
            if isinstance(instruction, do.Finish):
                self.finished = instruction
            else:
                self.queue.append(instruction)
        if getattr(self, "data_ended", False):  # what is beyond is never sent, told or not
            self.queue = deque(
                i
                for i in self.queue
                if not isinstance(i, do.Evaluate | do.SaveCheckpoint) or i.update <= self.issued
            )

    def cut_short(self, segment: do.RunSegment) -> None:
        """The loader answers that its data ends inside, or before, this segment."""
        end = self.data_end
        assert end is not None
        if segment.first_update <= end:
            self.queue.append(
                do.RunSegment(
                    generation=1, first_update=segment.first_update, last_update=end, reason="cut"
                )
            )
        self.issued = end
        self.data_ended = True

    def tell(self, event: ev.Event) -> None:
        self.take(self.state.handle(event, self.now))
        if getattr(self, "data_ended", False):
            self.data_ended = False
            self.take(self.state.handle(ev.DataEnded(generation=1, update=self.issued), self.now))

    @precondition(lambda self: getattr(self, "data_ended", False))
    @rule()
    def say_that_data_ended(self) -> None:
        self.tell(ev.Tick())

    @precondition(lambda self: self.queue)
    @rule(fails=st.booleans())
    def do_next(self, fails: bool) -> None:
        instruction = self.queue.popleft()
        match instruction:
            case do.RunSegment(last_update=last):
                assert instruction.first_update == self.trained + 1
                self.trained = last
                self.tell(ev.SegmentDone(generation=1, last_update=last))
            case do.Evaluate(update=update):
                assert update == self.trained, "evaluated a state that is not this commit point"
                self.tell(ev.EvaluationDone(generation=1, update=update))
            case do.SaveCheckpoint(update=update):
                assert update == self.trained, "saved a state that is not this commit point"
                assert self.saving is None, "two checkpoints at a time"
                self.saving = update

    @precondition(lambda self: self.saving is not None)
    @rule(fails=st.booleans())
    def save_ends(self, fails: bool) -> None:
        update, self.saving = self.saving, None
        assert update is not None
        if fails:
            self.tell(ev.CheckpointFailed(update=update, reason="disk full"))
        else:
            self.saved = max(self.saved, update)
            self.tell(ev.CheckpointWritten(update=update))

    @rule(seconds=st.floats(0.0, 60.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tell(ev.Tick())

    @rule()
    def stop(self) -> None:
        self.stop_wanted = True
        self.tell(ev.StopRequested(reason="SIGINT"))

    @rule(worker=st.sampled_from(["stage-0", "stage-9"]))
    def stray_join(self, worker: str) -> None:
        self.tell(ev.WorkerJoined(worker=worker))

    @invariant()
    def few_in_flight(self) -> None:
        if hasattr(self, "queue"):
            segments = [i for i in self.queue if isinstance(i, do.RunSegment)]
            assert len(segments) <= MAX_SEGMENTS_IN_FLIGHT

    @invariant()
    def an_end_is_a_saved_commit_point(self) -> None:
        finished: do.Finish | None = getattr(self, "finished", None)
        if finished is not None and finished.status != "failed":
            assert finished.update == self.trained == self.saved
            assert self.stop_wanted or finished.status == "completed"

    def teardown(self) -> None:
        """Left alone, the run comes to its end."""
        for _ in range(400):
            if not hasattr(self, "state") or self.finished is not None:
                return
            if getattr(self, "data_ended", False):
                self.say_that_data_ended()
            elif self.queue:
                self.do_next(False)
            elif self.saving is not None:
                self.save_ends(False)
            else:
                self.time_passes(60.0)
        pytest.fail(f"the run never ends: {self.state.phase}")


CoordinatorModel.TestCase.settings = settings(
    max_examples=400,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCoordinatorModel = CoordinatorModel.TestCase
