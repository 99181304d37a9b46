"""Workers join, leave and are asked for, one situation at a time, on the simulated cluster."""

from elastic_trainer.elastic import events as ev
from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.policies import WORTH
from elastic_trainer.elastic.staff import SETTLE_S
from elastic_trainer.elastic.state import Phase
from elastic_trainer.elastic.wishes import LEAVE_MARGIN_S
from elastic_trainer.testing.simulated_run import cluster, names, newest, phase, run

# Joining.


def test_it_starts_at_the_minimum_when_no_more_workers_come_for_a_while() -> None:
    sim = cluster(capacity=2, min_workers=2)
    sim.run_until(lambda: len(sim.state.workers) == 2)
    assert sim.state.phase is Phase.STARTING and not sim.orders(do.MakePlan)
    sim.now += SETTLE_S
    assert [type(i) for i in sim.tell(ev.Tick())] == [do.MakePlan]
    run(sim, stages=2)


def test_below_the_minimum_it_says_for_how_many_it_waits() -> None:
    sim = cluster(capacity=1, min_workers=3)
    for _ in range(10):
        sim.run_until(lambda: bool(sim.state.workers))
        sim.pass_time(60.0)
    assert sim.state.phase is Phase.STARTING
    assert newest(sim, do.Wait).reason == "1 of 3 workers: waiting for room"
    assert len(sim.orders(do.Wait)) == 1, "said once"
    sim.capacity = 3
    run(sim, stages=3)


def test_a_run_grows_without_stopping_until_the_plan_is_there() -> None:
    sim = run(cluster(capacity=2), stages=2)
    sim.capacity = 3
    sim.run_until(lambda: len(sim.orders(do.MakePlan)) == 2)
    before, committed = len(sim.log), sim.state.committed
    run(sim, stages=3)
    ask = newest(sim, do.MakePlan)
    assert ask.workers == ("stage-1", "stage-2", "stage-3") and "stage-3 joined" in ask.reason
    later = sim.log[before:]
    stock = next(i for i, order in enumerate(later) if isinstance(order, do.TakeStock))
    assert any(isinstance(i, do.RunSegment) for i in later[:stock]), "it trained on meanwhile"
    configure = newest(sim, do.Configure)
    assert configure.update >= committed and "trained again" not in configure.reason
    assert "predicted" in configure.reason
    owners = {
        layer: configure.plan.stages[configure.plan.stage_of_layer(i)].worker
        for i, layer in enumerate(configure.plan.layers)
    }
    moved = {layer for layer, source in configure.sources.items() if source != owners[layer]}
    assert moved == {"layer2", "layer4", "layer5"}, "of two stages of three to three of two"
    first = next(i for i in reversed(later) if isinstance(i, do.Configure))
    segment = next(i for i in later[later.index(first) :] if isinstance(i, do.RunSegment))
    assert segment.first_update == segment.last_update, "something is committed soon"


def test_workers_that_join_together_are_taken_in_together() -> None:
    sim = run(cluster(capacity=1), stages=1)
    sim.capacity = 3
    run(sim, stages=3)
    assert sim.state.generation == 2 and len(sim.orders(do.Configure)) == 2


def test_a_newcomer_that_does_not_help_stays_idle_and_is_not_considered_again() -> None:
    sim = run(cluster(capacity=2, step_s=lambda n: 1.0 - n * WORTH / 4), stages=2)
    sim.capacity = 3
    sim.run_until(lambda: bool(sim.orders(do.Note)))
    assert newest(sim, do.Note).reason.startswith("stage-3 not put to use: a step of ")
    plans = len(sim.orders(do.MakePlan))
    run(sim, updates=40)
    assert len(sim.orders(do.MakePlan)) == plans and sim.state.generation == 1
    assert sim.state.idle == ["stage-3"] and not sim.orders(do.StopWorkers)
    sim.kill("stage-1")
    run(sim, stages=2)
    assert names(sim) == ["stage-3", "stage-2"], "but takes the place of a lost one"


def test_as_many_newcomers_are_used_as_help() -> None:
    sim = run(cluster(capacity=2, max_workers=5, step_s=lambda n: 1.0 + abs(n - 3)), stages=2)
    sim.capacity = 5
    run(sim, stages=3)
    run(sim, updates=40, stages=3)
    asked = [len(i.workers) for i in sim.orders(do.MakePlan) if isinstance(i, do.MakePlan)]
    assert asked == [2, 5, 4, 3, 5, 4], "each size once, before and after"


def test_a_newcomer_lost_before_it_is_used_changes_nothing() -> None:
    sim = run(cluster(capacity=2), stages=2)
    sim.capacity = 3
    phase(sim, Phase.DRAINING)
    sim.capacity = 2
    sim.kill("stage-3")
    generation = sim.state.generation
    run(sim, updates=20, stages=2)
    assert sim.state.generation == generation and sim.state.counts["failures"] == 0
    assert not sim.orders(do.Abort)


