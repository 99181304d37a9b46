"""Training on several hosts that die, drop off the network, return, slow down, come and go.

Each fault is put on once the run has done a certain update, and all runs end as undisturbed ones
do: synchronously with the same bits, asynchronously too while the number of stages stays.

The tests share one lab, which has four hosts that are well whenever a test begins.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elastic_trainer.actors.journal import plan_from
from elastic_trainer.observability.runs import read_membership, read_plan, read_updates
from elastic_trainer.testing.host_lab import Host, HostLab, HostLabUnavailable
from elastic_trainer.testing.lab_run import LabRun
from elastic_trainer.testing.processes import LIMIT_S, wait_for
from elastic_trainer.testing.runs import (
    assert_checkpoints_undisturbed,
    assert_same_as_undisturbed,
    assert_samples_once,
    asynchronous_reference,
    causes,
    run_config,
)

if TYPE_CHECKING:
    from tests.lab.conftest import Watcher
else:
    Watcher = Any

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]

NUM_HOSTS = 4
LEASE_S = 3.0
STALL_S = 20.0
NOTICED_S = LEASE_S + 2.0  # by when a host that is gone must be known to be
COMMIT_EVERY = 12
UNPLANNED = {"crashed", "lease_expired", "wedged", "disturbed", "loader_lost"}
THREE = {"num_stages": 3}
Fault = Callable[[HostLab, Host], None]
Record = Callable[[str, object], None]  # of pytest: for its JUnit report


def settings(schedule: str = "1f1b", **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Eight layers that sleep, so long that each further stage is worth it."""
    asynchronous = schedule == "async_1f1b"
    pace_s = 0.02 if asynchronous else 0.01
    layers = {"num_layers": 8, "forward_s": pace_s / 2, "backward_s": pace_s / 2}
    base: dict[str, Mapping[str, Any]] = {
        "model": {
            "name": "emulated",
            "args": {**layers, "activation_bytes": 4096, "microbatch_size": 2},
        },
        "data": {"format": "synthetic", "sequence_length": 4},
        "train": {
            "global_batch_size": 2 if asynchronous else 8,
            "max_steps": 100_000,
            "eval_batches": 0,
            "max_grad_norm": 0.3,
        },
        "optim": {"lr_schedule": "constant"},
        "pipeline": {
            "schedule": schedule,
            "microbatch_size": 2,
            "commit_every": COMMIT_EVERY if asynchronous else 0,
        },
        "checkpoint": {"every_steps": 24, "num_to_keep": 100},
        # Hosts share two cores: one that misses its turn while others start uses a budget up.
        "elastic": {"stall_limit_s": STALL_S, "lease_limit_s": LEASE_S, "max_failures": 20},
    }
    return {key: {**base.get(key, {}), **sections.get(key, {})} for key in {**base, **sections}}


@pytest.fixture(scope="module")
def lab() -> Iterator[HostLab]:
    """A head without room for workers, and four hosts with room for one each."""
    # Ray asks five times at its own pace before it believes that a host is dead: 15 s.
    quick = {"RAY_health_check_period_ms": "1000"}
    with HostLab(NUM_HOSTS, num_cpus=1, head_cpus=0, ray_env=quick) as made:
        yield made


@pytest.fixture(autouse=True)
def hosts(lab: HostLab) -> Iterator[None]:
    """Four hosts, all of them well."""
    lab.add_hosts(NUM_HOSTS - len(lab.hosts))
    yield
    for host in lab.hosts:
        lab.thaw(host)
        lab.link_up(host)
        lab.set_rate(host, None)
        with contextlib.suppress(HostLabUnavailable):
            lab.set_cpu_quota(host, None)


def start(lab: HostLab, folder: Path, schedule: str, *options: str) -> LabRun:
    """Synchronous on two to four hosts, or asynchronous with three stages on four."""
    if schedule == "1f1b":
        return LabRun(lab, folder, settings(), "2:4", *options)
    return LabRun(lab, folder, settings(schedule, pipeline=THREE), "3", *options)


