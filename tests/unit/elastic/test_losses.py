"""Losses, and what they do to checkpoints, evaluations and the end of a run."""

from typing import Any

import pytest

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.state import Phase, State
from elastic_trainer.elastic.work import CHECKPOINT_RETRY_S, SAVE_GRACE_S
from elastic_trainer.testing.simulated_cluster import SimCluster
from elastic_trainer.testing.simulated_run import cluster, names, newest, phase, run
from elastic_trainer.testing.simulated_worker import even_cut


def test_survivors_take_over_from_the_newest_snapshot() -> None:
    sim = run(cluster(), updates=20, stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RECOVERING)
    abort, stock, plan = sim.log[-4:-1]
    assert isinstance(abort, do.Abort) and isinstance(stock, do.TakeStock)
    assert isinstance(plan, do.MakePlan) and plan.workers == ("stage-1", "stage-3")
    assert stock.generation == plan.generation == abort.generation + 1
    assert newest(sim, do.StartWorkers).num_workers == 3, "at once"
    phase(sim, Phase.RESTORING)
    configure = newest(sim, do.Configure)
    assert configure.reason.startswith("worker stage-2 (stage 1, node node-2) was lost at update")
    assert do.STORAGE not in configure.sources.values() and configure.update > 0
    run(sim, stages=3)
    assert sim.state.counts["failures"] == 1


def test_a_spare_takes_the_place_of_a_lost_worker() -> None:
    sim = run(cluster(num_spares=1), stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RECOVERING)
    assert newest(sim, do.MakePlan).workers == ("stage-1", "stage-4", "stage-3")


def test_the_loss_of_an_idle_worker_only_brings_another() -> None:
    sim = run(cluster(num_spares=1), stages=3)
    generation = sim.state.generation
    sim.kill("stage-4")
    sim.run_until(lambda: sim.state.idle == ["stage-5"])
    assert sim.state.generation == generation and not sim.orders(do.Abort)
    assert sim.state.counts == {"failures": 0, "preemptions": 0, "idle": 1}


def test_a_loss_while_recovering_starts_over_with_a_higher_generation() -> None:
    sim = run(cluster(), stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RECOVERING)
    first = newest(sim, do.TakeStock)
    sim.tell(ev.WorkerLost(worker="stage-3", detail="gone too"))
    second = newest(sim, do.TakeStock)
    assert second.generation > first.generation and "stage-3" not in second.workers
    stale = ev.StockTaken(generation=first.generation, copies={}, nodes={})
    assert sim.tell(stale) == []
    assert sim.state.phase is Phase.RECOVERING


def test_a_loss_while_restoring_starts_over() -> None:
    sim = run(cluster(), stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RESTORING)
    generation = sim.state.generation
    sim.kill("stage-3")
    run(sim)
    assert sim.state.generation > generation


def test_a_stock_that_lacks_a_worker_waits_for_news_of_its_loss() -> None:
    sim = run(cluster(), stages=3)
    sim.tell(ev.Disturbed(generation=1, reason="a link broke"))
    stock = newest(sim, do.TakeStock)
    layers = sim.plan.layers if sim.plan else ()
    copies = {w: {0: layers} for w in ("stage-1", "stage-3")}
    assert sim.tell(ev.StockTaken(generation=stock.generation, copies=copies, nodes={})) == []
    assert sim.state.phase is Phase.RECOVERING
    sim.tell(ev.WorkerLost(worker="stage-2", detail="gone"))
    assert newest(sim, do.TakeStock).workers == ("stage-1", "stage-3")


def test_idle_workers_are_asked_too_and_those_that_are_lost_are_not_waited_for() -> None:
    sim = run(cluster(num_spares=2), stages=3)
    idle = sim.state.idle[-1]
    sim.kill(names(sim)[1])
    phase(sim, Phase.RECOVERING)
    stock, plan = newest(sim, do.TakeStock), newest(sim, do.MakePlan)
    assert idle in stock.workers and idle not in plan.workers
    del sim.workers[idle]  # it dies, and nobody has heard of it yet
    sim.run_until(lambda: any(isinstance(event, ev.StockTaken) for event in sim.told))
    sim.run_until(lambda: not any(len(letters) for letters in sim.mail.values()))
    assert sim.state.phase is Phase.RECOVERING
    (configure,) = sim.tell(ev.WorkerLost(worker=idle, detail="it is gone"))[:1]
    assert isinstance(configure, do.Configure)
    assert newest(sim, do.Configure).plan.generation == stock.generation