def test_who_joins_while_the_run_recovers_is_taken_in_afterwards() -> None:
    sim = run(cluster(), stages=3)
    sim.kill("stage-2")
    phase(sim, Phase.RECOVERING)
    sim.tell(ev.WorkerJoined(worker="stage-77", node="n"))
    phase(sim, Phase.RESTORING)
    assert newest(sim, do.Configure).plan.num_stages == 2


def test_an_outdated_plan_is_ignored() -> None:
    sim = run(cluster(capacity=2), stages=2)
    sim.capacity = 3
    sim.run_until(lambda: len(sim.orders(do.MakePlan)) == 2)
    old = newest(sim, do.MakePlan).generation
    sim.tell(ev.WorkersDraining(workers=("stage-1",), reason="drain"))
    ask = newest(sim, do.MakePlan)
    assert ask.generation > old and ask.workers == ("stage-3", "stage-2")
    run(sim, stages=2)
    assert names(sim) == ["stage-3", "stage-2"]


# Leaving.


def test_a_drained_worker_is_dismissed_when_its_layers_have_moved() -> None:
    sim = run(cluster(), stages=3)
    committed = sim.state.committed
    sim.drain("stage-2", 60.0)
    assert sim.state.draining == ["stage-2"]
    sim.run_until(lambda: bool(sim.orders(do.StopWorkers)))
    assert sim.now < 60.0 and newest(sim, do.StopWorkers).workers == ("stage-2",)
    assert newest(sim, do.Configure).update >= committed
    assert not sim.orders(do.Abort) and sim.state.draining == []
    assert sim.state.counts == {"failures": 0, "preemptions": 1, "idle": 0}
    run(sim, stages=3)  # somebody else has come


def test_room_for_a_successor_is_asked_for_while_the_leaver_is_still_there() -> None:
    sim = run(cluster(), stages=3)
    sim.drain("stage-2", 60.0)
    assert newest(sim, do.StartWorkers).num_workers == 4
    sim.run_until(lambda: bool(sim.orders(do.StopWorkers)))
    assert newest(sim, do.StartWorkers).num_workers == 3


def test_a_spare_takes_the_place_of_a_leaver_and_no_other_layer_moves() -> None:
    sim = run(cluster(num_spares=1), stages=3)
    assert sim.state.idle == ["stage-4"]
    sim.drain("stage-2", None)
    sim.run_until(lambda: bool(sim.orders(do.StopWorkers)))
    assert names(sim) == ["stage-1", "stage-4", "stage-3"]
    sources = newest(sim, do.Configure).sources
    assert sources["layer0"] == "stage-1" and sources["layer5"] == "stage-3"


def test_several_changes_at_once_are_made_as_one() -> None:
    sim = run(cluster(num_spares=1), stages=3)
    generation = sim.state.generation
    sim.tell(ev.WorkersDraining(workers=("stage-1",), reason="drain node-1"))
    sim.tell(ev.WorkersDraining(workers=("stage-2",), reason="drain node-2"))
    sim.tell(ev.ScaleRequested(min_workers=1, max_workers=2, reason="scale"))
    configured = len(sim.orders(do.Configure))
    run(sim, updates=30)
    assert names(sim) == ["stage-4", "stage-3"]
    assert len(sim.orders(do.Configure)) == configured + 1
    assert newest(sim, do.Configure).plan.generation > generation


def test_a_segment_that_outlasts_the_deadline_is_cut_by_the_preemption() -> None:
    sim = run(cluster(max_failures=0), stages=3)
    sim.drain("stage-2", 5.0)
    phase(sim, Phase.DRAINING)
    sim.pass_time(6.0)
    phase(sim, Phase.RECOVERING)
    run(sim, stages=3)
    assert sim.state.counts == {"failures": 0, "preemptions": 1, "idle": 0}


def test_leaving_below_the_minimum_trains_on_saves_and_pauses_just_before() -> None:
    sim = run(cluster(capacity=2, min_workers=2, max_workers=2), stages=2)
    sim.capacity = 1
    began = sim.now
    sim.drain("stage-2", 60.0)
    run(sim, updates=20, stages=2)
    phase(sim, Phase.DRAINING)
    assert began + 60.0 - LEAVE_MARGIN_S <= sim.now < began + 60.0
    phase(sim, Phase.WAITING)
    assert sim.state.saved == sim.state.committed and sim.now < began + 60.0
    assert sim.state.reason.startswith("1 of 2 workers: waiting for room")
    assert newest(sim, do.StopWorkers).workers == ("stage-2",)
    committed = sim.state.committed
    sim.pass_time(100.0)
    assert sim.state.phase is Phase.WAITING and not sim.orders(do.Abort)
    sim.capacity = 2
    run(sim, stages=2)
    assert newest(sim, do.Configure).update == committed