def lose(run: LabRun, stage: int, fault: Fault, record: Record) -> tuple[dict[str, Any], Host, int]:
    """Put a fault on the host of a stage; how it is lost, the host and the worker's process."""
    worker = run.stages[stage]
    host, pid = run.host_of(worker), run.pid(worker)
    began = time.time()
    fault(run.lab, host)
    run.wait_for(lambda: losses(run, worker), f"{worker} is lost")
    (loss,) = losses(run, worker)
    detected_s = loss["time"] - began
    record("detect_s", round(detected_s, 2))
    record("commit_s", round(detected_s + loss["first_commit_s"], 2))
    assert (loss["stage"], loss["node"]) == (stage, host.ip)
    assert detected_s < NOTICED_S
    return loss, host, pid


def losses(run: LabRun, worker: str) -> list[dict[str, Any]]:
    """How a worker was lost, once training has gone on after it."""
    changes = read_membership(run.run_dir)
    return [c for c in changes if c["worker"] == worker and c["cause"] in UNPLANNED]


def end_undisturbed(run: LabRun) -> None:
    """Stop: everything is as if nothing had happened."""
    updates = run.stop()
    oracle = assert_checkpoints_undisturbed(run.run_dir)
    assert_same_as_undisturbed(run.run_dir, updates, oracle)


def end_undisturbed_asynchronously(run: LabRun) -> None:
    """The same, of a run that had the same stages all the time."""
    plan = plan_from(read_plan(run.run_dir))
    assert plan is not None
    updates = run.stop()
    config = run_config(run.run_dir)
    oracle = asynchronous_reference(config, updates, plan, COMMIT_EVERY)
    assert_same_as_undisturbed(run.run_dir, updates, oracle)


def assert_nothing_of(run: LabRun, loss: dict[str, Any]) -> None:
    """No update was committed for a generation that had ended with a worker's loss."""
    late = [u for u in read_updates(run.run_dir) if u["time"] > loss["time"]]
    assert late and min(u["generation"] for u in late) >= loss["generation"]


def test_a_host_drops_off_the_network_and_returns(
    lab: HostLab, tmp_path: Path, record_property: Record
) -> None:
    """Its worker goes on running, alone, and nothing comes of it; then the host gets a new one.
    Last, another host is left as planned."""
    with start(lab, tmp_path, "1f1b") as run:
        run.wait_stages(4)
        run.wait_update(10)
        loss, host, pid = lose(run, 2, HostLab.link_down, record_property)
        assert loss["cause"] == "lease_expired"
        run.goes_on()
        assert run.is_alive(host, pid), "nobody can reach it"
        assert len(run.stages) == 3
        lab.link_up(host)
        run.wait_for(lambda: not run.is_alive(host, pid), "it ends once it is heard of again")
        run.wait_for(lambda: host.ip in ips(run), "a new worker there has a stage")
        run.goes_on()
        assert_nothing_of(run, loss)
        leaving = run.host_of(run.stages[0])
        run.command("drain", "--node", leaving.ip)
        run.wait_for(lambda: not run.workers_on(leaving), "nobody is there")
        run.goes_on()
        end_undisturbed(run)


def ips(run: LabRun) -> set[str]:
    """Addresses of hosts with a stage."""
    return {w["node"] for w in run.status["workers"].values() if w["stage"] is not None}


def test_a_raylet_is_killed_then_the_coordinator(
    lab: HostLab, tmp_path: Path, record_property: Record
) -> None:
    """Asynchronous, with three stages on four hosts."""
    with start(lab, tmp_path, "async_1f1b") as run:
        run.wait_update(2 * COMMIT_EVERY)
        _, host, pid = lose(run, 1, HostLab.kill_raylet, record_property)
        run.wait_for(lambda: not run.is_alive(host, pid), "Ray ends what is left there")
        lab.kill_host(host)
        run.wait_stages(3)
        run.goes_on()
        coordinator, workers = run.status["pid"], run.stages
        run.kill(lab.head, coordinator)
        run.wait_for(lambda: run.status["pid"] != coordinator, "another coordinator")
        run.goes_on()
        assert run.stages == workers, "the same workers"
        end_undisturbed_asynchronously(run)
        assert causes(run.run_dir)[-1] == "taken_over"