def test_what_an_idle_worker_held_is_gone_with_it() -> None:
    sim = run(cluster(num_spares=2), stages=3)
    idle = sim.state.idle[-1]
    sim.kill(names(sim)[1])
    phase(sim, Phase.RECOVERING)
    stock, plan = newest(sim, do.TakeStock), newest(sim, do.MakePlan)
    layers = sim.plan.layers if sim.plan else ()
    copies = {w: {4: layers} if w == idle else {} for w in stock.workers}
    sim.tell(ev.StockTaken(generation=stock.generation, copies=copies, nodes={}))
    sim.tell(ev.WorkerLost(worker=idle, detail="it is gone"))
    made = even_cut(plan.generation, plan.workers, layers=6, step_s=1.0)
    (configure, *_) = sim.tell(ev.Planned(plan=made, segment_updates=4))
    assert isinstance(configure, do.Configure) and configure.update == 0


def test_the_loss_of_a_mere_source_starts_over() -> None:
    sim = run(cluster(), stages=3)
    sim.drain("stage-2", None)
    phase(sim, Phase.RESTORING)
    configure = newest(sim, do.Configure)
    assert "stage-2" in configure.sources.values()
    assert "stage-2" not in [stage.worker for stage in configure.plan.stages]
    sim.tell(ev.WorkerLost(worker="stage-2", detail="its time was up", cause=ev.Cause.PREEMPTED))
    assert sim.state.phase is Phase.RECOVERING
    assert newest(sim, do.TakeStock).generation > configure.plan.generation


def test_without_any_copy_the_newest_checkpoint_is_taken_and_the_loss_is_said() -> None:
    sim = cluster(save_steps=10, snapshot_every=-1)
    sim.run_until(lambda: sim.state.saved >= 10 and sim.state.committed > sim.state.saved + 4)
    sim.kill("stage-2")
    phase(sim, Phase.RECOVERING)
    committed, saved = sim.state.committed, sim.state.saved
    phase(sim, Phase.RESTORING)
    configure = newest(sim, do.Configure)
    assert configure.update == saved == sim.state.committed
    assert do.STORAGE in configure.sources.values()
    assert f"restoring update {saved} from the newest checkpoint" in configure.reason
    assert f"{committed - saved} committed updates are trained again" in configure.reason


def test_nobody_moves_when_only_the_loader_was_lost() -> None:
    sim = run(cluster(), stages=3)
    sim.tell(ev.LoaderLost(worker="loader-0", node="n", detail="out of memory"))
    assert isinstance(sim.log[-1], do.TakeStock), "the plan is known"
    run(sim, stages=3)
    assert names(sim) == ["stage-1", "stage-2", "stage-3"]
    assert newest(sim, do.Configure).plan.generation == sim.state.generation == 2
    assert sim.state.counts["failures"] == 1


def test_below_the_minimum_it_waits_and_resumes_unaided() -> None:
    sim = run(cluster(min_workers=3), stages=3)
    sim.capacity = 2
    sim.kill("stage-3")
    phase(sim, Phase.WAITING)
    wait = newest(sim, do.Wait)
    assert wait.reason.startswith("2 of 3 workers: waiting for room (worker stage-3 (stage 2")
    assert sim.state.workers == ["stage-1", "stage-2"], "who keep what they hold"
    sim.pass_time(1000.0)
    assert sim.state.phase is Phase.WAITING
    sim.capacity = 3
    run(sim, stages=3)
    assert newest(sim, do.Configure).update > 0, "from their memory"


# Evaluations and checkpoints across changes.


def test_an_evaluation_that_was_interrupted_is_asked_for_again() -> None:
    sim = cluster(eval_steps=4)
    sim.run_until(lambda: sim.state.committed == 4 and sim.state.evaluated < 4)
    sim.tell(ev.Disturbed(generation=1, reason="a link broke"))
    run(sim)
    again = [i for i in sim.orders(do.Evaluate) if isinstance(i, do.Evaluate) and i.update == 4]
    assert {i.generation for i in again} == {1, 2} and sim.state.evaluated >= 4


def test_a_planned_change_waits_for_a_pending_evaluation() -> None:
    sim = cluster(eval_steps=4, capacity=2)
    run(sim, stages=2)
    sim.capacity = 3
    phase(sim, Phase.DRAINING)
    sim.run_until(lambda: sim.state.phase is not Phase.DRAINING or sim.state.generation > 1)
    last = max(i.update for i in sim.orders(do.Evaluate) if isinstance(i, do.Evaluate))
    assert sim.state.evaluated == last


def test_who_writes_a_checkpoint_is_kept_until_it_is_written() -> None:
    sim = run(cluster(save_steps=6), updates=0, stages=3)
    sim.run_until(lambda: bool(sim.orders(do.SaveCheckpoint)))
    save = newest(sim, do.SaveCheckpoint)
    sim.drain("stage-2", None)
    hold(sim, lambda: len(names(sim)) == 2 and sim.state.phase is Phase.RUNNING)
    assert "stage-2" in sim.state.workers and not sim.orders(do.StopWorkers)
    sim.tell(ev.CheckpointWritten(update=save.update))
    assert newest(sim, do.StopWorkers).workers == ("stage-2",)


