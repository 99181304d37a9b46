"""The player on a run that is simulated: time, commits, losses and a plan that changes."""

import pickle
from collections.abc import Callable, Mapping, Sequence

import pytest

from elastic_trainer.elastic.events import Cause
from elastic_trainer.errors import ClusterError, WorkerLostError
from elastic_trainer.pipeline.hooks import RuntimeHooks
from elastic_trainer.testing.chaos.player import Player
from elastic_trainer.testing.chaos.script import parse_script
from elastic_trainer.testing.chaos.trace import parse_trace, trace_steps
from elastic_trainer.testing.chaos.verdict import Commit, Done, Facts, Loss, judge
from elastic_trainer.testing.faults import Fault, Injector

STEP_S = 0.1
RECOVERY_S = 1.0
LIMIT_S = 5.0


class Run:
    """Commits an update every tenth of a second, and does to itself what the hooks would do."""

    def __init__(self, num_workers: int = 3, last_update: int = 1000) -> None:
        self.now = 1000.0
        self.state = "running"
        self.generation = 1
        self.commits: list[Commit] = []
        self.told: list[str] = []
        self.scaled: list[tuple[int, int]] = []
        self.dead: set[str] = set()
        self.blames: Callable[[str], str] = lambda worker: worker
        self.recovers = True
        self.history: list[Loss] = []
        self.tells_late = 0.0
        self._last = last_update
        self._count = num_workers
        self._members = [f"stage-{i}" for i in range(num_workers)]
        self._armed: dict[tuple[str, str], Fault] = {}
        self._resumes_at = 0.0
        self.spare_after: dict[int, tuple[int, ...]] = {}
        self.is_hasty = False  # whether a kill that is due comes before the answer

    @property
    def stages(self) -> Mapping[int, str]:
        return dict(enumerate(self._members))

    @property
    def nodes(self) -> Mapping[str, str]:
        return {worker: f"10.0.0.{worker[6:]}" for worker in self._members}

    @property
    def losses(self) -> list[Loss]:
        """What the history tells; it may do so later than the commits."""
        return [loss for loss in self.history if loss.at + self.tells_late <= self.now]

    def look(self) -> None: ...

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        while self.state == "running" and self._next_at() <= self.now:
            self._step()

    def inject(self, worker: str, name: str, hooks: RuntimeHooks | None) -> None:
        if worker not in self._members:
            raise WorkerLostError(f"{worker} is gone")
        self._armed.pop((worker, name), None)
        if hooks is not None:
            hooks = pickle.loads(pickle.dumps(hooks))
            injector: Injector = hooks.before.__self__  # type: ignore[union-attr]
            (self._armed[worker, name],) = injector._faults
            if self.is_hasty:
                self.sleep(STEP_S)
                if worker not in self._members:
                    raise WorkerLostError(f"{worker} is gone")

    def scale(self, fewest: int, most: int) -> None:
        if most > 8:
            raise ClusterError("the cluster holds 8")
        self.scaled.append((fewest, most))
        while len(self._members) < most:
            self._join()

    def drain(self, node: str, deadline_s: float | None) -> None:
        del deadline_s
        gone = [worker for worker, where in self.nodes.items() if where == node]
        for worker in gone:
            self._lose(worker, Cause.PREEMPTED)

    def replan(self, order: Sequence[int]) -> None:
        """Give the stages to other workers."""
        self._members = [self._members[i] for i in order]
        self.generation += 1

    def _next_at(self) -> float:
        last = self.commits[-1].at if self.commits else 1000.0
        return max(last + STEP_S, self._resumes_at)

    def _step(self) -> None:
        at = self._next_at()
        update = len(self.commits) + 1
        if update in self.spare_after:
            self.replan(self.spare_after.pop(update))
        for (worker, name), fault in list(self._armed.items()):
            first, last = fault.updates or (0, None)
            due = first <= update <= (last or update)
            if due and fault.kind in ("kill", "stop", "hang") and worker in self._members:
                del self._armed[worker, name]
                self.dead.add(worker)
                self._lose(self.blames(worker), Cause.CRASHED, at)
        if self._resumes_at > at:
            return
        self.commits.append(Commit(update=update, generation=self.generation, at=at))
        if update == self._last:
            self.state = "completed"

    def _lose(self, worker: str, cause: Cause, at: float | None = None) -> None:
        at = self.now if at is None else at
        index = self._members.index(worker)
        self._members.remove(worker)
        self._join(index)
        self.generation += 1
        self.history.append(Loss(worker=worker, cause=cause, at=at))
        self._resumes_at = at + RECOVERY_S if self.recovers else float("inf")

    def _join(self, index: int | None = None) -> None:
        name = f"stage-{self._count}"
        self._count += 1
        self._members.insert(len(self._members) if index is None else index, name)


def play(run: Run, script: str, seed: int = 0) -> list[Done]:
    player = Player(
        parse_script(script),
        run,
        run,
        seed=seed,
        patience_s=LIMIT_S,
        tell=run.told.append,
        clock=run.clock,
        sleep=run.sleep,
    )
    return player.play()


def passed(run: Run, done: Sequence[Done]) -> bool:
    facts = Facts(
        state=run.state,
        reason="",
        now=run.now,
        losses=tuple(run.losses),
        commits=tuple(run.commits),
        audit="",
        num_audited=0,
    )
    return judge(done, facts, LIMIT_S).passed


def test_a_fault_waits_for_its_update() -> None:
    run = Run()
    (done,) = play(run, "kill stage=1 @update=30")
    assert (done.workers, done.problem) == (("stage-1",), "")
    assert run.dead == {"stage-1"} and run.losses[0].at == pytest.approx(1003.0)
    assert run.commits[-1].generation == 2 and passed(run, [done])
    assert run.told == [
        "kill stage=1 @update=30: waits on stage-1",
        "kill stage=1 @update=30: has happened (stage-1 is gone)",
    ]


