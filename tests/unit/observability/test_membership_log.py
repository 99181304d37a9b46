"""The history of the membership: what is written, counted, shown and summed up."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_trainer.elastic.events import Cause
from elastic_trainer.observability.changes import CAUSES, UNPLANNED, costs, headline, seats
from elastic_trainer.observability.membership import MembershipLog
from elastic_trainer.observability.metrics import RunMetrics
from elastic_trainer.observability.record import EXIT_REPORT_FILE, EXIT_REPORT_TEXT_FILE, RunRecord
from elastic_trainer.observability.runs import read_membership, run_story
from elastic_trainer.types import ConfigureReport, Plan, Prediction, StagePlan

EPOCH = 1_700_000_000.0
NODES = {f"stage-{n}": f"10.0.0.{n}" for n in range(9)}


def make_plan(generation: int, *workers: str) -> Plan:
    count = len(workers)
    return Plan(
        generation=generation,
        schedule="1f1b",
        num_microbatches=4,
        layers=tuple(f"blocks.{n}" for n in range(2 * count)),
        stages=tuple(
            StagePlan(stage=s, first=2 * s, stop=2 * s + 2, worker=w) for s, w in enumerate(workers)
        ),
        predicted=Prediction(
            step_s=0.5,
            bubble_ratio=0.2,
            stage_busy_s=(0.4,) * count,
            stage_memory_bytes=(1,) * count,
        ),
        reasons=(),
    )


class Run:
    """A log with its metrics, on a clock that starts at 100."""

    def __init__(self, folder: Path, time: float = EPOCH) -> None:
        self.folder = folder
        self.metrics = RunMetrics("r", version="1")
        self.log = MembershipLog(folder, self.metrics, time)

    def changed(self, at: float, cause: str, reason: str = "why", **fields: Any) -> None:
        known: dict[str, Any] = {"update": 7, "workers": 3} | fields
        self.log.changed(at=at, time=EPOCH + at - 100, cause=cause, reason=reason, **known)

    def configured(self, at: float, plan: Plan, **fields: Any) -> None:
        known: dict[str, Any] = {
            "update": 6,
            "nodes": NODES,
            "reports": [ConfigureReport(update=6, own_bytes=10, peer_bytes=2)],
            "updates_replayed": 0,
            "samples_reread": 0,
        }
        self.log.configured(at=at, plan=plan, **known | fields)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return read_membership(self.folder)

    def value(self, name: str, **labels: str) -> float | None:
        wanted = f"elastictrainer_{name}", {"run": "r"} | labels
        for family in text_string_to_metric_families(self.metrics.text()):
            for sample in family.samples:
                if (sample.name, sample.labels) == wanted:
                    return sample.value
        return None


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "r")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()


def start(run: Run) -> None:
    run.changed(100.0, "start", "the run starts", update=0, workers=0)
    run.log.planning(101.5)
    run.log.planned(102.0)
    run.configured(103.0, make_plan(1, "stage-0", "stage-1", "stage-2"), update=0, reports=[])
    run.log.committed(104.5)


def crash(run: Run, at: float = 200.0) -> None:
    run.changed(
        at,
        Cause.CRASHED,
        "its process was killed",
        worker="stage-1",
        stage=1,
        node="10.0.0.1",
        detect_s=0.5,
    )
    run.log.stopped(at + 0.125)
    run.log.planned(at + 0.25)
    run.configured(
        at + 1.0,
        make_plan(2, "stage-0", "stage-2"),
        reports=[
            ConfigureReport(update=6, own_bytes=100, snapshot_bytes=20),
            ConfigureReport(update=6, own_bytes=1, peer_bytes=3, storage_bytes=4),
        ],
        updates_replayed=3,
        samples_reread=96,
    )


def test_a_start_and_a_loss_as_they_are_written(run: Run) -> None:
    start(run)
    crash(run)
    assert len(run.lines) == 1, "it is not over"
    run.log.committed(201.5)
    first, second = run.lines
    assert (first["cause"], first["generation"], first["outcome"]) == ("start", 1, "committed")
    assert (first["workers_before"], first["workers_after"]) == (0, 3)
    assert (first["wait_s"], first["plan_s"], first["transfer_s"]) == (1.5, 0.5, 1.0)
    assert first["first_commit_s"] == 4.5
    assert second == {
        "time": EPOCH + 100,
        "cause": "crashed",
        "reason": "its process was killed",
        "update": 7,
        "workers_before": 3,
        "workers_after": 2,
        "worker": "stage-1",
        "stage": 1,
        "node": "10.0.0.1",
        "outcome": "committed",
        "note": "",
        "generation": 2,
        "restored_update": 6,
        "detect_s": 0.5,
        "wait_s": 0.125,
        "plan_s": 0.125,
        "transfer_s": 0.75,
        "first_commit_s": 1.5,
        "updates_replayed": 3,
        "samples_reread": 96,
        "moved_bytes": {"own": 101, "peer": 3, "snapshot": 20, "storage": 4},
        "stages": [
            {"stage": 0, "worker": "stage-0", "node": "10.0.0.0", "first": 0, "stop": 2}
            | {"layers": ["blocks.0", "blocks.1"]},
            {"stage": 1, "worker": "stage-2", "node": "10.0.0.2", "first": 2, "stop": 4}
            | {"layers": ["blocks.2", "blocks.3"]},
        ],
    }


def test_a_loss_is_counted_at_once_and_made_good_later(run: Run) -> None:
    start(run)
    run.metrics.observe_leases(3.0, {0: 0.1, 1: 2.9, 2: 0.1})
    crash(run)
    assert run.value("membership_changes_total", reason="crashed") == 1
    loss = {"worker": "stage-1", "node": "10.0.0.1", "reason": "crashed"}
    assert run.value("last_loss_info", **loss) == 1
    assert run.value("membership_last_change_timestamp_seconds") == EPOCH + 100
    assert run.value("stage_lease_age_seconds", stage="1") is None
    assert run.value("stage_lease_age_seconds", stage="2") == 0.1
    assert run.value("recovery_duration_seconds_count") is None
    run.log.committed(201.5)
    assert run.value("recovery_duration_seconds_sum") == 1.5
    assert run.value("pause_duration_seconds_sum") == 1.0
    assert run.value("replayed_updates_total") == 3 and run.value("reread_samples_total") == 96
    assert run.value("moved_bytes_total", source="snapshot") == 20
    run.log.committed(210.0)
    assert run.value("recovery_duration_seconds_count") == 1 and len(run.lines) == 2


def test_waiting_for_another_worker_is_no_planning(run: Run) -> None:
    run.changed(200.0, Cause.CRASHED, worker="stage-1", stage=1)
    run.log.stopped(200.0)
    run.log.stopped(204.5)
    run.log.planning(204.5)
    run.log.planned(205.0)
    run.configured(206.0, make_plan(2, "stage-0", "stage-3"))
    run.log.committed(207.0)
    (line,) = run.lines
    assert (line["wait_s"], line["plan_s"], line["transfer_s"]) == (4.5, 0.5, 1.0)
    assert line["first_commit_s"] == 7.0
    assert run.value("pause_duration_seconds_sum") == 6.0


def test_the_next_loss_takes_the_place_of_the_last_one(run: Run) -> None:
    crash(run)
    run.changed(300.0, Cause.WEDGED, worker="stage-2", stage=1, node="10.0.0.2")
    named = [line for line in run.metrics.text().splitlines() if "last_loss_info{" in line]
    assert len(named) == 1 and 'worker="stage-2"' in named[0] and 'reason="wedged"' in named[0]


def test_a_planned_change_counts_only_the_time_in_which_training_stood_still(run: Run) -> None:
    start(run)
    run.changed(200.0, "joined", "node 10.0.0.3 is there", worker="stage-3", node="10.0.0.3")
    run.log.committed(200.5)
    run.log.planning(200.5)
    run.log.planned(202.0)
    run.log.committed(203.0)
    run.log.stopped(204.0)
    assert len(run.lines) == 1, "updates of the generation before do not settle it"
    run.configured(204.25, make_plan(2, "stage-0", "stage-1", "stage-2", "stage-3"), update=9)
    run.log.committed(206.0)
    line = run.lines[-1]
    assert (line["wait_s"], line["plan_s"], line["transfer_s"]) == (2.5, 1.5, 0.25)
    assert line["first_commit_s"] == 6.0 and line["workers_after"] == 4
    assert run.value("pause_duration_seconds_sum") == 0.25, "it went on meanwhile"
    assert run.value("recovery_duration_seconds_count") is None, "nothing was lost"


def test_losses_that_come_while_recovering_end_together_and_count_once(run: Run) -> None:
    start(run)
    run.changed(200.0, Cause.CRASHED, worker="stage-1", stage=1)
    run.log.stopped(200.0)
    run.log.planned(200.5)
    run.changed(201.0, Cause.LEASE_EXPIRED, worker="stage-2", stage=2, detect_s=3.0)
    run.log.stopped(201.0)
    run.log.planned(201.25)
    run.configured(202.0, make_plan(4, "stage-0"), updates_replayed=5, samples_reread=40)
    run.log.committed(203.0)
    first, second = run.lines[1:]
    assert [first["worker"], second["worker"]] == ["stage-1", "stage-2"]
    assert first["generation"] == second["generation"] == 4
    assert (first["plan_s"], first["transfer_s"], first["first_commit_s"]) == (0.25, 0.75, 3.0)
    assert (second["plan_s"], second["transfer_s"], second["first_commit_s"]) == (0.25, 0.75, 2.0)
    assert (first["wait_s"], second["wait_s"]) == (1.0, 0.0)
    assert (first["updates_replayed"], second["updates_replayed"]) == (5, 0)
    assert first["moved_bytes"]["own"] == 10 and second["moved_bytes"] == {}
    assert run.value("replayed_updates_total") == 5
    assert run.value("recovery_duration_seconds_count") == 2
    assert run.value("pause_duration_seconds_sum") == 2.0


def test_a_loss_after_the_transfer_and_before_the_first_commit(run: Run) -> None:
    crash(run)
    run.changed(201.2, Cause.CRASHED, worker="stage-2", stage=1)
    run.log.planned(201.3)
    run.configured(201.5, make_plan(3, "stage-0"))
    run.log.committed(202.0)
    assert [line["generation"] for line in run.lines] == [3, 3]
    assert [line["first_commit_s"] for line in run.lines] == pytest.approx([2.0, 0.8])


def test_a_join_during_a_replay_is_not_settled_by_it(run: Run) -> None:
    crash(run)
    run.changed(201.2, "joined", worker="stage-3")
    run.log.committed(201.5)
    assert [line["cause"] for line in run.lines] == ["crashed"]
    run.log.refused("a step of 0.5 s is predicted: not 2% faster")
    assert run.lines[-1]["outcome"] == "refused"
    assert run.lines[-1]["note"] == "a step of 0.5 s is predicted: not 2% faster"
    run.log.committed(230.0)
    assert len(run.lines) == 2


def test_a_refusal_concerns_no_loss(run: Run) -> None:
    run.changed(200.0, "joined", worker="stage-3")
    run.changed(200.1, Cause.CRASHED, worker="stage-1", stage=1)
    run.log.refused("no")
    assert [line["cause"] for line in run.lines] == ["joined"]
    run.log.planned(200.2)
    run.configured(200.3, make_plan(3, "stage-0"))
    run.log.committed(201.0)
    assert [line["cause"] for line in run.lines] == ["joined", "crashed"]


def test_the_loss_of_an_idle_worker_is_written_at_once(run: Run) -> None:
    run.changed(200.0, Cause.CRASHED, worker="stage-5", concerns_plan=False)
    (line,) = run.lines
    assert line["outcome"] == "no_new_plan" and line["workers_after"] == 3
    assert run.value("membership_changes_total", reason="crashed") == 1
    assert run.value("last_loss_info", worker="stage-5", node="", reason="crashed") == 1
    run.log.committed(201.0)
    assert len(run.lines) == 1


def test_a_plan_that_was_kept_took_no_time(run: Run) -> None:
    start(run)
    run.changed(200.0, "disturbed")
    run.configured(200.5, make_plan(2, "stage-0", "stage-1", "stage-2"))
    run.log.committed(201.0)
    line = run.lines[-1]
    assert (line["plan_s"], line["transfer_s"], line["first_commit_s"]) == (0.0, 0.5, 1.0)


def test_another_coordinator_goes_on_with_what_is_open(run: Run) -> None:
    start(run)
    run.changed(200.0, Cause.CRASHED, worker="stage-1", stage=1, node="10.0.0.1")
    saved = json.loads(json.dumps({"log": run.log.state(), "metrics": run.metrics.state()}))
    after = Run(run.folder, time=EPOCH + 500)
    after.metrics.restore(saved["metrics"])
    after.log.restore(saved["log"], at=5.0, time=EPOCH + 104.0)  # its clock began elsewhere
    after.log.planned(5.5)
    after.configured(6.0, make_plan(2, "stage-0", "stage-2"))
    after.log.committed(7.0)
    line = after.lines[-1]
    assert (line["worker"], line["plan_s"], line["first_commit_s"]) == ("stage-1", 4.5, 6.0)
    assert after.value("membership_changes_total", reason="crashed") == 1
    after.log.finish(time=EPOCH + 900, status="stopped", reason="", update=8, budgets={})
    assert [c["cause"] for c in report(run.folder)["changes"]] == ["start", "crashed"]


def report(folder: Path) -> Mapping[str, Any]:
    read: Mapping[str, Any] = json.loads((folder / EXIT_REPORT_FILE).read_text())
    return read


BUDGETS = {"failures": (1, 3), "preemptions": (0, -1)}


def test_the_exit_report(run: Run) -> None:
    start(run)
    crash(run)
    run.log.committed(201.5)
    run.changed(300.0, Cause.WEDGED, "no progress for 75 s", worker="stage-2", stage=1)
    run.log.finish(time=EPOCH + 250, status="failed", reason="gave up", update=9, budgets=BUDGETS)
    told = report(run.folder)
    assert (told["run"], told["status"], told["update"]) == ("r", "failed", 9)
    assert told["budgets"]["failures"] == {"spent": 1, "limit": 3}
    assert told["budgets"]["preemptions"] == {"spent": 0, "limit": None}
    assert told["totals"] == {
        "changes": {"start": 1, "crashed": 1, "wedged": 1},
        "updates_replayed": 3,
        "samples_reread": 96,
        "moved_bytes": {"own": 101, "peer": 3, "snapshot": 20, "storage": 4},
        "recoveries": 1,
        "recovery_s": 1.5,
        "longest_recovery_s": 1.5,
    }
    assert [c["outcome"] for c in told["changes"]] == ["committed", "committed", "unfinished"]
    text = (run.folder / EXIT_REPORT_TEXT_FILE).read_text()
    assert text.startswith("r: failed at update 9: gave up\n") and "(4:10)" in text
    assert "Changes of the membership: crashed 1, wedged 1.\n" in text
    assert "Recoveries: 1, 1.50 s in all, 1.50 s the longest.\n" in text
    assert "Failures: 1 of 3\nPreemptions: 0 of any number\n" in text
    assert "crashed stage-1 (stage 1, node 10.0.0.1), generation 2, at update 7: 3 → 2" in text
    assert "    its process was killed\n    detected after 0.50 s, waited 0.12 s, " in text
    assert "    stage 1: stage-2 on 10.0.0.2: blocks.2 … blocks.3 (2)\n" in text


def test_a_run_without_changes_has_a_report_too(run: Run) -> None:
    run.log.finish(time=EPOCH + 1, status="failed", reason="no room", update=0, budgets=BUDGETS)
    assert report(run.folder)["changes"] == []
    text = (run.folder / EXIT_REPORT_TEXT_FILE).read_text()
    assert "Changes of the membership: none." in text and "Taken over: nothing." in text


def test_the_report_begins_with_this_trainer_and_the_history_does_not(run: Run) -> None:
    start(run)
    crash(run)
    run.log.committed(201.5)
    again = Run(run.folder, time=EPOCH + 1000)
    again.changed(1200.0, "resumed", "from the checkpoint of update 7")
    again.log.finish(time=EPOCH + 1200, status="stopped", reason="", update=7, budgets={})
    assert [c["cause"] for c in report(run.folder)["changes"]] == ["resumed"]
    assert [c["cause"] for c in again.lines] == ["start", "crashed", "resumed"]


def test_the_history_survives_many_changes_with_little_in_memory(run: Run) -> None:
    for number in range(300):
        crash(run, 200.0 + 10 * number)
        run.log.committed(205.0 + 10 * number)
    assert run.log.state()["open"] == [] and len(run.lines) == 300
    assert run.metrics.text().count("elastictrainer_last_loss_info{") == 1


def test_the_story_of_a_run_has_its_history(run: Run) -> None:
    start(run)
    with RunRecord(run.folder) as record:
        record.write_status({"state": "running"})
        assert [c["cause"] for c in run_story(run.folder)["membership"]] == ["start"]


def test_words(run: Run) -> None:
    crash(run)
    run.log.committed(201.5)
    (line,) = run.lines
    assert headline(line).endswith(
        "  crashed stage-1 (stage 1, node 10.0.0.1), generation 2, at update 7: 3 → 2 workers"
    )
    assert costs(line) == (
        "detected after 0.50 s, waited 0.12 s, planned in 0.12 s, transferred in 0.75 s, "
        "committed after 1.50 s, 3 updates trained again from update 6, 96 samples read again, "
        "101 B from own memory, 3 B from peers, 20 B from snapshots, 4 B from storage"
    )
    assert seats(line)[0] == "stage 0: stage-0 on 10.0.0.0: blocks.0 … blocks.1 (2)"


def test_causes_are_few_and_those_of_the_core_among_them() -> None:
    assert set(Cause) | UNPLANNED <= set(CAUSES) and len(set(CAUSES)) == len(CAUSES) < 20


def test_an_unknown_cause_is_a_fault_of_ours(run: Run) -> None:
    with pytest.raises(AssertionError, match="sunspots"):
        run.changed(1.0, "sunspots")


@pytest.mark.parametrize("change", [start, crash])
def test_durations_are_never_negative(run: Run, change: Callable[[Run], None]) -> None:
    run.log.planned(1.0)
    run.log.stopped(2.0)
    change(run)
    run.log.committed(1000.0)
    for line in run.lines:
        for key in ("plan_s", "wait_s", "transfer_s", "first_commit_s"):
            assert line[key] is None or line[key] >= 0.0