def test_who_writes_a_checkpoint_is_not_kept_for_ever() -> None:
    sim = run(cluster(save_steps=6), updates=0, stages=3)
    sim.run_until(lambda: bool(sim.orders(do.SaveCheckpoint)))
    sim.drain("stage-2", None)
    hold(sim, lambda: len(names(sim)) == 2 and sim.state.phase is Phase.RUNNING)
    sim.pass_time(SAVE_GRACE_S)
    assert newest(sim, do.StopWorkers).workers == ("stage-2",)
    assert "after a failure" in newest(sim, do.SaveCheckpoint).reason, "nobody heard of it"


def hold(sim: SimCluster, until: Any) -> None:
    """Let things happen, except that no word comes of any checkpoint, nor anybody joins."""
    for turn in range(500):
        if until():
            return
        kept = [box for box, letters in sim.mail.items() if written(letters[0] if letters else 0)]
        skip = {"write", "join", *(f"deliver {box}" for box in kept)}
        actions = [a for a in sim.actions() if a[0] not in skip]
        actions[turn % len(actions)][1]()
    pytest.fail("it does not come to that")


def written(letter: Any) -> bool:
    return isinstance(letter, ev.CheckpointWritten | ev.CheckpointFailed)


def test_a_failure_in_the_midst_of_a_checkpoint_has_it_written_later() -> None:
    sim = run(cluster(save_steps=6), updates=0, stages=3)
    sim.run_until(lambda: bool(sim.orders(do.SaveCheckpoint)))
    sim.tell(ev.Disturbed(generation=1, reason="a link broke"))
    hold(sim, lambda: sim.state.phase is Phase.RUNNING)
    assert len(sim.orders(do.SaveCheckpoint)) == 1
    hold(sim, lambda: sim.state.committed > 6)
    sim.pass_time(CHECKPOINT_RETRY_S)
    assert len(sim.orders(do.SaveCheckpoint)) == 2
    assert newest(sim, do.SaveCheckpoint).generation == 2


def test_a_late_word_of_an_older_checkpoint_is_not_one_of_the_newer() -> None:
    sim = run(cluster(save_steps=6), updates=0, stages=3)
    sim.run_until(lambda: bool(sim.orders(do.SaveCheckpoint)))
    sim.tell(ev.Disturbed(generation=1, reason="a link broke"))
    hold(sim, lambda: sim.state.committed > 6)
    sim.pass_time(CHECKPOINT_RETRY_S)
    assert newest(sim, do.SaveCheckpoint).update > 6
    ordered = len(sim.orders(do.SaveCheckpoint))
    sim.tell(ev.CheckpointFailed(update=6, reason="its worker is gone"))
    sim.pass_time(10 * CHECKPOINT_RETRY_S)
    assert len(sim.orders(do.SaveCheckpoint)) == ordered, "one at a time"


def test_updates_that_are_trained_again_are_not_evaluated_again() -> None:
    sim = cluster(eval_steps=4, snapshot_every=-1)
    run(sim, updates=10, stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RESTORING)
    evaluated = sim.state.evaluated
    assert sim.state.committed == 0 and evaluated >= 8
    run(sim, updates=20)
    orders = [i.update for i in sim.orders(do.Evaluate) if isinstance(i, do.Evaluate)]
    assert [u for u in orders if u <= evaluated] == list(range(4, evaluated + 1, 4))


# Stop.


def test_stop_while_waiting_ends_at_what_is_saved_and_says_what_is_not() -> None:
    sim = run(cluster(min_workers=3, save_steps=10), updates=25, stages=3)
    sim.capacity = 2
    sim.kill("stage-3")
    phase(sim, Phase.WAITING)
    saved, committed = sim.state.saved, sim.state.committed
    (finish,) = sim.tell(ev.StopRequested(reason="SIGINT"))
    assert isinstance(finish, do.Finish) and finish.status == "stopped"
    assert finish.update == saved < committed
    assert f"the {committed - saved} updates after {saved}" in finish.reason


def test_stop_while_recovering_regains_what_was_committed_and_saves_it() -> None:
    sim = run(cluster(), updates=20, stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RECOVERING)
    committed = sim.state.committed
    sim.tell(ev.StopRequested(reason="SIGINT"))
    sim.run_until(lambda: sim.finished is not None)
    assert sim.finished is not None and sim.finished.status == "stopped"
    assert sim.finished.update == committed == sim.state.saved
    assert sim.finished.reason == "SIGINT"