def test_it_moves_with_its_stage() -> None:
    run = Run()
    run.spare_after = {20: (2, 0, 1)}
    (done,) = play(run, "kill stage=1 @update=30")
    assert done.workers == ("stage-0",) == tuple(run.dead)
    assert passed(run, [done])


def test_a_replacement_is_not_hit_again() -> None:
    """The replay of update 30 comes to it, too."""
    run = Run()
    steps = play(run, "kill stage=1 @update=30\nkill stage=1 @update=60")
    assert [done.workers for done in steps] == [("stage-1",), ("stage-3",)]
    assert run.dead == {"stage-1", "stage-3"} and passed(run, steps)


def test_when_another_fault_takes_the_worker_it_moves_on() -> None:
    run = Run()
    steps = play(run, "kill worker=stage-1 @time=1\nkill stage=1 @update=30")
    assert [done.workers for done in steps] == [("stage-1",), ("stage-3",)]
    assert passed(run, steps)


@pytest.mark.parametrize("when", ["@time=2", "@update=1"])
def test_a_worker_that_is_killed_before_it_answers(when: str) -> None:
    run = Run()
    run.is_hasty = True
    (done,) = play(run, f"kill stage=1 {when}")
    assert (done.workers, done.problem) == (("stage-1",), "")
    assert run.dead == {"stage-1"} and passed(run, [done])


def test_a_worker_that_was_gone_before() -> None:
    kill, slow = play(run := Run(), "kill worker=stage-9\nslow worker=stage-9 factor=2")
    assert not run.dead and not passed(run, [kill])
    assert slow.problem == "stage-9 is gone"


def test_any_stage_is_drawn_by_the_seed() -> None:
    script = "kill stage=any @update=10\nkill stage=any @time=6\nhang stage=any @update=90"

    def workers(seed: int) -> list[tuple[str, ...]]:
        run = Run(5)
        steps = play(run, script, seed)
        assert passed(run, steps) and len(run.dead) == 3
        return [done.workers for done in steps]

    assert workers(1) == workers(1)
    assert len({tuple(workers(seed)) for seed in range(5)}) > 1


def test_levers() -> None:
    run = Run()
    steps = play(run, "scale 2:5 @update=5\ndrain node=10.0.0.2 @update=15\ndrain stage=0 @time=4")
    assert run.scaled == [(2, 5)]
    assert [done.workers for done in steps] == [(), ("stage-2",), ("stage-0",)]
    assert [loss.worker for loss in run.losses] == ["stage-2", "stage-0"]
    assert passed(run, steps)


def test_what_the_run_refuses_is_told() -> None:
    run = Run()
    refused, fine = play(run, "scale 9\nscale 5")
    assert refused.problem == "the cluster holds 8" and not fine.problem
    assert not passed(run, [refused])


def test_slowness_has_happened_when_its_update_is_past() -> None:
    run = Run()
    (done,) = play(run, "slow stage=1 factor=3 @update=10..20")
    assert not done.problem and not run.losses and passed(run, [done])


def test_a_run_that_ends_before() -> None:
    run = Run(last_update=20)
    kill, scale = play(run, "kill stage=1 @update=30\nscale 2:3 @time=60")
    assert kill.problem == scale.problem == "the run ended before, at update 20: completed"


def test_a_run_that_does_not_recover() -> None:
    run = Run()
    run.recovers = False
    first, second = play(run, "kill stage=1 @update=10\nkill stage=2 @update=50")
    assert not first.problem and second.problem == "the run stands still at update 9"
    assert run.now < 1000 + 1 + 3 * LIMIT_S
    assert not passed(run, [first])


def test_there_is_no_such_stage() -> None:
    run = Run(last_update=100)
    (done,) = play(run, "kill stage=7")
    assert done.problem.startswith("the run ended before")


def test_the_wrong_one_is_blamed() -> None:
    run = Run()
    run.blames = lambda worker: "stage-0"
    done = play(run, "hang stage=1 @time=1")
    assert not passed(run, done)


def test_a_trace_on_a_run() -> None:
    trace = "0,add,a\n0,add,b\n0,add,c\n3000,remove,a\n3000,remove,b\n6000,add,d\n9000,remove,c\n"
    run = Run()
    player = Player(
        trace_steps(parse_trace(trace), 1, 3),
        run,
        run,
        seed=3,
        patience_s=LIMIT_S,
        clock=run.clock,
        sleep=run.sleep,
    )
    done = player.play()
    assert run.scaled == [(1, 3), (1, 1), (1, 2), (1, 1)]
    assert len(run.dead) == 3 and passed(run, done)


def test_what_went_by_is_no_excuse_for_a_later_loss() -> None:
    """stage-1 was to be stopped too late; the fault that waits on it afterwards has happened."""
    run = Run()
    run.sleep(4.0)  # update 40
    late, kill = play(run, "stop stage=1 @update=30\nkill stage=1 @update=90")
    assert late.problem == "update 30 went by without that action, or before it was in place"
    assert kill.workers == ("stage-1",) and run.dead == {"stage-1"}
    assert run.told[-1] == "kill stage=1 @update=90: has happened (stage-1 is gone)"


def test_a_history_that_is_told_after_the_next_commits() -> None:
    run = Run()
    run.tells_late = 2.0
    first, second = play(run, "kill stage=1 @update=30\nkill stage=1 @update=90")
    assert [done.workers for done in (first, second)] == [("stage-1",), ("stage-3",)]
    assert run.dead == {"stage-1", "stage-3"} and passed(run, [first, second])
