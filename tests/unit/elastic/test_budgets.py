"""How many losses a run puts up with: of stages, of whole nodes, of workers never of use."""

from elastic_trainer.elastic import instructions as do
from elastic_trainer.elastic.staff import INCIDENT_S
from elastic_trainer.elastic.state import Phase
from elastic_trainer.testing.simulated_run import cluster, names, newest, phase, run


def test_one_loss_too_many_fails_the_run_and_says_how_many_there_were() -> None:
    sim = run(cluster(max_failures=2, refill_updates=1000), stages=3)
    for _ in range(3):
        sim.pass_time(INCIDENT_S + 1)
        sim.kill(names(sim)[0])
        sim.run_until(lambda: sim.finished is not None or sim.state.phase is Phase.RECOVERING)
        if sim.finished is None:
            run(sim, stages=3)
    assert sim.finished is not None and sim.finished.status == "failed"
    assert "number 3 in a row, elastic.max_failures is 2" in sim.finished.reason
    assert "it is gone" in sim.finished.reason


def test_progress_refills_the_budget_and_training_again_is_no_progress() -> None:
    sim = run(cluster(max_failures=1, refill_updates=30, snapshot_every=-1), stages=3)
    run(sim, updates=25)
    sim.kill("stage-1")
    phase(sim, Phase.RECOVERING)
    lost_at = sim.state.committed
    sim.run_until(lambda: sim.state.committed in range(max(31, lost_at - 4), lost_at + 1))
    assert sim.state.counts["failures"] == 1, "all of it was trained before"
    sim.run_until(lambda: sim.state.committed >= lost_at + 30)
    assert sim.state.counts["failures"] == 0


def test_workers_of_one_node_lost_at_once_count_once() -> None:
    sim = cluster(begin=False, max_failures=1, max_workers=4)
    sim.begin()
    run(sim, stages=4)  # stage-1 and stage-4 are on one node
    sim.kill("stage-1")
    sim.kill("stage-4")
    run(sim)
    assert sim.finished is None and sim.state.counts["failures"] == 1


def test_announced_departures_have_a_budget_of_their_own_and_end_with_a_checkpoint() -> None:
    sim = run(cluster(max_failures=0, max_preemptions=1), stages=3)
    sim.drain(names(sim)[0], 30.0)
    run(sim, stages=3)
    sim.drain(names(sim)[0], 30.0)
    sim.run_until(lambda: sim.finished is not None)
    assert sim.finished is not None and sim.finished.status == "failed"
    assert "number 2 in a row, elastic.max_preemptions is 1" in sim.finished.reason
    assert sim.state.saved == sim.state.committed > 0


def test_workers_that_die_as_they_start_are_not_replaced_for_ever() -> None:
    sim = run(cluster(capacity=2, max_failures=2), stages=2)
    sim.capacity = 3
    for _ in range(3):
        sim.stillborn()
        sim.run_until(lambda: not any(len(m) for m in sim.mail.values()))
    assert newest(sim, do.StartWorkers).num_workers == 2
    assert "no more until" in newest(sim, do.StartWorkers).reason
    run(sim, updates=50)
    assert sim.state.phase is Phase.RUNNING and sim.state.counts["failures"] == 0
    run(sim, updates=80)
    assert newest(sim, do.StartWorkers).num_workers == 3, "after progress it is tried again"


def test_waiting_for_workers_gives_newcomers_another_chance() -> None:
    sim = run(cluster(capacity=2, min_workers=2, max_failures=1), stages=2)
    sim.capacity = 3
    for _ in range(2):
        sim.stillborn()
        sim.run_until(lambda: not any(len(m) for m in sim.mail.values()))
    assert sim.state.counts["idle"] == 2
    sim.capacity = 1
    sim.kill("stage-1")
    phase(sim, Phase.WAITING)
    sim.capacity = 2
    sim.stillborn()
    run(sim, stages=2)
    assert sim.finished is None


def test_workers_that_die_as_they_start_fail_a_run_that_cannot_start_without() -> None:
    sim = cluster(min_workers=2, max_failures=1)
    for _ in range(2):
        sim.stillborn()
    sim.run_until(lambda: sim.finished is not None)
    assert sim.finished is not None and "cannot import" in sim.finished.reason