def test_a_successor_in_time_spares_the_pause() -> None:
    sim = run(cluster(capacity=2, min_workers=2, max_workers=2), stages=2)
    sim.drain("stage-2", 60.0)
    sim.capacity = 3
    sim.run_until(lambda: bool(sim.orders(do.StopWorkers)))
    assert names(sim) == ["stage-1", "stage-3"] and not sim.orders(do.Wait)[1:]
    assert sim.now < 60.0 - LEAVE_MARGIN_S


# Scaling.


def test_to_ask_for_more_workers_than_are_there_does_not_stop_training() -> None:
    sim = run(cluster(capacity=2, min_workers=2, max_workers=2), stages=2)
    sim.tell(ev.ScaleRequested(min_workers=3, max_workers=3, reason="scale"))
    assert newest(sim, do.StartWorkers).num_workers == 3
    run(sim, updates=30, stages=2)
    sim.step_s = lambda n: float(n)  # slower, but it was asked for
    sim.capacity = 3
    run(sim, stages=3)
    sim.kill("stage-1")
    sim.capacity = 2
    phase(sim, Phase.WAITING)
    assert "2 of 3 workers" in sim.state.reason, "now the new minimum holds"


def test_a_minimum_that_is_not_there_yet_does_not_count_when_a_worker_is_lost() -> None:
    sim = run(cluster(capacity=2, min_workers=1, max_workers=2), stages=2)
    sim.tell(ev.ScaleRequested(min_workers=3, max_workers=3, reason="scale"))
    sim.capacity = 1
    sim.kill("stage-2")
    run(sim, stages=1)
    assert not any("of 3" in i.reason for i in sim.orders(do.Wait))


def test_a_higher_minimum_that_is_there_counts_at_once() -> None:
    sim = run(cluster(min_workers=1), stages=3)
    sim.tell(ev.ScaleRequested(min_workers=3, max_workers=3, reason="scale"))
    sim.capacity = 2
    sim.kill("stage-3")
    phase(sim, Phase.WAITING)
    assert "2 of 3 workers" in sim.state.reason


def test_to_ask_for_fewer_moves_layers_and_dismisses_the_others() -> None:
    sim = run(cluster(num_spares=1), stages=3)
    sim.tell(ev.ScaleRequested(min_workers=1, max_workers=1, reason="scale"))
    assert newest(sim, do.StopWorkers).workers == ("stage-4",), "the others hold stages"
    run(sim, stages=1)
    assert sim.state.workers == ["stage-1", "stage-2"] and sim.state.idle == ["stage-2"]
    assert newest(sim, do.StartWorkers).num_workers == 2
    assert not sim.orders(do.Abort) and sim.state.counts["preemptions"] == 0


def test_a_lower_minimum_ends_the_waiting() -> None:
    sim = run(cluster(min_workers=3), stages=3)
    sim.capacity = 2
    sim.kill("stage-3")
    phase(sim, Phase.WAITING)
    sim.pass_time(SETTLE_S)
    out = sim.tell(ev.ScaleRequested(min_workers=2, max_workers=3, reason="scale"))
    assert [type(i) for i in out][:2] == [do.TakeStock, do.MakePlan]
    run(sim, stages=2)


# Plans that cannot be made.


def test_what_does_not_fit_waits_for_more_workers() -> None:
    sim = run(cluster(fewest=3), stages=3)
    sim.capacity = 2
    sim.kill("stage-3")
    phase(sim, Phase.WAITING)
    assert "too little memory" in sim.state.reason
    sim.pass_time(100.0)
    assert len(sim.orders(do.MakePlan)) == 2, "the same workers are not tried again"
    sim.capacity = 3
    run(sim, stages=3)


def test_what_does_not_fit_the_most_workers_fails() -> None:
    sim = cluster(fewest=4)
    sim.run_until(lambda: sim.finished is not None)
    assert sim.finished is not None and sim.finished.reason == "too little memory"


def test_fewer_workers_than_it_fits_are_asked_for_in_vain_and_only_once() -> None:
    sim = run(cluster(fewest=3), stages=3)
    sim.tell(ev.ScaleRequested(min_workers=1, max_workers=2, reason="scale"))
    plans = len(sim.orders(do.MakePlan))
    run(sim, updates=30, stages=3)
    assert len(sim.orders(do.MakePlan)) == plans
    (note,) = sim.orders(do.Note)
    assert note.reason == "no plan for stage-1, stage-2: too little memory"


def test_a_leaver_without_whom_it_does_not_fit_is_kept_until_it_must_go() -> None:
    sim = run(cluster(fewest=3, capacity=3), stages=3)
    sim.drain("stage-3", 60.0)
    run(sim, updates=20, stages=3)
    sim.capacity = 2
    phase(sim, Phase.WAITING)
    assert sim.state.saved == sim.state.committed
