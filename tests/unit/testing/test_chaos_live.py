"""A run's folder, as the chaos sees it while its trainer writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_trainer.config import load_config, to_yaml
from elastic_trainer.elastic.events import Cause
from elastic_trainer.observability.record import MEMBERSHIP_FILE, RunRecord
from elastic_trainer.testing.chaos.live import FolderView, check_audit, compare_samples
from elastic_trainer.testing.chaos.verdict import Commit, Loss
from elastic_trainer.testing.runs import training_batches
from elastic_trainer.types import Plan, Prediction, StagePlan


def plan(*workers: str) -> Plan:
    return Plan(
        generation=1,
        schedule="1f1b",
        num_microbatches=1,
        layers=tuple("abc"[: len(workers)]),
        stages=tuple(
            StagePlan(stage=i, first=i, stop=i + 1, worker=w) for i, w in enumerate(workers)
        ),
        predicted=Prediction(
            step_s=0.0, bubble_ratio=0.0, stage_busy_s=(0.0,), stage_memory_bytes=(0,)
        ),
        reasons=(),
    )


def status(state: str, *workers: str) -> dict[str, Any]:
    return {"state": state, "workers": {w: {"node": f"10.0.0.{w[-1]}"} for w in workers}}


def change(worker: str, cause: str, **fields: Any) -> dict[str, Any]:
    base = {"time": 50.0, "detect_s": None, "first_commit_s": None, "outcome": "committed"}
    return {"worker": worker, "cause": cause, **base, **fields}


def test_what_a_running_run_tells(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "run") as record:
        record.write_config(to_yaml(load_config(None)))
        view = FolderView(tmp_path / "run")
        view.look()
        assert (dict(view.stages), dict(view.nodes), view.commits, view.losses) == ({}, {}, [], [])
        record.write_plan(plan("stage-0", "stage-1"))
        record.write_status(status("running", "stage-0", "stage-1"))
        record.append_update({"update": 1, "generation": 1, "time": 10.0})
        view.look()
        assert view.state == "running" and view.stages == {0: "stage-0", 1: "stage-1"}
        assert view.nodes == {"stage-0": "10.0.0.0", "stage-1": "10.0.0.1"}
        assert view.commits == [Commit(update=1, generation=1, at=10.0)]
        record.write_status(status("recovering", "stage-0"))
        view.look()
        assert view.stages == {0: "stage-0"}  # the plan still names the lost one


def test_losses_and_nothing_else_of_the_history(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "run") as record:
        record.write_config(to_yaml(load_config(None)))
        lines = [
            change("", "start"),
            change("stage-1", "crashed", detect_s=0.1, first_commit_s=1.5),
            change("stage-2", "joined"),
            change("stage-0", "preempted", outcome="no_new_plan"),
            change("", "disturbed"),
        ]
        file = tmp_path / "run" / MEMBERSHIP_FILE
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        view = FolderView(tmp_path / "run")
        view.look()
    assert view.losses == [
        Loss(worker="stage-1", cause=Cause.CRASHED, at=50.0, detect_s=0.1, commit_s=1.5),
        Loss(worker="stage-0", cause=Cause.PREEMPTED, at=50.0, idle=True),
    ]


def test_updates_that_are_done_again(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "run") as record:
        record.write_config(to_yaml(load_config(None)))
        view = FolderView(record.path)
        for update in range(1, 6):
            record.append_update({"update": update, "generation": 1, "time": 1.0})
        view.look()
        record.truncate_after(3)
        record.append_update({"update": 4, "generation": 2, "time": 2.0})
        view.look()
    found = [(c.update, c.generation) for c in view.commits]
    assert found == [*((update, 1) for update in range(1, 6)), (4, 2)]


SYNTHETIC = {
    "model": {"name": "emulated", "args": {"num_layers": 2}},
    "data": {"format": "synthetic", "sequence_length": 4},
    "train": {"global_batch_size": 4, "max_steps": 10},
    "pipeline": {"microbatch_size": 2},
}


@pytest.mark.parametrize("cost", ["frozen", "adaptive"])
@pytest.mark.parametrize("wrong", [False, True])
def test_the_audit_of_a_run(tmp_path: Path, wrong: bool, cost: str) -> None:
    config = load_config(SYNTHETIC, [f"data.cost={cost}"])
    with RunRecord(tmp_path / "run") as record:
        record.write_config(to_yaml(config))
        assert check_audit(record.path) == (0, "the run keeps no audit of its samples")
        for info, _ in training_batches(config, 1, 6):
            samples = [list(m.sample_ids) for m in info.microbatches]
            assert samples[0]
            if cost == "adaptive":  # which share a microbatch is not fixed
                samples.reverse()
            if wrong and info.update == 5:
                samples = samples[:1] * 2 if cost == "adaptive" else samples[::-1]
            record.append_update({"update": info.update}, samples)
        found = check_audit(record.path)
    other = "update 5 has other samples than an undisturbed run"
    assert found == ((5, other) if wrong else (6, ""))


def lines(*updates: int) -> list[dict[str, Any]]:
    return [{"update": update, "samples": [[str(update)]]} for update in updates]


def expected(stop: int) -> Iterator[tuple[int, list[list[str]]]]:
    for update in range(1, stop):
        yield update, [[str(update)]]


@pytest.mark.parametrize(
    ("audited", "stop", "found"),
    [
        (lines(1, 2, 3), 99, (3, "")),
        (lines(3, 4), 99, (2, "")),  # a folder from before there were audits
        (lines(1, 3), 99, (0, "the audit has gaps or repeats")),
        (lines(1, 2, 2), 99, (0, "the audit has gaps or repeats")),
        (lines(1, 2, 3), 3, (2, "there are only 2 updates in the data, and 3 audited")),
    ],
)
def test_comparing_samples(audited: Any, stop: int, found: tuple[int, str]) -> None:
    assert compare_samples(audited, lambda: expected(stop)) == found