# The long ones: every fault by itself, and several at once.

MODES = ["1f1b", "async_1f1b"]
soak = pytest.mark.soak


def ready(run: LabRun) -> None:
    run.wait_for(lambda: run.num_updates > 0, "the first updates")
    run.wait_stages(3 if is_fixed(run) else 4)
    run.wait_update(run.num_updates + 2 * COMMIT_EVERY)


def is_fixed(run: LabRun) -> bool:
    return run_config(run.run_dir).pipeline.num_stages is not None


def end(run: LabRun) -> None:
    if is_fixed(run):
        end_undisturbed_asynchronously(run)
    else:
        end_undisturbed(run)


@soak
@pytest.mark.parametrize("schedule", MODES)
@pytest.mark.parametrize(
    ("fault", "stage"),
    [
        (HostLab.kill_raylet, 0),
        (HostLab.kill_host, 1),
        (HostLab.link_down, 0),
        (HostLab.link_down, 2),
    ],
)
def test_a_host_is_gone(
    lab: HostLab, tmp_path: Path, record_property: Record, schedule: str, fault: Fault, stage: int
) -> None:
    with start(lab, tmp_path, schedule) as run:
        ready(run)
        loss, host, _ = lose(run, stage, fault, record_property)
        run.goes_on()
        assert_nothing_of(run, loss)
        end(run)
    lab.kill_host(host)


@soak
@pytest.mark.parametrize("schedule", MODES)
def test_a_host_is_back_when_ray_has_given_it_up(
    lab: HostLab, watcher: Watcher, tmp_path: Path, record_property: Record, schedule: str
) -> None:
    """Ray on that host ends itself; started again, it is a host like any other."""
    with start(lab, tmp_path, schedule) as run:
        ready(run)
        _, host, pid = lose(run, 1, HostLab.link_down, record_property)
        watcher.wait_for(lambda ips: host.ip not in ips, "Ray misses the host", LIMIT_S)
        assert run.is_alive(host, pid)
        lab.link_up(host)
        run.wait_for(lambda: not run.is_alive(host, pid), "the old worker ends")
        lab.kill_host(host)
        new = lab.add_host()
        if not is_fixed(run):
            run.wait_for(lambda: new.ip in ips(run), "a worker on the new host has a stage")
        run.goes_on()
        end(run)


@soak
@pytest.mark.parametrize("schedule", MODES)
def test_a_frozen_host_is_thawed(
    lab: HostLab, tmp_path: Path, record_property: Record, schedule: str
) -> None:
    """What it goes on with is of a generation that has ended."""
    with start(lab, tmp_path, schedule) as run:
        ready(run)
        loss, host, pid = lose(run, 1, HostLab.freeze, record_property)
        assert loss["cause"] == "lease_expired"
        run.goes_on()
        lab.thaw(host)
        run.wait_for(lambda: not run.is_alive(host, pid), "the old worker ends")
        run.goes_on(2 * COMMIT_EVERY)
        assert_nothing_of(run, loss)
        end(run)


@soak
@pytest.mark.parametrize("schedule", MODES)
def test_slow_hosts_are_not_dead(lab: HostLab, tmp_path: Path, schedule: str) -> None:
    with start(lab, tmp_path, schedule) as run:
        ready(run)
        slow = run.host_of(run.stages[1])
        lab.set_rate(slow, 2)
        run.goes_on(COMMIT_EVERY)
        lab.set_rate(slow, None)
        try:
            lab.set_cpu_quota(slow, 0.2)
        except HostLabUnavailable as error:
            pytest.skip(str(error))
        run.goes_on(COMMIT_EVERY)
        assert run.workers_on(slow)
        assert not UNPLANNED & set(causes(run.run_dir))
        end(run)