def test_a_loss_after_stop_costs_nothing_but_what_was_committed() -> None:
    sim = run(cluster(), updates=20, stages=3)
    sim.tell(ev.StopRequested(reason="SIGINT"))
    committed = sim.state.committed
    sim.tell(ev.WorkerLost(worker="stage-2", detail="it is gone"))
    sim.run_until(lambda: sim.finished is not None)
    assert sim.finished is not None and sim.finished.update == committed
    assert sim.finished.status == "stopped"


def test_stop_ends_a_change_that_has_not_begun() -> None:
    sim = run(cluster(capacity=2), stages=2)
    sim.capacity = 3
    phase(sim, Phase.DRAINING)
    sim.tell(ev.StopRequested(reason="SIGINT"))
    sim.run_until(lambda: sim.finished is not None)
    assert sim.state.generation == 1 and sim.state.saved == sim.state.committed


def test_a_run_that_is_to_stop_does_not_wait_for_workers() -> None:
    sim = run(cluster(min_workers=3), stages=3)
    sim.capacity = 2
    sim.tell(ev.StopRequested(reason="SIGINT"))
    sim.kill("stage-3")
    sim.run_until(lambda: sim.finished is not None)
    assert sim.finished is not None and sim.finished.status == "stopped"


# A coordinator that takes over.


def resumed(sim: SimCluster, workers: list[str]) -> tuple[State, list[do.Instruction]]:
    old = sim.state
    state = State.resumed(
        old.goal,
        generation=old.generation,
        workers=workers,
        plan=old.plan,
        committed=old.committed,
        saved=old.saved,
        segment_updates=4,
    )
    return state, state.start()


def test_a_new_coordinator_goes_on_with_the_plan_when_all_are_alive() -> None:
    sim = run(cluster(), stages=3)
    state, out = resumed(sim, ["stage-1", "stage-2", "stage-3"])
    kinds = [type(i) for i in out]
    assert kinds == [do.StartWorkers, do.Abort, do.TakeStock]
    sim.tell(ev.Disturbed(generation=1, reason="so that the workers are free"))
    (stock,) = [i for i in out if isinstance(i, do.TakeStock)]
    layers = state.plan.layers if state.plan else ()
    copies = {w: {state.committed: layers} for w in stock.workers}
    event = ev.StockTaken(generation=stock.generation, copies=copies, nodes={})
    (configure,) = state.handle(event, 0.0)
    assert isinstance(configure, do.Configure)
    assert configure.update == sim.state.committed and configure.plan.generation == 2
    out = state.handle(ev.Configured(generation=2, update=configure.update), 0.0)
    first = next(i for i in out if isinstance(i, do.RunSegment))
    assert first.first_update == first.last_update == configure.update + 1


def test_a_new_coordinator_plans_without_those_that_are_gone() -> None:
    sim = run(cluster(), stages=3)
    _, out = resumed(sim, ["stage-1", "stage-3"])
    assert [type(i) for i in out] == [do.StartWorkers, do.Abort, do.TakeStock, do.MakePlan]
    assert isinstance(out[-1], do.MakePlan) and out[-1].workers == ("stage-1", "stage-3")


def test_a_new_coordinator_waits_below_the_minimum() -> None:
    sim = run(cluster(min_workers=3), stages=3)
    state, out = resumed(sim, ["stage-1"])
    assert [type(i) for i in out] == [do.StartWorkers, do.Abort, do.Wait]
    assert state.phase is Phase.WAITING and "1 of 3" in state.reason


# Segments.


def test_asynchronous_segments_end_on_a_fixed_grid_also_after_a_recovery() -> None:
    sim = run(cluster(grid=True, eval_steps=10, max_steps=30), updates=9, stages=3)
    sim.tell(ev.Disturbed(generation=1, reason="a link broke"))
    sim.run_until(lambda: sim.finished is not None)
    ends = {i.last_update for i in sim.orders(do.RunSegment) if isinstance(i, do.RunSegment)}
    assert ends == {4, 8, 10, 12, 16, 20, 24, 28, 30}


def test_the_first_segment_of_a_generation_ends_with_a_snapshot() -> None:
    sim = run(cluster(snapshot_every=3), updates=40, stages=3)
    segments = [i for i in sim.orders(do.RunSegment) if isinstance(i, do.RunSegment)]
    marks = [i.snapshot for i in segments]
    assert marks[:7] == [True, False, False, True, False, False, True]


def test_news_of_what_snapshots_cost_sets_their_pace() -> None:
    sim = run(cluster(), updates=60, stages=3)
    segments = [i for i in sim.orders(do.RunSegment) if isinstance(i, do.RunSegment)]
    marks = [i.snapshot for i in segments]
    assert sum(marks) > len(marks) / 2, "they are cheap; without news it is one in three"
