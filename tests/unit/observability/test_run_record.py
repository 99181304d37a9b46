"""A run folder: one writer, lines that match the updates, readers that see whole files."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_trainer.errors import RunError
from elastic_trainer.observability import record as record_module
from elastic_trainer.observability.lines import Journal, complete_lines
from elastic_trainer.observability.record import STATUS_FILE, RunRecord, is_alive, new_run_name
from elastic_trainer.observability.runs import (
    list_runs,
    read_audit,
    read_events,
    read_plan,
    read_status,
    read_updates,
    resolve_run,
    tail_updates,
)
from elastic_trainer.types import Plan, Prediction, StagePlan


@pytest.fixture(autouse=True)
def short_lock_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module, "LOCK_WAIT_S", 0.05)


def fill(folder: Path, updates: int) -> None:
    with RunRecord(folder) as run:
        for update in range(1, updates + 1):
            run.append_update({"update": update, "loss": 1 / update})


def test_a_second_trainer_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with RunRecord(tmp_path / "a"):
        assert is_alive(tmp_path / "a")
        with pytest.raises(RunError, match=f"in use by process {os.getpid()} on ") as caught:
            RunRecord(tmp_path / "a")
        assert "elastic-trainer stop a" in str(caught.value)
    assert not is_alive(tmp_path / "a")
    RunRecord(tmp_path / "a").close()


def test_a_trainer_that_is_silent_for_long_is_not_responding(tmp_path: Path) -> None:
    for age_s, state, shown in [
        (5.0, "running", "running"),
        (95.0, "running", "not responding"),
        (95.0, "starting", "starting"),
        (95.0, "completed", "completed"),
    ]:
        with RunRecord(tmp_path) as run:
            run.write_status({"state": state, "reason": ""})
            written = time.time() - age_s
            os.utime(tmp_path / STATUS_FILE, (written, written))
            status = read_status(tmp_path)
            assert status["state"] == shown and status["alive"]
            assert (f"process {os.getpid()}" in status["reason"]) is (shown == "not responding")


OPEN_AND_DIE = """
import os, sys
from elastic_trainer.observability.record import RunRecord
RunRecord(sys.argv[1]).write_status({"state": "running", "update": 3})
os._exit(9)
"""


def test_the_lock_of_a_killed_trainer_is_free_and_its_run_interrupted(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", OPEN_AND_DIE, str(tmp_path)], timeout=60)
    assert done.returncode == 9
    status = read_status(tmp_path)
    assert (status["state"], status["update"], status["alive"]) == ("interrupted", 3, False)
    assert "--resume auto" in status["reason"]
    RunRecord(tmp_path).close()


def test_a_reader_that_probes_does_not_turn_a_trainer_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe holds the lock for an instant; the trainer tries again."""
    monkeypatch.setattr(record_module, "LOCK_WAIT_S", 5.0)
    RunRecord(tmp_path).close()
    attempts = []
    real = record_module._try_lock

    def busy_at_first(file: object, kind: int) -> bool:
        attempts.append(kind)
        return len(attempts) > 2 and real(file, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(record_module, "_try_lock", busy_at_first)
    RunRecord(tmp_path).close()
    assert len(attempts) == 3


def test_lines_are_strict_json_and_resume_drops_those_it_will_repeat(tmp_path: Path) -> None:
    with RunRecord(tmp_path) as run:
        for update in range(1, 6):
            run.append_update({"update": update, "loss": 0.5, "grad_norm": math.inf})
        with pytest.raises(AssertionError, match="update 5 is recorded already"):
            run.append_update({"update": 5})
    with RunRecord(tmp_path) as run:
        assert run.last_update == 5
        run.truncate_after(3)
        assert run.last_update == 3
        run.append_update({"update": 4, "loss": 0.25})
    lines = read_updates(tmp_path)
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["grad_norm"] is None and lines[3]["loss"] == 0.25


def test_a_line_cut_short_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 4, "lo')
    assert [line["update"] for line in read_updates(tmp_path)] == [1, 2, 3]
    with RunRecord(tmp_path) as run:
        assert run.last_update == 3
        run.append_update({"update": 4})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert [json.loads(line)["update"] for line in text.splitlines()] == [1, 2, 3, 4]


def audited(run_dir: Path) -> list[int]:
    return [line["update"] for line in read_audit(run_dir)]


def test_samples_stand_beside_the_lines_and_go_with_them(tmp_path: Path) -> None:
    with RunRecord(tmp_path) as run:
        for update in range(1, 6):
            run.append_update({"update": update}, [[f"{update}:0"], [f"{update}:1", "é"]])
        run.truncate_after(3)
        assert run.last_update == 3 and audited(tmp_path) == [1, 2, 3]
        run.append_update({"update": 4}, [["again"]])
    lines = read_audit(tmp_path)
    assert lines[0] == {"update": 1, "samples": [["1:0"], ["1:1", "é"]]}
    assert lines[-1] == {"update": 4, "samples": [["again"]]}


def test_a_crash_between_the_files_leaves_none_of_them_ahead(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    with open(tmp_path / "audit.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 4, "samples": []}\n{"upd')
    with RunRecord(tmp_path) as run:
        assert run.last_update == 3 and audited(tmp_path) == [1, 2, 3]
        run.append_update({"update": 4})
    assert audited(tmp_path) == [1, 2, 3, 4]


def test_a_run_begun_without_an_audit_gets_one_from_here_on(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    (tmp_path / "audit.jsonl").unlink()
    with RunRecord(tmp_path) as run:
        assert run.last_update == 3
        run.append_update({"update": 4})
    with RunRecord(tmp_path) as run:
        assert run.last_update == 4
    assert audited(tmp_path) == [4] and len(read_updates(tmp_path)) == 4


@pytest.mark.parametrize("width", [0, 100, 70_000, 200_000])
@pytest.mark.parametrize("kept", [0, 1, 4, 5, 9])
def test_truncation_reads_only_the_end(tmp_path: Path, kept: int, width: int) -> None:
    """Lines shorter and longer than what is read at a time."""
    path = tmp_path / "lines.jsonl"
    journal = Journal(path)
    for update in range(1, 6):
        journal.append({"update": update, "text": "x" * width})
    journal.truncate_after(kept)
    want = list(range(1, min(kept, 5) + 1))
    assert [line["update"] for line in complete_lines(path)] == want
    assert journal.last_update() == len(want)
    journal.append({"update": len(want) + 1})
    assert journal.last_update() == len(want) + 1


@pytest.mark.parametrize("count", [0, 1, 3, 2000, 5000])
def test_tail_equals_the_end_of_all_lines(tmp_path: Path, count: int) -> None:
    fill(tmp_path, 4000)
    with open(tmp_path / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 4001, "lo')
    assert tail_updates(tmp_path, count) == read_updates(tmp_path)[4000 - min(count, 4000) :]


def test_tail_of_a_run_without_lines(tmp_path: Path) -> None:
    assert tail_updates(tmp_path, 3) == [] and read_updates(tmp_path) == []


def test_status_keeps_fields_and_is_stamped(tmp_path: Path) -> None:
    now = [100.0]
    with RunRecord(tmp_path / "r", clock=lambda: now[0]) as run:
        run.write_status({"state": "running", "update": 1})
        now[0] = 107.0
        run.write_status({"update": 2})
        status = read_status(tmp_path / "r")
    assert (status["state"], status["update"], status["updated_at"]) == ("running", 2, 107.0)
    assert (status["pid"], status["alive"], status["name"]) == (os.getpid(), True, "r")


def test_plan_and_events(tmp_path: Path) -> None:
    plan = Plan(
        generation=1,
        schedule="1f1b",
        num_microbatches=4,
        layers=("a", "b"),
        stages=(StagePlan(stage=0, first=0, stop=2, worker="stage-0"),),
        predicted=Prediction(
            step_s=0.5, bubble_ratio=0.0, stage_busy_s=(0.5,), stage_memory_bytes=(10,)
        ),
        reasons=("one worker",),
    )
    with RunRecord(tmp_path, clock=lambda: 5.0) as run:
        assert read_plan(tmp_path) == {} and read_events(tmp_path) == []
        run.write_plan(plan)
        run.log_event("plan", "one stage", generation=1)
    assert read_plan(tmp_path)["stages"][0]["worker"] == "stage-0"
    assert read_events(tmp_path) == [
        {"time": 5.0, "kind": "plan", "message": "one stage", "generation": 1}
    ]


def test_runs_are_found_by_path_name_and_latest(tmp_path: Path) -> None:
    for index, name in enumerate(["b-first", "a-second"]):
        with RunRecord(tmp_path / name) as run:
            run.write_status({"state": "completed", "started_at": 10.0 + index})
    (tmp_path / "not-a-run").mkdir()
    assert [run["name"] for run in list_runs(tmp_path)] == ["b-first", "a-second"]
    assert list_runs(tmp_path / "missing") == []
    assert resolve_run("b-first", tmp_path) == tmp_path / "b-first"
    assert resolve_run("latest", tmp_path) == tmp_path / "a-second"
    assert resolve_run(tmp_path / "a-second", "elsewhere") == tmp_path / "a-second"
    with pytest.raises(RunError, match="Did you mean `b-first`"):
        resolve_run("b-frist", tmp_path)
    with pytest.raises(RunError, match="lists them"):
        resolve_run("zzz", tmp_path)
    with pytest.raises(RunError, match="There are none in"):
        resolve_run("latest", tmp_path / "missing")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write to the run folder"):
        RunRecord(tmp_path / "file" / "run")


def test_names_sort_by_time_and_suit_a_folder() -> None:
    first, second = new_run_name("my.pkg:make/it", 1e9), new_run_name("gpt", 1e9 + 61)
    assert first < second and first.endswith("-my.pkg-make-it")