@soak
def test_hosts_come_and_go_as_planned(lab: HostLab, tmp_path: Path) -> None:
    with start(lab, tmp_path, "1f1b") as run:
        ready(run)
        run.command("scale", "--workers", "2")
        run.wait_stages(2)
        run.goes_on()
        run.command("scale", "--workers", "2:4")
        run.wait_stages(4)
        run.goes_on()
        leaving = run.host_of(run.stages[1])
        run.command("drain", "--node", leaving.ip, "--deadline", "30")
        run.wait_for(lambda: not run.workers_on(leaving), "nobody is there")
        run.goes_on()
        new = lab.add_host()
        run.wait_for(lambda: new.ip in ips(run), "a worker on the new host has a stage")
        run.goes_on()
        assert not UNPLANNED & set(causes(run.run_dir))
        end(run)
    lab.kill_host(leaving)


@soak
def test_the_number_of_stages_changes_asynchronously(
    lab: HostLab, tmp_path: Path, record_property: Record
) -> None:
    """Each sample once; how stale each gradient is, is asserted by the stages themselves."""
    with LabRun(lab, tmp_path, settings("async_1f1b"), "2:4") as run:
        run.wait_stages(4)
        run.wait_update(2 * COMMIT_EVERY)
        _, host, _ = lose(run, 3, HostLab.link_down, record_property)
        run.wait_stages(3)
        run.goes_on(2 * COMMIT_EVERY)
        run.command("scale", "--workers", "2")
        run.wait_stages(2)
        run.goes_on(2 * COMMIT_EVERY)
        lab.kill_host(host)  # Ray may have given it up
        lab.add_host()
        run.command("scale", "--workers", "2:4")
        run.wait_stages(4)
        run.goes_on(2 * COMMIT_EVERY)
        assert_samples_once(run.run_dir, run.stop())


@soak
@pytest.mark.parametrize("schedule", MODES)
def test_the_driver_is_killed(lab: HostLab, tmp_path: Path, schedule: str) -> None:
    """All of the run ends; another trainer goes on from the newest checkpoint."""
    with start(lab, tmp_path, schedule) as run:
        ready(run)
        run.wait_for(lambda: run.status.get("checkpoint_update"), "a checkpoint")
        old = [(run.host_of(w), run.pid(w)) for w in run.stages.values()]
        run.driver.send_signal(signal.SIGKILL)
        run.driver.wait(STALL_S)
    for host, pid in old:
        wait_for(partial(is_gone, run, host, pid), "the worker ends")
    with start(lab, tmp_path, schedule, "--resume", "auto") as again:
        again.wait_for(lambda: again.num_updates > 3 * COMMIT_EVERY, "training goes on")
        end(again)


def is_gone(run: LabRun, host: Host, pid: int) -> bool:
    return not run.is_alive(host, pid)


@soak
def test_two_hosts_and_the_coordinator_at_once(lab: HostLab, tmp_path: Path) -> None:
    """And another host while the run recovers."""
    with LabRun(lab, tmp_path, settings(), "1:4") as run:
        ready(run)
        stages, coordinator = run.stages, run.status["pid"]
        cut, dead, next_one = (run.host_of(stages[s]) for s in (0, 2, 3))
        with ThreadPoolExecutor(3) as threads:
            for fault in (
                threads.submit(lab.link_down, cut),
                threads.submit(lab.kill_raylet, dead),
                threads.submit(run.kill, lab.head, coordinator),
            ):
                fault.result()
        run.wait_for(lambda: run.status["pid"] != coordinator, "another coordinator")
        lab.kill_host(next_one)
        run.wait_for(lambda: len(run.stages) == 1, "the last host has all layers")
        run.goes_on()
        for host in (cut, dead):
            lab.kill_host(host)
        lab.add_hosts(2)
        run.wait_stages(3)
        run.goes_on()
        end(run)
